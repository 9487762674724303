"""How far apart two values are, and whether a contract allows that.

exact            the same bits (all NaNs are equal)
reassociates     some rounding errors of the largest element, and a multiple of what rounding errors of the inputs
                 change; errors are those of the coarsest dtype on the way to a value (compilers skip such roundings)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholestep.passes.engine.contract import Numerics
from wholestep.passes.engine.replay import leaves_of_output, widened

_ROUNDINGS = 64
_NOISE = 64
_AT_MOST = 1e-3
"""The most that noise may excuse: of the largest element, or of 1."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Gap:
    """The difference of two values."""

    kind: str
    """value, shape, dtype or type."""
    elements: int = 0
    """How many elements differ."""
    of: int = 0
    largest: float = 0.0
    """The largest difference."""
    ulps: int | None = None
    """The same in units of the last place; None where one side is not finite, or integers differ."""
    text: str = ""

    def __str__(self) -> str:
        if self.kind != "value":
            return self.text
        ulps = "" if self.ulps is None else f", {self.ulps} ulps"
        return f"{self.elements} of {self.of} elements differ, by at most {self.largest:.3g}{ulps}"


def gap_between(a: Any, b: Any, noisy: Any, numerics: Numerics, eps: float = 0.0) -> Gap | None:
    """The difference of two values of a node if the contract does not allow it.

    `noisy`: `a` of nudged inputs. `eps`: the rounding error of the coarsest type on the way to `a`.
    """
    left, right, noise = leaves_of_output(a), leaves_of_output(b), leaves_of_output(noisy)
    if len(left) != len(right):
        return Gap("type", text=f"{len(left)} values became {len(right)}")
    noise = noise if len(noise) == len(left) else [None] * len(left)
    gaps = [_gap(one, other, loud, numerics, eps) for one, other, loud in zip(left, right, noise, strict=True)]
    return next((gap for gap in gaps if gap is not None), None)


def eps_of(value: Any) -> float:
    """The largest rounding error of the types of a value; 0 where nothing is rounded."""
    leaves = [leaf for leaf in leaves_of_output(value) if isinstance(leaf, Tensor)]
    return max((torch.finfo(v.dtype).eps for v in leaves if v.is_floating_point() or v.is_complex()), default=0.0)


def _gap(a: Any, b: Any, noisy: Any, numerics: Numerics, eps: float) -> Gap | None:
    if isinstance(a, float) and isinstance(b, float):
        a, b = (torch.tensor(value, dtype=torch.float64) for value in (a, b))
        noisy = torch.tensor(noisy, dtype=torch.float64) if isinstance(noisy, float) else None
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        same = type(a) is type(b) and (isinstance(a, torch.Generator) or bool(a == b))
        return None if same else Gap("type", text=f"{a!r:.60} became {b!r:.60}")
    if a.shape != b.shape:
        return Gap("shape", text=f"shape {list(a.shape)} became {list(b.shape)}")
    if a.dtype != b.dtype:
        return Gap("dtype", text=f"{a.dtype} became {b.dtype}")
    if a.layout is not torch.strided or a.numel() == 0:
        return None
    return _distance(a.detach().cpu(), b.detach().cpu(), noisy, numerics, eps)


def _distance(a: Tensor, b: Tensor, noisy: Any, numerics: Numerics, eps: float) -> Gap | None:
    wide_a, wide_b = widened(a), widened(b)
    differ = ~((wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan()))
    if not bool(differ.any()):
        return None
    apart = (wide_a - wide_b).abs()
    loud = noisy.detach().cpu() if isinstance(noisy, Tensor) and noisy.shape == a.shape else None
    if numerics != "exact" and _allowed(a, wide_a, apart[differ], loud, eps):
        return None
    finite = apart[differ].nan_to_num(float("inf"))
    return Gap("value", int(differ.sum()), a.numel(), float(finite.max()), max_ulps(a, b))


def _allowed(a: Tensor, wide: Tensor, apart: Tensor, noisy: Tensor | None, eps: float) -> bool:
    noise = 0.0 if noisy is None else float((wide - widened(noisy)).abs().nan_to_num(0, 0, 0).max())
    if not (a.is_floating_point() or a.is_complex()):
        return noise > 0  # where a rounding error moves an integer, so may a reassociated sum
    finite = wide[wide.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    eps = max(eps, torch.finfo(a.dtype).eps)
    roundings = _ROUNDINGS * eps if eps < 1e-4 else 8 * eps
    limit = roundings * largest + min(_NOISE * noise, max(_AT_MOST, roundings) * max(1.0, largest))
    return bool((apart <= limit).all())


def max_ulps(a: Tensor, b: Tensor) -> int | None:
    """The largest distance of two tensors in representable values; None if one of them is not finite there."""
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point() or a.dtype != b.dtype:
        return None
    one, other = a.float() if a.dtype.itemsize < 2 else a, b.float() if b.dtype.itemsize < 2 else b
    differ = ~((one == other) | (one.isnan() & other.isnan()))
    one, other = one[differ], other[differ]
    if not bool(one.isfinite().all() and other.isfinite().all()):
        return None
    if one.numel() == 0:
        return 0
    left, right = _places(one), _places(other)
    same_side = (left < 0) == (right < 0)
    near = int((left - right).abs()[same_side].max()) if bool(same_side.any()) else 0
    # As doubles: values on both sides of zero are so far apart that the last digits do not matter.
    across = (left.double().abs() + right.double().abs())[~same_side]
    return max(near, int(across.max()) if across.numel() else 0)


def _places(tensor: Tensor) -> Tensor:
    """The rank of each float among all floats of its dtype; zero is 0."""
    bits = tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize]).to(torch.int64)
    lowest = -(1 << (8 * tensor.dtype.itemsize - 1))
    return torch.where(bits < 0, lowest - bits, bits)
