"""Whether a captured graph may run for a call: all its guards, in the order in which they usually fail.

Built once per graph from what capture saw. Nearly all of it runs as whole-list comparisons in C: identity of
parameters, equality of module attributes, one C++ call over all tensors.
"""

from __future__ import annotations

from typing import Any

from wholestep.guards.arguments_and_scalars import (
    FoundElsewhere,
    NoGradients,
    SameBranches,
    SameContents,
    SameNumberTypes,
    SameObjects,
    SameStructure,
    SameTensorTwice,
    SizesInRange,
)
from wholestep.guards.guard import Call, Guard
from wholestep.guards.modules import (
    EmptyBuffers,
    OtherAttributes,
    watched_attributes,
    watched_parameters,
)
from wholestep.guards.optimizers import OptimizerAttributes, SameNests, SameOptimizer, SameScalers
from wholestep.guards.python_state import (
    SameArrays,
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
    SameTensors,
    SameThreadLocals,
    SameVariables,
)
from wholestep.guards.tensors import (
    AllThere,
    SameForm,
    SameGradients,
    SameHooks,
    SameRequiresGrad,
    SameTensorAttributes,
)
from wholestep.ir.captured_step import GuardSpecs
from wholestep.runtime.gather import Gather


class Guards:
    """The conditions of one captured graph."""

    def __init__(self, specs: GuardSpecs, gather: Gather, leaves: list[Any]) -> None:
        """`leaves`: the arguments of the captured call; not kept."""
        self._sizes = SizesInRange(specs)
        self._structure = SameStructure(specs)
        everything: list[Guard] = [
            SameModes(),
            self._structure,
            SameObjects(specs),
            watched_attributes(specs),
            watched_parameters(specs),
            *(SameOptimizer(o, path, specs, gather) for o, path in specs.optimizers.items()),
            SameGradients(specs),
            SameRequiresGrad(specs, gather),
            SameHooks(specs),
            AllThere(gather.slots),
            SameNumberTypes(specs),
            SameForm(specs, gather, leaves),
            # Most steps have few of these.
            OtherAttributes(specs),
            EmptyBuffers(specs),
            SameTensorAttributes(specs),
            SameClasses(specs),
            SameThreadLocals(specs),
            SameFunctions(specs),
            SameEnvironment(specs),
            SameFiles(specs),
            SameVariables(specs),
            SameReads(specs),
            SameClassReads(specs),
            OptimizerAttributes(specs),
            SameKinds(specs),
            SameContents(specs),
            SameContainers(specs),
            SameArrays(specs),
            SameTensors(specs),
            SameNests(specs),
            SameScalers(specs),
            SameChains(specs),
            FoundElsewhere(specs),
            NoGradients(specs, leaves),
            SameTensorTwice(specs, leaves),
            self._sizes,
            SameBranches(specs),
        ]
        self._guards = [guard for guard in everything if guard.is_needed()]
        self._checks = [guard.holds for guard in self._guards]

    def add_conditions_on_sizes(self) -> None:
        """Take over what was assumed of sizes since the capture: lowering compares them too."""
        self._sizes.renew()

    def hold(self, leaves: list[Any], structure: Any, state: list[Any]) -> bool:
        """Whether the graph may run. `state` is what `gather` read."""
        call = Call(leaves, structure, state)
        for holds in self._checks:  # noqa: SIM110  (a generator costs more than the checks)
            if not holds(call):
                return False
        return True

    def why_not(self, leaves: list[Any], structure: Any, state: list[Any] | None) -> str:
        """The first difference between this graph's conditions and a call, for people."""
        call = Call(leaves, structure, state)
        reasons = (reason for guard in self._guards for reason in guard.reasons(call))
        return next(reasons, "a condition that could not be named")

    def same_structure(self, leaves: list[Any], structure: Any) -> bool:
        """Whether the arguments of a call are nested as those of the captured one."""
        return self._structure.holds(Call(leaves, structure, None))

    def changed_numbers(self, leaves: list[Any], structure: Any, state: list[Any] | None) -> set[str]:
        """The paths of all Python numbers that a guard holds constant and that have another value now."""
        call = Call(leaves, structure, state)
        if not self._structure.holds(call):
            return set()
        return {path for guard in self._guards for path in guard.changed_numbers(call)}
