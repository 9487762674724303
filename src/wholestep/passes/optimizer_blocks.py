"""The optimizers of a graph: list operators with their step counts, states and write-backs.

    steps = _foreach_add([s0, s1], 1)                                step.add_node
    new = _fused_adam([p0, p1], [g0, g1], [m0, m1], .., [steps..])   optim.optim_node
    copy_(p0, new[0][0]); copy_(p1, new[0][1])                       optim.param_outputs
    copy_(s0, steps[0]); ..                                          step.outputs

Fused and foreach optimizers have the same interface: a block has lanes, one per parameter (`list_lanes`). For a foreach
optimizer the operator that computes the new parameters represents the whole chain. Where a state is created by this
step instead of written back, the outputs are the values themselves.  Cost: one walk for all blocks of a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from wholestep.errors import OptionError
from wholestep.ir.effects import keeps_elements, written_inputs
from wholestep.ir.functionalize import writes_in_place
from wholestep.ir.graph_walks import descendants
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import format_node
from wholestep.passes.list_lanes import (
    Lanes,
    base_name,
    element_of,
    is_list_op,
    list_arguments,
    returns_several_lists,
    width,
)
from wholestep.torch_private.operators import OpOverload, OpOverloadPacket

OptimOp = str | OpOverload | OpOverloadPacket
"""How optimizers are named: the beginning of an operator's name (`"_fused_adam"`), or the operator."""

_COPY = torch.ops.aten.copy_.default
_CHOICE = torch.ops.aten.where.self
_FACTORIES = ("zeros", "ones", "full", "empty", "lift_fresh", "scalar_tensor")
_FOREACH_ADAM = {"_foreach_lerp": "exp_avgs", "_foreach_addcmul": "exp_avg_sqs", "_foreach_maximum": "max_exp_avg_sqs"}
_FUSED_ADAM = ("_fused_adam", "_fused_adamw")


class NoOptimizerError(OptionError, RuntimeError):
    """A node is not part of an optimizer that updates lists of parameters."""


class NoParentsError(OptionError, AssertionError):
    """No nodes were given whose descendants could be found."""


class AdamArgs(NamedTuple):
    """The lists that `_fused_adam` takes, in its order: `AdamArgs(*node.args)`."""

    params: Sequence[fx.Node]
    grads: Sequence[fx.Node]
    exp_avgs: Sequence[fx.Node]
    exp_avg_sqs: Sequence[fx.Node]
    max_exp_avg_sqs: Sequence[fx.Node]
    state_steps: Sequence[fx.Node]


@dataclass(eq=False)
class ForeachAddBlock:
    """The operator that counts steps, and the write-back of each count."""

    add_node: fx.Node
    generate_output: bool = False
    """Create elements and write-backs (in the epilogue) instead of searching for them."""
    outputs: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.generate_output and not self.outputs:
            _generate_outputs(self.add_node, 0, 0)
        self.outputs = self.outputs or outputs_of(self.add_node)


@dataclass(eq=False)
class FusedAdamBlock:
    """Adam or AdamW: its operator, and the write-backs of parameters and states in the order of the arguments."""

    optim_node: fx.Node
    generate_output: bool = False
    """Create elements and write-backs (in the epilogue) instead of searching for them."""
    param_outputs: list[fx.Node] = field(default_factory=list)
    grad_outputs: list[fx.Node] = field(default_factory=list)
    """Empty if no node reads the unscaled gradients, as usual."""
    exp_avgs_outputs: list[fx.Node] = field(default_factory=list)
    exp_avg_sqs_outputs: list[fx.Node] = field(default_factory=list)
    max_exp_avg_sqs: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.param_outputs:
            return
        if self.generate_output:
            for which in (0, 2, 3, 4):
                _generate_outputs(self.optim_node, which, which)
        self.param_outputs = outputs_of(self.optim_node, 0)
        self.grad_outputs = outputs_of(self.optim_node, 1)
        self.exp_avgs_outputs = outputs_of(self.optim_node, 2)
        self.exp_avg_sqs_outputs = outputs_of(self.optim_node, 3)
        self.max_exp_avg_sqs = outputs_of(self.optim_node, 4)


@dataclass(eq=False)
class ListOptimizerBlock:
    """SGD, or any other optimizer made of list operators."""

    optim_node: fx.Node
    param_outputs: list[fx.Node] = field(default_factory=list)
    state_outputs: list[list[fx.Node]] = field(default_factory=list)
    """One list per kind of state (momentum buffers), in graph order."""


