"""The executable form of a StepGraph: regions compiled, the rest updated in place like eager."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from wholestep.ir.effects import may_write, writes
from wholestep.ir.graphs import copy_graph, epilogue
from wholestep.ir.meta import node_meta
from wholestep.ir.step_graph import StepGraph
from wholestep.lower.cuda_graph import GraphPool, Program, cuda_graph_step
from wholestep.lower.inductor import RegionCache
from wholestep.lower.options import LowerOptions
from wholestep.lower.partial_lower import partial_lower
from wholestep.lower.predicates import NodePredicate, any_node
from wholestep.lower.report import lowering_of
from wholestep.torch_private.fx_graphs import lazy_graph_module
from wholestep.torch_private.operators import OpOverload, op_name

log = logging.getLogger("wholestep.lower")


class Lowering:
    """How the graphs of one compiled step are lowered; regions that are the same share what was compiled."""

    def __init__(self, options: LowerOptions, *, compiles: bool, cuda_graph: bool | str, planned: bool = False) -> None:
        self._options = options
        self._planned = planned
        """Under a memory budget: what the backward computes again was chosen for each graph."""
        self.compiles = compiles
        """Whether regions are compiled; if not, only the recording of kernels is left."""
        self._cuda_graph = cuda_graph
        self._cache = RegionCache()
        self._pool = GraphPool()
        self._lowered: tuple[StepGraph, fx.GraphModule] | None = None
        """A graph that is about to run, and what was made of it while it was planned."""

    def replayed(
        self, gm: fx.GraphModule, batch: Sequence[int], make_program: Callable[[fx.GraphModule], Program]
    ) -> Program | None:
        """The executable graph as one CUDA graph; None where that is not wanted or not possible."""
        if self._cuda_graph is False or (self._cuda_graph == "auto" and not self.compiles):
            return None
        return cuda_graph_step(gm, batch, self._pool, make_program, must=self._cuda_graph is True)

    def lowers(self, step_graph: StepGraph, *, runs_once: bool) -> bool:
        """Whether a graph is lowered.

        One that runs once is only if its regions are those of the graph that follows: the optimizer, which makes its
        state here, has to be outside in both.
        """
        return self.compiles and not (runs_once and not _has_fused_optimizer(step_graph.gm.graph))

    def step(self, step_graph: StepGraph, *, runs_once: bool = False) -> fx.GraphModule | None:
        """A lowered copy of a graph in normal form, which stays as it is; None where it is not lowered. Write-backs
        outside of regions remain."""
        if not self.lowers(step_graph, runs_once=runs_once):
            return None
        kept, self._lowered = self._lowered, None
        if kept is not None and kept[0] is step_graph:
            return kept[1]
        gm = lazy_graph_module(step_graph.gm, copy_graph(step_graph.gm.graph), "WholeStepLowered")
        return self.lower(gm, runs_once=runs_once, shed=None if step_graph.memory is None else step_graph.memory.shed)

    def keep(self, step_graph: StepGraph, lowered: fx.GraphModule) -> None:
        """The next `step` of this graph is what was lowered already."""
        self._lowered = (step_graph, lowered)

    @property
    def may_cut(self) -> bool:
        """Whether torch's cut may choose what a backward computes again."""
        return self._options.remat

    def lower(self, gm: fx.GraphModule, *, runs_once: bool = False, shed: int | None = None) -> fx.GraphModule:
        """Lower a graph in normal form; returns it. `shed`, of a graph under a memory budget: torch's cut with so many
        bytes less; None: what is computed again is in the graph."""
        options = self._options
        if self._planned:
            options = replace(options, remat=shed is not None, shed=shed or 0)
        return _timed(gm, options, self._cache, _is_no_update if runs_once else any_node)

    def in_place(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Lower a graph that already updates in place: what writes stays outside."""
        options = replace(self._options, remat=False, shed=0) if self._planned else self._options
        return _timed(gm, options, self._cache, lambda node: not (may_write(node.target) and writes(node)))

    @staticmethod
    def written(step_graph: StepGraph, lowered: fx.GraphModule) -> tuple[int, ...]:
        """Places of the inputs that compiled regions update; their kernels do not tell autograd so."""
        left = {str(node.args[0]) for node in epilogue(lowered.graph)}
        written = {write.target for write in step_graph.signature.write_backs} - left
        return tuple(i for i, spec in enumerate(step_graph.signature.inputs) if spec.name in written)


def _has_fused_optimizer(graph: fx.Graph) -> bool:
    return any(isinstance(n.target, OpOverload) and op_name(n.target).startswith("aten::_fused_") for n in graph.nodes)


def _is_no_update(node: fx.Node) -> bool:
    return node_meta(node).phase != "optimizer"


def _timed(gm: fx.GraphModule, options: LowerOptions, cache: RegionCache, predicate: NodePredicate) -> fx.GraphModule:
    started = time.perf_counter()
    # Capture guards that inputs are apart, or knows which are not.
    partial_lower(gm, predicate, options=options, cache=cache, may_alias=False)
    found = lowering_of(gm)
    log.info("%s", found)
    log.info("lowered in %.1f s: %d regions", time.perf_counter() - started, len(found.regions))
    return gm
