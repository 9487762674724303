"""Every step of the capture suite trains under Inductor as in eager, within rounding; random numbers equal eager's.

Some cases run always; `-m every_lowered_case` runs all the others (over half an
hour of compiling on two cores).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import wholestep as ws
from cases import buffers_and_randomness, gradients, huggingface, networks, optimizers, precision, schedules, structure
from cases.parts import adamw, train_step
from harness import Case, Run, batch_of, case, cases_on, device
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
)


ALWAYS = (
    "AdamW-single-amsgrad=True",
    "autocast-bfloat16-fused",
    "random-dropout",
    "generator_of_the_users_own-rand",
    "buffers-Counting",
)
"""One of each form of optimizer and of what lowering treats in its own way; quick to compile."""


def small(name: str, mask: bool = False, **settings: Any) -> Case:
    """A language model of one layer."""
    return Case(f"small-{name}", lambda where: huggingface.training(where, name, mask, **settings))


SMALL = cases_on(
    "cpu",
    [
        small("GPT2", n_layer=1, n_embd=16),
        small("Llama", num_hidden_layers=1, hidden_size=16, head_dim=4, make_optimizer=SGD),
        small("Bert", mask=True, num_hidden_layers=1, hidden_size=16, make_optimizer=SGD),
    ],
)


def every(cases: Sequence[Any]) -> list[Any]:
    """The parameters, those that do not run always marked."""
    assert not (missing := {*ALWAYS} - {each.id for each in [*ALL, *OTHERS, *SMALL]}), missing
    mark = pytest.mark.every_lowered_case
    return [each if each.id in ALWAYS else pytest.param(*each.values, id=each.id, marks=mark) for each in cases]


@pytest.mark.parametrize("each", every(ALL))
def test_a_step_trains_lowered_as_in_eager(each: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ws.LowerWarning)
        assert_close_parity(each, device())


@pytest.mark.parametrize("each", every(SMALL))
def test_a_small_language_model_trains_lowered_as_in_eager(each: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ws.LowerWarning)
        assert_close_parity(each, device(), steps=2)


@pytest.mark.parametrize("each", every(OTHERS))
def test_unlisted_steps_are_close_to_eager_or_refused(each: Case) -> None:
    with contextlib.suppress(ws.errors.CaptureError):
        assert_close_parity(each, device())


@pytest.mark.long  # tests/lower/test_sources.py has a dynamic batch of a plainer step
def test_batches_of_any_size_train_lowered_as_in_eager() -> None:
    def sizes_that_change(where: torch.device) -> Run:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2)).to(where)
        optimizer = adamw(model)
        watch = {"model": model, "optimizer": optimizer}
        return Run(train_step, lambda i: (model, optimizer, batch_of(where, i, (5, 3, 8, 2, 17)[i], 6)), watch)

    dynamic = {"x": {0: ws.Dim(min=2, max=32)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", ws.LowerWarning)
        step = assert_close_parity(case(sizes_that_change), device(), steps=5, dynamic=dynamic)
    assert len(step.graphs) <= 2
