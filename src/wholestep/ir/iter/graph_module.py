"""A graph module with graphs for its first, its last and all other iterations; a write to pending state raises.

    igm = IterGraphModule(gm)
    igm.graph.move_to_next_iter_before([wait, update, copy], first_use)
    igm.finalize_setup()
    igm(x)                            setup: nothing is pending before
    igm(x)                            main
    igm(x, last_train_step=True)      cleanup: nothing is pending after; on the first call too
    igm.flush()                       completes pending updates, at any time

Pending updates belong to tensors:

    igm(p, x)           the update of p is pending
    igm(p, x)           applies it: p is the same tensor
    igm(q, x)           q is another tensor: the pending update is applied to p first, and the iteration is a first one
    igm(p, bad)         raises in the middle: moves that had run by then do not run again
    p.copy_(saved)      between two iterations: WS-PENDING, instead of adding an old update to it

Modelled on the `IterGraphModule` of PyTorch's `torch.distributed._spmd`, whose calls it keeps.
"""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen, PythonCode

from wholestep.errors import OptionError, PendingError
from wholestep.ir.effects import writes
from wholestep.ir.graph_walks import copy_graph, written_back
from wholestep.ir.iter.graph import (
    IterGraph,
    cleanup_graph,
    find_output,
    flush_graph,
    kept,
    running_graph,
    setup_graph,
    single_graph,
)
from wholestep.ir.iter.moves import DESTINATIONS, iteration_facts, marked_moves, requested_moves
from wholestep.ir.meta import node_meta, update_node_meta
from wholestep.ir.rewrite_rules import replace_node
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.fake_tensors import storage_key, version_of
from wholestep.torch_private.fx_graphs import codegen_of, has_plain_codegen

log = logging.getLogger("wholestep.iter_graph")


