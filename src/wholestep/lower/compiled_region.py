"""The compiled call that replaces a region in a graph, and the assumptions that it checks before each call.

Inductor assumes that inputs have the layout that they had at trace time, that what it writes into does not alias
another input, and that no gradients are recorded; comparisons of symbolic sizes have one answer. A float64 tensor would
be read as twice as many float32 elements. A call for which an assumption does not hold runs the region operator by
operator, as without lowering. Steps of `ws.compile` guard all this themselves; then regions check sizes only.

Compile a region with Inductor, under its settings.

Equal regions (repeated layers) are compiled once per process; across processes Inductor's own cache on disk has them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn

from wholestep.errors import LowerError, LowerWarning
from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.ir.readable import describe_value
from wholestep.lower.options import LowerOptions
from wholestep.lower.pieces import argument_form
from wholestep.lower.regions import Region, order_of
from wholestep.lower.retrace import Retraced, device_of
from wholestep.lower.scalar_inputs import SizeConditions
from wholestep.lower.shared_bodies import BodyCache, compile_shared
from wholestep.lower.supported_nodes import EXACT_SETTINGS
from wholestep.progress import SILENT, Progress
from wholestep.torch_private.autograd import is_profiling
from wholestep.torch_private.fake_tensors import why_unreadable
from wholestep.torch_private.fx_graphs import lazy_graph_module
from wholestep.torch_private.inductor import compile_inductor, improve_joint, unknown_inductor_settings
from wholestep.torch_private.symbolic_shapes import expression_of, shape_env_of, symbols_in

log = logging.getLogger("wholestep.lower")

Compiled = Callable[[list[Any]], Any]


class CompiledRegion(nn.Module):
    """Takes the tensors of a region in order; returns a tuple. The profiler shows its tag."""

    boxed = True
    """May be called with one list, which it empties: values are freed as early as they can be."""

    _is_impure = True
    """Read by torch.fx: not dead if its results have no users, because it may write into its arguments."""

    def __init__(self, compiled: Compiled, tag: str, operators: int) -> None:
        super().__init__()
        self._compiled = compiled
        self._assumptions: Assumptions | None = None
        self.tag = tag
        self.operators = operators

    @property
    def compiled(self) -> Compiled:
        """The code that runs."""
        return self._compiled

    def assume(self, assumptions: Assumptions) -> None:
        """Check these assumptions before each call."""
        self._assumptions = assumptions

    @property
    def added(self) -> list[fx.Node]:
        """Inputs of the graph that are only checked; they follow the region's own."""
        return self._assumptions.added if self._assumptions is not None else []

    def forward(self, *tensors: Any, tag: str = "") -> tuple[Any, ...]:
        return self.call_boxed(list(tensors))

    def call_boxed(self, tensors: list[Any]) -> tuple[Any, ...]:
        """The same with a list that is emptied."""
        if is_profiling():
            with torch.profiler.record_function(self.tag):
                return tuple(self._run(tensors))
        return self._run(tensors)

    def _run(self, tensors: list[Any]) -> tuple[Any, ...]:
        if self._assumptions is not None:
            added = self._assumptions.take(tensors)
            if not self._assumptions.hold(tensors, added):
                return self._assumptions.run(tensors)
        return self._compiled(tensors)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledRegion:
        return self  # it has no state

    def __reduce__(self) -> Any:
        raise LowerError(
            f"{self.tag!r} is compiled code of this process and cannot be pickled.",
            fix="pickle the graph before it is lowered, and lower it again: Inductor's cache knows its regions.",
        )

    def extra_repr(self) -> str:
        return f"{self.tag!r}, {self.operators} operators"


_MOST_KNOWN = 1024


class TracedLayouts:
    """The dtype, device, sizes and strides of the inputs of a region at trace time.

    A symbol has one value throughout a call: two inputs that had the same symbolic size must have the same size.
    """

    def __init__(self, inputs: Sequence[fx.Node]) -> None:
        self._names = [node.name for node in inputs]
        self._traced = [node.meta.get("val") for node in inputs]
        self._known: dict[Any, str] = {}

    def difference(self, values: Sequence[Any]) -> str:
        """The first input with another layout, and what differs; "" if there is none."""
        for name, value in zip(self._names, values, strict=True):
            kind = why_unreadable(value) if isinstance(value, Tensor) else ""
            if kind:
                return f"{name} is {kind}, and its code reads plain memory"
        key = tuple([_key(value) for value in values])
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = self._compare(values)
        return found

    def _compare(self, values: Sequence[Any]) -> str:
        symbols: dict[Any, int] = {}
        for binds in (True, False):  # plain symbols are bound first; then sums and products are evaluated
            for name, traced, value in zip(self._names, self._traced, values, strict=True):
                if not _fits(traced, value, symbols, binds):
                    return f"{name} is {_described(value)}, and its code is for {_described(traced)}"
        return ""


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.dtype, value.device, value.shape, value.stride())
    return (type(value), value) if type(value) is int else type(value)


