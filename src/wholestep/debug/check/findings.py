"""Compare two observations of the state: what is equal, what differs by rounding, and what is different.

    observe(roots, result, copy=True)      values by path, to be compared after the state has changed
    observe(roots, result, copy=False)     to be compared now

`within rounding` is decided for one call from one state, so that errors of earlier calls do not count. A difference is
rounding if it is

- a few rounding errors of the coarsest dtype that the graph computes in, relative to the largest element, and a
  multiple of what eager itself changes when its inputs move by one rounding error (`debug/value_distance.py`); or
- no farther from a float64 run of the same call than a small multiple of eager's own distance (`check_calls.py`).

Where the contract is exact (`lower="eager"`, passes that promise the same bits) every difference counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholestep.debug.check.object_contents import random_state_of
from wholestep.debug.check.reachable import Part, reach
from wholestep.debug.check.snapshot import Roots, can_be_saved, process_values
from wholestep.debug.value_distance import Gap, gap_between
from wholestep.ir.tensor_copies import copy_tensor
from wholestep.ir.user_objects.plain_contents import same_plain
from wholestep.ir.user_objects.slots import ABSENT
from wholestep.passes.engine.contract import Numerics

_AS_CLOSE = 4.0
"""How many times eager's own distance from float64 the compiled step may have."""
_EXPLAINED = 16.0
"""How far eager may be from float64, in multiples of what rounding moves it by, to be the same computation."""


class Status(IntEnum):
    """From best to worst."""

    EQUAL = 0
    ROUNDING = 1
    DIFFERENT = 2

    def __str__(self) -> str:
        return ("equal to the bit", "within rounding", "DIFFERENT")[self.value]


@dataclass(frozen=True)
class Finding:
    """One value that is not equal to the bit."""

    part: Part
    path: str
    status: Status
    text: str
    ulps: int | None = None
    relative: float = 0.0
    """The largest difference, relative to the largest element."""
    distance: float | None = None
    """How far the compiled value is from float64, in multiples of eager's own distance; None without a reference."""


@dataclass(frozen=True)
class Tolerance:
    """What counts as a rounding difference."""

    numerics: Numerics
    eps: float = 0.0
    """The rounding error of the coarsest dtype that the graph computes in."""
    noise: Observation | None = None
    """Eager again, from inputs that were moved by one rounding error."""
    reference: Observation | None = None
    """Eager again, in float64."""


def findings(eager: Observation, compiled: Observation, tolerance: Tolerance) -> list[Finding]:
    """Every value that is not equal to the bit, in the order in which eager's were seen."""
    found = []
    for path in [*eager.values, *(path for path in compiled.values if path not in eager.values)]:
        part = (eager.values.get(path) or compiled.values[path])[0]
        finding = _finding(part, path, eager.at(path), compiled.at(path), tolerance)
        if finding is not None:
            found.append(finding)
    return found


def counts(observation: Observation) -> dict[Part, int]:
    """How many values of each part were compared."""
    found: dict[Part, int] = {}
    for part, _ in observation.values.values():
        found[part] = found.get(part, 0) + 1
    return found


def _finding(part: Part, path: str, a: Any, b: Any, tolerance: Tolerance) -> Finding | None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return None if same_bits(a, b) else _of_tensors(part, path, a, b.to(a.device), tolerance)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return None if same else Finding(part, path, Status.DIFFERENT, "the arrays differ")
    if same_plain(a, b) or (isinstance(a, tuple | frozenset) and type(a) is type(b) and _same_items(a, b)):
        return None
    exact = tolerance.numerics == "exact" or part is Part.RNG
    both = isinstance(a, float) and isinstance(b, float) and not exact
    if both and gap_between(a, b, _at(tolerance.noise, path), "reassociates", tolerance.eps) is None:
        relative = abs(a - b) / max(abs(a), 1e-300)
        return Finding(part, path, Status.ROUNDING, f"eager {a!r}, compiled {b!r}", relative=relative)
    return Finding(part, path, Status.DIFFERENT, f"eager has {_short(a)}, compiled {_short(b)}")


def _same_items(a: Any, b: Any) -> bool:
    if isinstance(a, frozenset):
        return bool(a == b)
    return len(a) == len(b) and all(
        same_plain(x, y) or (isinstance(x, tuple) and isinstance(y, tuple) and _same_items(x, y))
        for x, y in zip(a, b, strict=True)
    )


def _of_tensors(part: Part, path: str, a: Tensor, b: Tensor, tolerance: Tolerance) -> Finding:
    gap = gap_between(a, b, None, "exact")
    if gap is None:
        gap = Gap("sign", text="zeros of another sign")
    relative = _relative(a, gap)
    exact = tolerance.numerics == "exact" or part is Part.RNG or a.shape != b.shape or a.dtype != b.dtype
    if exact:
        return Finding(part, path, Status.DIFFERENT, str(gap), gap.ulps, relative)
    distance = _distance(a, b, path, tolerance)
    allowed = gap_between(a, b, _at(tolerance.noise, path), "reassociates", tolerance.eps) is None
    close = distance is not None and distance <= _AS_CLOSE
    status = Status.ROUNDING if allowed or close else Status.DIFFERENT
    return Finding(part, path, status, str(gap), gap.ulps, relative, distance)


def _at(observation: Observation | None, path: str) -> Any:
    return None if observation is None else observation.at(path)


def _relative(a: Tensor, gap: Gap) -> float:
    if gap.kind != "value" or not (a.is_floating_point() or a.is_complex()):
        return 0.0
    finite = a.abs()[a.abs().isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    return gap.largest / largest if largest else float(gap.largest > 0)


def _distance(a: Tensor, b: Tensor, path: str, tolerance: Tolerance) -> float | None:
    """How far the compiled value is from float64, in multiples of eager's own distance.

    None where eager itself is farther from float64 than rounding explains: that run computed something else.
    """
    wide, noisy = _at(tolerance.reference, path), _at(tolerance.noise, path)
    if not isinstance(wide, Tensor) or wide.shape != a.shape or not wide.is_floating_point():
        return None
    if not bool(a.isfinite().all() and b.isfinite().all() and wide.isfinite().all()):
        return None
    mine, theirs = (float((each.double() - wide.to(each.device)).abs().max()) for each in (a, b))
    largest = float(wide.abs().max())
    noise = float((a.double() - noisy.double()).abs().max()) if _is_like(noisy, a) else 0.0
    eps = max(tolerance.eps, torch.finfo(a.dtype).eps)
    if mine > _EXPLAINED * (noise + eps * largest):
        return None
    return theirs / max(mine, torch.finfo(a.dtype).eps * largest / 2, 1e-300)


def _is_like(value: Any, a: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == a.shape and bool(value.isfinite().all())


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')}{list(value.shape)} tensor"
    text = "nothing" if value is ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def worst_of(found: Mapping[Part, list[Finding]], part: Part) -> Finding | None:
    """The worst finding of a part: by status, then by how far it is off."""
    return max(found.get(part, []), key=lambda each: (each.status, each.relative), default=None)


@dataclass(frozen=True)
class Observation:
    """Values by path. Tensors with several paths are under the first, which is the same in every observation."""

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
    """True if equal to the bit: the sign of zero counts, all NaNs are equal."""
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
