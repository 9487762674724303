"""Language models of Hugging Face with sizes that vary, with and without a memory budget: one graph, eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import wholestep as ws

LLAMA = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
)
GPT2 = transformers.GPT2Config(
    vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
)


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
    ("make", "config"),
    [(transformers.LlamaForCausalLM, LLAMA), (transformers.GPT2LMHeadModel, GPT2)],
    ids=["Llama", "GPT2"],
)
@pytest.mark.parametrize("budget", [None, 0.5])
def test_batches_and_sequences_of_any_size_run_in_one_graph(make, config, budget):
    sizes = [(4, 8), (2, 8), (3, 12), (1, 5)]
    torch.manual_seed(0)
    expected = losses(make(config), train_step, sizes)
    torch.manual_seed(0)
    dims = {0: ws.Dim(min=1, max=8), 1: ws.Dim(min=2, max=32)}
    step = ws.compile(train_step, lower="eager", dynamic={"ids": dims}, memory_budget=budget)
    assert torch.equal(losses(make(config), step, sizes), expected)
    assert len(step.graphs) == 1
    memory = step.last.memory
    assert memory is None or memory.planned_peak <= memory.budget


def test_a_padded_size_stays_a_size_that_varies():
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 1), value=3.0)[:, 1:].sum()

    compiled = ws.compile(step, lower="eager", dynamic={"x": {0: ws.Dim(), 1: ws.Dim()}})
    for size in ((4, 6), (2, 3), (1, 1)):
        x = torch.randn(size)
        assert torch.equal(compiled(x), step(x))
    assert len(compiled.graphs) == 1
