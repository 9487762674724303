"""How much memory a call, an operator and a whole executable step need.

Calls are measured: by the CUDA allocator's own count, or by what the CPU allocator handed out. Operators are measured
by calling each one once with tensors of zeros (`example_of`). `MeasureEager` measures a step that runs operator by
operator; compiled steps are measured by `lower`, which implements the same protocol.

The peak memory of a graph: `timeline` of a graph as it is, `peak_of` of a graph under a plan, without rewriting it.

A value is freed after its last use, as the runtime does; a piece of memory when the last value in it is. What the
caller holds (inputs, constants) is live all the time, an output from where it is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, fx

from wholestep.ir.effects import (
    draws,
    find_storages,
    is_communication,
    is_custom_operator,
    is_data_dependent,
    main_device,
    read_by,
    shared_inputs,
    writes,
)
from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.io.node_values import is_packed, size_hint, tensor_bytes
from wholestep.ir.reinplace import reinplace
from wholestep.ir.signature import ChangeKind, InputKind
from wholestep.ir.step_graph import StepGraph
from wholestep.remat.pointwise_recompute import RegionCut
from wholestep.remat.problem import RematProblem, is_elementwise
from wholestep.torch_private.autograd import below_autograd, cpu_bytes_at_most, is_profiling
from wholestep.torch_private.operators import OpOverload, op_name, plain_name

ExtraBytes = Callable[[fx.Node], int | None]


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes that a run of a graph needs."""

    held: int
    """Bytes of inputs and constants."""
    peak: int
    """The most bytes at any moment, with `held`."""
    peak_at: str
    """The node that runs at the peak."""


def timeline(
    graph: fx.Graph,
    extra: ExtraBytes = lambda node: None,
    device: torch.device | None = None,
    early: Iterable[fx.Node] = (),
) -> MemoryTimeline:
    """Simulate a run of a graph, counting bytes on `device`.

    `extra`: the most bytes of a call above those before it; None: its results. `early`: results that are live from the
    start, as if they were inputs.
    """
    pieces = find_storages(graph, device)
    held_early = 0
    for piece in {piece for node in early for piece in pieces.seen_by.get(node, ())}:
        maker = pieces.maker[piece]
        if maker.op == "call_function":
            held_early += pieces.size[piece]
            pieces.size[piece] = 0
    nodes = list(graph.nodes)
    dies_at = _last_moments(nodes, pieces.seen_by)
    held = sum(pieces.size[p] for n in nodes if n.op in ("placeholder", "get_attr") for p in pieces.made_by.get(n, ()))
    frees: dict[int, int] = {}
    for piece, moment in dies_at.items():
        if pieces.maker[piece].op not in ("placeholder", "get_attr"):
            frees[moment] = frees.get(moment, 0) + pieces.size[piece]
    held += held_early
    live, peak, at = held, held, nodes[0].name if nodes else ""
    for i, node in enumerate(nodes):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        before = live
        live += sum(pieces.size[p] for p in pieces.made_by.get(node, ()))
        more = extra(node)
        now = live if more is None else max(before + more, 0)
        if now > peak:
            peak, at = now, node.name
        live -= frees.get(i, 0)
    return MemoryTimeline(held, peak, at)


def _last_moments(nodes: list[fx.Node], seen_by: dict[fx.Node, tuple[int, ...]]) -> dict[int, int]:
    """For each piece of memory the position of the last node that needs it; outputs are never freed."""
    found: dict[int, int] = {}
    for i, node in enumerate(nodes):
        moment = len(nodes) if node.op == "output" else i
        for source in (node, *read_by(node)):
            for piece in seen_by.get(source, ()):
                found[piece] = moment
    return found


def peak_of(problem: RematProblem, plan: Collection[int]) -> int:
    """The most bytes of a step under a plan at any moment, estimated, with inputs and constants."""
    return _Simulation(problem, problem.recomputed(plan)).peak()


