"""Steps written for Accelerate and Lightning Fabric, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from harness import Case, Run, Story, assert_parity, assert_same_story, batch_of, device
from selection import each_now
from wholestep import errors


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def run_of(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer, **watch: Any) -> Run:
    def slower(i: int, result: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    where = device()
    return Run(
        step,
        lambda i: (batch_of(where, i, 5, 6), batch_of(where, 50 + i, 5, 4)),
        {"model": model, "optimizer": optimizer, **watch},
        after=slower,
    )


def accelerated(where: torch.device, *, clips: bool = False, schedules: bool = False) -> Run:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    plain, optimizer = network()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, prepared, prepared_scheduler = accelerator.prepare(plain, optimizer, scheduler)

    def step(x: Tensor, y: Tensor) -> Tensor:
        prepared.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        prepared.step()
        if schedules:
            prepared_scheduler.step()
        return loss

    return run_of(step, plain, optimizer)


def in_fabric(where: torch.device, *, precision: Any = None, clips: dict[str, Any] | None = None) -> Run:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    plain, optimizer = network()
    model, prepared = fabric.setup(plain, optimizer)

    def step(x: Tensor, y: Tensor) -> Tensor:
        prepared.zero_grad()
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        if clips:
            fabric.clip_gradients(model, prepared, **clips)
        prepared.step()
        return loss

    return run_of(step, plain, optimizer)


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_of_accelerate_trains_as_in_eager(clips: bool) -> None:
    assert_parity(Case("accelerate", lambda where: accelerated(where, clips=clips), steps=6), device())


def test_a_scheduler_of_accelerate_trains_as_in_eager() -> None:
    assert_parity(Case("scheduler", lambda where: accelerated(where, schedules=True), steps=6), device())


@pytest.mark.parametrize("precision", each_now([None, "bf16-mixed"], "bf16-mixed"))
def test_a_step_in_fabric_trains_as_in_eager(precision: Any) -> None:
    assert_parity(Case("fabric", lambda where: in_fabric(where, precision=precision), steps=6), device())


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_default_dtype_that_fabric_sets_is_refused_with_a_line(precision: Any) -> None:
    run = in_fabric(device(), precision=precision)
    with pytest.raises(errors.UnsupportedError, match="get_default_dtype") as caught:
        ws.compile(run.step)(*run.arguments(0))
    assert caught.value.location is not None
    assert caught.value.location.file == __file__


def test_fabric_clips_as_in_eager() -> None:
    for clips in ({"clip_val": 0.1}, {"max_norm": 0.1, "error_if_nonfinite": False}):
        assert_parity(Case("clips", lambda where, clips=clips: in_fabric(where, clips=clips), steps=3), device())


def test_a_check_of_fabric_for_finite_gradients_is_refused_with_a_line() -> None:
    run = in_fabric(device(), clips={"max_norm": 0.1})
    with pytest.raises(errors.ControlFlowError) as caught:
        ws.compile(run.step)(*run.arguments(0))
    where = caught.value.location
    assert where is not None
    assert where.inside is not None
    assert (where.file, where.text) == (__file__, "fabric.clip_gradients(model, prepared, **clips)")
    assert "lightning" in where.inside.file
    assert f"  in    {where.inside}" in str(caught.value)


def test_a_checkpoint_that_is_loaded_through_fabric_is_used() -> None:
    def story(teller: Story) -> None:
        optimizer = teller.run.watch["optimizer"]
        teller.call(3)
        saved = {
            k: v.clone() if isinstance(v, Tensor) else v for k, v in teller.run.watch["model"].state_dict().items()
        }
        teller.call(2)
        teller.run.watch["model"].load_state_dict(saved)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.2
        teller.call(2)

    assert_same_story(in_fabric, story)
