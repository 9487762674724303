"""Which updates of a step may wait for the next one: found by data flow, nothing is edited.

    started = all_reduce(g, 'avg', '0')     stays: the ranks begin to talk in their own iteration
    done = wait_tensor(started)             crosses, if all that depends on it may:
    m1 = lerp(m, done, 0.1)                   arithmetic, and write-backs of the epilogue
    p1 = sub(p, m1, alpha=lr)
    copy_(m, m1); copy_(p, p1)              no other node reads these results

A wait does not cross if something needs its result now: the user's result, a gradient that stays in `.grad`, another
collective, a random draw. A `copy_` among the outputs is no such need: it gives the state itself, whatever it holds.
What the moved nodes compute from state and numbers alone (decay of a parameter, the count of steps) goes with them; all
other values are carried to the next iteration. Updates that share a node go together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from wholestep.ir.collectives import collective_of
from wholestep.ir.effects import is_collective, is_wait, may_draw, shared_inputs, writes
from wholestep.ir.iter.moves import needed_outputs, roots_of, state_of
from wholestep.ir.meta import node_meta
from wholestep.ir.slices import reachable
from wholestep.torch_private.operators import OpOverload, op_name


@dataclass(frozen=True)
class Crossing:
    """What may cross in one graph."""

    groups: tuple[tuple[fx.Node, ...], ...]
    """Nodes that go together, in graph order."""
    stays: Mapping[fx.Node, str]
    """For each wait that cannot cross: why."""


def plan_crossing(
    graph: fx.Graph, waits: Iterable[fx.Node] | None = None, late_outputs: Collection[int] = ()
) -> Crossing:
    """What may cross, of some waits or of all. `late_outputs`: places in the output that may be filled later."""
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
    """What a wait is called in messages: its parameter, or its node."""
    parameter = node_meta(wait).parameter or node_meta(collective_of(wait)).parameter
    return f"{wait.name} ({parameter})" if parameter else wait.name


class _Finder:
    def __init__(self, graph: fx.Graph, late_outputs: Collection[int]) -> None:
        self._nodes = list(graph.nodes)
        self._place = {node: i for i, node in enumerate(self._nodes)}
        self._needed = needed_outputs(graph, late_outputs)
        self._blocked: dict[fx.Node, tuple[str, fx.Node | None]] = {}
        """Nodes that cannot cross: why, or the user that is the reason."""
        self.waits = [
            node
            for node in self._nodes
            if is_wait(node.target) and not node_meta(node).move and is_collective(collective_of(node).target)
        ]
        """Of this iteration, and not moved yet."""
        for node in reversed(self._nodes):
            self._look_at(node)
        self._parent: dict[fx.Node, fx.Node] = {}

    # What may cross.

    def _look_at(self, node: fx.Node) -> None:
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
            return f"{node.name} sends it on"
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

    # What goes together.

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
        """Nodes that compute from state and numbers only go with the one group that uses them."""
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
                continue  # a number that several updates share is carried to each
            member |= {node, *copies}
            for each in (*users, *copies):
                self._unite(node, each)

    def _unite_by_state(self, member: set[fx.Node]) -> None:
        """An update that reads state which another writes goes with it."""
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
    """Whether the output has a write-back, as in graphs of PyTorch's `_spmd`: the user gets the state, a tensor."""
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
