"""The checks of `bisect`, one for each stage; each runs in its own process and returns plain data.

meta        does every node return what its metadata says?
eager       does the captured graph compute what the function computes?
passes      is the graph right after the first k passes: verified, and with the results that it had?
one pass    which node differs across it, or breaks a rule?
lowering    which node of the lowered graph differs, and in which region?
guard       does the graph of an earlier call compute what one captured for this call computes?
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from wholestep.compilers.debug_interpreter import SymbolValues, differences, is_known, unknown_places
from wholestep.debug.compare import SEED, Comparison, NodeRaised, Note, compare_versions, run_nodes
from wholestep.debug.step_versions import CapturedCall, Version, lowered_call, with_passes
from wholestep.debug.value_distance import gap_between
from wholestep.errors import WholestepError
from wholestep.ir.readable import format_node
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.options import Options
from wholestep.passes.engine.contract import BoundPass

Verdict = dict[str, Any]
"""wrong; what; node and text, where a node is known; region; kind: value, rule or raised."""

RIGHT: Verdict = {"wrong": False}
_NAME = re.compile(r"%?([A-Za-z_]\w*)")


def wrong(what: str, node: str = "", text: str = "", *, kind: str = "value", region: str = "") -> Verdict:
    """The verdict on what is wrong."""
    return {"wrong": True, "what": what, "node": node, "text": text, "kind": kind, "region": region}


def judge_meta(gm: fx.GraphModule, inputs: Sequence[Any], note: Note | None = None) -> Verdict:
    """The first node whose real value has another dtype, size or stride than its metadata says, or that raises."""
    seen: list[Verdict] = []
    symbols = SymbolValues()

    def visit(node: fx.Node, value: Any) -> bool:
        apart = meta_apart(node, value, symbols)
        if apart:
            seen.append(wrong(apart, node.name, format_node(node), kind="meta"))
        return not apart

    try:
        run_nodes(gm, inputs, visit, note=note)
    except NodeRaised as raised:
        what = f"{type(raised.error).__name__}: {raised.error}"
        return wrong(what, raised.node.name, format_node(raised.node), kind="raised")
    return seen[0] if seen else RIGHT


def meta_apart(node: fx.Node, value: Any, symbols: SymbolValues) -> str:
    """How a value differs from what `val` says of it; "" if it does not."""
    said = node.meta.get("val")
    if said is None or value is None:
        return ""
    found = list(differences(said, value, symbols, shifts=None, plain_numbers=False, skip=unknown_places(node)))
    # Graphs with collectives run on the CPU whatever their device, and its kernels may choose other strides.
    moved = any(each.what == "device" for each in found)
    other = ("device", "stride", "contiguity") if moved else ()
    return next((str(each) for each in found if each.what not in other and not is_known(node, each)), "")


def judge_eager(call: CapturedCall, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict:
    """Run the function itself, on the user's own objects: for a process that ends afterwards."""
    captured = call.captured
    left: list[Any] = []
    outputs = run_nodes(call.step_graph.gm, call.inputs, lambda node, value: True, left)
    leaves, _ = leaves_of((args, kwargs))
    gather = call.step_graph.gather
    torch.manual_seed(SEED)
    try:
        result = fn(*args, **kwargs)
    except Exception as error:
        return wrong(f"the function itself raises {type(error).__name__}: {error}", kind="eager")
    shown = leaves_of(result)[0]
    for (kind, place), value in zip(captured.result_leaves, shown, strict=False):
        if kind in ("output", "attached", "detached"):
            gap = gap_between(value, outputs[place], None, "reassociates")
            if gap is not None:
                node = call.step_graph.gm.graph.output_node().args[0][place]  # type: ignore[index]
                return wrong(f"a result is not what the function returns: {gap}", str(node), kind="value")
    now = gather.read(leaves)
    written = {write.target: write.value for write in call.step_graph.signature.write_backs}
    for spec, mine, theirs in zip(call.step_graph.signature.inputs, left, now or (), strict=False):
        if spec.name in written:
            gap = gap_between(theirs, mine, None, "reassociates")
            if gap is not None:
                return wrong(f"{spec.path} is not what the function leaves: {gap}", written[spec.name], kind="value")
    return RIGHT


def judge_passes(base: StepGraph, inputs: Sequence[Any], passes: Sequence[BoundPass], level: int) -> Verdict:
    """Check a graph after some passes. The result of a pass that may change values is the reference for later ones."""
    try:
        graph = with_passes(base, passes, level)
    except WholestepError as error:
        return _rule(error)
    changing = [i for i, bound in enumerate(passes) if bound.graph_pass.contract.numerics == "changes"]
    start = changing[-1] + 1 if changing else 0
    reference = with_passes(base, passes[:start], 0)
    before, after = Version("before", reference.gm, tuple(inputs)), Version("after", graph.gm, tuple(inputs))
    exact = all(bound.graph_pass.contract.numerics == "exact" for bound in passes[start:])
    return of_comparison(compare_versions(before, after, "exact" if exact else "reassociates"))


