"""`ws.inspect.report(step, "step.html")`: write the page of a step, one file that needs no network and no server.

The page is a shell, our own style sheet and scripts (`page/`), and the data, compressed and as base64. A policy in the
page's head forbids every request, so nothing leaves the machine that opens it.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from wholestep.errors import OptionError
from wholestep.inspect.report_page.collect import ReportSource, collect
from wholestep.inspect.report_page.side_by_side import pipeline_columns, rank_columns
from wholestep.simulate.machine import GroupSpread, Machine
from wholestep.simulate.timeline import Timeline

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = (
    "data.js",
    "elements.js",
    "axis.js",
    "details.js",
    "summary.js",
    "timeline.js",
    "memory.js",
    "graph.js",
    "passes.js",
    "modules.js",
    "side_by_side.js",
    "main.js",
)
"""In the order in which they are read."""


def report(
    given: Any,
    path: str | Path,
    *,
    title: str = "",
    machine: Machine | None = None,
    profile: Any = None,
    groups: Mapping[str, GroupSpread] | None = None,
    with_source: bool = True,
    ranks: Sequence[Any] | Mapping[str, Any] = (),
    pipeline: Timeline | Sequence[Timeline] = (),
) -> Path:
    """Write a page about a step as one HTML file, and return its path.

    `given`: a compiled step that has run, a StepGraph, an Executable or a graph module. `machine`: what times are
    predicted for, by default that of the graph's device. `profile`: measured times to show beside the predicted ones,
    as `step.profile(*args)` returns them, or `{node name: (start, end)}` in microseconds. `groups`: how process groups
    lie on machines, where torch.distributed does not know. `with_source`: whether the page holds the text of the files
    that the step's nodes come from; without, it names files and lines only.

    `ranks`: the graphs of the other ranks (as `given`, or each with its profile: `(graph, profile)`), in order from
    rank 1 on or by name; they stand side by side with `given`. `pipeline`: timelines of a schedule, simulated
    (`simulate.pipeline.simulate`) or as run (`timeline_of`).
    """
    file = Path(path)
    if file.suffix not in (".html", ".htm"):
        raise OptionError(f"{file.name!r} is not the name of a page.", fix='end it in .html: "step.html".')
    source = ReportSource.of(given, title, profile)
    data = collect(source, machine=machine, groups=groups, with_source=with_source)
    data["ranks"] = rank_columns(source, ranks, machine, groups)
    data["pipeline"] = pipeline_columns([pipeline] if isinstance(pipeline, Timeline) else pipeline)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page_of(data), encoding="utf-8")
    return file


def page_of(data: Mapping[str, Any]) -> str:
    """The page of collected data."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    shell = Template((_FOLDER / "page.html").read_text(encoding="utf-8"))
    return shell.substitute(
        title=html.escape(str(data["title"])),
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        script=script,
        data=base64.b64encode(zlib.compress(text, 9)).decode(),
    )
