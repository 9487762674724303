"""Language models of Hugging Face with sizes that vary, with and without a memory budget: one graph, eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wholestep as ws
from cases.huggingface import language_model


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def losses(model: Any, step: Any, sizes: list[tuple[int, int]]) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    return torch.stack([step(model, optimizer, torch.randint(0, 64, size)) for size in sizes])


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("Llama", 0.5),
        ("GPT2", None),
        pytest.param("Llama", None, marks=pytest.mark.long),
        pytest.param("GPT2", 0.5, marks=pytest.mark.long),
    ],
)
def test_batches_and_sequences_of_any_size_run_in_one_graph(name: str, budget: float | None) -> None:
    sizes = [(4, 8), (2, 8), (3, 12), (1, 5)]
    torch.manual_seed(0)
    expected = losses(language_model(name), train_step, sizes)
    torch.manual_seed(0)
    dims = {0: ws.Dim(min=1, max=8), 1: ws.Dim(min=2, max=32)}
    step = ws.compile(train_step, lower="eager", dynamic={"ids": dims}, memory_budget=budget)
    assert torch.equal(losses(language_model(name), step, sizes), expected)
    assert len(step.graphs) == 1
    memory = step.last.memory
    assert memory is None or memory.planned_peak <= memory.budget


def test_a_padded_size_stays_a_size_that_varies() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 1), value=3.0)[:, 1:].sum()

    compiled = ws.compile(step, lower="eager", dynamic={"x": {0: ws.Dim(), 1: ws.Dim()}})
    for size in ((4, 6), (2, 3), (1, 1)):
        x = torch.randn(size)
        assert torch.equal(compiled(x), step(x))
    assert len(compiled.graphs) == 1
