"""Lower a StepGraph: from a graph in normal form to a finished executable graph, which the caller holds.

lower_step        regions compiled, everything else updated in place like eager
lower_iteration   the same for a graph that already updates in place (steps that cross iterations)
record_step       the executable graph as one CUDA graph
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from wholestep.ir.effects import writes
from wholestep.ir.graph_walks import copy_graph, epilogue
from wholestep.ir.meta import node_meta
from wholestep.ir.reinplace import reinplace, reinplaced
from wholestep.ir.signature import InputKind
from wholestep.ir.step_graph import StepGraph
from wholestep.lower.compiled_region import RegionCache
from wholestep.lower.cuda_graph import GraphPool, Program, cuda_graph_step
from wholestep.lower.options import LowerOptions
from wholestep.lower.partial_lower import partial_lower
from wholestep.lower.report import Lowering as LoweringReport
from wholestep.lower.report import lowering_of
from wholestep.lower.supported_nodes import NodePredicate, any_node
from wholestep.torch_private.fx_graphs import lazy_graph_module
from wholestep.torch_private.operators import OpOverload, op_name

log = logging.getLogger("wholestep.lower")


@dataclass(frozen=True)
class LoweredStep:
    """An executable step."""

    gm: fx.GraphModule
    """Compiled regions are `call_module` nodes; everything else updates in place."""
    report: LoweringReport | None
    """What was compiled, and why the rest was not; None if nothing was to be."""
    written: tuple[int, ...]
    """Positions of the inputs that compiled regions write: their kernels do not tell autograd so."""


@dataclass(frozen=True)
class RecordedStep:
    """A step that replays a CUDA graph."""

    program: Program
    written: tuple[int, ...]
    """Positions of all inputs that the step writes: a replay does not tell autograd so."""


@dataclass(frozen=True)
class LoweringCache:
    """What the graphs of one compiled step share: equal regions are compiled once, recordings use one memory pool."""

    regions: RegionCache = field(default_factory=RegionCache)
    pool: GraphPool = field(default_factory=GraphPool)


def lower_step(
    step_graph: StepGraph,
    options: LowerOptions | None,
    *,
    cache: RegionCache | None = None,
    runs_once: bool = False,
) -> LoweredStep:
    """The executable form of a graph in normal form, which stays as it is.

    `options`: None runs it operator by operator. `cache`: regions that were compiled for other graphs of the same step.
    `runs_once`: the graph creates optimizer state, and the next call has another graph.
    """
    if options is None or not is_compiled(step_graph, runs_once=runs_once):
        return LoweredStep(reinplaced(step_graph), None, ())
    graph = copy_graph(step_graph.gm.graph)
    return lower_graph(step_graph, graph, options, cache or RegionCache(), runs_once=runs_once)


def lower_graph(
    step_graph: StepGraph, graph: fx.Graph, options: LowerOptions, cache: RegionCache, *, runs_once: bool = False
) -> LoweredStep:
    """Lower another graph of a step (a copy, or one that recomputes), which becomes the executable one."""
    gm = lazy_graph_module(step_graph.gm, graph, "WholeStepLowered")
    report = _lower(gm, options, cache, _is_no_update if runs_once else any_node)
    written = _written(step_graph, left=frozenset(str(node.args[0]) for node in epilogue(gm.graph)))
    reinplace(gm.graph)
    return LoweredStep(gm, report, written)


def is_compiled(step_graph: StepGraph, *, runs_once: bool) -> bool:
    """True if regions of a graph are compiled where the user asks for it.

    A graph that runs once is compiled only if its regions are those of the graph that follows: the optimizer, which
    creates its state here, has to be outside of regions in both.
    """
    return not runs_once or _has_fused_optimizer(step_graph.gm.graph)


def lower_iteration(gm: fx.GraphModule, options: LowerOptions, *, cache: RegionCache | None = None) -> fx.GraphModule:
    """Lower a graph that already updates in place; what writes stays outside of regions. Returns the same module."""
    _lower(gm, options, cache or RegionCache(), lambda node: not writes(node))
    return gm


def record_step(
    step_graph: StepGraph,
    lowered: LoweredStep,
    make_program: Callable[[fx.GraphModule], Program],
    *,
    cuda_graph: bool | str,
    pool: GraphPool | None = None,
) -> RecordedStep | None:
    """The executable step as one CUDA graph; None where that is not asked for or, for "auto", not possible.

    `cuda_graph="auto"` asks for it where regions are compiled, `True` raises where it is not possible. `pool`: memory
    that the recordings of several graphs share.
    """
    if cuda_graph is False or (cuda_graph == "auto" and lowered.report is None):
        return None
    batch = [i for i, spec in enumerate(step_graph.signature.inputs) if spec.kind is InputKind.BATCH]
    program = cuda_graph_step(lowered.gm, batch, pool or GraphPool(), make_program, must=cuda_graph is True)
    return None if program is None else RecordedStep(program, _written(step_graph))


def _written(step_graph: StepGraph, left: frozenset[str] = frozenset()) -> tuple[int, ...]:
    """Positions of the inputs that a step writes back, except for those `left` to in-place operators."""
    written = {write.target for write in step_graph.signature.write_backs} - left
    return tuple(i for i, spec in enumerate(step_graph.signature.inputs) if spec.name in written)


def _has_fused_optimizer(graph: fx.Graph) -> bool:
    return any(isinstance(n.target, OpOverload) and op_name(n.target).startswith("aten::_fused_") for n in graph.nodes)


def _is_no_update(node: fx.Node) -> bool:
    return node_meta(node).phase != "optimizer"


def _lower(gm: fx.GraphModule, options: LowerOptions, cache: RegionCache, predicate: NodePredicate) -> LoweringReport:
    started = time.perf_counter()
    # Capture guards that inputs do not share memory, or knows which do.
    partial_lower(gm, predicate, options=options, cache=cache, may_alias=False)
    found = lowering_of(gm)
    log.info("%s", found)
    log.info("lowered in %.1f s: %d regions", time.perf_counter() - started, len(found.regions))
    return found
