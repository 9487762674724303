"""Run a graph in which some updates wait for the next iteration.

    setup        an iteration before which nothing is pending: the graph without what crosses; gives what is carried
    main         the same with the pending pieces of the last iteration, each right before the first use of its state
    piece        the pending part of one move: its wait, the optimizer, the write-backs

All three are made from the marks of `passes.iter_move`, each updates in place like any other graph, and main is setup
with the pieces put in. Pieces communicate with nobody, so that they can run at any time, on any rank alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from wholestep.cross_iteration.late_tensor import LateTensor
from wholestep.errors import IterMoveError, PendingError
from wholestep.ir.effects import is_collective, shared_inputs
from wholestep.ir.iter.graph import CROSS, IterGraph, copy_nodes, find_output, flush_graph, kept, setup_graph
from wholestep.ir.iter.moves import (
    DESTINATIONS,
    iteration_facts,
    marked_moves,
    move_of,
    needed_outputs,
    requested_moves,
)
from wholestep.ir.reinplace import reinplace
from wholestep.ir.slices import reachable
from wholestep.ir.step_graph import StepGraph
from wholestep.runtime.program import program
from wholestep.torch_private.dtensor import local_of
from wholestep.torch_private.fake_tensors import storage_of, version_of

log = logging.getLogger("wholestep")


@dataclass(frozen=True, eq=False)
class Piece:
    """What one move leaves pending."""

    gm: fx.GraphModule
    state: tuple[int, ...]
    """Places of the state among the inputs of the step; with what is given, the inputs of `gm`."""
    given: tuple[int, ...]
    """Places among the carried values."""
    results: tuple[int, ...]
    """Places in the step's output that it fills late."""

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The piece as a function."""
        return program(self.gm)


class _Ran:
    """A target of nodes that say which piece is done."""

    __name__ = "ran"

    def __init__(self, pieces: list[int]) -> None:
        self._pieces = pieces

    def __call__(self, piece: int) -> None:
        self._pieces.append(piece)


class Iterations:
    """The graphs of one step whose updates cross."""

    def __init__(self, root: fx.GraphModule, setup: fx.Graph, pieces: list[Piece], destinations: list[str]) -> None:
        """`root` has the constants of setup and of all pieces."""
        self.setup = fx.GraphModule(root, setup, "WholeStepSetup")
        self.pieces = pieces
        self._ran: list[int] = []
        self.main = fx.GraphModule(root, _main(setup, pieces, destinations, _Ran(self._ran)), "WholeStepMain")
        self._run_main = program(self.main)
        self.state = tuple(dict.fromkeys(i for piece in pieces for i in piece.state))
        """Places of all state that crosses, among the inputs of the step."""
        self.late = tuple(dict.fromkeys(i for piece in pieces for i in piece.results))

    def lower(self, lower_in_place: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        """Compile the runs of nodes between the pieces. Setup runs once, and the pieces are updates in place."""
        self.main = lower_in_place(self.main)
        self._run_main = program(self.main)

    def run_as(self, make_program: Callable[[fx.GraphModule], Callable[..., Any]]) -> None:
        """Run setup and main by functions of another kind."""
        self._run_main, self._run_setup = make_program(self.main), make_program(self.setup)

    @cached_property
    def _run_setup(self) -> Callable[..., Any]:
        return program(self.setup)

    def run(self, inputs: list[Any], pending: Pending | None) -> tuple[tuple[Any, ...], Pending]:
        """One iteration: its outputs, and what it leaves for the next. What was pending is done, or still pending if
        an error came before."""
        if pending is None:
            outputs, carried = self._run_setup(*inputs)
        else:
            self._ran.clear()
            try:
                outputs, carried = self._run_main(*inputs, *pending.carried)
            except BaseException:
                pending.keep_all_but(self._ran)
                raise
        return outputs, Pending(self, carried, inputs)


@dataclass(eq=False)
class Pending:
    """What an iteration left to do."""

    iterations: Iterations
    carried: list[Any]
    inputs: list[Any]
    left: list[int] = field(default_factory=list)
    """Pieces that did not run yet."""
    ask: Callable[[], None] = lambda: None
    """Completes the step, for a gradient that somebody looks at."""
    late: dict[int, Tensor] = field(default_factory=dict)
    """Late outputs that are there."""
    waiting: list[weakref.ref[LateTensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        places = set(self.iterations.state)
        self.inputs = [value if i in places else None for i, value in enumerate(self.inputs)]
        self.left = list(range(len(self.iterations.pieces)))
        self.state: list[Tensor] = [self.inputs[i] for i in self.iterations.state]
        self._versions = list(map(_identity, self.state))

    def keep_all_but(self, pieces: list[int]) -> None:
        """Some pieces ran, and wrote what they had to; the others are still to be done."""
        self.left = [i for i in self.left if i not in pieces]
        self._versions = list(map(_identity, self.state))

    def goes_on(self, inputs: list[Any]) -> bool:
        """Whether an iteration with these inputs may do it: they are the same tensors, and complete."""
        if len(self.left) != len(self.iterations.pieces):
            return False
        return all(inputs[i] is tensor for i, tensor in zip(self.iterations.state, self.state, strict=True))

    def check_unchanged(self, path: Callable[[int], str]) -> None:
        """Raise PendingError, once, if someone wrote to state whose update is pending."""
        before, self._versions = self._versions, list(map(_identity, self.state))
        for i, then, now in zip(self.iterations.state, before, self._versions, strict=True):
            if then != now:
                raise PendingError(
                    f"{path(i)} was written while its update by the last step was pending: the write saw the value "
                    "before that update, which would now be added to it.",
                    fix="call step.flush() before you change parameters or optimizer state between steps.",
                )

    def complete(self) -> None:
        """Run the pieces that are left; their late outputs are in `late` then."""
        done: list[int] = []
        try:
            for number in self.left:
                piece = self.iterations.pieces[number]
                results = piece.run(*(self.inputs[i] for i in piece.state), *(self.carried[i] for i in piece.given))
                self.late.update(zip(piece.results, results, strict=True))
                done.append(number)
        finally:
            self.keep_all_but(done)

    def stand_in(self, output: int, like: Any) -> Tensor:
        """A tensor for a late output: it completes the step when somebody looks at it."""

        def value() -> Tensor:
            if output not in self.late:
                self.ask()
            return self.late[output]

        made = LateTensor(like, value)
        self.waiting.append(weakref.ref(made))
        return made

    @property
    def is_looked_at(self) -> bool:
        """Whether somebody still holds a stand-in, and may look at it when the next iteration is over."""
        return any(each() is not None for each in self.waiting)


def _identity(tensor: Tensor) -> tuple[int, int]:
    """Another one after every write that torch counts, and in another memory (`p.data = ...`, a cast)."""
    return version_of(tensor), storage_of(local_of(tensor))


def iterations_of(step_graph: StepGraph) -> Iterations | None:
    """The graphs of a step that has marks; None if it has none, or if what became of it makes a move illegal."""
    gm = step_graph.gm
    if not any(marked_moves(gm.graph)):
        return None
    late = iteration_facts(gm).late_outputs
    graph = IterGraph(gm.graph, late_outputs=late)
    marked = marked_moves(graph)
    try:
        _check(graph, marked.values(), late)
        graph.move_all_to_next_iter(requested_moves(graph, marked, gm.meta.get(DESTINATIONS, {})))
    except IterMoveError as error:
        log.warning("updates stay in their own iteration: %s", error.what)
        return None
    place = {spec.name: i for i, spec in enumerate(step_graph.signature.inputs)}
    crosses = {cross: i for i, cross in enumerate(graph.cross_iter_inputs)}
    pieces = []
    for move in graph.moves:
        inside = set(move.nodes)
        results = {i: node for i, node in graph.late_results.items() if node in inside}
        piece = flush_graph(move, results.values())
        reinplace(piece)
        state = tuple(place[node.name] for node in move.state)
        given = tuple(crosses[cross] for cross in move.given)
        pieces.append(Piece(fx.GraphModule(gm, piece, "WholeStepPending"), state, given, tuple(results)))
    setup = setup_graph(graph)
    reinplace(setup)
    _own_what_is_carried(setup)
    names = gm.meta.get(DESTINATIONS, {})
    return Iterations(gm, setup, pieces, [names.get(n, "") for n in marked])


def _check(graph: fx.Graph, groups: Iterable[list[fx.Node]], late: tuple[int, ...]) -> None:
    needed = needed_outputs(graph, late)
    for nodes in groups:
        for node in nodes:
            if is_collective(node.target):
                raise IterMoveError(f"{node.name} communicates, and would need all ranks to be completed.")
        for state in move_of(nodes, set()).state:
            if state in needed:
                raise IterMoveError(f"the step returns {state.name}.")


def _own_what_is_carried(graph: fx.Graph) -> None:
    """Copy what is carried where others have its memory: state that was updated in place, or the user's result."""
    output = find_output(graph)
    whole: Any = output.args[0]
    result, carried = whole
    shown = {root for node in _nodes(result) for root in _memory(node)}
    new: list[fx.Node] = []
    for value in carried:
        is_number = not isinstance(value.meta.get("val", Tensor), Tensor | type)
        if is_number or value.target is kept or not any(r.op == "placeholder" or r in shown for r in _memory(value)):
            new.append(value)
            continue
        with graph.inserting_before(output):
            new.append(graph.call_function(kept, (value,)))
        new[-1].meta = dict(value.meta)
    output.args = ((result, new),)


