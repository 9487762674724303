"""Networks of the tests of compilers, each with inputs, its loss, and its gradients in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cases.huggingface import language_model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


def mlp() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), {"input": torch.randn(3, 8)}


def convolution() -> tuple[nn.Module, dict[str, Tensor]]:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)]
    return nn.Sequential(*layers), {"input": torch.randn(2, 3, 8, 8)}


def attention() -> tuple[nn.Module, dict[str, Tensor]]:
    return Attention(), {"x": torch.randn(2, 5, 16)}


def hugging_face(name: str) -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.randint(3, 60, (2, 9))
    extra = {"use_cache": False} if name == "GPT2" else {}
    return language_model(name).eval(), {"input_ids": ids, "labels": ids, **extra}


SMALL: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "mlp": mlp,
    "convolution": convolution,
    "attention": attention,
}


def loss_of(result: Any) -> Tensor:
    return result.loss if hasattr(result, "loss") else result.square().mean()


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def trained(model: nn.Module, call: Callable[..., Any], inputs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and buffers after a forward and backward, the loss among the first."""
    loss = loss_of(call(**inputs))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], [b.clone() for b in model.buffers()]


def assert_trains_as_in_eager(
    model: nn.Module, compiled: Callable[[nn.Module], Any], inputs: dict[str, Any], *, exact: bool = True
) -> None:
    eager, other = copied(model), copied(model)
    expected, found = trained(eager, eager, inputs), trained(other, compiled(other), inputs)
    for want, have in zip((*expected[0], *expected[1]), (*found[0], *found[1]), strict=True):
        if exact:
            assert torch.equal(want, have)
        else:
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
