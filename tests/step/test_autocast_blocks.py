"""One `torch.autocast` block around several calls: eager goes on with the casts of weights that the first call made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from harness import device, marked_line


def make() -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Linear(4, 4).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, train, torch.ones(2, 4, device=device())


def autocast(**options: Any) -> torch.autocast:
    return torch.autocast(device().type, dtype=torch.bfloat16, **options)


def test_a_second_call_that_would_train_on_stale_casts_is_refused_with_its_line() -> None:
    model, train, x = make()
    step = ws.compile(train, lower="eager")

    def loop() -> None:
        with autocast():
            for _ in range(3):
                step(x)  # <- here

    with pytest.raises(ws.errors.UnsupportedError, match=r"torch\.autocast block") as caught:
        loop()
    assert caught.value.location is not None
    assert caught.value.location.line == marked_line(loop)
    _, eager, _ = made = make()
    with autocast():
        eager(x)
    assert torch.equal(model.weight, made[0].weight), "the first call was that of eager"


@pytest.mark.parametrize("how", ["a block for each call", "cache_enabled=False", "in the step"])
def test_other_uses_of_autocast_are_captured(how: str) -> None:
    def run(compiled: bool) -> list[Any]:
        model, train, x = make()

        def inside(x: torch.Tensor) -> torch.Tensor:
            with autocast():
                return train(x)

        step = inside if how == "in the step" else train
        step = ws.compile(step, lower="eager") if compiled else step
        losses = []
        if how == "cache_enabled=False":
            with autocast(cache_enabled=False):
                losses = [step(x) for _ in range(4)]
        for _ in range(4 if not losses else 0):
            if how == "in the step":
                losses.append(step(x))
            else:
                with autocast():
                    losses.append(step(x))
        return [*losses, model.weight.detach()]

    for ours, eager in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, eager)


def test_a_step_that_writes_no_weights_may_be_called_many_times_in_a_block() -> None:
    model, _, x = make()
    step = ws.compile(lambda x: model(x).sum(), lower="eager")
    with autocast():
        assert torch.equal(step(x), model(x).sum())
        assert torch.equal(step(x * 2), model(x * 2).sum())