def _fits(traced: Any, value: Any, symbols: dict[Any, int], binds: bool) -> bool:
    if not isinstance(traced, Tensor):
        return not isinstance(traced, SymInt) or _is_size(traced, value, symbols, binds)
    if not isinstance(value, Tensor) or value.dtype != traced.dtype or value.device != traced.device:
        return False
    if value.dim() != traced.dim():
        return False
    if not all(_is_size(a, b, symbols, binds) for a, b in zip(traced.shape, value.shape, strict=True)):
        return False
    # The stride of a dimension of size 1 does not matter.
    steps = zip(traced.stride(), value.stride(), value.shape, strict=True)
    return all(size == 1 or _is_size(a, b, symbols, binds) for a, b, size in steps)


def _is_size(traced: Any, value: int, symbols: dict[Any, int], binds: bool) -> bool:
    expression = expression_of(traced)
    if expression is None:
        return bool(traced == value)
    if expression.is_Symbol:
        return symbols.setdefault(expression, value) == value
    if binds or not expression.free_symbols <= symbols.keys():
        return True
    return bool(expression.subs(symbols) == value)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return describe_value(value)
    return f"{describe_value(value)} with strides {tuple(value.stride())} on {value.device}"


class Assumptions:
    """Decides if the compiled form of a region is valid for a call, and runs its operators if not."""

    def __init__(
        self,
        region: Region,
        owner: fx.GraphModule,
        written: Sequence[int],
        sizes: SizeConditions,
        packs: int,
        *,
        check_layouts: bool,
    ) -> None:
        """`written`: inputs that the region writes. `packs`: how many tensors of packed scalars follow its inputs.
        `check_layouts`: no guard has checked the inputs."""
        self._inputs = len(region.inputs)
        self._layouts = TracedLayouts(region.inputs) if check_layouts else None
        self._packs = packs
        self._written = tuple(written)
        self._sizes = sizes
        self._operators = lazy_graph_module(owner, region_graph(region), f"Region{region.number}")
        self._warned: set[str] = set()
        self._what = f"region {region.number}"
        self.added = sizes.inputs
        """Inputs of the graph that follow the arguments of the compiled region."""

    def take(self, arguments: list[Any]) -> list[Any]:
        """Remove and return the arguments that are only checked."""
        start = len(arguments) - len(self.added)
        taken = arguments[start:]
        del arguments[start:]
        return taken

    def hold(self, arguments: list[Any], added: Sequence[Any]) -> bool:
        """True if the compiled form is valid for these arguments."""
        if self._layouts is not None and not self._have_layouts(self._layouts, arguments[: self._inputs]):
            return False
        if self._sizes and not self._sizes.hold(added):
            self._warn("some sizes", f"its code is for {self._sizes}.")
            return False
        if self._written and _overlap(arguments[: self._inputs], self._written):
            log.info("%s runs operator by operator: it writes into an input that aliases another", self._what)
            return False
        return True

    def _have_layouts(self, layouts: TracedLayouts, values: list[Any]) -> bool:
        difference = layouts.difference(values)
        if difference:
            self._warn("some inputs", f"{difference}.")
            return False
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values):
            self._warn(
                "inputs that require gradients", "compiled code records none. Call the graph under torch.no_grad()."
            )
            return False
        return True

    def _warn(self, when: str, why: str) -> None:
        if when not in self._warned:
            self._warned.add(when)
            warnings.warn(LowerWarning(f"{self._what} runs operator by operator for {when}: {why}"), stacklevel=2)

    def run(self, arguments: list[Any]) -> tuple[Any, ...]:
        """The region, operator by operator."""
        given = arguments[: self._inputs]
        packs = arguments[self._inputs : self._inputs + self._packs]
        # The last pack has the highest precision that the region computes with.
        scalars = packs[-1].tolist() if packs else []
        arguments.clear()
        found: tuple[Any, ...] = self._operators(*given, *scalars)
        return found