@dataclass(eq=False)
class FusedOptimizerBlock:
    """An optimizer that updates several parameters at once. Lane i is the update of parameter i."""

    step: ForeachAddBlock | None
    """None where steps are not counted in the graph, as in SGD."""
    optim: FusedAdamBlock | ListOptimizerBlock
    params: list[fx.Node] = field(default_factory=list)
    grads: list[fx.Node] = field(default_factory=list)
    ops: list[fx.Node] = field(default_factory=list)
    """The list operators, in graph order; one of them is `optim.optim_node`, one `step.add_node`."""
    lanes: dict[fx.Node, list[int]] = field(default_factory=dict)
    """For each list operator: the lane of each of its elements; -1 for one that belongs to no parameter."""
    members: dict[fx.Node, int] = field(default_factory=dict)
    """All nodes of the block in graph order, write-backs too, with their lanes; -1 for nodes that all lanes share."""

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that move with the optimizer: list operators, elements, scalars of single lanes, write-backs."""
        return list(self.members)

    @property
    def args(self) -> AdamArgs:
        """The lists that Adam updates, for fused and foreach Adam alike."""
        return _adam_args(self)


def get_fused_optimizer_block(optim_node: fx.Node) -> FusedOptimizerBlock:
    """The block that a list operator belongs to. Costs a walk over the graph: for many, use `get_all_...`."""
    if _updates_in_place(optim_node):
        raise _in_place_error(optim_node)
    if is_list_op(optim_node):
        for block in _blocks(optim_node.graph):
            if optim_node in block.lanes:
                return block
    raise NoOptimizerError(
        f"{optim_node.name} is not part of an optimizer that updates lists of parameters.",
        fix="give a functional `_fused_*` or `_foreach_*` node whose results are written back to parameters.",
        node=format_node(optim_node),
        location=node_meta(optim_node).location,
    )


def get_all_fused_optimizer_blocks(
    gm: fx.GraphModule, optim_ops: OptimOp | Iterable[OptimOp] = ("_fused_", "_foreach_")
) -> list[FusedOptimizerBlock]:
    """The optimizers with one of these operators among theirs, in graph order. By default all of them."""
    wanted = [optim_ops] if isinstance(optim_ops, OptimOp) else list(optim_ops)
    for node in gm.graph.nodes:
        if _updates_in_place(node) and _is_one_of(node, wanted):
            raise _in_place_error(node)
    return [block for block in _blocks(gm.graph) if any(_is_one_of(op, wanted) for op in block.ops)]


def all_blocks(graph: fx.Graph) -> list[FusedOptimizerBlock]:
    """The functional optimizers of a graph; those that write in place are not searched for."""
    return list(_blocks(graph))


def _updates_in_place(node: fx.Node) -> bool:
    """Whether a list operator writes into inputs of the graph."""
    if not writes_in_place(node) or not base_name(node).startswith(("_fused_", "_foreach_")):
        return False
    return any(written.op == "placeholder" for written in written_inputs(node))


def _in_place_error(node: fx.Node) -> NoOptimizerError:
    return NoOptimizerError(
        f"{node.name} updates its parameters in place: the graph does not show what depends on the update.",
        fix="run ws.passes.functionalize_optimizer(gm) first; the passes that move optimizers do that themselves.",
        node=format_node(node),
        location=node_meta(node).location,
    )


def find_all_descendants(gm: fx.GraphModule, parent_nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Some nodes and all that depends on them, without the output node, in graph order."""
    found = descendants(parent_nodes)
    if not found:
        raise NoParentsError("No parent nodes are given.", fix="give at least one node.")
    return [node for node in gm.graph.nodes if node in found and node.op != "output"]


def make_block(
    ops: list[fx.Node], lanes: dict[fx.Node, list[int]], members: dict[fx.Node, int]
) -> FusedOptimizerBlock | None:
    """A block from its list operators; None if they are no optimizer: nothing new is written, or nothing is read."""
    optim = _optim_node(ops)
    param_outputs = outputs_of(optim)
    if not param_outputs:
        return None
    step = _step_node(ops, optim, members)
    block = FusedOptimizerBlock(
        step=None if step is None else ForeachAddBlock(step, outputs=_step_outputs(step)),
        optim=_outputs_block(ops, optim, step, param_outputs),
        params=[_self_root(optim, i) for i in range(width(optim))],
        ops=ops,
        lanes=lanes,
        members=members,
    )
    block.grads = _gradients(block)
    return block if block.grads else None


