"""A graph in which some nodes of an iteration run in the next one.

    before                           main, after move_to_next_iter_before([w, p1, c], t)
    p, x, lr                         p, x, lr, cross_iter_input_0, cross_iter_input_1
    t = t(p)                         w = wait_tensor(cross_iter_input_0)        of the last iteration
    g = f(x, t)                      p1 = sub(p, w, alpha=cross_iter_input_1)
    a = all_reduce(g, ..)            c = copy_(p, p1)
    w = wait_tensor(a)               t = t(p)                                   of this iteration
    p1 = sub(p, w, alpha=lr)         g = f(x, t)
    c = copy_(p, p1)                 a = all_reduce(g, ..)
    output(loss)                     output((loss, [a, lr]))                    for the next iteration

The main graph is the single source of truth: it may be edited like any `fx.Graph`, and the graphs of other iterations
are derived from it:

    setup      the first iteration: nothing is pending, moved nodes are left out
    cleanup    the last iteration: pending updates first, and at the end those that would be pending after it
    single     the only iteration: the graph as if nothing had moved
    running    main or cleanup, with nodes that report which moves have run: they must not run twice
    flush      only the pending part of one move: takes state and carried values, needs nothing of the step

State that moved nodes write is read when they run; everything else that they read is carried from the iteration that
they belong to, each value once. Legal if nothing else in an iteration needs the results of moved nodes, and if the
destination is not after the first use of the state that they write. Everything is checked before anything is changed
(`moves.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx.node import Argument

from wholestep.errors import IterMoveError
from wholestep.ir.effects import is_collective, is_wait
from wholestep.ir.functionalize import functionalize
from wholestep.ir.iter.moves import Move, MovePlan, check_moves, move_of, plan_moves, state_of
from wholestep.torch_private.fx_graphs import codegen_of

CROSS = "cross_iter_input"


def kept(value: Any) -> Any:
    """A copy that no other node writes."""
    return value.clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Moved:
    """What an IterGraph has besides its nodes: enough to rebuild it from copies of them."""

    late_outputs: frozenset[int]
    late_results: Mapping[int, fx.Node]
    numbers: Mapping[fx.Node, int]
    moves: int
    cross: tuple[fx.Node, ...]
    carried_without_output: tuple[Any, ...]
    never_dead: frozenset[fx.Node]
    frozen: bool


class NodeEdits:
    """The `node_*` methods and moves of PyTorch's `IterGraph`: each does what `fx.Node` does itself.

    There they kept three graphs in sync; here the other graphs are derived from the main one.
    """

    def move_before(self, nodes: Iterable[fx.Node], target_node: fx.Node) -> None:
        """Move nodes, in their order, to right before another."""
        for node in nodes:
            target_node.prepend(node)

    def move_after(self, nodes: Iterable[fx.Node], target_node: fx.Node) -> None:
        """Move nodes, in their order, to right after another."""
        for node in nodes:
            target_node.append(node)
            target_node = node

    def node_prepend(self, target_node: fx.Node, node: fx.Node) -> None:
        """`target_node.prepend(node)`."""
        target_node.prepend(node)

    def node_append(self, target_node: fx.Node, node: fx.Node) -> None:
        """`target_node.append(node)`."""
        target_node.append(node)

    def node_set_args(self, node: fx.Node, args: tuple[Argument, ...]) -> None:
        """`node.args = args`."""
        node.args = args

    def node_set_kwargs(self, node: fx.Node, kwargs: dict[str, Argument]) -> None:
        """`node.kwargs = kwargs`."""
        node.kwargs = kwargs

    def node_update_arg(self, node: fx.Node, index: int, arg: Argument) -> None:
        """`node.update_arg(index, arg)`."""
        node.update_arg(index, arg)

    def node_replace_all_uses_with(
        self,
        node: fx.Node,
        replace_with: fx.Node,
        delete_user_cb: Callable[[fx.Node], bool] = lambda user: True,
        *,
        propagate_meta: bool = False,
    ) -> list[fx.Node]:
        """`node.replace_all_uses_with(..)`."""
        return node.replace_all_uses_with(replace_with, delete_user_cb, propagate_meta=propagate_meta)


class IterGraph(NodeEdits, fx.Graph):
    """The main graph of an `IterGraphModule`, with the editing methods of `fx.Graph` and, as `node_*`, of `fx.Node`."""

    def __init__(
        self,
        orig_graph: fx.Graph,
        owning_module: fx.GraphModule | None = None,
        tracer_cls: type[fx.Tracer] | None = None,
        tracer_extras: dict[str, Any] | None = None,
        *,
        late_outputs: Iterable[int] = (),
    ) -> None:
        super().__init__(owning_module, tracer_cls, tracer_extras)
        self.late_outputs = frozenset(late_outputs)
        """Places in the user's result that may be filled by the next iteration; until then they hold None."""
        self.late_results: dict[int, fx.Node] = {}
        """The moved nodes among those."""
        self._numbers: dict[fx.Node, int] = {}
        """The move of each moved node."""
        self._moves = 0
        self._cross: list[fx.Node] = []
        self._carried_without_output: list[Any] = []
        """Values for the next iteration, while the graph has no output node."""
        self._never_dead: set[fx.Node] = set()
        self._frozen = False
        copy_nodes(orig_graph.nodes, self, {})

    # Copies.

    @property
    def moved(self) -> Moved:
        """What a copy of the nodes needs to become a copy of the graph."""
        return Moved(
            self.late_outputs,
            dict(self.late_results),
            dict(self._numbers),
            self._moves,
            tuple(self._cross),
            tuple(self._carried_without_output),
            frozenset(self._never_dead),
            self._frozen,
        )

    @classmethod
    def of_copies(cls, graph: fx.Graph, moved: Moved, made: Mapping[fx.Node, fx.Node]) -> IterGraph:
        """The graph with the nodes of `graph`; `made` maps the nodes in `moved` to their copies there."""
        new = cls(fx.Graph(), late_outputs=moved.late_outputs)
        env: dict[fx.Node, fx.Node] = {}
        copy_nodes(graph.nodes, new, env)
        for old, node in env.items():
            node.name = old.name
        copies = {old: env[node] for old, node in made.items()}
        new.late_results = {i: copies[node] for i, node in moved.late_results.items()}
        new._numbers = {copies[node]: number for node, number in moved.numbers.items() if node in copies}
        new._moves = moved.moves
        new._cross = [copies[node] for node in moved.cross]
        new._carried_without_output = [copies[node] for node in moved.carried_without_output]
        new._never_dead = {copies[node] for node in moved.never_dead if node in copies}
        new._frozen = moved.frozen
        new.set_codegen(codegen_of(graph))
        return new

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> IterGraph:
        plain = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        copy_nodes(self.nodes, plain, env)
        for old, node in env.items():
            node.name = old.name
        plain.set_codegen(codegen_of(self))
        made = IterGraph.of_copies(plain, self.moved, env)
        if memo is not None:
            memo[id(self)] = made
        return made

    # What crosses.

    @property
    def setup_graph(self) -> fx.Graph:
        """The graph of a first iteration, as it is now."""

        return setup_graph(self)

    @property
    def cleanup_graph(self) -> fx.Graph:
        """The graph of a last iteration, as it is now."""

        return cleanup_graph(self)

    @property
    def has_moves(self) -> bool:
        """True if some nodes run in the next iteration; the output then is a pair (user's result, what is carried)."""
        return self._moves > 0

    @property
    def cross_iter_inputs(self) -> tuple[fx.Node, ...]:
        """Placeholders for values carried from the last iteration."""
        return tuple(self._cross)

    @property
    def cross_iter_values(self) -> tuple[fx.Node, ...]:
        """The values that this iteration carries over, one per input."""
        result: Any = find_output(self).args[0]
        return tuple(result[1]) if self.has_moves else ()

    @property
    def num_extra_output(self) -> int:
        """How many values cross."""
        return len(self._cross)

    @property
    def user_result(self) -> Any:
        """The user's part of the output node."""
        result: Any = find_output(self).args[0]
        return result[0] if self.has_moves else result

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moved nodes as the graph is now; a user of a moved node has moved with it."""
        found: dict[int, list[fx.Node]] = {number: [] for number in range(self._moves)}
        for node in self.nodes:
            number = self._number_of(node)
            if number is not None:
                found[number].append(node)
        cross = set(self._cross)
        return tuple(move_of(nodes, cross) for nodes in found.values() if nodes)

    def _number_of(self, node: fx.Node) -> int | None:
        known = {self._numbers[source] for source in node.all_input_nodes if source in self._numbers}
        own = self._numbers.get(node)
        known |= set() if own is None else {own}
        if node.op == "output" and known:
            raise IterMoveError("the output needs what was moved to the next iteration.", node=str(node))
        if len(known) > 1:
            raise IterMoveError(f"{node.name} belongs to several moves.", node=str(node))
        if known and own is None:
            self._numbers[node] = min(known)
        return min(known, default=None)

    def move_to_next_iter_before(self, subgraph: Sequence[fx.Node], target_node: fx.Node) -> None:
        """Run `subgraph` in the next iteration, right before `target_node`.

        Nothing outside of `subgraph` may use its results, but for a `copy_` into a placeholder that is an output: then
        the output is the placeholder. Several moves may follow each other.
        """
        self.move_all_to_next_iter([(subgraph, target_node)])

    def move_all_to_next_iter(self, requests: Sequence[tuple[Sequence[fx.Node], fx.Node]]) -> None:
        """Several moves, each a subgraph and the node that it runs before; all of them or, with an error, none."""
        if self._frozen:
            raise RuntimeError("The cross-iteration movement has been frozen for the given IterGraph.")
        for plan in plan_moves(self, requests, self.moves, self.late_outputs):
            self._apply(plan)

    def check_moves(self) -> None:
        """Raise IterMoveError if an edit made a move illegal: a node reads state before its pending update."""
        check_moves(self, self.moves)

    def _apply(self, plan: MovePlan) -> None:
        result = self._result_without(set(plan.nodes))
        values = list(self.cross_iter_values)
        have = {_unkept(value): cross for value, cross in zip(values, self._cross, strict=True)}
        for value, shared in plan.carried.items():
            if value not in have:
                have[value] = self._new_input(value)
                values.append(self._own(value) if shared else value)
        for constant in plan.constants:
            plan.target.prepend(constant)
        own = self._own_views(plan)
        for node in (*own.values(), *plan.nodes):
            given = {n: own[n] if n in own else have[n] for n in node.all_input_nodes if n in own or n in plan.carried}
            node.args = fx.map_arg(node.args, lambda n, given=given: given.get(n, n))  # type: ignore[misc]
            node.kwargs = fx.map_arg(node.kwargs, lambda n, given=given: given.get(n, n))  # type: ignore[misc]
            plan.target.prepend(node)
            self._numbers[node] = self._moves
        self._moves += 1
        find_output(self).args = ((result, values),)

    def _own_views(self, plan: MovePlan) -> dict[fx.Node, fx.Node]:
        """New nodes for views of the state that other nodes read too."""
        made: dict[fx.Node, fx.Node] = {}
        with super().inserting_before(plan.target):
            for view in plan.views:
                made[view] = fx.Graph.node_copy(self, view)
                made[view].meta = dict(view.meta)
        return made

    def _result_without(self, moved: set[fx.Node]) -> Any:
        """The user's result without moved nodes: state itself, None for late outputs."""
        result: Any = self.user_result
        if self.late_outputs:
            late = {i: value for i, value in enumerate(result) if i in self.late_outputs and value in moved}
            self.late_results |= late
            self._never_dead |= set(late.values())
            result = tuple(None if i in late else value for i, value in enumerate(result))
        return fx.map_arg(result, lambda n: state_of(n) if n in moved else n)

    def _new_input(self, value: fx.Node) -> fx.Node:
        """A default is given only so that it may follow arguments with defaults."""
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        taken = {str(node.target) for node in inputs}
        number = len(self._cross)
        while f"{CROSS}_{number}" in taken:
            number += 1
        with super().inserting_after(inputs[-1]) if inputs else super().inserting_before(next(iter(self.nodes))):
            made = super().placeholder(f"{CROSS}_{number}", default_value=None)
        made.meta = dict(value.meta)
        self._cross.append(made)
        return made

    def _own(self, value: fx.Node) -> fx.Node:
        """A copy, taken before any write to memory that `value` shares."""
        after = value
        while after.op == "placeholder" and after.next.op == "placeholder":
            after = after.next
        with super().inserting_after(after):
            made = super().call_function(kept, (value,))
        made.meta = dict(value.meta)
        return made

    def freeze_cross_iter_movement(self) -> None:
        """Refuse further moves."""
        self._frozen = True

    # Editing, as PyTorch's IterGraph had it: the other graphs are derived from this one, so they follow.

    def erase_node(self, to_erase: fx.Node) -> None:
        """Remove a node without users."""
        if to_erase.op == "output":
            self._carried_without_output = list(self.cross_iter_values)
        super().erase_node(to_erase)
        self._numbers.pop(to_erase, None)
        self._never_dead.discard(to_erase)
        if to_erase in self._cross:
            raise AssertionError(f"{to_erase.name} is fed by the last iteration and cannot be erased")

    def output(self, result: Argument, type_expr: Any = None) -> fx.Node:
        """Add the output node; what is carried to the next iteration stays."""
        whole = (result, self._carried_without_output) if self.has_moves else result
        made: fx.Node = super().output(whole, type_expr)
        return made

    def placeholder(self, name: str, type_expr: Any = None, default_value: Any = inspect.Signature.empty) -> fx.Node:
        """Add an input of the user."""
        return super().placeholder(name, type_expr, default_value)

    def eliminate_dead_code(self, is_impure_node: Callable[[fx.Node], bool] | None = None) -> bool:
        """Remove nodes without users, but for effects, waits, collectives and what `keep_unused_nodes` names."""

        def needed(node: fx.Node) -> bool:
            if node in self._never_dead or is_wait(node.target) or is_collective(node.target):
                return True
            return node.is_impure() if is_impure_node is None else is_impure_node(node)

        return super().eliminate_dead_code(needed)

    def node_add_user(self, node: fx.Node, user: Any) -> None:
        """Dead-code elimination leaves a node, as if it had one more user."""
        self._never_dead.add(node)

    def node_remove_user(self, node: fx.Node, user: Any) -> None:
        """Undo `node_add_user`; real users stay."""
        self._never_dead.discard(node)

    def functionalize_optim(self) -> int:
        """Turn optimizers that write in place into functional operators, and a `copy_` for each.

        Nodes that have moved already stay as they are. Returns the number of operators.
        """
        return functionalize(self, self._numbers)

    def defunctionalize_optim(self) -> None:
        """Does nothing: PyTorch's removed artificial users, and there are none here."""

    def keep_unused_nodes(self) -> None:
        """Dead-code elimination leaves nodes that have no users now: they run for their effects."""
        self._never_dead |= {node for node in self.nodes if not node.users and node.op != "output"}