def _memory(node: fx.Node) -> set[fx.Node]:
    """The nodes whose memory a node may share: itself, what it is a view of, what it was updated in."""
    return {each for each in reachable([node], shared_inputs) if not shared_inputs(each)}


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def _main(setup: fx.Graph, pieces: list[Piece], destinations: list[str], ran: Callable[[int], None]) -> fx.Graph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    nodes = list(setup.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    copy_nodes(inputs, graph, env)
    output = find_output(setup)
    carried: Any = output.args[0][1]  # type: ignore[index]
    crosses = [graph.placeholder(f"{CROSS}_{i}") for i in range(len(carried))]
    for cross, value in zip(crosses, carried, strict=True):
        cross.meta = dict(value.meta)
    due = _due(nodes, inputs, pieces, destinations)
    for node in nodes:
        for number in due.get(node, ()):
            _insert(graph, pieces[number], [env[n] for n in inputs], crosses)
            graph.call_function(ran, (number,))
        if node.op != "placeholder":
            copy_nodes([node], graph, env)
    return graph


def _due(
    nodes: list[fx.Node], inputs: list[fx.Node], pieces: list[Piece], destinations: list[str]
) -> dict[fx.Node, list[int]]:
    """The pieces that run right before a node."""
    first: dict[fx.Node, int] = {}
    place: dict[str, int] = {}
    for i, node in enumerate(nodes):
        if node.op not in ("placeholder", "output"):
            place[node.name] = i
            for source in node.all_input_nodes:
                first.setdefault(source, i)
    found: dict[fx.Node, list[int]] = {}
    end = len(nodes) - 1
    for number, (piece, name) in enumerate(zip(pieces, destinations, strict=True)):
        latest = min((first.get(inputs[i], end) for i in piece.state), default=end)
        found.setdefault(nodes[min(latest, place.get(name, end))], []).append(number)
    return found


def _insert(graph: fx.Graph, piece: Piece, inputs: list[fx.Node], crosses: list[fx.Node]) -> None:
    given = [*(inputs[i] for i in piece.state), *(crosses[i] for i in piece.given)]
    body = [node for node in piece.gm.graph.nodes if node.op != "output"]
    env = dict(zip((n for n in body if n.op == "placeholder"), given, strict=True))
    copy_nodes((node for node in body if node.op != "placeholder"), graph, env)


__all__ = ["Iterations", "Pending", "Piece", "iterations_of"]