class _Simulation:
    """Moments are entries of `order`: `i` is a node, `~i` its recomputation, which has pieces of memory of its own."""

    def __init__(self, problem: RematProblem, again: set[int]) -> None:
        self._problem = problem
        self._again = again
        self._count = len(problem.pieces.size)
        self._order = order_of(problem, again)

    def peak(self) -> int:
        problem, size, count = self._problem, self._problem.pieces.size, self._count
        last, skipped = self._last_moments()
        held = 0
        frees = [0] * (len(self._order) + 1)
        for piece, moment in last.items():
            number = piece % count
            if problem.nodes[problem.maker[number]].op != "call_function":
                held += size[number]
            elif piece not in skipped:
                frees[moment] += size[number]
        live = peak = held
        for moment, entry in enumerate(self._order):
            i, shift = (~entry, count) if entry < 0 else (entry, 0)
            if problem.nodes[i].op == "call_function":
                for piece in problem.pieces.made_by.get(problem.nodes[i], ()):
                    if piece + shift not in skipped:
                        live += size[piece]
                peak = max(peak, live + problem.besides[i])
            live -= frees[moment]
        return peak

    def _last_moments(self) -> tuple[dict[int, int], set[int]]:
        """When each piece is needed last, and the pieces that are never allocated: values inside of fused kernels."""
        problem, count = self._problem, self._count
        seen, fused = problem.seen, problem.fused
        last: dict[int, int] = {}
        made: set[int] = set()  # read by something that is not fused with their maker
        end = len(self._order)
        for moment, entry in enumerate(self._order):
            i = ~entry if entry < 0 else entry
            in_backward = entry < 0 or problem.backward[i]
            for piece in self._own(entry):
                last[piece] = moment
            for source in problem.reads[i]:
                second = in_backward and source in self._again
                joined = fused[i] and in_backward == (second or problem.backward[source])
                for piece in seen[source]:
                    key = piece + (count if second and problem.maker[piece] in self._again else 0)
                    last[key] = end if problem.nodes[i].op == "output" else moment
                    if not joined:
                        made.add(key)
        skipped = {p for p in last if fused[problem.maker[p % count]] and p not in made}
        self._extend_sources(last, skipped)
        return last, skipped

    def _extend_sources(self, last: dict[int, int], skipped: set[int]) -> None:
        """Let the sources of a value that is never allocated live until that value is read."""
        if not skipped:
            return
        problem, count = self._problem, self._count
        for entry in reversed(self._order):
            own = self._own(entry)
            if not own or not skipped.issuperset(own):
                continue
            i = ~entry if entry < 0 else entry
            late = max(last[piece] for piece in own)
            for source in problem.reads[i]:
                second = (entry < 0 or problem.backward[i]) and source in self._again
                for piece in problem.seen[source]:
                    key = piece + (count if second and problem.maker[piece] in self._again else 0)
                    last[key] = max(last[key], late)

    def _own(self, entry: int) -> list[int]:
        """The pieces that the value of a moment is in."""
        problem = self._problem
        if entry >= 0:
            return list(problem.seen[entry])
        return [p + (self._count if problem.maker[p] in self._again else 0) for p in problem.seen[~entry]]


def order_of(problem: RematProblem, again: Collection[int]) -> list[int]:
    """All nodes in the order in which they run: `i`, or `~i` for a recomputation."""
    order: list[int] = []
    done: set[int] = set()
    for i in range(len(problem.nodes)):
        if problem.backward[i]:
            stack = [s for s in problem.inputs[i] if s in again and s not in done]
            while stack:
                each = stack[-1]
                missing = [s for s in problem.inputs[each] if s in again and s not in done]
                if missing:
                    stack += missing
                    continue
                stack.pop()
                # Elements are taken out of a list at once: the list would keep all of them alive.
                for made in (each, *(e for e in problem.elements.get(each, ()) if e in again)):
                    if made not in done:
                        done.add(made)
                        order.append(~made)
        order.append(i)
    return order


E = TypeVar("E")
"""What a measure builds to run."""


@dataclass(frozen=True)
class Measured(Generic[E]):
    """What an executable form of a step needs."""

    peak: int
    """Bytes on the device, with the inputs."""
    peak_at: str = ""
    """The node that runs at the peak."""
    later_peak: int = 0
    """Peak of the calls that follow, if this one creates optimizer state that they hold from the start; 0: unknown, or
    the same."""
    cuts: tuple[RegionCut, ...] = ()
    """One for each compiled region with a forward and a backward."""
    executable: E | None = None
    """What was built, for the caller of `fit_to_budget` to run; None: nothing was compiled."""


