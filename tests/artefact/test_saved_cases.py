"""Steps of the capture suite, saved and loaded for fresh objects, do what eager does to the bit, and trace nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import wholestep as ws
from cases import (
    buffers_and_randomness,
    gradients,
    networks,
    optimizers,
    precision,
    schedules,
    structure,
)
from harness import SEED, Case, Run, assert_frames_equal, device, play
from selection import each_now
from wholestep import step as stages

_STEPS = 4
# custom_library_ops: needs allow_ops=, as the file says.
_ALL = [
    each
    for group in (
        optimizers.CASES,
        schedules.CASES,
        gradients.CASES,
        buffers_and_randomness.CASES,
        precision.CASES,
        structure.CASES,
        networks.CASES,
    )
    for each in group
    if "cpu" in each.devices and each.name != "custom_library_ops"
]


def assert_loaded_runs_as_eager(each: Case, path: Path) -> None:
    """Save what a case captured, load it for new objects, and compare with eager."""
    steps = min(each.steps, _STEPS)
    run = _fresh(each)
    expected = play(run, run.step, steps)
    run = _fresh(each)
    step: Any = ws.compile(run.step, **{"lower": "eager", **each.options})
    play(run, step, steps)
    step.save(path)
    run = _fresh(each)
    loaded: Any = ws.load(path, run.step)
    with mock.patch.object(stages, "trace_step", side_effect=AssertionError("traced")):
        assert_frames_equal(expected, play(run, loaded, steps))


def _fresh(each: Case) -> Run:
    torch.manual_seed(SEED)
    return each.make(device())


_NOW = (
    "SGD-fused-momentum=0.9",
    "AdamW-single",
    "NAdam-single",
    "scheduler_inside-OneCycleLR-SGD-foreach",
    "tensor_lr_replaced",
    "accumulation_over_steps-2",
    "tied_weights",
    "batch_norm-1-True-None",
    "random-multinomial",
    "generator_of_the_users_own-rand",
    "grad_scaler-AdamW-foreach-(4,)-True",
    "reached_by_self",
    "objects_inside_an_argument",
    "averaged_model-ema",
    "returned-named_tuple",
    "batch_shaped_as-dataclass",
    "recurrent-LSTM",
)


@pytest.mark.parametrize("each", each_now(_ALL, *_NOW), ids=lambda each: each.name)
def test_a_loaded_step_does_what_eager_does(each: Case, tmp_path: Path) -> None:
    assert_loaded_runs_as_eager(each, tmp_path / "step.ws")
