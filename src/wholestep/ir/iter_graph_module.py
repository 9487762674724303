"""A graph module that runs its first, its last and all other iterations as different graphs.

    igm = IterGraphModule(gm)
    igm.graph.move_to_next_iter_before([wait, update, copy], first_use)
    igm.finalize_setup()
    igm(x)                            setup: nothing is pending before
    igm(x)                            main
    igm(x, last_train_step=True)      cleanup: nothing is pending after; on the first call too
    igm.flush()                       completes what is pending, at any time

Made by the `IterGraphModule` of PyTorch's `torch.distributed._spmd`, whose calls it keeps.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch import fx, nn
from torch.fx.graph import CodeGen, PythonCode

from wholestep._torch_compat import codegen_of, has_plain_codegen
from wholestep.errors import OptionError
from wholestep.ir.iter_derived import cleanup_graph, flush_graph, setup_graph, single_graph
from wholestep.ir.iter_graph import IterGraph

log = logging.getLogger("wholestep.iter_graph")


class IterGraphModule(nn.Module):
    """Three versions of one graph (`setup_gm`, `main_gm`, `cleanup_gm`), edited together through `graph`."""

    main_gm: fx.GraphModule

    def __init__(self, main_gm: fx.GraphModule, max_iters: int = -1, enable_inductor: bool = False) -> None:
        super().__init__()
        if enable_inductor:
            raise OptionError("enable_inductor=True is not available in this version.", fix="leave it out.")
        self.main_gm = fx.GraphModule(main_gm, IterGraph(main_gm.graph))
        self.main_gm.meta = dict(main_gm.meta)
        self._codegen: Any = None if has_plain_codegen(main_gm.graph) else codegen_of(main_gm.graph)
        """Flattens inputs and rebuilds outputs, where the given graph does."""
        self._setup_gm: fx.GraphModule
        self._cleanup_gm: fx.GraphModule
        self._single_gm: fx.GraphModule
        self._flushes: list[tuple[fx.GraphModule, tuple[str, ...], tuple[int, ...]]] = []
        self._max_iters = max_iters
        self._iter = 0
        self._finalized = False
        self._carried: tuple[Any, ...] | None = None
        """What the last iteration left for the next; None if nothing is pending."""
        self._state: dict[str, Any] = {}
        """The tensors that pending nodes will write, by the name of their input."""
        self.recompile()

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
        """Whether the last iteration left something to do."""
        return self._carried is not None

    def recompile(self) -> PythonCode:
        """Make all versions follow the main graph."""
        graph = self.graph
        code = self.main_gm.recompile()
        self._setup_gm = _module(self.main_gm, setup_graph(graph))
        self._cleanup_gm = _module(self.main_gm, cleanup_graph(graph))
        self._single_gm = _module(self.main_gm, single_graph(graph))
        number = {cross: i for i, cross in enumerate(graph.cross_iter_inputs)}
        self._flushes = [
            (
                _module(self.main_gm, flush_graph(move)),
                tuple(str(node.target) for node in move.state),
                tuple(number[cross] for cross in move.given),
            )
            for move in graph.moves
        ]
        return code

    def finalize_setup(self) -> None:
        """Refuse further moves and begin with a first iteration; to be called before the first call."""
        if not self._finalized:
            self.graph.freeze_cross_iter_movement()
            self.recompile()
            self._finalized = True
        self._iter = 0
        self._carried = None

    def freeze_cross_iter_movement(self) -> None:
        """Refuse further moves."""
        self.graph.freeze_cross_iter_movement()

    def forward(self, *args: Any, last_iter: bool = False, last_train_step: bool = False, **kwargs: Any) -> Any:
        """One iteration. After one with `last_iter` (or `last_train_step`) nothing is pending."""
        if not self._finalized:
            self.finalize_setup()
        self._iter += 1
        last = last_iter or last_train_step or self._iter == self._max_iters
        if self._codegen is not None:
            args, kwargs = tuple(self._codegen.process_inputs(*args, **kwargs)), {}
        pending = self._given()
        if last:
            module = self.cleanup_gm if self.has_pending else self._single_gm
            self._iter = 0
            log.debug("last iteration: %s", "cleanup" if self.has_pending else "single")
        else:
            module = self.main_gm if self.has_pending else self.setup_gm
        result = module(*args, **kwargs, **pending)
        self._carried = None
        if not last and self.graph.has_moves:
            result, carried = result
            self._carried = tuple(carried)
            self._hold_state(args, kwargs)
        return result if self._codegen is None else self._codegen.process_outputs(result)

    def flush(self) -> None:
        """Complete what the last iteration left; the next one is a first one."""
        if self._carried is None:
            return
        for module, state, given in self._flushes:
            module(*(self._state[name] for name in state), *(self._carried[i] for i in given))
        self._carried = None
        self._state = {}
        self._iter = 0

    def _given(self) -> dict[str, Any]:
        if self._carried is None:
            return {}
        names = (str(cross.target) for cross in self.graph.cross_iter_inputs)
        return dict(zip(names, self._carried, strict=True))

    def _hold_state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(self.setup_gm.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        self._state = {name: bound.arguments[name] for _, names, _ in self._flushes for name in names}

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
