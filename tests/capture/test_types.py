"""`type(x)` and `data_ptr()` in user code answer what they answer in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from cases.parts import mlp
from harness import Run, assert_parity, batch_of, case, device

QUESTIONS: dict[str, Callable[[nn.Module, Any, Any], Any]] = {
    "tensor": lambda m, x, k: m(x if type(x) is torch.Tensor else x[0]),
    "computed": lambda m, x, k: m(x) * (2.0 if type(m(x)) is torch.Tensor else 5.0),
    "parameter": lambda m, x, k: sum(p.sum() for p in m.parameters() if type(p) is nn.Parameter),
    "dispatch": lambda m, x, k: {torch.Tensor: lambda v: m(v), list: lambda v: m(v[0])}[type(x)](x),
    "name": lambda m, x, k: m(x) * len(type(x).__name__),
    "number": lambda m, x, k: m(x) * (k if type(k) is int else 7),
    "module": lambda m, x, k: m(x) * (2.0 if type(m[0]) is nn.Linear else 3.0),  # type: ignore[index]
    "of-a-class": lambda m, x, k: m(x) * (2.0 if type(nn.Linear) is type else 3.0),
    "isinstance": lambda m, x, k: m(x) * (2.0 if isinstance(nn.Linear, type) and not isinstance(x, type) else 3.0),
    "new-class": lambda m, x, k: m(x) * type("Two", (), {"value": 2.0}).value,  # type: ignore[attr-defined]
    "same-memory": lambda m, x, k: sum(
        p.sum() * 2
        for p in m.parameters()
        if p.data_ptr() == m[0].weight.data_ptr()  # type: ignore[index, union-attr]
    ),
    "view-of-a-parameter": lambda m, x, k: (
        m(x)
        * sum(
            (2.0 if p.view(-1).data_ptr() == p.data_ptr() else 3.0) + (p.view(-1)[1:].data_ptr() - p.data_ptr())
            for p in m.parameters()
        )
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_type_asked_for_in_a_step_is_that_of_eager(name: str) -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(x: torch.Tensor, k: int) -> Any:
            loss = QUESTIONS[name](model, x, k).sum()
            loss.backward()
            return loss.detach()

        return Run(step, lambda i: (batch_of(where, i, 5, 6), i), {"model": model})

    assert_parity(case(make, name=name, steps=5, graphs=3), device())
    assert "type" not in globals()


def test_the_address_of_a_computed_tensor_is_refused() -> None:
    @ws.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y if y.data_ptr() % 64 == 0 else y + 1

    with pytest.raises(ws.errors.ItemError, match="data_ptr"):
        step(torch.ones(3))
