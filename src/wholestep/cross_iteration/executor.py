"""Run a compiled step some of whose updates are moved to the next iteration.

    setup        the iteration without pending updates: the graph without the moved nodes; it returns the carried values
    piece        the moved nodes of one move: a wait, the optimizer, the write-backs
    main         setup with the pieces of the last iteration, each right before the first use of its state

All three are built from the marks of `passes.iter_move`, and each updates in place like any other graph. Pieces have no
collectives, so each rank can run them at any time on its own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from wholestep.cross_iteration.pending_updates import LateTensor
from wholestep.errors import IterMoveError, PendingError
from wholestep.ir.captured_step import CapturedStep
from wholestep.ir.deferred import DeferredValues
from wholestep.ir.effects import is_collective, shared_inputs
from wholestep.ir.graph_walks import reachable
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
from wholestep.ir.signature import InputKind
from wholestep.ir.step_graph import MemoryReport, StepGraph
from wholestep.ir.user_objects.slots import GradSlot, ModuleSlot, Slot, in_users_objects
from wholestep.runtime.executor import Executor
from wholestep.runtime.python_program import program
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.fake_tensors import storage_key, version_of

log = logging.getLogger("wholestep")


@dataclass(frozen=True, eq=False)
class Piece:
    """The moved nodes of one move. Its inputs are the state, then carried values."""

    gm: fx.GraphModule
    state: tuple[int, ...]
    """Indices of the state among the inputs of the step."""
    carried: tuple[int, ...]
    """Indices of the carried values that it reads."""
    results: tuple[int, ...]
    """Indices of the outputs of the step that it computes."""

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The piece as a function."""
        return program(self.gm)


class _MarkDone:
    """Target of the nodes that record which piece has run."""

    __name__ = "mark_done"

    def __init__(self, pieces: list[int]) -> None:
        self._pieces = pieces

    def __call__(self, piece: int) -> None:
        self._pieces.append(piece)


