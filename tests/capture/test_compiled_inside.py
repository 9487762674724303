"""Functions and modules from `torch.compile` inside of a step: their Python is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import Case, Run, assert_parity, batch_of, device


def plain_update(p: Tensor, grad: Tensor, rate: float) -> None:
    p.add_(grad, alpha=-rate)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """No test meets Dynamo's limit of recompiles because of another one."""
    torch.compiler.reset()


def make(where: torch.device, **options: Any) -> Run:
    torch.manual_seed(1)
    model = nn.Linear(4, 3).to(where)
    update = torch.compile(plain_update, backend="eager", **options)
    forward = torch.compile(model, backend="eager", **options)
    rates = {"rate": 0.1}

    def step(x: Tensor) -> Tensor:
        loss = forward(x).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                update(p, p.grad, rates["rate"])
        return loss

    def slower(i: int, result: Any) -> None:
        rates["rate"] *= 0.9

    return Run(step, lambda i: (batch_of(where, i, 5, 4),), {"model": model}, after=slower)


@pytest.mark.compiles
@pytest.mark.parametrize("options", [{}, {"fullgraph": True}, {"dynamic": True}, {"fullgraph": True, "dynamic": True}])
def test_the_python_of_compiled_functions_is_captured(options: dict[str, Any]) -> None:
    assert_parity(Case("compiled", lambda where: make(where, **options), steps=5, graphs=None), device())


@pytest.mark.compiles
def test_functions_from_torch_compile_compile_again_after_a_capture() -> None:
    calls = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        calls.append(gm)
        return gm.forward

    doubled = torch.compile(lambda x: x * 2, backend=backend)
    assert_parity(
        Case("step", lambda w: Run(lambda x: doubled(x) + 1, lambda i: (torch.ones(3),), {}), steps=2), device()
    )
    before = len(calls)
    doubled(torch.ones(5, 5, dtype=torch.float64))
    assert len(calls) == before + 1
