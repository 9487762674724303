"""Where in the graph and in the user's code a difference comes from.

`ws.debug.bisect` checks capture, passes, lowering and guards. Where it finds nothing (the graph is right, the use of
its outputs is not), the signature says which node computes the value that differs.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

from torch import fx

from wholestep.debug.bisect import Found, bisect
from wholestep.debug.check.findings import Finding
from wholestep.debug.compare import compare_versions
from wholestep.debug.step_versions import Version, capture_call, with_passes
from wholestep.errors import Location
from wholestep.ir.meta import nearest_location
from wholestep.ir.readable import format_node
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import leaves_of

_SECONDS = 120.0


@dataclass(frozen=True)
class FirstDifference:
    """The first node that differs, and the stage of the step that makes it differ."""

    stage: str
    """capture, pass, lowering or guard; "run" where the graph is right, and the use of its outputs is not."""
    what: str
    node: str = ""
    text: str = ""
    """The node as Python."""
    location: Location | None = None
    """The user's line."""
    pass_name: str = ""
    region: str = ""

    def __str__(self) -> str:
        part = {"pass": f"pass {self.pass_name}", "lowering": f"lowering, {self.region or 'no region'}"}
        lines = [f"{part.get(self.stage, self.stage)}: {self.what}"]
        lines += [f"  node  {self.text or self.node}"] if self.node else []
        lines += [f"  at    {self.location}"] if self.location is not None else []
        if self.location is not None and self.location.text:
            lines.append(f"            {self.location.text}")
        return "\n".join(lines)


def locate(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], finding: Finding) -> FirstDifference:
    """Find the stage that makes a value differ. The state is that before the call."""
    graph: StepGraph | None = step.last
    if graph is None:  # a mode around the call makes the compiled step run in eager
        return FirstDifference("eager", f"two runs in eager differ. {finding.path}: {finding.text}")
    with tempfile.TemporaryDirectory(prefix="wholestep-check-") as folder:
        try:
            found = bisect(step, args, kwargs, folder=folder, timeout=_SECONDS, minimise=False, quiet=True)
            if found.stage == "guard" and not found.node:
                found = _stale_node(step, args, kwargs) or found
        except Exception as error:  # the difference is known; the search for its node must not hide it
            found = Found("nothing", what=f"the search for the node raised {type(error).__name__}: {error}")
    if found:
        node = _node(graph.gm.graph, found.node)
        where = nearest_location(node) or nearest_location(_maker(graph, finding.path))
        text = found.text or (format_node(node) if node is not None else "")
        return FirstDifference(found.stage, found.what, found.node, text, where, found.pass_name, found.region)
    node = _maker(graph, finding.path)
    text = "" if node is None else format_node(node)
    what = f"{finding.path}: {finding.text}" + (f" ({found.what})" if found.what else "")
    return FirstDifference("run", what, "" if node is None else node.name, text, nearest_location(node))


def _stale_node(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
    """The first node of the graph that ran that differs from a graph captured for this call."""
    entry = step._last
    inputs = entry.gather.read(leaves_of((args, kwargs))[0])
    if inputs is None:
        return None
    call = capture_call(step._fn, args, kwargs, step.options)
    fresh = with_passes(call.step_graph, step.options.passes, 0)
    versions = Version("new", fresh.gm, call.inputs), Version("kept", entry.step_graph.gm, tuple(inputs))
    first = compare_versions(*versions, "reassociates").first
    if first is None:
        return None
    what = f"a graph of an earlier call ran, whose guards hold and which is wrong for this one: {first.gap}"
    return Found("guard", what=what, node=first.node, text=first.text)


def _node(graph: fx.Graph, name: str) -> fx.Node | None:
    return next((node for node in graph.nodes if node.name == name), None)


def _maker(graph: StepGraph, path: str) -> fx.Node | None:
    """The node whose value is written to a path, or the input at that path."""
    signature = graph.signature
    path = path.removesuffix(".requires_grad")
    by_path = {signature.input(write.target).path: write.value for write in signature.write_backs}
    if path in by_path:
        return _node(graph.gm.graph, by_path[path])
    outputs: Any = graph.gm.graph.output_node().args[0]
    for change in signature.state_changes:
        if change.path == path and change.output is not None:
            return _as_node(outputs[change.output])
    for i, spec in enumerate(signature.outputs):
        if spec.path == path or f"result{spec.path}" == path:
            return _as_node(outputs[i])
    return next((_node(graph.gm.graph, spec.name) for spec in signature.inputs if spec.path == path), None)


def _as_node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None