class Measure(Protocol[E]):
    """Builds the executable form of a graph in normal form, and tells what it needs: `measure(graph)`."""

    @property
    def device(self) -> torch.device:
        """The device whose bytes count."""

    @property
    def compiles(self) -> bool:
        """True if a compiler fuses operators: building takes seconds, and values inside of kernels take no memory."""

    @property
    def may_cut(self) -> bool:
        """True if the compiler may choose what a backward recomputes (`shed`)."""

    @property
    def knows_later(self) -> bool:
        """False if the next call is compiled and this one, which creates the optimizer state, is not."""

    def workspace(self, node: fx.Node) -> int:
        """Bytes that a node needs while it runs, besides its results."""

    def __call__(self, graph: fx.Graph, shed: int | None = None) -> Measured[E]:
        """Build and measure; the graph may be changed. `shed`: let the compiler choose what is recomputed, with this
        many fewer bytes saved than by its own cut; None: the graph says what is recomputed."""


class MeasureEager:
    """Measures a step that runs operator by operator."""

    compiles = False
    may_cut = False

    def __init__(self, step_graph: StepGraph, *, knows_later: bool = True) -> None:
        self.device = main_device(step_graph.gm.graph)
        self.knows_later = knows_later
        self._operators = OperatorMemory(self.device)
        self._created = created_state(step_graph) if knows_later else ()

    def workspace(self, node: fx.Node) -> int:
        return self._operators.workspace(node)

    def __call__(self, graph: fx.Graph, shed: int | None = None) -> Measured[Any]:
        assert shed is None, "nothing is compiled"
        reinplace(graph)
        return measured_graph(graph, self._operators.extra, self.device, self._created)


def measured_graph(
    graph: fx.Graph, extra: ExtraBytes, device: torch.device, created: Iterable[int] = ()
) -> Measured[Any]:
    """The peaks of an executable graph. `created`: outputs that the next calls hold from the start."""
    found = timeline(graph, extra, device)
    later = 0
    if created:
        results: Any = graph.output_node().args[0]
        later = timeline(graph, extra, device, [results[i] for i in created]).peak
    return Measured(found.peak, found.peak_at, later)


def created_state(step_graph: StepGraph) -> tuple[int, ...]:
    """Outputs of a graph that become optimizer state which was not there before."""
    return tuple(
        change.output
        for change in step_graph.signature.state_changes
        if change.kind is ChangeKind.CREATED and change.slot is InputKind.OPTIMIZER_STATE and change.output is not None
    )


def bytes_at_most(function: Callable[[], Any], device: torch.device) -> tuple[Any, int | None]:
    """The result of a call, and the most bytes on `device` during it, above those before it.

    None while a profiler runs, which uses the allocator's count itself. On CUDA this resets the allocator's peak.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    if is_profiling():
        return function(), None
    return cpu_bytes_at_most(function)


def held_bytes(inputs: list[Any], device: torch.device) -> int:
    """Bytes of the inputs of a step on `device`; memory that two of them share counts once."""
    found: dict[int, int] = {}
    for value in inputs:
        if isinstance(value, Tensor) and value.device == device:
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(found.values())


class OperatorMemory:
    """The memory of operators on one device, each measured once for the same arguments.

    Convolutions and attention copy their inputs to another layout, sorts allocate indices: no metadata tells of that
    memory. Elementwise operators need none, except for Python numbers, which become tensors, and inputs that are not
    dense, which some of them copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Any, int] = {}

    def workspace(self, node: fx.Node) -> int:
        """Bytes that a node needs while it runs, besides its results."""
        more = self.extra(node)
        made = sum(tensor_bytes(t) for t in tensors_in(node.meta.get("val")) if t.device == self._device)
        return 0 if more is None else max(more - made, 0)

    def extra(self, node: fx.Node) -> int | None:
        """The most bytes that a node allocates while it runs, with its results; None: the results are all."""
        if not self._is_measured(node):
            return None
        key = (node.target, _layout(node.args), _layout(tuple(node.kwargs.items())))
        if key not in self._known:
            self._known[key] = self._measure(node)
        found = self._known[key]
        return None if found < 0 else found

    def _is_measured(self, node: fx.Node) -> bool:
        target = node.target
        if node.op != "call_function" or not isinstance(target, OpOverload) or is_communication(target):
            return False
        if is_data_dependent(target) or shared_inputs(node) or (is_elementwise(target) and not _may_need_memory(node)):
            return False
        if writes(node) or draws(node) or is_custom_operator(target):
            return False
        made = [t for t in tensors_in(node.meta.get("val")) if t.device == self._device]
        return bool(made) and any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)

    def _measure(self, node: fx.Node) -> int:
        function: Callable[..., Any] = node.target  # type: ignore[assignment]
        try:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), example_of)
            with below_autograd(), torch.random.fork_rng():
                function(*args, **kwargs)  # loads libraries and allocates their handles
                _, most = bytes_at_most(lambda: function(*args, **kwargs), self._device)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return -1  # it does not accept zeros
        return -1 if most is None else most