class IterationGraphs:
    """The setup graph, the main graph and the pieces of one step."""

    def __init__(self, root: fx.GraphModule, setup: fx.Graph, pieces: list[Piece], destinations: list[str]) -> None:
        """`root` has the constants of setup and of all pieces."""
        self.setup = fx.GraphModule(root, setup, "WholeStepSetup")
        self.pieces = pieces
        self._done: list[int] = []
        main = _main(setup, pieces, destinations, _MarkDone(self._done))
        self.main = fx.GraphModule(root, main, "WholeStepMain")
        self._run_main = program(self.main)
        self.state = tuple(dict.fromkeys(i for piece in pieces for i in piece.state))
        """Indices, among the inputs of the step, of all state that pieces update."""
        self.late = tuple(dict.fromkeys(i for piece in pieces for i in piece.results))
        """Indices of the outputs that pieces compute."""

    def lower(self, lower_in_place: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        """Compile main. Setup is not compiled: it runs once."""
        self.main = lower_in_place(self.main)
        self._run_main = program(self.main)

    def run_as(self, make_program: Callable[[fx.GraphModule], Callable[..., Any]]) -> None:
        """Run setup and main with another kind of program."""
        self._run_main, self._run_setup = make_program(self.main), make_program(self.setup)

    @cached_property
    def _run_setup(self) -> Callable[..., Any]:
        return program(self.setup)

    def run(self, inputs: list[Any], pending: Pending | None) -> tuple[tuple[Any, ...], Pending]:
        """One iteration: its outputs and its pending updates. If it raises, the pieces of `pending` that did not run
        stay pending."""
        if pending is None:
            outputs, carried = self._run_setup(*inputs)
        else:
            self._done.clear()
            try:
                outputs, carried = self._run_main(*inputs, *pending.carried)
            except BaseException:
                pending.mark_done(self._done)
                raise
        return outputs, Pending(self, carried, inputs)


@dataclass(eq=False)
class Pending:
    """The pending updates of one iteration."""

    graphs: IterationGraphs
    carried: list[Any]
    inputs: list[Any]
    remaining: list[int] = field(default_factory=list)
    """Indices of the pieces that have not run."""
    flush: Callable[[], None] = lambda: None
    """Completes the step; called when a late output is read."""
    late: dict[int, Tensor] = field(default_factory=dict)
    """Late outputs that are computed."""
    late_tensors: list[weakref.ref[LateTensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        indices = set(self.graphs.state)
        self.inputs = [value if i in indices else None for i, value in enumerate(self.inputs)]
        self.remaining = list(range(len(self.graphs.pieces)))
        self.state: list[Tensor] = [self.inputs[i] for i in self.graphs.state]
        self._versions = list(map(_version, self.state))

    def mark_done(self, pieces: list[int]) -> None:
        """Remove pieces that have run, and take the versions of the state that they wrote."""
        self.remaining = [i for i in self.remaining if i not in pieces]
        self._versions = list(map(_version, self.state))

    def fits(self, inputs: list[Any]) -> bool:
        """Whether main may run with these inputs: the state is the same tensors, and no piece has run yet."""
        if len(self.remaining) != len(self.graphs.pieces):
            return False
        return all(inputs[i] is tensor for i, tensor in zip(self.graphs.state, self.state, strict=True))

    def check_unchanged(self, path: Callable[[int], str]) -> None:
        """Raise PendingError, once, if state was written while its update is pending."""
        before, self._versions = self._versions, list(map(_version, self.state))
        for i, then, now in zip(self.graphs.state, before, self._versions, strict=True):
            if then != now:
                raise PendingError(
                    f"{path(i)} was written while its update by the last step was pending: the write saw the value "
                    "before that update, which would now be added to it.",
                    fix="call step.flush() before you change parameters or optimizer state between steps.",
                )

    def complete(self) -> None:
        """Run the remaining pieces, and put their late outputs into `late`."""
        done: list[int] = []
        try:
            for i in self.remaining:
                piece = self.graphs.pieces[i]
                results = piece.run(*(self.inputs[s] for s in piece.state), *(self.carried[c] for c in piece.carried))
                self.late.update(zip(piece.results, results, strict=True))
                done.append(i)
        finally:
            self.mark_done(done)

    def late_tensor(self, output: int, like: Any) -> Tensor:
        """A tensor in the place of a late output: it completes the step when it is read."""

        def value() -> Tensor:
            if output not in self.late:
                self.flush()
            return self.late[output]

        late = LateTensor(like, value)
        self.late_tensors.append(weakref.ref(late))
        return late

    @property
    def has_readers(self) -> bool:
        """Whether user code still holds a late tensor, and may read it after the next iteration."""
        return any(each() is not None for each in self.late_tensors)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Differs after every write that torch counts, and after a change of memory (`p.data = ...`, a cast)."""
    return version_of(tensor), storage_key(local_of(tensor))


def iteration_graphs(step_graph: StepGraph) -> IterationGraphs | None:
    """The graphs of a step that has marks; None if it has none, or if a later rewrite made a move illegal."""
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
    index = {spec.name: i for i, spec in enumerate(step_graph.signature.inputs)}
    crosses = {cross: i for i, cross in enumerate(graph.cross_iter_inputs)}
    pieces = []
    for move in graph.moves:
        inside = set(move.nodes)
        results = {i: node for i, node in graph.late_results.items() if node in inside}
        piece = flush_graph(move, results.values())
        reinplace(piece)
        state = tuple(index[node.name] for node in move.state)
        carried = tuple(crosses[cross] for cross in move.given)
        pieces.append(Piece(fx.GraphModule(gm, piece, "WholeStepPending"), state, carried, tuple(results)))
    setup = setup_graph(graph)
    reinplace(setup)
    _copy_shared_carried_values(setup)
    names = gm.meta.get(DESTINATIONS, {})
    return IterationGraphs(gm, setup, pieces, [names.get(n, "") for n in marked])


def _check(graph: fx.Graph, groups: Iterable[list[fx.Node]], late: tuple[int, ...]) -> None:
    needed = needed_outputs(graph, late)
    for nodes in groups:
        for node in nodes:
            if is_collective(node.target):
                raise IterMoveError(f"{node.name} communicates: completing the update would need all ranks.")
        for state in move_of(nodes, set()).state:
            if state in needed:
                raise IterMoveError(f"the step returns {state.name}.")


def _copy_shared_carried_values(graph: fx.Graph) -> None:
    """Copy each carried value that shares memory with state, which is updated in place, or with the user's result."""
    output = find_output(graph)
    whole: Any = output.args[0]
    result, carried = whole
    returned = {root for node in _nodes(result) for root in _memory(node)}
    new: list[fx.Node] = []
    for value in carried:
        is_scalar = not isinstance(value.meta.get("val", Tensor), Tensor | type)
        is_shared = any(root.op == "placeholder" or root in returned for root in _memory(value))
        if is_scalar or value.target is kept or not is_shared:
            new.append(value)
            continue
        with graph.inserting_before(output):
            new.append(graph.call_function(kept, (value,)))
        new[-1].meta = dict(value.meta)
    output.args = ((result, new),)


def _memory(node: fx.Node) -> set[fx.Node]:
    """The nodes whose memory a node may share: itself, its base if it is a view, the input that it updates in place."""
    return {each for each in reachable([node], shared_inputs) if not shared_inputs(each)}


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def _main(setup: fx.Graph, pieces: list[Piece], destinations: list[str], mark_done: Callable[[int], None]) -> fx.Graph:
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
    before = _pieces_before(nodes, inputs, pieces, destinations)
    for node in nodes:
        for i in before.get(node, ()):
            _insert(graph, pieces[i], [env[n] for n in inputs], crosses)
            graph.call_function(mark_done, (i,))
        if node.op != "placeholder":
            copy_nodes([node], graph, env)
    return graph


def _pieces_before(
    nodes: list[fx.Node], inputs: list[fx.Node], pieces: list[Piece], destinations: list[str]
) -> dict[fx.Node, list[int]]:
    """For each node, the indices of the pieces that run right before it."""
    first_use: dict[fx.Node, int] = {}
    position: dict[str, int] = {}
    for i, node in enumerate(nodes):
        if node.op not in ("placeholder", "output"):
            position[node.name] = i
            for source in node.all_input_nodes:
                first_use.setdefault(source, i)
    found: dict[fx.Node, list[int]] = {}
    end = len(nodes) - 1
    for index, (piece, name) in enumerate(zip(pieces, destinations, strict=True)):
        latest = min((first_use.get(inputs[i], end) for i in piece.state), default=end)
        found.setdefault(nodes[min(latest, position.get(name, end))], []).append(index)
    return found


def _insert(graph: fx.Graph, piece: Piece, inputs: list[fx.Node], crosses: list[fx.Node]) -> None:
    arguments = [*(inputs[i] for i in piece.state), *(crosses[i] for i in piece.carried)]
    body = [node for node in piece.gm.graph.nodes if node.op != "output"]
    env = dict(zip((n for n in body if n.op == "placeholder"), arguments, strict=True))
    copy_nodes((node for node in body if node.op != "placeholder"), graph, env)


class CrossingExecutor(Executor):
    """Runs setup if no updates are pending, and main if some are."""

    def __init__(self, captured: CapturedStep, graphs: IterationGraphs, memory: MemoryReport | None = None) -> None:
        super().__init__(captured, graphs.main, self._iterate, memory=memory)
        self.graphs = graphs
        self.pending: Pending | None = None
        """The pending updates of the last run."""
        self._completes: Pending | None = None
        """The pending updates that the current run completes."""
        late = graphs.late
        self._late = [c for c in self._changes if c.output in late]
        self._changes = [c for c in self._changes if c.output not in late or c.output is None]

    def run(self, inputs: list[Any], leaves: list[Any], pending: Pending | None = None) -> Any:
        """Run one iteration. `pending`: the pending updates of the last one."""
        if pending is not None and pending.has_readers:
            for change in self._release:
                change.slot.remove()
            self.complete(pending, current=False)
            pending = None
        self._completes = pending
        try:
            result = super().run(inputs, leaves)
        finally:
            self._completes = None
        return result

    def _iterate(self, *inputs: Any) -> tuple[Any, ...]:
        self.pending = None
        outputs, self.pending = self.graphs.run(list(inputs), self._completes)
        return outputs

    def _apply_changes(self, outputs: tuple[Any, ...], leaves: list[Any], deferred: DeferredValues) -> None:
        super()._apply_changes(outputs, leaves, deferred)
        for change in self._late:
            assert change.output is not None
            assert self.pending is not None
            change.slot.set(self.pending.late_tensor(change.output, self._values[change.output]))

    def complete(self, pending: Pending, *, current: bool = True) -> None:
        """Complete the pending updates of a run. `current`: its gradients are still those of the parameters."""
        with self._mode():
            pending.complete()
        for change in self._late if current else ():
            if change.output in pending.late and isinstance(local_of(change.slot.get()), LateTensor):
                change.slot.set(pending.late[change.output])  # the user has not put another value or None there

    @cached_property
    def _values(self) -> list[Any]:
        """The metadata of the graph's outputs."""
        results: Any = next(iter(reversed(self.captured.step_graph.gm.graph.nodes))).args[0]
        return [value.meta.get("val") if isinstance(value, fx.Node) else value for value in results]

    @cached_property
    def _state_slots(self) -> list[Slot]:
        """The slots of the state that pieces update."""
        return [in_users_objects(self.captured.inputs[i]) for i in self.graphs.state]

    @cached_property
    def owners(self) -> tuple[Any, ...]:
        """The modules that hold this state, and the optimizers: the objects that have a `state_dict`."""
        modules = dict.fromkeys(slot.module for slot in self._state_slots if isinstance(slot, ModuleSlot))
        return (*modules, *self.captured.guards.optimizers)

    @cached_property
    def without_hooks(self) -> tuple[Slot, ...]:
        """The slots of this state in objects that have no hook for reads: scalers, and gradients that the graph reads
        (gradients that it creates are late outputs)."""
        scaler = InputKind.SCALER_STATE
        return tuple(slot for slot in self._state_slots if isinstance(slot, GradSlot) or slot.kind is scaler)

    @cached_property
    def modules(self) -> dict[int, Any]:
        """All modules of the step, by identity."""
        return {id(module): module for module, _ in self.captured.guards.modules}