def outputs_of(op: fx.Node, which: int = 0) -> list[fx.Node]:
    """For each element of a result: its write-back, or the element itself where it leaves the graph otherwise.

    Empty if that is not so for every element.
    """
    found = [_output(element) if element is not None else None for element in elements_of(op, which)]
    known = [node for node in found if node is not None]
    return known if len(known) == len(found) else []


def elements_of(op: fx.Node, which: int = 0) -> list[fx.Node | None]:
    """The nodes that take the elements of a result, by index."""
    found: list[fx.Node | None] = [None] * width(op)
    sources = list(op.users)
    if returns_several_lists(op):
        sources = [node for part in op.users if part.args[1] == which for node in part.users]
    for node in sources:
        element = element_of(node)
        if element is not None and element[:2] == (op, which):
            found[element[2]] = found[element[2]] or node
    return found


def _blocks(graph: fx.Graph) -> Iterator[FusedOptimizerBlock]:
    lanes = Lanes(graph)
    groups = lanes.blocks()
    group_of = {op: i for i, ops in enumerate(groups) for op in ops}
    members: list[dict[fx.Node, int | None]] = [{} for _ in groups]
    for node, op, lane in lanes.members():
        members[group_of[op]][node] = lane
    phases = {node_meta(op).phase for op in group_of}
    for ops, belonging in zip(groups, members, strict=True):
        if "optimizer" in phases and node_meta(ops[0]).phase != "optimizer":
            continue  # clipping, a moving average of the parameters
        optim = _optim_node(ops)
        number = {lanes.lane(optim, i): i for i in range(width(optim))}
        table = {op: [number.get(lanes.lane(op, i), -1) for i in range(width(op))] for op in ops}
        block = make_block(ops, table, {n: -1 if k is None else number.get(k, -1) for n, k in belonging.items()})
        if block is not None:
            yield block


def _is_one_of(op: fx.Node, wanted: list[OptimOp]) -> bool:
    for each in wanted:
        if isinstance(each, str):
            if base_name(op).startswith(str.__str__(each)):
                return True
        elif op.target is each or getattr(op.target, "overloadpacket", None) is each:
            return True
    return False


def _optim_node(ops: list[fx.Node]) -> fx.Node:
    """The operator that computes the new parameters: the fused one, or the end of the chain."""
    for prefix in ("_fused_", "_foreach_addcdiv"):
        found = [op for op in ops if base_name(op).startswith(prefix)]
        if found:
            return found[-1]
    return ops[-1]


def _step_node(ops: list[fx.Node], optim: fx.Node, members: Mapping[fx.Node, int]) -> fx.Node | None:
    """The operator that adds one scalar to values that no other operator of the block computed."""
    for op in ops:
        if op is not optim and base_name(op) == "_foreach_add" and not str(op.target).endswith(".List"):
            _, counts = next(list_arguments(op))
            if not any(count in members for count in counts):
                return op
    return None


def _step_outputs(step: fx.Node) -> list[fx.Node]:
    """Also where a gradient scaler restores the counts for a step that it skips."""
    found = outputs_of(step)
    elements = elements_of(step)
    after = [user for user in (elements[0].users if elements[0] is not None else ()) if is_list_op(user)]
    for op in after:
        if not found and list(next(list_arguments(op))[1]) == elements:
            found = outputs_of(op)
    return found


def _outputs_block(
    ops: list[fx.Node], optim: fx.Node, step: fx.Node | None, param_outputs: list[fx.Node]
) -> FusedAdamBlock | ListOptimizerBlock:
    if base_name(optim) in _FUSED_ADAM:
        return FusedAdamBlock(optim)
    adam = _foreach_adam(ops, optim)
    if adam is not None:
        outputs = {role: outputs_of(op) for role, op in adam.items()}
        return FusedAdamBlock(
            optim,
            param_outputs=param_outputs,
            exp_avgs_outputs=outputs["exp_avgs"],
            exp_avg_sqs_outputs=outputs["exp_avg_sqs"],
            max_exp_avg_sqs=outputs.get("max_exp_avg_sqs", []),
        )
    states = [outputs_of(optim, i) for i in range(2, 5)] if returns_several_lists(optim) else []
    states += [outputs_of(op) for op in ops if op is not optim and op is not step]
    return ListOptimizerBlock(optim, param_outputs, [outputs for outputs in states if outputs])