def find_output(graph: fx.Graph) -> fx.Node:
    """The output node."""
    last: fx.Node = next(iter(reversed(graph.nodes)))
    if last.op != "output":
        raise IterMoveError("the graph has no output node at its end.", node=str(last))
    return last


def copy_nodes(nodes: Iterable[fx.Node], into: fx.Graph, env: dict[fx.Node, fx.Node]) -> None:
    """Append copies of nodes, under their names where those are free; `env` maps what they read, and gets them."""
    for node in nodes:
        made = fx.Graph.node_copy(into, node, env.__getitem__)
        made.meta = dict(node.meta)
        env[node] = made


def _unkept(value: fx.Node) -> fx.Node:
    inner = value.args[0] if value.target is kept else value
    assert isinstance(inner, fx.Node)
    return inner


__all__ = ["CROSS", "IterGraph", "Move", "copy_nodes", "find_output", "kept"]


def setup_graph(main: IterGraph) -> fx.Graph:
    """The graph of a first iteration; its output is that of the main graph."""
    return _without(main, set(main.cross_iter_inputs) | _moved(main))


def cleanup_graph(main: IterGraph) -> fx.Graph:
    """The graph of a last iteration; its output is the user's result alone."""
    return _completed(main, set())


def single_graph(main: IterGraph) -> fx.Graph:
    """The graph of an iteration that is the first and the last one."""
    return _completed(main, set(main.cross_iter_inputs) | _moved(main))


