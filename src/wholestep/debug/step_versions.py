"""A version of a step (a function, a compiled step, a StepGraph, a graph module) as a graph with its inputs.

Steps are captured again for the arguments of one call, which changes no state; inputs are read from the user's objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from wholestep.cross_iteration.executor import CrossingExecutor
from wholestep.errors import BisectError, called
from wholestep.ir.captured_step import CapturedStep
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.options import Options
from wholestep.passes.engine.contract import BoundPass, Contract, Numerics, applied_contracts, weakest
from wholestep.passes.engine.manager import run_passes
from wholestep.step import BoundGraph, ResolvedOptions, Shared, capture_call, compile_step, resolve
from wholestep.torch_private.fx_graphs import has_plain_codegen, pytree


@dataclass(frozen=True)
class Version:
    """A graph that can be run by itself."""

    label: str
    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    contracts: tuple[Contract, ...] = ()
    lowered: bool = False
    function: Any = None
    """What was captured, where that is known."""

    def has_names_of(self, other: Version) -> bool:
        """True if a name is the same node in both: unless they are captures of two functions."""
        is_known = self.function is not None and other.function is not None
        return not is_known or self.lowered or other.lowered or self.function == other.function

    def contract_with(self, other: Version) -> Numerics:
        """What may differ between two versions: the least strict contract of passes that only one of them had."""
        if self.lowered or other.lowered:
            return "reassociates"
        names = [{contract.name for contract in version.contracts} for version in (self, other)]
        apart = [c.numerics for c in (*self.contracts, *other.contracts) if c.name in names[0] ^ names[1]]
        return weakest(apart)


@dataclass(frozen=True)
class CapturedCall:
    """One call of a step: its captured graph before all passes, and the inputs that it has now."""

    step_graph: BoundGraph
    """The graph as captured. Copy it before a pass."""
    inputs: tuple[Any, ...]

    @property
    def captured(self) -> CapturedStep:
        """What left capture."""
        return self.step_graph.captured


def captured_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> CapturedCall:
    """Capture a call as `ws.compile` does, without its passes. Nothing runs, and no state changes."""
    graph = capture_call(fn, args, kwargs, replace(resolve(options), passes=()))
    inputs = graph.gather.read(leaves_of((args, kwargs))[0])
    if inputs is None:
        raise BisectError("the inputs of the captured graph cannot be read back.", fix="report this with the step.")
    return CapturedCall(graph, tuple(inputs))


def with_passes(step_graph: StepGraph, passes: Sequence[BoundPass], level: int) -> StepGraph:
    """A copy of a graph after some passes, each verified at the given level."""
    made = step_graph.copy()
    run_passes(made, [replace(bound, verify=level) for bound in passes], level=level)
    return made


def lowered_call(call: CapturedCall, step_graph: StepGraph, options: Options) -> fx.GraphModule:
    """What would run for a call: regions compiled, updates in place."""
    compiled = resolve(replace(options, lower="inductor", memory_budget=None, policy=None, cuda_graph=False))
    executable = compile_step(call.step_graph.rebound(step_graph.copy()), compiled, Shared.of(options))
    return step_graph.gm if isinstance(executable.executor, CrossingExecutor) else executable.graph_module


def two_versions(one: Any, other: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Version, Version]:
    """Both as graphs. Where one of them is a step, `args` and `kwargs` are those of its call."""
    steps = [each for each in (one, other) if not isinstance(each, fx.GraphModule | StepGraph)]
    if not steps:
        versions = [_of_graph(each, args, f"{name}") for each, name in ((one, "a"), (other, "b"))]
        return _same_inputs(*versions)
    plans = [options.parallel for each in steps if (options := options_of(each)) is not None]
    made = [
        None if isinstance(each, fx.GraphModule | StepGraph) else _of_step(each, args, kwargs, plans)
        for each in (one, other)
    ]
    by_name = {name: value for version in made if version is not None for name, value in _named(version).items()}
    found = [
        version if version is not None else _with_inputs(each, by_name)
        for version, each in zip(made, (one, other), strict=True)
    ]
    if found[0].label == found[1].label:
        names = [getattr(version.function, "__name__", version.label) for version in found]
        names = names if names[0] != names[1] else [f"{names[0]} (first)", f"{names[1]} (second)"]
        found = [replace(version, label=name) for version, name in zip(found, names, strict=True)]
    return _same_inputs(*found)


def options_of(step: Any) -> ResolvedOptions | None:
    """The options of a compiled step, also of a bound one; None for a function."""
    found = getattr(step, "options", None)
    return found if isinstance(found, ResolvedOptions) else None


def _of_step(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plans: list[Any]) -> Version:
    options = options_of(step)
    if options is None and not callable(step):
        raise BisectError(
            f"{called(step)} is not a version of a step.",
            fix="give a function, a compiled step, a StepGraph or a graph module.",
        )
    fn = getattr(step, "__wholestep_function__", step)
    plan = next(iter(plans), None)
    call = captured_call(fn, args, kwargs, options or Options(lower="eager", parallel=plan))
    if options is None:
        return Version("eager", call.step_graph.gm, call.inputs, function=fn)
    graph = with_passes(call.step_graph, options.passes, 0)
    contracts = applied_contracts(graph.gm)
    lowers = options.lower == "inductor"
    gm = lowered_call(call, graph, options) if lowers else graph.gm
    return Version("compiled", gm, call.inputs, contracts, lowers, fn)


def _of_graph(given: StepGraph | fx.GraphModule, args: tuple[Any, ...], label: str) -> Version:
    gm = given.gm if isinstance(given, StepGraph) else given
    values = args if has_plain_codegen(gm.graph) else tuple(pytree.tree_leaves(args))
    places = gm.graph.find_nodes(op="placeholder")
    if len(values) != len(places):
        raise BisectError(
            f"{len(values)} inputs for a graph with {len(places)} placeholders.",
            fix="give one value for each placeholder, in order.",
        )
    return Version(label, gm, tuple(values), applied_contracts(gm))


def _named(version: Version) -> dict[str, Any]:
    names = [node.name for node in version.gm.graph.find_nodes(op="placeholder")]
    return dict(zip(names, version.inputs, strict=True))


def _with_inputs(given: StepGraph | fx.GraphModule, by_name: dict[str, Any]) -> Version:
    gm = given.gm if isinstance(given, StepGraph) else given
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    missing = [name for name in names if name not in by_name]
    if missing:
        raise BisectError(
            f"the other version has no input {', '.join(missing[:5])}: the graphs are not of the same step.",
            fix="compare a StepGraph with the step that it was captured from, in the same state.",
        )
    return Version("graph", gm, tuple(by_name[name] for name in names), applied_contracts(gm))


def _same_inputs(a: Version, b: Version) -> tuple[Version, Version]:
    """Raise unless inputs that both have agree in shape or type."""
    one, other = _named(a), _named(b)
    for name in one.keys() & other.keys():
        forms = [tuple(v.shape) if isinstance(v, Tensor) else type(v) for v in (one[name], other[name])]
        if forms[0] != forms[1]:
            raise BisectError(f"{name} is {forms[0]} in one version and {forms[1]} in the other.")
    if not one.keys() & other.keys() and (one or other):
        raise BisectError("the two versions have no input in common.", fix="give two versions of the same step.")
    return a, b