def _may_need_memory(node: fx.Node) -> bool:
    """True if an operator has Python numbers among its arguments, or tensors that are not dense."""
    if any(isinstance(value, int | float) for value in (*node.args, *node.kwargs.values())):
        return True
    values = (value for source in node.all_input_nodes for value in tensors_in(source.meta.get("val")))
    return any(value.layout is torch.strided and not is_packed(value) for value in values)


def _layout(value: Any) -> Any:
    """What the memory of an operator depends on: dtypes, devices, sizes, strides and Python numbers."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, Tensor):
        return (value.dtype, value.device, tuple(map(str, value.shape)), tuple(map(str, value.stride())))
    if isinstance(value, list | tuple):
        return tuple(map(_layout, value))
    return (type(value), str(value))


_OPAQUE_RESULTS = {"aten::mkldnn_rnn_layer": 3, "aten::_cudnn_rnn": 3}
"""Operators with a result that only their backward can read, and the index of that result. Its size is not known before
the operator runs (torch traces it as empty), and zeros in its place crash the backward."""
_SORTS = frozenset({"sort", "argsort", "randperm"})
"""Operators that make a permutation. Code that inverts it writes each position of an empty tensor once, and reads
indices there: with zeros for a permutation most positions would hold garbage."""
_SAME_ELEMENTS = frozenset(
    {"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "clone", "_to_copy", "alias", "detach"}
)


def example_of(value: Any, device: torch.device | None = None) -> Any:
    """A real tensor for a node or a fake tensor, or a list of them: zeros, which are valid as indices too.

    Opaque results and permutations are made by running their operator on such tensors.
    """
    if isinstance(value, fx.Node):
        if device is None and _is_opaque(value):
            return _run_for(value)
        if device is None and _is_permutation(value):
            return _permutation(value)
        value = value.meta.get("val")
    if isinstance(value, list | tuple):
        return type(value)(example_of(item, device) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, Tensor):
        return value
    shape, stride = [size_hint(n) for n in value.shape], [size_hint(n) for n in value.stride()]
    made = torch.empty_strided(shape, stride, dtype=value.dtype, device=device or value.device)
    return made if made.is_meta else made.zero_()


def set_opaque_sizes(graph: fx.Graph) -> None:
    """Set the sizes of opaque results, which only their operators know, in the metadata of a graph."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if not _is_opaque(node) or not isinstance(value, Tensor) or size_hint(value.numel()):
            continue
        try:
            shape = _run_for(node).shape
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue  # it does not accept zeros
        source: Any = node.args[0]
        parts = list(source.meta["val"])
        parts[node.args[1]] = node.meta["val"] = value.new_empty(shape)
        source.meta["val"] = tuple(parts)


def _is_opaque(node: fx.Node) -> bool:
    """True if a node is an opaque result."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or not isinstance(source.target, OpOverload):
        return False
    return _OPAQUE_RESULTS.get(op_name(source.target)) == node.args[1]


def _is_permutation(node: fx.Node) -> bool:
    """True if the elements of a node are a permutation that sorting gave."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
        return False
    source = node
    while source.target is operator.getitem or _named(source, _SAME_ELEMENTS):
        source = source.args[0]  # type: ignore[assignment]
    return _named(source, _SORTS)


def _named(node: fx.Node, names: frozenset[str]) -> bool:
    return isinstance(node.target, OpOverload) and plain_name(node.target) in names


def _permutation(node: fx.Node) -> Any:
    if node.target is operator.getitem:
        return _permutation(node.args[0])[node.args[1]]  # type: ignore[arg-type]
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), example_of)
    with below_autograd(), torch.random.fork_rng():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _run_for(node: fx.Node) -> Tensor:
    source: Any = node.args[0]
    args, kwargs = fx.map_arg((source.args, dict(source.kwargs)), example_of)
    with below_autograd(), torch.random.fork_rng():
        found: Tensor = source.target(*args, **kwargs)[node.args[1]]
    return found
