"""Let updates of parameters wait for the next iteration, so that communication hides behind more than a backward.

    before                                     what runs at iteration k + 1
    h = addmm(b, x, t(p))                      done = wait_tensor(started of k)
    ...                                        p1 = sub(p, done, alpha=lr of k); copy_(p, p1)
    started = all_reduce(g, 'avg', '0')        h = addmm(b, x, t(p))
    done = wait_tensor(started)                ...
    p1 = sub(p, done, alpha=lr)                started = all_reduce(g, 'avg', '0')   in flight until k + 2
    copy_(p, p1); output(loss)                 output(loss)

Needs: remove_copy_from_optimizer (the first of both); both come after schedule_comm_wait where that is used.
Numerics: exact.  Legal where nothing else needs the new value in its own iteration.  The collective
always stays in its own iteration: completing pending updates needs no other rank.

A StepGraph stays in its normal form: the nodes are only marked (`NodeMeta.move`), and the runtime makes the graphs of
first and other iterations from the marks.  In an IterGraphModule the nodes move at once.  Optimizers that update many
parameters in one operator are split by bucket first.  Cost: a few walks over the graph.

Which updates of a step may wait for the next one is found by data flow (`plan_crossing`), without editing the graph.

    started = all_reduce(g, 'avg', '0')     stays: communication starts in its own iteration
    done = wait_tensor(started)             crosses, if all that depends on it may:
    m1 = lerp(m, done, 0.1)                   arithmetic, and write-backs of the epilogue
    p1 = sub(p, m1, alpha=lr)
    copy_(m, m1); copy_(p, p1)              no other node reads these results

A wait does not cross if something needs its result now: the user's result, a gradient that stays in `.grad`, another
collective, a random operator. A `copy_` among the outputs is no such need: it returns the state itself, whatever it
holds. Nodes that compute only from state and scalars (decay of a parameter, the count of steps) move with them; all
other values are carried to the next iteration. Updates that share a node go together.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import IterMoveError
from wholestep.ir.collectives import collective_of, comm_block
from wholestep.ir.effects import is_collective, is_wait, may_draw, shared_inputs, writes
from wholestep.ir.graph_walks import reachable
from wholestep.ir.iter.graph import IterGraph
from wholestep.ir.iter.moves import (
    DESTINATIONS,
    deadline,
    first_readers,
    gm_meta,
    iteration_facts,
    marked_moves,
    move_of,
    needed_outputs,
    plan_moves,
    roots_of,
    state_of,
)
from wholestep.ir.meta import node_meta, update_node_meta
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.functionalize_optimizer import apply_removal, functionalized, plan_orphans
from wholestep.passes.optimizer_blocks import all_blocks
from wholestep.passes.split_optimizer import split_optimizer
from wholestep.torch_private.operators import OpOverload, op_name

log = logging.getLogger("wholestep.passes")

_COPY = torch.ops.aten.copy_.default

STAYS = "wholestep_stays"
"""In the `meta` of a graph module: name of a wait that did not cross, to the reason."""


@graph_optimization_pass(
    prerequisites=["remove_copy_from_optimizer"], apply_after=["schedule_comm_wait"], numerics="exact", allow_rerun=True
)
def iter_move_grads_and_optimizers(gm: Any, target_comm_node: str, target_dest_node: str) -> None:
    """Run the wait of one collective, and the optimizer of what it reduces, in the next iteration before a node."""
    graph: fx.Graph = gm.graph
    if iteration_facts(gm).creates_state:
        log.info("%s: all updates of a step that creates optimizer state stay in it", target_comm_node)
        return
    by_name = {node.name: node for node in graph.nodes}
    started, target = by_name.get(target_comm_node), by_name.get(target_dest_node)
    if started is None or not is_collective(started.target):
        found = [node.name for node in graph.nodes if is_collective(node.target)]
        raise IterMoveError(
            f"Cannot find {target_comm_node} among the collectives of the graph.",
            fix=f"name one of {', '.join(found[:20])}." if found else "this graph has no collective.",
        )
    if target is None:
        raise IterMoveError(f"Cannot find the destination {target_dest_node}.", fix="name a node of the graph.")
    waits = list(comm_block(started).waits)
    _prepare(gm)
    _split_optimizers(gm, waits)
    crossing = plan_crossing(graph, waits, iteration_facts(gm).late_outputs)
    for wait, why in crossing.stays.items():
        raise IterMoveError(
            f"{target_comm_node} cannot be completed in the next iteration: {why}.",
            fix="name a collective whose result only updates state; overlap_optimizer_with_next_forward finds those.",
            node=wait.name,
        )
    if not all(move_of(group, set()).state for group in crossing.groups):
        raise IterMoveError(
            f"{target_comm_node} is not used by any fused optimizer, nor by another one.",
            fix="name a collective whose result is written back into an input by a `copy_` at the end of the graph.",
        )
    _move(gm, [(group, target) for group in crossing.groups])


@graph_optimization_pass(apply_after=["comm_fusion_with_concat", "schedule_comm_wait"], numerics="exact")
def overlap_optimizer_with_next_forward(gm: Any) -> None:
    """Let every update that can cross run in the next iteration, right before the first use of what it writes."""
    graph: fx.Graph = gm.graph
    _prepare(gm)
    crossing = plan_crossing(graph, late_outputs=iteration_facts(gm).late_outputs)
    if crossing.groups:
        _split_optimizers(gm, [node for group in crossing.groups for node in group if is_wait(node.target)])
        crossing = plan_crossing(graph, late_outputs=iteration_facts(gm).late_outputs)
    gm_meta(gm)[STAYS] = {wait.name: why for wait, why in crossing.stays.items()}
    for wait, why in crossing.stays.items():
        log.info("%s stays in its own iteration: %s", name_of(wait), why)
    moved = {node: None for group in crossing.groups for node in group}
    readers = first_readers(graph, moved)
    place = {node: i for i, node in enumerate(graph.nodes)}
    _move(gm, [(group, deadline(group, readers, place, graph)) for group in crossing.groups])


def _prepare(gm: Any) -> None:
    """Graphs from elsewhere have optimizers that write in place, and copies of results that no node reads."""
    graph = gm.graph
    functionalized(graph)
    if any(node.target is _COPY and _is_made_here(node.args[0]) for node in graph.nodes):
        apply_removal(graph, plan_orphans(graph))


def _is_made_here(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op != "placeholder"


def _split_optimizers(gm: Any, waits: Sequence[fx.Node]) -> None:
    """Optimizers of many parameters become one per wait, and one for the parameters of other waits."""
    for block in all_blocks(gm.graph):
        behind = waits_behind(block.grads, waits)
        parts: dict[frozenset[fx.Node], list[fx.Node]] = {}
        for grad in block.grads:
            parts.setdefault(behind.get(grad, frozenset()), []).append(grad)
        rest = parts.pop(frozenset(), None)
        chosen = list(parts.values())
        if rest is None:
            chosen = chosen[:-1]
        if chosen:
            split_optimizer(gm, block, chosen)


def _move(gm: Any, moves: Sequence[tuple[Sequence[fx.Node], fx.Node]]) -> None:
    if not moves:
        return
    graph = gm.graph
    if isinstance(graph, IterGraph):
        graph.move_all_to_next_iter(moves)
        return
    marked = marked_moves(graph)
    earlier = [move_of(nodes, set()) for nodes in marked.values()]
    plan_moves(graph, moves, earlier, iteration_facts(gm).late_outputs)  # raises where one is not legal
    destinations = dict(gm.meta.get(DESTINATIONS, {}))
    for number, (nodes, target) in enumerate(moves, max(marked, default=0) + 1):
        for node in nodes:
            update_node_meta(node, move=number)
        destinations[number] = target.name
        names = [name_of(node) for node in nodes if is_wait(node.target)]
        log.info("%d nodes run in the next iteration before %s: %s", len(nodes), target.name, ", ".join(names)[:200])
    gm.meta[DESTINATIONS] = destinations


@dataclass(frozen=True)
class Crossing:
    """The nodes of one graph that may cross."""

    groups: tuple[tuple[fx.Node, ...], ...]
    """Nodes that move together, in graph order."""
    stays: Mapping[fx.Node, str]
    """For each wait that cannot cross: why."""


def plan_crossing(
    graph: fx.Graph, waits: Iterable[fx.Node] | None = None, late_outputs: Collection[int] = ()
) -> Crossing:
    """The nodes that may cross, for some waits or for all. `late_outputs`: outputs that may be filled later."""
    finder = _Finder(graph, late_outputs)
    wanted = finder.waits if waits is None else list(waits)
    stays = {wait: why for wait in wanted if (why := finder.why_not(wait))}
    return Crossing(finder.groups([wait for wait in wanted if wait not in stays]), stays)


def waits_behind(nodes: Iterable[fx.Node], waits: Iterable[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each of some nodes (gradients), the waits that it depends on. Costs what depends on the waits."""
    wanted = set(nodes)
    behind: dict[fx.Node, frozenset[fx.Node]] = {}
    for wait in waits:
        for node in reachable([wait], lambda node: () if node in wanted else node.users):
            if node in wanted:
                behind[node] = behind.get(node, frozenset()) | {wait}
    return behind


