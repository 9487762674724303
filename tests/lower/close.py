"""Parity of lowered steps: every float that the user can reach agrees with eager within rounding, all else is equal."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import wholestep as ws
from harness import SEED, Bits, Case, Frame, differences, play, reasons

_LIMITS = {
    torch.float64: 1e-7,
    torch.float32: 2e-2,
    torch.complex64: 2e-3,
    torch.complex128: 1e-7,
    torch.bfloat16: 6e-2,
    torch.float16: 2e-2,
}
"""By how much a value may differ from eager, relative to the largest one of its tensor (at least 1). Kernels that fuse
round differently, and Adam divides tiny gradients by themselves."""


def is_close(want: Bits, got: Bits) -> bool:
    """True if two tensors agree within rounding; integers and booleans must be equal."""
    if want.shape != got.shape or want.dtype != got.dtype or want.device != got.device:
        return False
    limit = _LIMITS.get(want.dtype)
    if limit is None or not want.value.numel():
        return want.bits == got.bits
    a, b = want.value.to(torch.complex128), got.value.to(torch.complex128)
    finite = a.abs().isfinite()
    scale = max(1.0, float(a[finite].abs().max()) if bool(finite.any()) else 1.0)
    return torch.allclose(a, b, rtol=0, atol=limit * scale, equal_nan=True)


def agreeing(want: Frame, got: Frame) -> Frame:
    """`got` with the values that are close replaced by those of `want`, so that what is left differs."""
    seen = dict(got.seen)
    for path, value in got.seen.items():
        expected = want.seen.get(path)
        if isinstance(value, Bits) and isinstance(expected, Bits):
            same = is_close(expected, value)
        else:
            same = _is_float(expected) and _is_float(value) and abs(float(expected[1]) - float(value[1])) <= 2e-3
        if same:
            seen[path] = expected
    return dataclasses.replace(got, seen=seen)


def _is_float(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] == "float"


def assert_close_parity(each: Case, where: torch.device, steps: int = 3, **options: object) -> ws.CompiledStep:
    """Eager and the lowered step agree within rounding after every call. Returns the step."""
    torch.manual_seed(SEED)
    run = each.make(where)
    expected = play(run, run.step, min(steps, each.steps))
    torch.manual_seed(SEED)
    run = each.make(where)
    step = ws.compile(run.step, **{**each.options, "lower": "inductor", **options})
    actual = play(run, step, min(steps, each.steps))
    for want, got in zip(expected, actual, strict=True):
        lines = differences(want, agreeing(want, got))
        if lines:
            pytest.fail(f"after {want.label}, of {len(expected)}:\n  " + "\n  ".join(lines[:12]))
    if each.graphs is not None:
        assert len(step.graphs) <= each.graphs, reasons(step)
    return step
