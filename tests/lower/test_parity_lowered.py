"""Every step of the capture suite trains under Inductor as in eager, within rounding; random numbers are eager's own.

A few cases run always; `-m every_lowered_case` runs all of them (an hour of compiling on two cores).
"""

from __future__ import annotations

import contextlib
import warnings

import pytest

import wholestep as ws
from cases import buffers_and_randomness, gradients, huggingface, networks, optimizers, precision, schedules, structure
from harness import Case, cases_on, device
from lower.close import assert_close_parity

ALL = cases_on(
    "cpu",
    optimizers.CASES,
    schedules.CASES,
    gradients.CASES,
    buffers_and_randomness.CASES,
    precision.CASES,
    structure.CASES,
    networks.CASES,
    huggingface.CASES,
)
OTHERS = cases_on(
    "cpu",
    optimizers.OTHERS,
    schedules.OTHERS,
    gradients.OTHERS,
    networks.OTHERS,
    buffers_and_randomness.OTHERS,
    precision.OTHERS,
    huggingface.OTHERS,
)


@pytest.mark.every_lowered_case
@pytest.mark.parametrize("each", ALL)
def test_a_step_trains_lowered_as_in_eager(each: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ws.LowerWarning)
        assert_close_parity(each, device())


@pytest.mark.every_lowered_case
@pytest.mark.parametrize("each", OTHERS)
def test_what_no_list_promises_is_close_or_refused(each: Case) -> None:
    with contextlib.suppress(ws.errors.CaptureError):
        assert_close_parity(each, device())
