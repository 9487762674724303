"""Hooks that transformers adds to a model in its first forward that asks for hidden states or attentions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import wholestep as ws
from cases.huggingface import language_model
from corpus.entry import Entry, try_entry
from corpus.hugging_face import Family, text, train


def matching(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Any:
    """Uses all layers: a loss on hidden states and attentions, as for distillation."""
    out = model(**batch, output_hidden_states=True, output_attentions=True)
    loss = out.loss + sum(h.square().mean() for h in (*out.hidden_states, *out.attentions))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, out.hidden_states, out.attentions


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize(
    "family",
    [
        Family("LlamaConfig", "LlamaForCausalLM", text, {"attn_implementation": "eager"}, step=matching),
        pytest.param(
            Family("GPT2Config", "GPT2LMHeadModel", text, {"attn_implementation": "eager"}, step=matching),
            marks=pytest.mark.long,
        ),
        pytest.param(
            Family("BertConfig", "BertForMaskedLM", text, {"attn_implementation": "eager"}, step=matching),
            marks=pytest.mark.long,
        ),
        pytest.param(
            Family("MixtralConfig", "MixtralForCausalLM", text, {"output_router_logits": True}, step=train),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda family: family.model,
)
def test_hidden_states_and_attentions_are_right_from_the_first_call_on(family: Family) -> None:
    found = try_entry(Entry("hooks", family.model, family.run), lower="eager")
    assert (found.kind, found.graphs) == ("equal", 2), found.text


def test_a_capture_adds_the_hooks_that_the_first_forward_of_eager_adds() -> None:
    mine, theirs = language_model("GPT2"), language_model("GPT2")
    ids = torch.arange(8).view(2, 4)

    def step(model: Any, ids: Tensor) -> Tensor:
        loss: Tensor = sum(h.mean() for h in model(input_ids=ids, output_hidden_states=True).hidden_states)
        return loss

    ws.capture(step, mine, ids)
    step(theirs, ids)
    assert hooks_of(mine) == hooks_of(theirs) > 0


def test_a_refused_step_leaves_no_hooks() -> None:
    model = language_model("GPT2")

    def step(ids: Tensor) -> Tensor:
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        if states[-1].mean() > 0:
            states = states[:1]
        total: Tensor = sum(h.mean() for h in states)
        return total

    with pytest.raises(ws.errors.ControlFlowError):
        ws.compile(step, lower="eager")(torch.arange(8).view(2, 4))
    assert hooks_of(model) == 0
    assert not any(
        isinstance(m, transformers.PreTrainedModel) and "_output_capturing_hooks_installed" in vars(m)
        for m in model.modules()
    )
