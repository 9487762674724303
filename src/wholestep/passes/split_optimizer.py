"""Cut one optimizer into two, so that a part of it can run at another time.

    before                                            after
    s = _foreach_add([s0, s1], 1)                     a = _foreach_add([s0], 1); b = _foreach_add([s1], 1)
    new = _fused_adam([p0, p1], [g0, g1], ..)         x = _fused_adam([p0], [g0], ..); y = _fused_adam([p1], [g1], ..)
    copy_(p0, new[0][0]); copy_(p1, new[0][1])        copy_(p0, x[0][0]); copy_(p1, y[0][0])

Needs: an optimizer of functional list operators (`optimizer_blocks`).  Numerics: exact.
Legal everywhere: element i of a list operator's results depends only on element i of its arguments, and the parts are
placed where the whole was. Elements, write-backs and outputs keep their nodes and names; what all lanes share (a
learning rate, the flag of a gradient scaler) is read by all parts.  Cost: the nodes of the optimizer.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from wholestep.errors import OptionError, UnsupportedError
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import format_node
from wholestep.passes.list_lanes import element_of, list_arguments, returns_several_lists, width
from wholestep.passes.optimizer_blocks import FusedOptimizerBlock, make_block

_PACKED = frozenset({"aten._foreach_addcdiv.Tensor", "aten._foreach_addcmul.Tensor"})


@dataclass(frozen=True)
class ListSplit:
    """The elements of a list operator in each part; empty parts are skipped when applied."""

    op: fx.Node
    parts: tuple[tuple[int, ...], ...]

    @property
    def is_trivial(self) -> bool:
        """Whether one part has all elements: the operator stays unchanged."""
        return sum(1 for part in self.parts if part) == 1


@dataclass(frozen=True)
class SplitPlan:
    """The lanes of each part of an optimizer, and the resulting splits of its list operators."""

    lanes: tuple[tuple[int, ...], ...]
    splits: tuple[ListSplit, ...]


def split_fused_optimizer(
    gm: fx.GraphModule, optim_block: FusedOptimizerBlock, split_gradients: Collection[fx.Node]
) -> tuple[FusedOptimizerBlock, FusedOptimizerBlock]:
    """Split off the parameters with some gradients: (their optimizer, that of the others).

    Gradients of other optimizers are ignored. ValueError if one of the two would be empty.
    """
    if not split_gradients:
        raise OptionError("The given split_gradients is empty.", fix="give the gradients that the first part takes.")
    first, second = split_optimizer(gm, optim_block, [split_gradients])
    if isinstance(gm, fx.GraphModule):
        gm.recompile()
    return first, second


def split_optimizer(
    gm: fx.GraphModule, block: FusedOptimizerBlock, gradients: Sequence[Collection[fx.Node]]
) -> list[FusedOptimizerBlock]:
    """Split into one part per collection of gradients and one for the rest, in one go; recompiles nothing."""
    plan = plan_split(block, gradients)
    return apply_split(gm.graph, block, plan)


def plan_split(block: FusedOptimizerBlock, gradients: Sequence[Collection[fx.Node]]) -> SplitPlan:
    """The lanes of each part; the last part is the rest. Gradients in several collections belong to the first."""
    part_of: dict[fx.Node, int] = {}
    for number, collection in enumerate(gradients):
        for gradient in collection:
            part_of.setdefault(gradient, number)
    chosen = [part_of.get(gradient, len(gradients)) for gradient in block.grads]
    lanes = tuple(tuple(i for i, part in enumerate(chosen) if part == number) for number in range(len(gradients) + 1))
    empty = [number for number, part in enumerate(lanes) if not part]
    if empty:
        raise OptionError(
            f"At least one split optimizer does not have input: {block.optim.optim_node.name} updates "
            f"{len(chosen)} parameters, and part {empty[0]} of {len(lanes)} would get none of them.",
            fix="give some, and not all, of the gradients of this optimizer (`block.grads`).",
        )
    rest = len(gradients)
    splits = []
    for op in block.ops:
        _check(op)
        parts: list[list[int]] = [[] for _ in lanes]
        for index, lane in enumerate(block.lanes[op]):
            parts[chosen[lane] if lane >= 0 else rest].append(index)
        splits.append(ListSplit(op, tuple(map(tuple, parts))))
    return SplitPlan(lanes, tuple(splits))


def apply_split(graph: fx.Graph, block: FusedOptimizerBlock, plan: SplitPlan) -> list[FusedOptimizerBlock]:
    """Replace each list operator by its parts; returns a block for each part."""
    made: dict[fx.Node, list[list[fx.Node]]] = {}
    """For each old node: the nodes that replace it in each part."""
    part_of_op: dict[fx.Node, int] = {}
    old_op: dict[fx.Node, tuple[fx.Node, tuple[int, ...]]] = {}
    for split in plan.splits:
        if split.is_trivial:
            part_of_op[split.op] = next(number for number, part in enumerate(split.parts) if part)
            old_op[split.op] = split.op, split.parts[part_of_op[split.op]]
            continue
        for number, (op, indices) in enumerate(_replace(graph, split, made)):
            if op is not None:
                part_of_op[op] = number
                old_op[op] = split.op, indices
    blocks = _Blocks(block, plan, made, part_of_op, old_op)
    return [blocks.block(number) for number in range(len(plan.lanes))]


class _Blocks:
    """The blocks of the parts, derived from that of the whole."""

    def __init__(
        self,
        block: FusedOptimizerBlock,
        plan: SplitPlan,
        made: dict[fx.Node, list[list[fx.Node]]],
        part_of_op: dict[fx.Node, int],
        old_op: dict[fx.Node, tuple[fx.Node, tuple[int, ...]]],
    ) -> None:
        self._old_op = old_op
        self._old_lanes = block.lanes
        self._lane = {lane: (number, i) for number, lanes in enumerate(plan.lanes) for i, lane in enumerate(lanes)}
        self._members: list[dict[fx.Node, int]] = [{} for _ in plan.lanes]
        self._ops: list[list[fx.Node]] = [[] for _ in plan.lanes]
        for op, number in part_of_op.items():
            self._ops[number].append(op)
        for node, lane in block.members.items():
            if node in made:
                for members, new in zip(self._members, made[node], strict=True):
                    members.update(dict.fromkeys(new, -1))
            elif lane >= 0:
                number, index = self._lane[lane]
                self._members[number][node] = index
            else:
                source = node.args[0] if node not in part_of_op else node
                number = part_of_op.get(source, len(plan.lanes) - 1)  # type: ignore[arg-type]
                self._members[number][node] = -1

    def block(self, number: int) -> FusedOptimizerBlock:
        lanes = {op: [self._lane_in(number, lane) for lane in self._lanes_of(op)] for op in self._ops[number]}
        found = make_block(self._ops[number], lanes, self._members[number])
        assert found is not None
        return found

    def _lanes_of(self, op: fx.Node) -> list[int]:
        old, indices = self._old_op[op]
        return [self._old_lanes[old][i] for i in indices]

    def _lane_in(self, number: int, lane: int) -> int:
        return self._lane[lane][1] if lane >= 0 and self._lane[lane][0] == number else -1


def _check(op: fx.Node) -> None:
    """Raise UnsupportedError for an operator that cannot be split by index."""
    why = ""
    if any(len(values) not in (0, width(op)) for _, values in list_arguments(op)):
        why = "its lists have different lengths"
    elif str(op.target) in _PACKED:
        why = "the scalars of all its elements are in one tensor"
    for user in op.users:
        elements = list(user.users) if returns_several_lists(op) and user.target is operator.getitem else [user]
        if any(element_of(element) is None for element in elements):
            why = f"{user.name} reads a whole list"
    if why:
        raise UnsupportedError(
            f"{op.name} cannot be split: {why}.",
            fix="use operators that compute lists element by element.",
            node=format_node(op),
            location=node_meta(op).location,
        )


def _replace(
    graph: fx.Graph, split: ListSplit, made: dict[fx.Node, list[list[fx.Node]]]
) -> list[tuple[fx.Node | None, tuple[int, ...]]]:
    """Replace a list operator by its parts and let its elements read from them."""
    op = split.op
    parts: list[tuple[fx.Node | None, tuple[int, ...]]] = []
    with graph.inserting_before(op):
        for indices in split.parts:
            parts.append((_part(graph, op, indices) if indices else None, indices))
    made[op] = [[] if part is None else [part] for part, _ in parts]
    place = {old: (number, new) for number, (_, part) in enumerate(parts) for new, old in enumerate(part)}
    heads: list[tuple[fx.Node, list[fx.Node | None]]]
    if returns_several_lists(op):
        heads = [(head, _heads(graph, head, parts)) for head in list(op.users)]
        made.update({head: [[] if new is None else [new] for new in news] for head, news in heads})
    else:
        heads = [(op, [part for part, _ in parts])]
    for head, news in heads:
        for element in list(head.users):
            found = element_of(element)
            assert found is not None
            number, index = place[found[2]]
            element.args = (news[number], index)
    for head, _ in heads:
        if head is not op:
            graph.erase_node(head)
    graph.erase_node(op)
    return parts


def _part(graph: fx.Graph, op: fx.Node, indices: tuple[int, ...]) -> fx.Node:
    args: list[Any] = list(op.args)
    kwargs: dict[str, Any] = dict(op.kwargs)
    for where, values in list_arguments(op):
        chosen = [values[i] for i in indices] if values else []
        if isinstance(where, int):
            args[where] = chosen
        else:
            kwargs[where] = chosen
    assert callable(op.target)
    part = graph.call_function(op.target, tuple(args), kwargs)
    part.meta = dict(op.meta)
    _choose_values(part, indices, returns_several_lists(op))
    return part


def _heads(
    graph: fx.Graph, head: fx.Node, parts: Sequence[tuple[fx.Node | None, tuple[int, ...]]]
) -> list[fx.Node | None]:
    """`getitem(op, k)`, for each part."""
    found: list[fx.Node | None] = []
    for part, indices in parts:
        if part is None:
            found.append(None)
            continue
        with graph.inserting_before(head):
            new = graph.call_function(operator.getitem, (part, head.args[1]))
        new.meta = dict(head.meta)
        _choose_values(new, indices, nested=False)  # the operator itself may have no `val`
        found.append(new)
    return found


def _choose_values(part: fx.Node, indices: tuple[int, ...], nested: bool) -> None:
    value = part.meta.get("val")
    if not isinstance(value, list | tuple) or not value:
        return
    if nested:
        part.meta["val"] = type(value)([each[i] for i in indices] if each else each for each in value)
    else:
        part.meta["val"] = type(value)(value[i] for i in indices)
