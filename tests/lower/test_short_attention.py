"""Attention over short sequences is decomposed, and agrees with the fused operator."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from wholestep.lower import decompositions as short_attention
from wholestep.lower import retrace
from wholestep.torch_private.operators import OpOverload

pytestmark = pytest.mark.compiles


class Attention(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.settings = settings

    def forward(self, x: Tensor, places: int) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q[:, :, :places], k, v, **self.settings).tanh()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, places: int) -> Tensor:
    loss = model(x, places).square().sum() + x.sum() * 0
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(settings: dict[str, Any], dtype: torch.dtype, places: int, how: Any) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = Attention(**settings).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [how(model, optimizer, torch.randn(2, 12, 16, dtype=dtype), places).detach() for _ in range(3)]
    return losses, [p.detach() for p in model.parameters()]


CASES = [
    pytest.param({"is_causal": True}, torch.float32, 12, id="causal", marks=pytest.mark.long),
    pytest.param({"is_causal": True}, torch.float64, 5, id="causal-fewer-queries"),
    pytest.param({"scale": 0.7}, torch.float32, 5, id="scale", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("settings", "dtype", "places"), CASES)
def test_a_step_trains_as_in_eager(
    settings: dict[str, Any], dtype: torch.dtype, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = mock.Mock(wraps=short_attention.call_short_attention)
    monkeypatch.setattr(retrace, "call_short_attention", called)
    compiled = ws.compile(step, lower="inductor", lower_options={"strict": True, "min_aten_ops": 1})
    torch.testing.assert_close(trained(settings, dtype, places, compiled), trained(settings, dtype, places, step))
    assert {call.args[0] for call in called.call_args_list} == {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }


def is_decomposed(query: Tensor, **settings: Any) -> bool:
    """True if the attention of a step with such a query is decomposed."""

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, **settings).sum()

    graph = ws.capture(attend, query).gm.graph
    found = [n for n in graph.nodes if isinstance(n.target, OpOverload) and "attention" in n.target.name()]
    return bool(found) and all(short_attention.is_short_attention(node) for node in found)


def test_only_short_attention_without_mask_dropout_or_low_precision_is_decomposed() -> None:
    query = torch.randn(2, 4, 16, 8)
    assert is_decomposed(query)
    assert is_decomposed(query, is_causal=True)
    assert not is_decomposed(torch.randn(2, 4, 256, 8))
    assert not is_decomposed(torch.randn(64, 4, 64, 8))
    assert not is_decomposed(query.bfloat16())
    assert not is_decomposed(query, attn_mask=torch.zeros(16, 16))
    assert not is_decomposed(query, dropout_p=0.5)
