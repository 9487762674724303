"""`ws.check` and `check_first=` on CUDA: device generators, CUDA graphs, memory of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from cases.parts import adamw, train_step
from harness import batch_of, differences, frame
from wholestep.runtime.executor import Executor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def network() -> nn.Module:
    layers = nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.3), nn.BatchNorm1d(32), nn.Linear(32, 4)
    return nn.Sequential(*layers).to(CUDA)


@pytest.mark.parametrize(
    "options", [{"lower": "eager"}, {"lower": "inductor", "cuda_graph": False}, {"lower": "inductor"}]
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_correct_step_is_ok_and_nothing_is_changed(options: dict[str, Any], fused: bool) -> None:
    model = network()
    optimizer = adamw(model, fused=fused)
    x = batch_of(CUDA, 0, 20, 6)
    torch.rand(1, device=CUDA)
    before = frame("before", None, {"model": model, "optimizer": optimizer}, (x,))
    report = ws.check(train_step, model, optimizer, x, steps=4, **options)
    assert differences(before, frame("after", None, {"model": model, "optimizer": optimizer}, (x,))) == []
    assert report.ok, str(report)
    assert report.exact or options["lower"] == "inductor"
    assert report["RNG"].compared >= 4
    assert report.eager is not None
    assert report.eager.peak_bytes


def test_float16_autocast_with_a_scaler_is_ok() -> None:
    model = network()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cuda")

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    for lower in ("eager", "inductor"):
        report = ws.check(step, batch_of(CUDA, 0, 20, 6), lower=lower, cuda_graph=False)
        assert report.ok, str(report)


def test_other_random_numbers_of_the_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    original = Executor.run

    def run(*given: Any) -> Any:
        result = original(*given)
        torch.rand(1, device=CUDA)
        return result

    monkeypatch.setattr(Executor, "run", run)
    report = ws.check(train_step, model, adamw(model), batch_of(CUDA, 0, 20, 6), lower="eager")
    assert [str(row.part) for row in report.rows if row.status is ws.debug.Status.DIFFERENT] == ["RNG"], str(report)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_first_calls_are_checked_and_training_continues(lower: str) -> None:
    model = network()
    optimizer = adamw(model)
    step = ws.compile(train_step, lower=lower, check_first=3)
    losses = [float(step(model, optimizer, batch_of(CUDA, 0, 20, 6)).detach()) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert len(step.graphs) == 2