def name_of(wait: fx.Node) -> str:
    """The name of a wait in messages: its parameter, or its node."""
    parameter = node_meta(wait).parameter or node_meta(collective_of(wait)).parameter
    return f"{wait.name} ({parameter})" if parameter else wait.name


class _Finder:
    def __init__(self, graph: fx.Graph, late_outputs: Collection[int]) -> None:
        self._nodes = list(graph.nodes)
        self._place = {node: i for i, node in enumerate(self._nodes)}
        self._needed = needed_outputs(graph, late_outputs)
        self._blocked: dict[fx.Node, tuple[str, fx.Node | None]] = {}
        """Nodes that cannot cross: the reason, or the user that is the reason."""
        self.waits = [
            node
            for node in self._nodes
            if is_wait(node.target) and not node_meta(node).move and is_collective(collective_of(node).target)
        ]
        """Nodes of this iteration that are not moved yet."""
        for node in reversed(self._nodes):
            self._visit(node)
        self._parent: dict[fx.Node, fx.Node] = {}

    # What may cross.

    def _visit(self, node: fx.Node) -> None:
        reason = self._own_reason(node)
        if reason:
            self._blocked[node] = (reason, None)
            return
        for user in node.users:
            if user.op == "output" and (node not in self._needed or _gives_state(node, user)):
                continue  # it may come later
            if user in self._blocked:
                self._blocked[node] = ("", user)
                return

    def _own_reason(self, node: fx.Node) -> str:
        if node.op == "output":
            return "the step's output needs it: the user's result, or state such as a gradient that stays in `.grad`"
        if node.op not in ("call_function", "call_method", "call_module"):
            return ""
        if is_collective(node.target):
            return f"{node.name} communicates it"
        if may_draw(node.target):
            return f"{node.name} draws random numbers"
        if _is_write_back(node):
            target = state_of(node)
            if target in self._needed:
                return f"the step returns {target}"
            return ""
        return f"{node.name} writes in place, and is no update of state that could move" if writes(node) else ""

    def why_not(self, wait: fx.Node) -> str:
        """Why a wait cannot cross; empty if it can."""
        node: fx.Node | None = wait
        while node in self._blocked:
            reason, user = self._blocked[node]
            if reason:
                return reason
            node = user
        started = collective_of(wait)
        copies = isinstance(started.target, OpOverload) and "all_reduce" in op_name(started.target)
        if not copies and any(_is_input_memory(source) for source in started.all_input_nodes):
            return f"{started.name} reads memory of an input while it is under way"
        return ""

    def groups(self, waits: list[fx.Node]) -> tuple[tuple[fx.Node, ...], ...]:
        member = set(waits)
        """The nodes that cross; `_find` says in which group."""
        if not waits:
            return ()
        for node in self._nodes:
            if node.op == "output":
                continue
            for source in node.all_input_nodes:
                if source in member:
                    member.add(node)
                    self._unite(node, source)
        self._pull_state_only(member)
        self._unite_by_state(member)
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self._nodes:
            if node in member:
                found.setdefault(self._find(node), []).append(node)
        return tuple(tuple(nodes) for nodes in found.values())

    def _pull_state_only(self, member: set[fx.Node]) -> None:
        """Move nodes that compute only from state and scalars with the one group that uses them."""
        written = {state_of(n) for n in self._nodes if _is_write_back(n)}
        free: set[fx.Node] = set()
        for node in self._nodes:
            if node.op != "call_function" or node in self._blocked or node in member or not node.users:
                continue
            if all(n in free or n in written or _is_small(n) for n in node.all_input_nodes):
                free.add(node)
        for node in reversed(self._nodes):
            if node not in free or node in member:
                continue
            copies = [user for user in node.users if _is_write_back(user) and user not in member]
            users = [user for user in node.users if user not in copies and not _gives_state(node, user)]
            if not users or any(user not in member for user in users):
                continue
            groups = {self._find(user) for user in users}
            if len(groups) > 1 and _is_small(node) and not copies:
                continue  # a scalar that several updates share is carried to each
            member |= {node, *copies}
            for each in (*users, *copies):
                self._unite(node, each)

    def _unite_by_state(self, member: set[fx.Node]) -> None:
        """Unite an update that reads state with the one that writes it."""
        writer = {state_of(n): n for n in member if _is_write_back(n)}
        for node in list(member):
            for source in node.all_input_nodes:
                for state in (source, *roots_of(source)):
                    if state in writer:
                        self._unite(node, writer[state])

    def _find(self, node: fx.Node) -> fx.Node:
        while node in self._parent:
            above = self._parent[node]
            if above in self._parent:
                self._parent[node] = self._parent[above]
            node = above
        return node

    def _unite(self, one: fx.Node, other: fx.Node) -> None:
        one, other = self._find(one), self._find(other)
        if one is not other:
            self._parent[other] = one


def _is_write_back(node: fx.Node) -> bool:
    return state_of(node) is not None


def _gives_state(node: fx.Node, user: fx.Node) -> bool:
    """Whether the output returns a write-back, as graphs of PyTorch's `_spmd` do: the user gets the state tensor."""
    return user.op == "output" and _is_write_back(node)


def _is_small(node: fx.Node) -> bool:
    """A number, or a tensor with one element: cheap to carry."""
    if node.op == "get_attr":
        return True
    if "val" not in node.meta:
        return False
    value = node.meta["val"]
    if isinstance(value, list | tuple):
        return False
    return not isinstance(value, Tensor) or (value.numel() == 1 if all(type(s) is int for s in value.shape) else False)


def _is_input_memory(node: fx.Node) -> bool:
    shared = reachable([node], shared_inputs)
    return any(each.op == "placeholder" or any(map(_is_write_back, each.users)) for each in shared)
