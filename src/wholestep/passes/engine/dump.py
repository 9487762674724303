"""Before and after of each pass as files: readable text, JSON, and a line about what changed.

003-comm_fusion_with_concat.before.txt   .after.txt   .before.json   .after.json
004-schedule_comm_wait.before.txt        .failed.txt  ...            of a pass that failed: what it had left
summary.txt      003 comm_fusion_with_concat: 0.412 s, 2684 -> 2391 nodes, 12 displaced, all_reduce 148 -> 6, ...
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections import Counter
from pathlib import Path

from torch import fx

from wholestep.errors import GraphFormatError
from wholestep.ir.io.arguments import target_name
from wholestep.ir.io.serialize import write_step_graph
from wholestep.ir.readable import readable
from wholestep.ir.signature import Signature

_current: list[PassDump] = []


class PassDump:
    """A folder that passes write to."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._number = sum(len(list(self.folder.glob(f"*.{side}.txt"))) for side in ("after", "failed"))

    def write(
        self,
        name: str,
        before: fx.GraphModule | None,
        after: fx.GraphModule,
        signature: Signature | None,
        seconds: float,
    ) -> None:
        """Write one application of a pass."""
        prefix = self._prefix(name)
        for side, gm in (("before", before), ("after", after)):
            if gm is not None:
                self._write(f"{prefix}.{side}", gm, signature)
        with (self.folder / "summary.txt").open("a", encoding="utf-8") as file:
            file.write(f"{prefix}: {summary(before, after, seconds)}\n")

    def write_failure(
        self, name: str, before: fx.GraphModule, failed: fx.GraphModule, signature: Signature | None, error: Exception
    ) -> None:
        """Write a pass that failed, with the graph that it left, which may be invalid."""
        prefix = self._prefix(name)
        self._write(f"{prefix}.before", before, signature)
        try:
            self._write(f"{prefix}.failed", failed, signature)
        except Exception as unreadable:
            text = f"cannot be shown ({type(unreadable).__name__}: {unreadable}); its nodes:\n{_names(failed.graph)}\n"
            (self.folder / f"{prefix}.failed.txt").write_text(text, encoding="utf-8")
        what = str(error).strip().splitlines() or [""]
        with (self.folder / "summary.txt").open("a", encoding="utf-8") as file:
            file.write(f"{prefix}: failed, {type(error).__name__}: {what[0]}\n")

    def _prefix(self, name: str) -> str:
        self._number += 1
        return f"{self._number - 1:03d}-{name}"

    def _write(self, name: str, gm: fx.GraphModule, signature: Signature | None) -> None:
        (self.folder / f"{name}.txt").write_text(readable(gm, signature or Signature()), encoding="utf-8")
        try:
            text = write_step_graph(gm, signature or Signature())
        except GraphFormatError as error:
            text = f'{{"error": "{type(error).__name__}: not a graph that JSON can hold"}}'
        (self.folder / f"{name}.json").write_text(text, encoding="utf-8")


def enable_graph_optimization_dump(folder: str | Path = "") -> Path:
    """From now on every pass of this process writes its graphs to a folder (a new one if none is given).

    The default of `ws.compile`'s own option; `disable_graph_optimization_dump` ends it.
    """
    chosen = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="wholestep-passes-"))
    _current[:] = [PassDump(chosen)]
    return chosen


def disable_graph_optimization_dump() -> None:
    """Stop writing the graphs of passes."""
    _current.clear()


def current_dump() -> PassDump | None:
    """The dump that passes write to by default."""
    return _current[0] if _current else None


def summary(before: fx.GraphModule | None, after: fx.GraphModule, seconds: float) -> str:
    """Time, nodes, displaced nodes and the operators whose count changed."""
    now = _counts(after.graph)
    if before is None:
        return f"{seconds:.3f} s, {sum(now.values())} nodes"
    was = _counts(before.graph)
    changes = [f"{op} {was[op]} -> {now[op]}" for op in sorted({*was, *now}) if was[op] != now[op]]
    parts = [
        f"{seconds:.3f} s",
        f"{len(before.graph.nodes)} -> {len(after.graph.nodes)} nodes",
        f"{displaced(before.graph, after.graph)} displaced",
        *changes,
    ]
    return ", ".join(parts)


def _names(graph: fx.Graph) -> str:
    return "\n".join(f"{node.name} = {node.op} {node.target}" for node in graph.nodes)


def _counts(graph: fx.Graph) -> Counter[str]:
    return Counter(_name(node) for node in graph.nodes if node.op == "call_function")


def _name(node: fx.Node) -> str:
    try:
        return target_name(node.target)
    except GraphFormatError:
        return str(getattr(node.target, "__name__", node.target))


def displaced(before: fx.Graph, after: fx.Graph) -> int:
    """How many nodes of both graphs are not in their old relative order: all but a longest increasing sequence."""
    place = {node.name: i for i, node in enumerate(before.nodes)}
    order = [place[node.name] for node in after.nodes if node.name in place]
    tails: list[int] = []
    for position in order:
        at = bisect_left(tails, position)
        tails[at : at + 1] = [position]
    return len(order) - len(tails)
