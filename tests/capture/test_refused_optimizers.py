"""Optimizers that evaluate the model themselves, and sparse gradients, are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from cases.parts import mlp
from harness import (
    assert_frames_equal,
    batch_of,
    device,
    frame,
)

HERE = Path(__file__).name


def steps_with_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure)  # <- here


def test_lbfgs_is_refused() -> None:
    model = mlp(device())
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ws.errors.OptimizerClosureError) as caught:
        ws.compile(steps_with_a_closure)(model, optimizer, batch_of(device(), 0, 5, 6))
    assert "return optimizer.step(closure)  # <- here" in str(caught.value)


@pytest.mark.parametrize("kind", ["embedding", "bag"])
def test_sparse_gradients_are_refused(kind: str) -> None:
    model: nn.Module = nn.Embedding(11, 4, sparse=True)
    if kind == "bag":
        model = nn.EmbeddingBag(11, 4, sparse=True, mode="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = frame("look", None, {"model": model, "optimizer": optimizer})

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(ws.errors.SparseError, match=r"\[WS-SPARSE\]") as caught:
        ws.compile(step)(torch.arange(6).view(2, 3))
    assert HERE in str(caught.value)
    assert_frames_equal([before], [frame("look", None, {"model": model, "optimizer": optimizer})])