def judge_one_pass(
    before: StepGraph, inputs: Sequence[Any], bound: BoundPass, level: int, note: Note | None = None
) -> Verdict:
    """What one pass does wrong: by values first, since they name the node; then by the verifier."""
    after = before.copy()
    numerics = bound.graph_pass.contract.numerics
    try:
        bound.graph_pass.function(after.gm, *bound.args, **(bound.options or {}))
        after.gm.recompile()
    except Exception as error:
        return wrong(f"{type(error).__name__}: {error}", kind="raised")
    found: Verdict = RIGHT
    if numerics != "changes":
        versions = [Version(label, graph.gm, tuple(inputs)) for label, graph in (("before", before), ("after", after))]
        found = of_comparison(compare_versions(versions[0], versions[1], numerics, note))
        if found["wrong"] and found["kind"] == "value":
            return _with_texts(found, before.gm.graph, after.gm.graph)
    try:
        with_passes(before, [bound], level)
    except WholestepError as error:
        return _rule(error)
    return found


def _with_texts(found: Verdict, before: fx.Graph, after: fx.Graph) -> Verdict:
    """The node after the pass and before it: a user of a node that the pass removed or inserted shows that itself."""
    was, now = (
        next((format_node(node) for node in graph.nodes if node.name == found["node"]), "") for graph in (before, after)
    )
    return {**found, "text": now or found["text"], "was": was if was != now else ""}


def judge_lowering(call: CapturedCall, graph: StepGraph, options: Options, note: Note | None = None) -> Verdict:
    """The first node of a lowered graph that differs from the same graph run operator by operator."""
    try:
        lowered = lowered_call(call, graph, options)
    except WholestepError as error:
        return _rule(error)
    before, after = Version("graph", graph.gm, call.inputs), Version("lowered", lowered, call.inputs, lowered=True)
    found = of_comparison(compare_versions(before, after, "reassociates", note))
    if found["wrong"]:
        found["region"] = region_of(lowered, found["node"])
        found["inputs"], found["outputs"] = _edges(lowered, found["region"])
    return found


def judge_guard(kept: StepGraph, fresh: StepGraph, inputs: Sequence[Any]) -> Verdict:
    """True if a graph of an earlier call is right for this one."""
    names = [[node.name for node in graph.gm.graph.find_nodes(op="placeholder")] for graph in (kept, fresh)]
    if names[0] != names[1]:
        return wrong("the graph that was captured earlier has other inputs than one for this call", kind="guard")
    versions = [Version(label, graph.gm, tuple(inputs)) for label, graph in (("new", fresh), ("kept", kept))]
    return of_comparison(compare_versions(versions[0], versions[1], versions[0].contract_with(versions[1])))


def region_of(gm: fx.GraphModule, name: str) -> str:
    """The compiled call that makes a value, or that may write an input."""
    node = next((each for each in gm.graph.nodes if each.name == name), None)
    if node is None:
        return ""
    if node.op == "placeholder":
        return next((str(user.target) for user in node.users if user.op == "call_module"), "")
    for each in (node, *node.all_input_nodes):
        if each.op == "call_module":
            return str(each.target)
    return ""


def _edges(gm: fx.GraphModule, region: str) -> tuple[list[str], list[str]]:
    call = next((node for node in gm.graph.nodes if node.op == "call_module" and node.target == region), None)
    if call is None:
        return [], []
    return [node.name for node in call.all_input_nodes], [node.name for node in call.users]


def describe(node: fx.Node) -> Verdict:
    """The verdict that is recorded before a node runs, in case the process does not survive it."""
    region = str(node.target) if node.op == "call_module" else ""
    found = wrong("", "" if region else node.name, format_node(node), kind="died", region=region)
    if region:
        found |= {"inputs": [n.name for n in node.all_input_nodes], "outputs": [n.name for n in node.users]}
    return found


def of_comparison(found: Comparison) -> Verdict:
    """The verdict of a comparison."""
    first = found.first
    if first is None:
        return dict(RIGHT)
    kind = "raised" if first.gap.kind == "raised" else "value"
    # A single new node computes the value that differs: the fault is in it, not in its user.
    node = first.new[0] if len(first.new) == 1 and kind == "value" else first.node
    return wrong(str(first.gap), node, first.text if node == first.node else "", kind=kind)


def _rule(error: WholestepError) -> Verdict:
    name = _NAME.match(error.node.strip()) if error.node else None
    return wrong(error.what, name[1] if name else "", error.node, kind="rule")
