"""Lower a StepGraph in normal form to a finished executable graph, and measure how much memory that needs.

    lower_step        regions compiled, everything else updated in place like eager
    lower_iteration   the same for a graph that already updates in place (steps that cross iterations)
    record_step       the executable graph as one CUDA graph

`measure_step` serves `remat.fit_to_budget`: compiled regions are measured, by calling each once. What Inductor fuses,
reuses and reorders is not visible from outside; nor is the scratch memory of the libraries that it calls. Arguments are
zeros, except for integers that another region computed: those are the ones it returned when it was measured, because
they may be a permutation, for which zeros are not valid.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import main_device, writes
from wholestep.ir.graph_walks import copy_graph, epilogue
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.ir.meta import node_meta
from wholestep.ir.reinplace import reinplace, reinplaced
from wholestep.ir.signature import InputKind
from wholestep.ir.step_graph import StepGraph
from wholestep.lower.compiled_region import CompiledRegion, RegionCache
from wholestep.lower.cuda_graph import GraphPool, Program, cuda_graph_step
from wholestep.lower.forward_backward import ForwardBackward
from wholestep.lower.options import LowerOptions
from wholestep.lower.partial_lower import partial_lower
from wholestep.lower.report import Lowering as LoweringReport
from wholestep.lower.report import lowering_of
from wholestep.lower.scalar_inputs import pack_scalars
from wholestep.lower.supported_nodes import NodePredicate, any_node
from wholestep.remat.measure import (
    Measure,
    Measured,
    MeasureEager,
    OperatorMemory,
    bytes_at_most,
    created_state,
    example_of,
    measured_graph,
)
from wholestep.remat.pointwise_recompute import RegionCut
from wholestep.torch_private.autograd import below_autograd
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


def measure_step(
    step_graph: StepGraph, options: LowerOptions | None, cache: RegionCache, *, runs_once: bool
) -> Measure[LoweredStep]:
    """The measure for `remat.fit_to_budget` of a step that `lower_step` lowers with the same arguments."""
    if options is None or not is_compiled(step_graph, runs_once=runs_once):
        return MeasureEager(step_graph, knows_later=options is None)
    return MeasureLowered(step_graph, options, cache, runs_once=runs_once)


class MeasureLowered:
    """Lowers graphs of a step and measures what is built."""

    compiles = True
    knows_later = True

    def __init__(self, step_graph: StepGraph, options: LowerOptions, cache: RegionCache, *, runs_once: bool) -> None:
        self.device = main_device(step_graph.gm.graph)
        self.may_cut = options.remat
        self._step_graph = step_graph
        self._options = options
        self._cache = cache
        self._runs_once = runs_once
        self._regions = RegionMemory(OperatorMemory(self.device))
        self._created = created_state(step_graph)

    def workspace(self, node: fx.Node) -> int:
        """Not known of single operators: they are measured as parts of regions."""
        return 0

    def __call__(self, graph: fx.Graph, shed: int | None = None) -> Measured[LoweredStep]:
        options = replace(self._options, remat=shed is not None, shed=shed or 0)
        lowered = lower_graph(self._step_graph, graph, options, self._cache, runs_once=self._runs_once)
        extra = self._regions.of(lowered.gm, self.device)
        found = measured_graph(lowered.gm.graph, extra, self.device, self._created)
        return replace(found, cuts=_cuts_in(lowered.gm), executable=lowered)


def _cuts_in(gm: fx.GraphModule) -> tuple[RegionCut, ...]:
    """The cuts of compiled regions between forward and backward."""
    modules = [module.compiled for module in gm.children() if isinstance(module, CompiledRegion)]
    return tuple(compiled.cut for compiled in modules if isinstance(compiled, ForwardBackward))


class RegionMemory:
    """The memory of compiled regions, each measured once."""

    def __init__(self, operators: OperatorMemory) -> None:
        self._operators = operators
        self._known: dict[Any, int] = {}
        self._alive: list[Any] = []
        """The objects whose ids are keys of `_known`."""
        self._integers: dict[tuple[int, int], Tensor] = {}
        """Integers that a region returned, by the id of its code and the index of the result."""

    def of(self, gm: fx.GraphModule, device: torch.device) -> Callable[[fx.Node], int | None]:
        """For calls of compiled regions and of operators: the most bytes during the call, above those before."""
        last = _last_users(gm.graph)

        def extra(node: fx.Node) -> int | None:
            if node.op != "call_module":
                return self._operators.extra(node)
            module = gm.get_submodule(str(node.target))
            if not isinstance(module, CompiledRegion):
                return None
            given = [last.get(source) is node for source in node.args]  # type: ignore[arg-type]
            key = (id(module.compiled), tuple(given))
            if key not in self._known:
                self._alive.append(module.compiled)
                self._known[key] = self._measure(gm, module, node, given, device)
            return self._known[key]

        return extra

    def _measure(
        self, gm: fx.GraphModule, module: CompiledRegion, node: fx.Node, given: list[bool], device: torch.device
    ) -> int:
        """Inputs that die in the call are allocated while it is counted: the CPU's count does not see frees of
        others."""
        arguments = list(node.args)
        held = [None if gives else self._argument(gm, source) for source, gives in zip(arguments, given, strict=True)]

        def call() -> Any:
            made = [self._argument(gm, arguments[i]) if gives else held[i] for i, gives in enumerate(given)]
            return module.call_boxed(made)

        with below_autograd(), torch.random.fork_rng():
            self._note_integers(module, call())  # loads and tunes kernels
            _, most = bytes_at_most(call, device)
        if most is None:
            return 0
        given_away = (source.meta.get("val") for source, gives in zip(arguments, given, strict=True) if gives)  # type: ignore[union-attr]
        return most - sum(tensor_bytes(t) for t in given_away if isinstance(t, Tensor) and t.device == device)

    def _note_integers(self, module: CompiledRegion, results: Sequence[Any]) -> None:
        for place, value in enumerate(results):
            if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32):
                self._integers[id(module.compiled), place] = value.clone()

    def _argument(self, gm: fx.GraphModule, source: Any) -> Any:
        """An example of an argument; scalar inputs that are packed for a region have no metadata."""
        if not isinstance(source, fx.Node):
            return example_of(source)
        if source.target is pack_scalars:
            scalars, dtype, device = source.args
            return pack_scalars([0.0] * len(scalars), dtype, device)  # type: ignore[arg-type]
        if source.target is operator.getitem and source.args[0].op == "call_module":  # type: ignore[union-attr]
            module = gm.get_submodule(str(source.args[0].target))  # type: ignore[union-attr]
            known = self._integers.get((id(getattr(module, "compiled", None)), source.args[1]))  # type: ignore[arg-type]
            if known is not None:
                return known.clone()
        return example_of(source)


def _last_users(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each value that is computed in the graph the node that uses it last."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source.op not in ("placeholder", "get_attr"):
                found[source] = node
    return found
