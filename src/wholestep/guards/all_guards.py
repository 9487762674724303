"""All guards of a captured graph: whether it may run for a call. Ordered so that likely failures come first.

Built once per graph from its guard specs. Nearly all checks are comparisons of whole lists in C: identity of
parameters, equality of module attributes, one C++ call over all tensors.
"""

from __future__ import annotations

from typing import Any

from wholestep.guards.arguments_and_scalars import (
    DynamicSizes,
    NoArgumentGradients,
    SameArgumentAliases,
    SameContents,
    SameInference,
    SameObjects,
    SameScalarConditions,
    SameScalarTypes,
    SameStateArguments,
    SameStructure,
)
from wholestep.guards.classes_and_code import SameBuiltins, SameCode, SameLibraries, SameRegistries, SameTypes
from wholestep.guards.guard import Call, Guard
from wholestep.guards.modules_and_optimizers import (
    OptimizerAttributes,
    SameNestedState,
    SameNoneBuffers,
    SameOptimizer,
    SameOtherAttributes,
    SameScalers,
    attribute_guards,
    parameter_guards,
)
from wholestep.guards.python_state import (
    SameArrays,
    SameCaches,
    SameCallResults,
    SameChains,
    SameClasses,
    SameClassReads,
    SameContainers,
    SameEnvironment,
    SameFiles,
    SameFunctions,
    SameKinds,
    SameModes,
    SameReads,
    SameReferents,
    SameTensors,
    SameThreadLocals,
    SameVariables,
    SameWholeReads,
    SameWritten,
)
from wholestep.guards.tensors import (
    InputsExist,
    SameGradients,
    SameHooks,
    SameMetadata,
    SameRequiresGrad,
    SameTensorAttributes,
)
from wholestep.ir.captured_step import GuardSpecs
from wholestep.runtime.executor import Gather

_ON_CODE = (SameClasses, SameFunctions, SameTypes, SameCode, SameBuiltins, SameLibraries)


class Guards:
    """The conditions of one captured graph."""

    def __init__(self, specs: GuardSpecs, gather: Gather, leaves: list[Any]) -> None:
        """`leaves`: the arguments of the captured call; not stored."""
        self._sizes = DynamicSizes(specs)
        self._structure = SameStructure(specs)
        everything: list[Guard] = [
            SameModes(),
            self._structure,
            SameObjects(specs),
            attribute_guards(specs),
            parameter_guards(specs),
            *(SameOptimizer(o, path, specs, gather) for o, path in specs.optimizers.items()),
            SameGradients(specs),
            SameRequiresGrad(specs, gather),
            SameHooks(specs),
            InputsExist(gather.slots),
            SameScalarTypes(specs),
            SameMetadata(specs, gather, leaves),
            # Most steps have few items for these.
            SameOtherAttributes(specs),
            SameNoneBuffers(specs),
            SameTensorAttributes(specs),
            SameClasses(specs),
            SameThreadLocals(specs),
            SameReferents(specs),
            SameCallResults(specs),
            SameWholeReads(specs),
            SameFunctions(specs),
            SameTypes(specs),
            SameCode(specs),
            SameBuiltins(specs),
            SameRegistries(specs),
            SameLibraries(specs),
            SameEnvironment(specs),
            SameFiles(specs),
            SameVariables(specs),
            SameReads(specs),
            SameClassReads(specs),
            OptimizerAttributes(specs),
            SameKinds(specs),
            SameContents(specs),
            SameContainers(specs),
            SameWritten(specs),
            SameArrays(specs),
            SameCaches(specs),
            SameTensors(specs),
            SameNestedState(specs),
            SameScalers(specs),
            SameChains(specs),
            SameStateArguments(specs),
            NoArgumentGradients(specs, leaves),
            SameArgumentAliases(specs, leaves),
            SameInference(specs, leaves),
            self._sizes,
            SameScalarConditions(specs),
        ]
        self._guards = [guard for guard in everything if guard.is_needed()]
        self._on_code = [guard for guard in self._guards if isinstance(guard, _ON_CODE)]
        self._checks = [guard.holds for guard in self._guards]

    def add_conditions_on_sizes(self) -> None:
        """Add the conditions on sizes that were recorded after the capture, by lowering."""
        self._sizes.update()

    def hold(self, leaves: list[Any], structure: Any, state: list[Any]) -> bool:
        """Whether the graph may run. `state`: what `Gather.read` returned."""
        call = Call(leaves, structure, state)
        for holds in self._checks:  # noqa: SIM110  (a generator costs more than the checks)
            if not holds(call):
                return False
        return True

    def why_not(self, leaves: list[Any], structure: Any, state: list[Any] | None) -> str:
        """The first guard that fails for a call, as text."""
        call = Call(leaves, structure, state)
        reasons = (reason for guard in self._guards for reason in guard.reasons(call))
        return next(reasons, "a condition that could not be named")

    def changed_code(self) -> str | None:
        """Code that is not what it was at the capture, as text; None if all of it is."""
        none = Call([], None, None)
        return next((reason for guard in self._on_code for reason in guard.reasons(none)), None)

    def same_structure(self, leaves: list[Any], structure: Any) -> bool:
        """Whether the arguments of a call have the tree structure of the captured call."""
        return self._structure.holds(Call(leaves, structure, None))

    def changed_scalars(self, leaves: list[Any], structure: Any, state: list[Any] | None) -> set[str]:
        """The paths of all Python scalars that a guard compares with a constant and whose value changed."""
        call = Call(leaves, structure, state)
        if not self._structure.holds(call):
            return set()
        return {path for guard in self._guards for path in guard.changed_scalars(call)}
