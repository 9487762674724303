"""What the user can see after a call: values by path, tensors to the bit.

observe(roots, result, copy=True)      to be compared later, when the state is another one
observe(roots, result, copy=False)     to be compared now
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wholestep.debug.check.children import random_state_of
from wholestep.debug.check.reachable import Part, reach
from wholestep.debug.check.snapshot import Roots, process_values
from wholestep.debug.check.tensor_memory import can_be_saved
from wholestep.ir.memory import copy_tensor
from wholestep.ir.user_objects.slots import ABSENT


@dataclass(frozen=True)
class Observation:
    """Values by path. Tensors that have several paths are under the first, which is the same in every observation."""

    values: dict[str, tuple[Part, Any]]
    aliases: dict[str, str] = field(default_factory=dict)
    """Further paths of tensors to the first one."""
    error: BaseException | None = None
    """What the call raised."""

    def at(self, path: str) -> Any:
        """The value that a path leads to, by whichever path it was seen first; `ABSENT` where there is none."""
        return self.values.get(self.aliases.get(path, path), (None, ABSENT))[1]


def observe(roots: Roots, result: Any, *, copy: bool) -> Observation:
    """Everything reachable, and what the call returned. Generators count by their state."""
    values: dict[str, tuple[Part, Any]] = {}
    aliases: dict[str, str] = {}
    for where in ([("result", result)], roots):
        found = reach(where, Part.RESULT if where is not roots else None)
        aliases.update(found.aliases)
        for path, known in found.values.items():
            values.setdefault(path, known)
        for seen in found.tensors:
            if seen.observed:
                values.setdefault(seen.path, (seen.part, _frozen(seen.obj, copy)))
        for seen in found.holders:
            if seen.observed and seen.part is Part.RNG:
                values.setdefault(seen.path, (Part.RNG, _random_state(seen.obj)))
    return Observation({**values, **process_values()}, aliases)


def _random_state(generator: Any) -> Any:
    state = random_state_of(generator)
    return repr(state) if isinstance(state, dict) else state


def _frozen(tensor: Tensor, copy: bool) -> Any:
    if not can_be_saved(tensor):
        return f"<{type(tensor).__name__} of {list(tensor.shape)}>"
    found = tensor.detach()
    if not copy:
        return found
    return copy_tensor(found) if found.device.type == "cpu" else found.to("cpu", copy=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit: the sign of zero counts, one NaN is like another."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg().to(a.device)
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if torch.equal(a, b):
        zeros = a == 0
        return torch.equal(torch.signbit(a[zeros]), torch.signbit(b[zeros]))
    same = (a == b) & (torch.signbit(a) == torch.signbit(b))
    return bool((same | (a.isnan() & b.isnan())).all())
