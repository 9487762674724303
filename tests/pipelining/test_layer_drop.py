"""Layer drop: a branch on a random value before each layer. Captured for probability 0, refused above."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from pipelining.models import numbers
from wholestep.errors import PipelineCaptureError, PipelineModeError
from wholestep.pipelining import SplitPoint, pipeline


class Dropping(nn.Module):
    """Layers that are left out at random, and dropout."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.layerdrop = probability

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            x = nn.functional.dropout(layer(x), 0.5, self.training)
        return x


def test_a_probability_of_0_is_captured_with_the_rng_calls_of_eager():
    model = Dropping(0.0)
    pipe = pipeline(model, (numbers(4, 8),), split_spec={"layers.2": SplitPoint.BEGINNING})
    for training in (True, False):
        model.train(training)
        pipe.train(training)
        torch.manual_seed(3)
        expected, state = model(numbers(4, 8)), torch.get_rng_state()
        torch.manual_seed(3)
        assert torch.equal(pipe(numbers(4, 8))[0], expected)
        assert torch.equal(torch.get_rng_state(), state)


def test_a_probability_above_0_is_refused_with_the_line():
    with pytest.raises(PipelineCaptureError, match=r"(?s)self\.layerdrop.*layerdrop=0\.0"):
        pipeline(Dropping(0.1), (numbers(4, 8),), stages=2)


def test_a_pipe_captured_in_eval_names_the_line_that_prevents_training():
    pipe = pipeline(Dropping(0.1).eval(), (numbers(4, 8),), stages=2)
    pipe.train()
    with pytest.raises(PipelineModeError, match=r"no graph for training.*test_layer_drop\.py:\d+ in forward"):
        pipe(numbers(4, 8))


@pytest.mark.long  # a model that others wrote; the mechanism is above
def test_bart_is_trained():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=50,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=16,
        use_cache=False,
    )
    model = transformers.BartForConditionalGeneration(config).train()
    words = torch.arange(3, 19).reshape(2, 8)
    pipe = pipeline(model, (), {"input_ids": words, "labels": words}, stages=2)
    torch.manual_seed(1)
    expected = model(input_ids=words, labels=words).loss
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    loss = pipe(input_ids=words, labels=words)["loss"]
    loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(parameter.grad, g) for parameter, g in zip(model.parameters(), gradients, strict=True))