def _foreach_adam(ops: list[fx.Node], optim: fx.Node) -> dict[str, fx.Node] | None:
    """The operators that compute the states of a foreach Adam; None for other optimizers."""
    found = {_FOREACH_ADAM[base_name(op)]: op for op in ops if base_name(op) in _FOREACH_ADAM}
    is_adam = base_name(optim) == "_foreach_addcdiv" and {"exp_avgs", "exp_avg_sqs"} <= found.keys()
    return found if is_adam else None


def _adam_args(block: FusedOptimizerBlock) -> AdamArgs:
    optim = block.optim.optim_node
    if base_name(optim) in _FUSED_ADAM:
        return AdamArgs(*optim.args)  # type: ignore[arg-type]
    adam = _foreach_adam(block.ops, optim)
    if adam is None:
        raise OptionError(f"{optim.name} is not an Adam.", fix="use `params`, `grads` and `ops` of the block.")

    def roots(op: fx.Node | None) -> list[fx.Node]:
        return [] if op is None else [_self_root(op, i) for i in range(width(op))]

    steps = block.step.add_node if block.step is not None else None
    return AdamArgs(
        block.params,
        block.grads,
        roots(adam["exp_avgs"]),
        roots(adam["exp_avg_sqs"]),
        roots(adam.get("max_exp_avg_sqs")),
        [element for element in elements_of(steps) if element is not None] if steps is not None else [],
    )


def _self_root(op: fx.Node, index: int) -> fx.Node:
    """Element `index` before the first operator of its chain: operators update their first argument."""
    while True:
        _, values = next(list_arguments(op))
        value = values[index]
        assert isinstance(value, fx.Node)
        element = element_of(value)
        if element is None or element[1] != 0:
            return value
        op, _, index = element


def _gradients(block: FusedOptimizerBlock) -> list[fx.Node]:
    """One per lane: the value from outside that is neither its parameter nor its state. Empty if a lane has none."""
    optim = block.optim.optim_node
    if base_name(optim).startswith("_fused_"):
        return list(list(list_arguments(optim))[1][1])
    written = {node.args[0]: lane for node, lane in block.members.items() if node.target is _COPY}
    found: dict[int, fx.Node] = {}
    others: dict[int, fx.Node] = {}
    for op in block.ops:
        for _, values in list_arguments(op):
            for lane, value in zip(block.lanes[op], values, strict=True):
                if lane < 0 or not isinstance(value, fx.Node) or value in block.members:
                    continue
                source = _source(value)
                if source is block.params[lane]:
                    continue
                is_state = written.get(source) == lane or _is_made_here(source)
                (others if is_state else found).setdefault(lane, source)
    gradients = [found.get(i) or others.get(i) for i in range(width(optim))]
    return [] if None in gradients else [gradient for gradient in gradients if gradient is not None]


def _source(value: fx.Node) -> fx.Node:
    """A gradient behind the optimizer's copy of it."""
    while node_meta(value).phase == "optimizer" and keeps_elements(value) and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value


def _is_made_here(value: fx.Node) -> bool:
    if value.op != "call_function":
        return False
    return node_meta(value).phase == "optimizer" or str(value.target).startswith(tuple(f"aten.{n}" for n in _FACTORIES))


def _output(element: fx.Node) -> fx.Node | None:
    """Where a new value is stored: by a `copy_`, possibly behind a selection of old or new, or as an output."""
    stack, leaves = [element], None
    seen: set[fx.Node] = set()
    while stack:
        value = stack.pop()
        for user in value.users:
            if user.target is _COPY and user.args[1] is value:
                return user
            if user.op == "output":
                leaves = leaves or value
            elif user.target is _CHOICE and user not in seen:
                seen.add(user)
                stack.append(user)
    return leaves


def _generate_outputs(op: fx.Node, which: int, position: int) -> None:
    """Elements for a result, and their write-backs to the argument at a position."""
    graph = op.graph
    targets: Any = op.args[position]
    if not targets:
        return
    source = op
    with graph.inserting_after(op):
        if returns_several_lists(op):
            source = graph.call_function(operator.getitem, (op, which))
    with graph.inserting_after(source):
        new = [graph.call_function(operator.getitem, (source, i)) for i in reversed(range(len(targets)))]
    with graph.inserting_before(graph.output_node()):
        for target, value in zip(targets, reversed(new), strict=True):
            graph.call_function(_COPY, (target, value))
