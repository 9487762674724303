"""Whether a captured graph may run for a call: all its guards, in the order in which they usually fail.

Built once per graph from what capture saw. Nearly all of it runs as whole-list comparisons in C: identity of
parameters, equality of module attributes, one C++ call over all tensors.
"""

from __future__ import annotations

from typing import Any

from wholestep.capture.captured import Captured
from wholestep.runtime.gather import Gather
from wholestep.runtime.guards.arguments import (
    FoundElsewhere,
    NoGradients,
    SameContents,
    SameObjects,
    SameStructure,
    SameTensorTwice,
)
from wholestep.runtime.guards.gradients import SameGradients, SameHooks, SameRequiresGrad
from wholestep.runtime.guards.guard import Call, Guard
from wholestep.runtime.guards.modules import (
    EmptyBuffers,
    OtherAttributes,
    SameAttributes,
    watched_attributes,
    watched_parameters,
)
from wholestep.runtime.guards.numbers import SameBranches, SizesInRange
from wholestep.runtime.guards.objects import (
    SameClassReads,
    SameContainers,
    SameKinds,
    SameReads,
    SameTensors,
    SameVariables,
)
from wholestep.runtime.guards.optimizers import OptimizerAttributes, SameOptimizer, SameScalers
from wholestep.runtime.guards.process import SameModes
from wholestep.runtime.guards.tensors import AllThere, SameForm


class Guards:
    """The conditions of one captured graph."""

    def __init__(self, captured: Captured, gather: Gather) -> None:
        attributes, variables, reads = SameAttributes(captured), SameVariables(captured), SameReads(captured)
        optimizer_attributes = OptimizerAttributes(captured)
        self._sizes = SizesInRange(captured)
        everything: list[Guard] = [
            SameModes(),
            SameStructure(captured),
            SameObjects(captured),
            watched_attributes(attributes, captured),
            watched_parameters(captured),
            *(SameOptimizer(o, path, captured, gather) for o, path in captured.world.optimizers.items()),
            SameGradients(captured),
            SameRequiresGrad(captured, gather),
            SameHooks(captured),
            AllThere(captured),
            SameForm(captured, gather),
            # Most steps have few of these.
            OtherAttributes(captured),
            EmptyBuffers(captured),
            variables,
            reads,
            SameClassReads(captured),
            optimizer_attributes,
            SameKinds(captured),
            SameContents(captured),
            SameContainers(captured),
            SameTensors(captured),
            SameScalers(captured),
            FoundElsewhere(captured),
            NoGradients(captured),
            SameTensorTwice(captured),
            self._sizes,
            SameBranches(captured),
        ]
        self._guards = [guard for guard in everything if guard.is_needed()]
        self._checks = [guard.holds for guard in self._guards]
        self._changed_numbers = [g.changed_number for g in (attributes, reads, optimizer_attributes, variables)]

    def add_conditions_on_sizes(self) -> None:
        """Take over what was assumed of sizes since the capture: lowering compares them too."""
        self._sizes.renew()

    def hold(self, leaves: list[Any], structure: Any, state: list[Any]) -> bool:
        """Whether the graph may run. `state` is what `gather` read."""
        call = Call(leaves, structure, state)
        try:
            for holds in self._checks:
                if not holds(call):
                    return False
        except (RuntimeError, KeyError, TypeError, ValueError):
            # Comparing attributes that are tensors or arrays, or a slot that is gone: another graph.
            return False
        return True

    def why_not(self, leaves: list[Any], structure: Any, state: list[Any] | None) -> str:
        """The first difference between this graph's conditions and a call, for people."""
        call = Call(leaves, structure, state)
        reasons = (reason for guard in self._guards for reason in guard.reasons(call))
        return next(reasons, "a condition that could not be named")

    def changed_number(self) -> str | None:
        """The path of a number that differs: read from a plain object, or counted up by the step on a module."""
        found = (changed() for changed in self._changed_numbers)
        return next((path for path in found if path is not None), None)