def running_graph(version: fx.Graph, main: IterGraph, ran: Callable[[int], None]) -> fx.Graph:
    """A copy of the main or the cleanup graph that calls `ran` with the number of each completed move."""
    last = {move.nodes[-1].name: number for number, move in enumerate(main.moves)}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in version.nodes:
        copy_nodes([node], graph, env)
        if node.name in last:
            graph.call_function(ran, (last[node.name],))
    return graph


def flush_graph(move: Move, results: Iterable[fx.Node] = ()) -> fx.Graph:
    """The pending part of one move. Inputs: the move's `state`, then what it is `given`; returns some of its nodes."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs = [*move.state, *move.given]
    moved = set(move.nodes)
    constants = dict.fromkeys(n for node in move.nodes for n in node.all_input_nodes if n not in moved)
    copy_nodes([*inputs, *(n for n in constants if n.op == "get_attr"), *move.nodes], graph, env)
    graph.output(tuple(env[node] for node in results))
    return graph


def _moved(main: IterGraph) -> set[fx.Node]:
    return {node for move in main.moves for node in move.nodes}


def _without(main: IterGraph, left_out: set[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    copy_nodes((node for node in main.nodes if node not in left_out), graph, {})
    return graph


def _completed(main: IterGraph, left_out: set[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    output = find_output(main)
    copy_nodes((node for node in main.nodes if node not in left_out and node is not output), graph, env)
    own = dict(env)
    for cross, value in zip(main.cross_iter_inputs, main.cross_iter_values, strict=True):
        own[cross] = env[value]
    for move in main.moves:
        copy_nodes(move.nodes, graph, own)
    result = main.user_result
    if main.late_results:
        result = tuple(main.late_results.get(i, value) for i, value in enumerate(result))
    made = graph.output(fx.map_arg(result, lambda n: own[n]))
    made.meta = dict(output.meta)
    return graph
