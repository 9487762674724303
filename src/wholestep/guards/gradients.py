"""Guards on what autograd keeps at parameters: gradients, `requires_grad`, hooks."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from torch.utils.hooks import RemovableHandle

from wholestep.guards.guard import Call, Guard, Listed
from wholestep.ir.guard_specs import GuardSpecs
from wholestep.ir.user_objects.slots import LocalSlot
from wholestep.runtime.gather import Gather
from wholestep.torch_private.autograd import HOOK_ATTRIBUTES
from wholestep.torch_private.modules_and_optimizers import hook_registries

_grad = attrgetter("grad")


class SameGradients(Guard):
    """The parameters that had a gradient have one; the others have none."""

    def __init__(self, specs: GuardSpecs) -> None:
        self._owners = [parameter for parameter, _ in specs.parameters]
        self._paths = [slot.path for _, slot in specs.parameters]
        self._absent = [owner.grad is None for owner in self._owners]
        self._none_there = [None] * len(self._owners) if all(self._absent) else None

    def holds(self, call: Call) -> bool:
        grads = list(map(_grad, self._owners))
        if self._none_there is not None:
            return grads == self._none_there
        return [grad is None for grad in grads] == self._absent

    def reasons(self, call: Call) -> Iterator[str]:
        for path, owner, absent in zip(self._paths, self._owners, self._absent, strict=True):
            if (owner.grad is None) != absent:
                yield f"{path}.grad is {'set' if absent else 'None'}"


class SameRequiresGrad(Listed):
    """Parameters that are no input require grad as they did; inputs have it checked with their shape."""

    def __init__(self, specs: GuardSpecs, gather: Gather) -> None:
        checked = {id(slot) for slot in gather.tensor_slots}
        self._parameters = [
            (parameter, parameter.requires_grad, slot.path)
            for parameter, slot in specs.parameters
            if id(slot) not in checked or isinstance(slot, LocalSlot)
        ]
        super().__init__(self._parameters)

    def reasons(self, call: Call) -> Iterator[str]:
        for parameter, required, path in self._parameters:
            if parameter.requires_grad != required:
                yield f"{path}.requires_grad is {not required}"


class SameHooks(Guard):
    """No hook was added to or removed from modules, optimizers and parameters.

    Every hook of torch gets a number: while the next one is the same, none was added anywhere.
    """

    def __init__(self, specs: GuardSpecs) -> None:
        self._owners = [parameter for parameter, _ in specs.parameters]
        self._nones = [None] * len(self._owners)
        self._registries = hook_registries([m for m, _ in specs.modules], list(specs.optimizers))
        self._counts = list(map(len, self._registries))
        self._on_tensors = self._tensors_with_hooks()
        self._next = RemovableHandle.next_id
        self._has_hooks = any(self._counts) or bool(self._on_tensors)

    def holds(self, call: Call) -> bool:
        following = RemovableHandle.next_id
        if following == self._next and not self._has_hooks:
            return True
        if not self._same_hooks():
            return False
        self._next = following
        return True

    def reasons(self, call: Call) -> Iterator[str]:
        if not self._same_hooks():
            yield "a hook was added or removed"

    def _same_hooks(self) -> bool:
        return list(map(len, self._registries)) == self._counts and self._tensors_with_hooks() == self._on_tensors

    def _tensors_with_hooks(self) -> list[int]:
        """Numbers of the parameters that have a hook: nearly always none."""
        found: list[int] = []
        for get in HOOK_ATTRIBUTES:
            hooks = list(map(get, self._owners))
            if hooks != self._nones:
                found += [i for i, registry in enumerate(hooks) if registry]
        return found
