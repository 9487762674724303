"""Models that export cannot capture: the line in the error, and the split between submodules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipelining.models import numbers
from wholestep.errors import PipelineCaptureError, PipelineError
from wholestep.pipelining import pipeline, split_modules

X = numbers(4, 8)


class Branch(nn.Module):
    """Decides by the values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if x.sum() > 0:
            x = x + 1
        return self.fc(x)


class Chain(nn.Module):
    """Layers one after the other, some in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Branch() for _ in range(4)])
        self.leave = nn.Sequential(nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def test_the_error_names_the_line_and_offers_the_submodules(capfd):
    model = Chain()
    with pytest.raises(PipelineCaptureError, match="Chain into one graph") as caught:
        pipeline(model, (X,))
    assert caught.value.location.text == "if x.sum() > 0:"
    assert caught.value.location.function == "forward"
    assert (
        "split_modules(model, ...) of 'enter', 'layers.0', 'layers.1', '...', 'leave.0', 'leave.1'" in caught.value.fix
    )
    assert model.layers[0].calls == 0
    assert "def forward" not in capfd.readouterr().err  # export's own dump of the graph


def test_the_error_of_a_model_that_is_not_a_chain_suggests_stages():
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Branch(), Branch()

        def forward(self, x):
            return self.b(self.a(x)) + x

    with pytest.raises(PipelineCaptureError) as caught:
        pipeline(Skip(), (X,))
    assert "PipelineStage" in caught.value.fix
    with pytest.raises(PipelineError, match="not a chain"):
        split_modules(Skip(), 2, (X,))


def test_a_chain_is_cut_between_submodules_and_shares_the_state():
    model = Chain()
    for stages in (split_modules(model, 3, (X,)), split_modules(model, [["enter", "layers"], ["leave"]])):
        value = X
        for stage in stages:
            value = stage(value)
        assert torch.equal(value, model(X))
        names = [name for stage in stages for name in stage.state_dict()]
        assert sorted(names) == sorted(model.state_dict())
        assert {id(p) for stage in stages for p in stage.parameters()} == {id(p) for p in model.parameters()}


def test_stages_that_do_not_cover_the_chain_are_refused():
    with pytest.raises(PipelineError, match="in this order"):
        split_modules(Chain(), [["leave"], ["enter", "layers"]], (X,))
    with pytest.raises(PipelineError, match="7 submodules cannot be cut into 9 stages"):
        split_modules(Chain(), 9, (X,))
