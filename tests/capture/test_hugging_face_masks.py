"""Hugging Face looks at an attention mask and leaves it out where it is all ones; so does the graph, under a guard."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import wholestep as ws


def _models() -> list[Any]:
    llama = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    gpt2 = transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    bert = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return [
        pytest.param(transformers.LlamaForCausalLM, llama, id="Llama"),
        pytest.param(transformers.GPT2LMHeadModel, gpt2, id="GPT2"),
        pytest.param(transformers.BertForMaskedLM, bert, id="Bert"),
    ]


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> Any:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize(("kind", "config"), _models())
def test_masks_of_ones_and_masks_with_padding_give_the_bits_of_eager(kind: Any, config: Any) -> None:
    torch.manual_seed(0)
    mine = kind(config)
    theirs = copy.deepcopy(mine)
    ours, eager = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (mine, theirs))
    step = ws.compile(train_step)
    ids = torch.arange(32).view(2, 16)
    for i in range(6):
        mask = torch.ones_like(ids)
        if i in (2, 3):
            mask[0, :4] = 0
        batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
        torch.manual_seed(i)
        expected = train_step(theirs, eager, batch)
        torch.manual_seed(i)
        assert torch.equal(step(mine, ours, batch), expected)
        assert all(torch.equal(p, q) for p, q in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert len(step.graphs) == 3
