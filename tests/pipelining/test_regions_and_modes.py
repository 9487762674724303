"""Autocast, no_grad, checkpoints and train and eval mode survive capturing and cutting, also with a cut inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipelining.models import numbers
from pipelining.test_local_runs import assert_like_eager
from wholestep.errors import PipelineError, PipelineModeError
from wholestep.pipelining import SplitPoint, pipe_split, pipeline

X = numbers(4, 8)


class Count(TorchDispatchMode):
    """How often an operator runs."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.times = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.times += func is self.op
        return func(*args, **(kwargs or {}))


def both_modes(model: nn.Module, **options: Any) -> Any:
    pipe = pipeline(model, (X,), **options)
    for training in (True, False):
        model.train(training)
        pipe.train(training)
        assert_like_eager(pipe, model, (X,), {})
    return pipe


class Blocks(nn.Module):
    """Cuts inside autocast and inside no_grad; gradients on again inside of it; checkpoints inside autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
            pipe_split()
            h = checkpoint(lambda t: self.drop(torch.sin(self.b(t))).relu(), h, use_reentrant=False)
        h = h.float()
        with torch.no_grad():
            z = h * 2
            pipe_split()
            z = z + 1
            with torch.enable_grad():
                y = self.b(h)
        return checkpoint(self.norm, h + y, use_reentrant=True) + z


def test_autocast_no_grad_and_checkpoint_regions_survive_cuts_inside_them():
    pipe = both_modes(Blocks())
    assert pipe.num_stages == 3
    blocks = [
        [module.region.kind for _, module in stage.named_children() if hasattr(module, "region")]
        for stage in pipe.stages
    ]
    assert blocks == [["autocast"], ["autocast", "grad"], ["grad", "checkpoint"]]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_operators_are_recomputed_in_the_backward(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            h = self.fc(x)
            pipe_split()
            return checkpoint(lambda t: torch.sin(torch.sin(t)), h, use_reentrant=use_reentrant)

    pipe = both_modes(Checkpointed())
    with Count(torch.ops.aten.sin.default) as count:
        pipe(X)[0].sum().backward()
    assert count.times == 3  # of the second run, the last operator is not needed


class Scaled(torch.autograd.Function):
    """Rounds; the gradient is one of its own, and an input is only used there."""

    @staticmethod
    def forward(ctx, x, weight, steps):
        ctx.save_for_backward(weight)
        return torch.round(x.detach() * steps) / steps, x.sign()

    @staticmethod
    def backward(ctx, gradient, _):
        (weight,) = ctx.saved_tensors
        return gradient * weight, gradient.sum(0), None


class OwnBackward(nn.Module):
    """Calls the function, with a cut before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x):
        h = self.a(x)
        pipe_split()
        h, sign = Scaled.apply(h, self.weight, 4.0)
        pipe_split()
        return self.b(h), sign


def test_an_autograd_function_keeps_its_backward():
    pipe = both_modes(OwnBackward())
    assert pipe.num_stages == 3
    assert [value.differentiable for value in pipe.routing.values.values()] == [False, True, True, True, True]
    for stages in (2, 3):
        assert both_modes(OwnBackward(), stages=stages).num_stages == stages
    with pytest.raises(PipelineError, match="cannot be cut into 4 stages"):
        pipeline(OwnBackward(), (X,), stages=4)


def test_dropout_batch_norm_and_attention_follow_train_and_eval():
    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            h = self.drop(self.norm(self.fc(x)))
            pipe_split()
            h = F.dropout(h, 0.3, True)  # always on
            h = h.view(1, 2, 2, 8)
            h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.4 if self.training else 0.0)
            return F.dropout(h.reshape(4, 8), 0.3, False)

    pipe = both_modes(Modes())
    with Count(torch.ops.aten.bernoulli_.float) as drawn:
        pipe.eval()(X)
    assert drawn.times == 1


def test_operators_of_training_only_follow_train_and_eval():
    class DropPath(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                h = layer(x)
                if self.training:
                    h = h * torch.bernoulli(torch.full((x.shape[0], 1), 0.5)) / 0.5
                x = x + h
            return x

    cuts = {"layers.1": SplitPoint.BEGINNING, "layers.2": SplitPoint.BEGINNING}
    assert both_modes(DropPath(), split_spec=cuts).num_stages == 3
    assert both_modes(DropPath(), stages=2).num_stages == 2


def test_a_model_with_frozen_parts_keeps_them_frozen():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)
            self.drop = nn.Dropout(0.5)

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x):
            h = self.norm(self.fc(x))
            pipe_split()
            return self.drop(h)

    both_modes(Frozen().train())
    by_hand = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    by_hand[1].eval()
    pipe = pipeline(by_hand, (X,), split_spec={"1": SplitPoint.BEGINNING})
    assert_like_eager(pipe, by_hand, (X,), {})
    assert [by_hand[i].training for i in range(3)] == [True, False, True]


def test_a_mode_with_another_result_structure_is_refused_on_first_use():
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.help = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x):
            x = self.body(x)
            pipe_split()
            return (self.head(x), self.help(x)) if self.training else self.head(x)

    model = TwoHeads()
    pipe = pipeline(model, (X,))
    assert_like_eager(pipe, model, (X,), {})
    pipe.eval()
    with pytest.raises(PipelineModeError, match="evaluation: the model returns a different structure"):
        pipe(X)
    assert_like_eager(pipe.train(), model, (X,), {})
    pipe = pipeline(model.eval(), (X,))
    assert_like_eager(pipe, model, (X,), {})