class IterGraphModule(nn.Module):
    """Three versions of one graph (`setup_gm`, `main_gm`, `cleanup_gm`), edited together through `graph`.

    Moves that a pass marked in the given graph are performed at once.
    """

    main_gm: fx.GraphModule

    def __init__(
        self,
        main_gm: fx.GraphModule,
        max_iters: int = -1,
        enable_inductor: bool = False,
        *,
        lower: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> None:
        """`lower` gets a copy of each graph before it first runs and returns what runs: `ws.partial_lower`."""
        super().__init__()
        if enable_inductor and lower is None:
            raise OptionError(
                "enable_inductor=True: the graph itself does not know Inductor.",
                fix="use lower=ws.partial_lower, or the class of wholestep.compat.spmd.iter_graph_module.",
            )
        self._lower = lower
        self._lowered: dict[int, tuple[fx.GraphModule, fx.GraphModule]] = {}
        """By identity, a graph that ran and what was made of it."""
        graph = IterGraph(main_gm.graph, late_outputs=iteration_facts(main_gm).late_outputs)
        make_marked_moves(graph, main_gm.meta)
        self.main_gm = fx.GraphModule(main_gm, graph)
        self.main_gm.meta = dict(main_gm.meta)
        self._codegen: Any = None if has_plain_codegen(main_gm.graph) else codegen_of(main_gm.graph)
        """Flattens inputs and rebuilds outputs, where the given graph does."""
        self._setup_gm: fx.GraphModule
        self._cleanup_gm: fx.GraphModule
        self._single_gm: fx.GraphModule
        self._running: dict[str, fx.GraphModule] = {}
        """What runs if updates are pending: main and cleanup, with nodes that report completed moves."""
        self._inputs = inspect.Signature()
        self._max_iters = max_iters
        self._iter = 0
        self._finalized = False
        self._left = PendingUpdates()
        self._complete_at_last()
        self.recompile()

    def _complete_at_last(self) -> None:
        """A module that goes out of scope completes pending updates, except at the end of the process."""
        weakref.finalize(self, flush_at_last, self._left).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> IterGraphModule:
        """A copy has no pending updates: those belong to tensors which are not part of the module."""
        self.flush()
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        nn.Module.__init__(made)
        made.main_gm = copy.deepcopy(self.main_gm, memo)
        made.main_gm.meta = dict(self.main_gm.meta)
        made._codegen, made._max_iters = self._codegen, self._max_iters
        made._lower, made._lowered = self._lower, {}
        made._iter, made._finalized = 0, self._finalized
        made._running = {}
        made._left = PendingUpdates()
        made._complete_at_last()
        made.recompile()
        return made.train(self.training)

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata of the main graph module: which passes ran, and what they recorded."""
        return self.main_gm.meta

    @property
    def graph(self) -> IterGraph:
        """The main graph; edit it as any graph, `recompile` makes the others follow."""
        graph = self.main_gm.graph
        assert isinstance(graph, IterGraph)
        return graph

    @property
    def setup_gm(self) -> fx.GraphModule:
        """The first iteration. Follows edits of `graph` until `finalize_setup`, and at each `recompile`."""
        if not self._finalized:
            self._setup_gm = _module(self.main_gm, setup_graph(self.graph))
        return self._setup_gm

    @property
    def cleanup_gm(self) -> fx.GraphModule:
        """The last iteration. Follows edits as `setup_gm` does."""
        if not self._finalized:
            self._cleanup_gm = _module(self.main_gm, cleanup_graph(self.graph))
        return self._cleanup_gm

    @property
    def has_pending(self) -> bool:
        """True if updates of the last iteration are pending."""
        return self._left.exists

    def recompile(self) -> PythonCode:
        """Derive all versions from the main graph again."""
        graph = self.graph
        self._lowered.clear()
        code = self.main_gm.recompile()
        self._setup_gm = _module(self.main_gm, setup_graph(graph))
        self._cleanup_gm = _module(self.main_gm, cleanup_graph(graph))
        self._single_gm = _module(self.main_gm, single_graph(graph))
        self._inputs = inspect.signature(self._setup_gm.forward)
        done = self._left.done
        self._running = {
            name: _module(self.main_gm, running_graph(version, graph, Ran(done)))
            for name, version in (("main", graph), ("cleanup", self._cleanup_gm.graph))
            if graph.has_moves
        }
        number = {cross: i for i, cross in enumerate(graph.cross_iter_inputs)}
        self._left.flushes = [
            Flush(
                _module(self.main_gm, flush_graph(move)),
                tuple(str(node.target) for node in move.state),
                tuple(number[cross] for cross in move.given),
            )
            for move in graph.moves
        ]
        return code

    def marked(self) -> fx.GraphModule:
        """One graph that computes what an iteration does, with marks on the nodes that run in the next one.

        A StepGraph has this instead of three graphs: its runtime performs the moves. A step that creates optimizer
        state has nothing to move yet.
        """
        graph, destinations = marked_graph(self.graph)
        meta = dict(self.meta)
        if iteration_facts(self).creates_state:
            for node in graph.nodes:
                if node_meta(node).move:
                    update_node_meta(node, move=0)
        else:
            meta[DESTINATIONS] = destinations
        made = _module(self.main_gm, graph)
        if self._codegen is not None:
            made.graph.set_codegen(self._codegen)
            made.recompile()
        made.meta = meta
        return made

    def setup(self, max_iters: int = 0) -> None:
        """Set the number of iterations, as the first versions of PyTorch's had it; moves may follow."""
        if max_iters <= 0:
            raise OptionError(
                f"max_iters={max_iters} must be greater than 0.", fix="leave setup() out if it is unknown."
            )
        self.flush()
        self._max_iters = max_iters
        self._iter = 0

    def finalize_setup(self) -> None:
        """Refuse further moves and begin with a first iteration; pending updates are completed."""
        self.flush()
        if not self._finalized:
            self.graph.freeze_cross_iter_movement()
            self.recompile()
            self._finalized = True
        self._iter = 0

    def freeze_cross_iter_movement(self) -> None:
        """Refuse further moves."""
        self.graph.freeze_cross_iter_movement()

    def forward(self, *args: Any, last_iter: bool = False, last_train_step: bool = False, **kwargs: Any) -> Any:
        """One iteration. After one with `last_iter` (or `last_train_step`) nothing is pending."""
        if not self._finalized:
            self.finalize_setup()
        if self._codegen is not None:
            args, kwargs = tuple(self._codegen.process_inputs(*args, **kwargs)), {}
        inputs = self._bound(args, kwargs)
        if self.has_pending and not self._left.can_continue(inputs):
            self._left.flush()  # other tensors: the update belongs to those of the last iteration
        last = last_iter or last_train_step or self._iter + 1 == self._max_iters
        if self.has_pending:
            result = self._complete_and_run(args, kwargs, last)
        else:
            result = self._compiled(self._first(last))(*args, **kwargs)
        self._iter = 0 if last else self._iter + 1
        if not last and self.graph.has_moves:
            result, carried = result
            self._left.left(carried, inputs)
        return result if self._codegen is None else self._codegen.process_outputs(result)

    def _first(self, last: bool) -> fx.GraphModule:
        return self._single_gm if last else self.setup_gm

    def _compiled(self, gm: fx.GraphModule) -> fx.GraphModule:
        """What runs for a graph: itself, or what `lower` makes of a copy."""
        if self._lower is None:
            return gm
        if id(gm) not in self._lowered:
            self._lowered[id(gm)] = gm, self._lower(fx.GraphModule(gm, copy_graph(gm.graph)))
        return self._lowered[id(gm)][1]

    def _complete_and_run(self, args: tuple[Any, ...], kwargs: dict[str, Any], last: bool) -> Any:
        """An iteration that applies pending updates. If it fails, those it has applied are not pending any more."""
        left = self._left
        left.check_unchanged()
        names = (str(cross.target) for cross in self.graph.cross_iter_inputs)
        pending = dict(zip(names, left.carried, strict=True))
        module = self._compiled(self._running["cleanup" if last else "main"])
        log.debug("iteration that completes the last one: %s", "cleanup" if last else "main")
        left.done.clear()
        try:
            result = module(*args, **kwargs, **pending)
        except BaseException:
            left.keep_all_but(left.done)
            raise
        left.keep_all_but(range(len(left.flushes)))
        return result

    def flush(self) -> None:
        """Apply pending updates; the next iteration is a first one."""
        if self.has_pending:
            self._left.flush()
            self._iter = 0

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of the step by name, where moves need them."""
        if not self.graph.has_moves:
            return {}
        bound = self._inputs.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def print_readable(self, print_output: bool = True) -> str:
        """The main graph as Python text."""
        return str(self.main_gm.print_readable(print_output))

    def print_all_graphs(self) -> None:
        """Log the three graphs."""
        for name, module in self._versions():
            log.info("%s fx.Graph:\n%s", name, module.graph)

    def print_all_graph_modules(self) -> None:
        """Log the three graph modules as Python text."""
        for name, module in self._versions():
            log.info("%s fx.GraphModule:\n%s", name, module.print_readable(False))

    def _versions(self) -> list[tuple[str, fx.GraphModule]]:
        return [("setup", self.setup_gm), ("main", self.main_gm), ("cleanup", self.cleanup_gm)]


def _module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph, with the submodules and constants that it reads."""
    if not any(node.op == "output" for node in graph.nodes):
        graph.output(None)
    graph.set_codegen(CodeGen())
    return fx.GraphModule(root, graph)


log = logging.getLogger("wholestep.iter_graph")


@dataclass(frozen=True, eq=False)
class Flush:
    """The pending part of one move as a module: takes state, then some of what was carried."""

    gm: fx.GraphModule
    state: tuple[str, ...]
    """Names of inputs of the step."""
    given: tuple[int, ...]
    """Places among the carried values."""


class Ran:
    """The target of nodes that report a completed move."""

    __name__ = "ran"

    def __init__(self, done: list[int]) -> None:
        self._done = done

    def __call__(self, move: int) -> None:
        self._done.append(move)


class PendingUpdates:
    """Pending updates. They have no reference to the module, so that they can outlive it."""

    def __init__(self) -> None:
        self.flushes: list[Flush] = []
        """One per move."""
        self.done: list[int] = []
        """Moves that the running iteration has completed."""
        self._carried: tuple[Any, ...] = ()
        self._state: dict[str, Any] = {}
        self._left: list[int] = []
        self._versions: list[tuple[Any, ...]] = []

    @property
    def exists(self) -> bool:
        """True if something is pending."""
        return bool(self._left)

    @property
    def carried(self) -> tuple[Any, ...]:
        """The values that the last iteration carries over."""
        return self._carried

    def left(self, carried: Iterable[Any], inputs: Mapping[str, Any]) -> None:
        """Record that an iteration with these inputs left each move pending."""
        self._carried = tuple(carried)
        self._state = {name: inputs[name] for flush in self.flushes for name in flush.state}
        self._left = list(range(len(self.flushes)))
        self._versions = self._seen()

    def can_continue(self, inputs: Mapping[str, Any]) -> bool:
        """True if an iteration with these inputs can apply all of them: it has the same tensors."""
        if len(self._left) != len(self.flushes):
            return False
        return all(_is_same(inputs[name], value) for name, value in self._state.items())

    def check_unchanged(self) -> None:
        """Raise PendingError, once, if a tensor was written while its update is pending."""
        before, self._versions = self._versions, self._seen()
        for name, then, now in zip(self._state, before, self._versions, strict=True):
            if then != now:
                raise PendingError(
                    f"{name} was written while its update by the last iteration was pending: the write saw the value "
                    "before that update, which would now be added to it.",
                    fix="call flush() before you change state between iterations.",
                )

    def keep_all_but(self, moves: Iterable[int]) -> None:
        """Mark some moves as done; the others stay pending."""
        gone = set(moves)
        self._left = [number for number in self._left if number not in gone]
        self._versions = self._seen()
        if not self._left:
            self._carried, self._state, self._versions = (), {}, []

    def flush(self) -> None:
        """Apply pending updates; those that fail stay pending."""
        if not self._left:
            return
        self.check_unchanged()
        done: list[int] = []
        try:
            for number in self._left:
                flush = self.flushes[number]
                flush.gm(*(self._state[name] for name in flush.state), *(self._carried[i] for i in flush.given))
                done.append(number)
        finally:
            self.keep_all_but(done)

    def _seen(self) -> list[tuple[Any, ...]]:
        return [_identity(value) for value in self._state.values()]


def flush_at_last(left: PendingUpdates) -> None:
    """Flush for a module that was collected: its parameters may live on."""
    try:
        left.flush()
    except Exception:
        log.exception("pending updates of an IterGraphModule could not be applied")


def _identity(value: Any) -> tuple[Any, ...]:
    """Changes with every write that torch counts, and with the storage (`p.data = ...`, a cast)."""
    if not isinstance(value, Tensor):
        return (id(value),)
    local: Tensor = local_of(value)
    return version_of(value), storage_key(local), value.dtype


def _is_same(one: Any, other: Any) -> bool:
    """True if two values are one tensor, perhaps under two names (`p` and `p.detach()`)."""
    if one is other:
        return True
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or type(one) is not type(other):
        return False
    form = (one.dtype, one.shape, one.stride(), one.storage_offset())
    if form != (other.dtype, other.shape, other.stride(), other.storage_offset()):
        return False
    return storage_key(local_of(one)) == storage_key(local_of(other))


def marked_graph(main: IterGraph) -> tuple[fx.Graph, dict[int, str]]:
    """The graph as if nothing had moved, each moved node with its mark; and where each move goes (`DESTINATIONS`).

    What `make_marked_moves` undoes. Write-backs come last, as a StepGraph has them, where nothing else writes.
    """
    graph = single_graph(main)
    for node in graph.find_nodes(op="call_function", target=kept):
        replace_node(node, node.args[0])
    by_name = {node.name: node for node in graph.nodes}
    moved = {node for move in main.moves for node in move.nodes}
    destinations: dict[int, str] = {}
    for number, move in enumerate(main.moves, 1):
        for node in move.nodes:
            update_node_meta(by_name[node.name], move=number)
        after = move.nodes[-1].next
        while after in moved or after.target is kept:
            after = after.next
        destinations[number] = after.name
    written = [node for node in graph.nodes if writes(node)]
    if all(map(_is_final, written)):
        output = find_output(graph)
        for node in written:
            output.prepend(node)
    return graph, destinations


def _is_final(write: fx.Node) -> bool:
    """Whether a write goes back to an input and nothing but the output reads it."""
    return written_back(write) is not None and all(user.op == "output" for user in write.users)


def make_marked_moves(graph: IterGraph, meta: Mapping[str, Any]) -> None:
    """Perform the moves that are marked in a graph, and remove the marks; `meta` is that of its module."""
    marked = marked_moves(graph)
    if not marked:
        return
    graph.move_all_to_next_iter(requested_moves(graph, marked, meta.get(DESTINATIONS, {})))
    for nodes in marked.values():
        for node in nodes:
            update_node_meta(node, move=0)
