"""What was lowered, and why the rest was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from wholestep.errors import LowerError
from wholestep.ir.readable import html_in_notebooks
from wholestep.lower.shared_bodies import SharedBodies
from wholestep.torch_private.operators import OpOverload

_KEY = "wholestep.lowering"


@dataclass(frozen=True)
class RegionReport:
    """One compiled call."""

    number: int
    name: str
    tag: str
    operators: int
    inputs: int
    outputs: int
    writes: int
    """Inputs that it updates in place."""
    phases: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    """Names of the nodes that it computes."""
    shared: SharedBodies = field(default_factory=SharedBodies)
    """How often which body is called, if repeated parts of it are compiled once."""


@dataclass
class Lowering:
    """What `partial_lower` did to a graph."""

    regions: list[RegionReport] = field(default_factory=list)
    outside: list[tuple[str, str, str]] = field(default_factory=list)
    """Nodes outside of regions: name, target, reason."""

    _repr_html_ = html_in_notebooks

    def add_earlier(self, earlier: Lowering, graph: fx.Graph) -> None:
        """Add the regions of an earlier lowering of the same graph; their calls are not nodes outside."""
        known = {region.name: region for region in earlier.regions}
        calls = [node for node in graph.find_nodes(op="call_module") if node.target in known]
        names = {node.name for call in calls for node in (call, *call.users)}
        self.regions[:0] = [known[str(call.target)] for call in calls]
        self.outside = [entry for entry in self.outside if entry[0] not in names]

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int | None = None) -> str:
        """Regions and reasons as text; `most`: only so many of the largest regions."""
        inside = sum(region.operators for region in self.regions)
        listed = self.regions if most is None else sorted(self.regions, key=lambda region: -region.operators)[:most]
        regions = f"{len(self.regions)} region" + ("" if len(self.regions) == 1 else "s")
        lines = [f"{regions} with {inside} operators; {len(self.outside)} nodes outside"]
        rows = [("region", "operators", "in", "out", "writes", "what")]
        for r in listed:
            row = (r.name, str(r.operators), str(r.inputs), str(r.outputs), str(r.writes), ", ".join(r.phases))
            rows.append(row)
        lines += _table(rows)
        lines += [f"and {len(self.regions) - len(listed)} smaller"] if len(listed) < len(self.regions) else []
        lines += [f"{r.name}: {r.shared}" for r in listed if r.shared.calls]
        reasons = Counter(reason for _, _, reason in self.outside)
        if reasons:
            rows2 = [("nodes", "why outside", "for example")]
            for reason, count in reasons.most_common():
                name, target, _ = next(entry for entry in self.outside if entry[2] == reason)
                rows2.append((str(count), reason, f"{name} = {target}"))
            lines += ["", *_table(rows2)]
        return "\n".join(lines)


def note_lowering(gm: fx.GraphModule, lowering: Lowering) -> None:
    """Attach the report to the graph module."""
    gm.meta[_KEY] = lowering


def found_lowering(gm: fx.GraphModule) -> Lowering | None:
    """The report of a graph module, if it was lowered."""
    found = gm.meta.get(_KEY)
    return found if isinstance(found, Lowering) else None


def lowering_of(gm: Any) -> Lowering:
    """The report of a lowered graph module, or of a compiled step's last graph."""
    given = gm
    executable = getattr(gm, "executable", None)
    found = getattr(executable if executable is not None else gm, "meta", {}).get(_KEY)
    if found is None:
        raise LowerError(
            f"nothing was lowered in this {type(given).__name__}.",
            fix='give what partial_lower returned, or a step of ws.compile(..., lower="inductor") that has run.',
        )
    assert isinstance(found, Lowering)
    return found


def explain(gm: Any) -> Lowering:
    """Print what was lowered and why the rest was not; returns the report."""
    found = lowering_of(gm)
    print(found)
    return found


def target_text(node: fx.Node) -> str:
    """The target of a node as text."""
    target = node.target
    if isinstance(target, str | OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