def region_graph(region: Region) -> fx.Graph:
    """The nodes of a region as a graph that takes its tensors, then its scalar inputs."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in (*region.inputs, *region.scalars):
        env[node] = graph.placeholder(node.name)
    for node in order_of(region):
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in region.outputs))
    return graph


def _overlap(tensors: Sequence[Any], written: Sequence[int]) -> bool:
    """True if one of the written tensors shares memory with another argument."""
    places: dict[int, int] = {}
    for value in tensors:
        if isinstance(value, Tensor):
            start = value.untyped_storage().data_ptr()
            places[start] = places.get(start, 0) + 1
    return any(places[tensors[i].untyped_storage().data_ptr()] > 1 for i in written)


CompileRegion = Callable[[Retraced, Mapping[str, Any]], Compiled]


def compile_whole(retraced: Retraced, config: Mapping[str, Any]) -> Compiled:
    """Compile a region as one call."""
    improved = improve_joint(retraced.gm, retraced.inputs, dict(config))

    def compile_body(gm: fx.GraphModule, inputs: list[Any], given_away: Sequence[int]) -> Compiled:
        return compile_inductor(gm, inputs, dict(config))

    return compile_shared(improved, retraced.inputs, compile_body, retraced.bodies, how=settings_key(config))


@dataclass
class RegionCache:
    """Compiled regions by what they compute."""

    _known: dict[Any, tuple[Compiled, list[Any]]] = field(default_factory=dict)
    """With the constants of each region: keys have their ids, so the objects must stay alive."""
    hits: int = 0
    conditions_before: dict[Any, int] = field(default_factory=dict)
    """By shape environment: how many guards on sizes there were before the first region was compiled."""
    progress: Progress = SILENT
    bodies: dict[str, BodyCache] = field(default_factory=dict)
    """By `LowerOptions.repeat`."""

    def bodies_for(self, repeat: str) -> BodyCache | None:
        """The bodies that regions share under an option."""
        if repeat == "inline":
            return None
        return self.bodies.setdefault(repeat, BodyCache(share=repeat == "share"))

    def compile(self, retraced: Retraced, config: Mapping[str, Any], how: CompileRegion) -> Compiled:
        """The compiled form of a region, or of an equal one that was compiled the same way."""
        key = (how, id(retraced.bodies), *region_key(retraced), settings_key(config))
        found = self._known.get(key)
        if found is not None:
            self.hits += 1
            return found[0]
        constants = [_attribute(retraced.gm, str(n.target)) for n in retraced.gm.graph.find_nodes(op="get_attr")]
        compiled = how(retraced, config)
        self._known[key] = (compiled, constants)
        return compiled


def settings_key(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Equal for equal settings."""
    return tuple(sorted((name, repr(value)) for name, value in config.items()))


def region_key(retraced: Retraced) -> tuple[Any, ...]:
    """Equal for regions that compute the same from tensors of the same layout."""
    number: dict[fx.Node, int] = {}
    lines: list[Any] = [_layout(value) for value in retraced.inputs]
    # `s0` of another trace is another symbol, with another range.
    lines.append(next((shape_env_of(value) for value in retraced.inputs if symbols_in(value)), None))
    for node in retraced.gm.graph.nodes:
        number[node] = len(number)
        if node.op == "get_attr":
            lines.append(("get_attr", id(_attribute(retraced.gm, str(node.target)))))
            continue
        target = node.target if node.op == "call_function" else node.op
        lines.append((target, argument_form(node.args, number), argument_form(dict(node.kwargs), number)))
    return tuple(lines)


def _layout(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return (type(value), str(value))
    return (str(value.dtype), str(value.device), tuple(map(str, value.shape)), tuple(map(str, value.stride())))


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for name in path.split("."):
        found = getattr(found, name)
    return found


_SHORT = 32 * 2**20
"""Bytes of a tensor that a GPU reads in the time of some launches."""


def region_settings(options: LowerOptions, region: Region) -> dict[str, Any]:
    """Inductor settings for the trace and the compilation of a region: ours, then those of `exact`, then the user's."""
    # On the CPU random numbers are eager's own, in eager's order; on a GPU Inductor's generator is part of its kernels.
    found: dict[str, Any] = {"fallback_random": device_of(region).type == "cpu"}
    if device_of(region).type == "cuda" and _largest(region) <= _SHORT:
        # Fuses independent small kernels (bias gradients, norms of other layers): a recorded step takes as long as its
        # kernels and the gaps between them. H200, 6 layers: 1.09 ms instead of 1.27. With large tensors nothing is
        # gained, and gradients are allocated earlier: GPT-2 needs 0.15 GiB more.
        found["combo_kernels"] = True
    if options.exact:
        unknown = unknown_inductor_settings(EXACT_SETTINGS)
        found.update({name: value for name, value in EXACT_SETTINGS.items() if name not in unknown})
    return {**found, **options.config, **options.region_config.get(region.number, {})}


def _largest(region: Region) -> int:
    """Bytes of the largest tensor in a region."""
    values = (tensor for node in region.nodes for tensor in tensors_in(node.meta.get("val")))
    return max(map(tensor_bytes, values), default=0)
