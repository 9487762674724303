"""The probability of dropout, changed between calls: on the CPU one graph for all between 0 and 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness import Case, Run, assert_parity, batch_of, device
from selection import each_now

DROPPED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "module": lambda m, h: m.dropout(h),
    "in place": lambda m, h: F.dropout(h * 1.0, m.dropout.p, m.training, True),
    "by name": lambda m, h: F.dropout(h, training=True, p=m.dropout.p),
    "of torch": lambda m, h: torch.dropout(h, m.dropout.p, True),
    "channels": lambda m, h: F.dropout1d(h[None], m.dropout.p, m.training)[0],
    "evaluated": lambda m, h: F.dropout(h, m.dropout.p, False) * m.dropout.p,
    "twice": lambda m, h: m.dropout(m.dropout(h) + F.dropout(h, m.dropout.p / 2)),
    "bfloat16": lambda m, h: m.dropout(h.bfloat16()).float(),
}
OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "recomputed": lambda m, h: checkpoint(m.dropout, h, use_reentrant=False),
    "alpha": lambda m, h: F.alpha_dropout(h, m.dropout.p, True),
    "attention": lambda m, h: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=m.dropout.p)[0],
    "empty": lambda m, h: h * 2 + F.dropout(h[:0], m.dropout.p).sum(),
    "mapped": lambda m, h: torch.vmap(lambda row: F.dropout(row, m.dropout.p), randomness="different")(h),
}


def run_of(where: torch.device, dropped: Callable[[Any, Tensor], Tensor], probability: Callable[[int], float]) -> Run:
    model: Any = nn.Linear(6, 4).to(where)
    model.dropout = nn.Dropout(probability(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = dropped(model, model(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def after(i: int, result: Any) -> None:
        model.dropout.p = probability(i + 1)

    return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "optimizer": optimizer}, after=after)


@pytest.mark.parametrize("name", each_now(DROPPED, "module", "by name", "channels", "twice"))
def test_a_probability_that_changes_is_an_input_on_the_cpu(name: str) -> None:
    graphs = 2 if device().type == "cpu" else None
    run = lambda where: run_of(where, DROPPED[name], lambda i: 0.5 - 0.07 * i)  # noqa: E731
    assert_parity(Case(name, run, steps=6, graphs=graphs), device())


@pytest.mark.parametrize("name", each_now(OTHERS, "alpha", "empty", "recomputed"))
def test_where_it_cannot_be_an_input_each_value_has_its_graph(name: str) -> None:
    assert_parity(
        Case(name, lambda where: run_of(where, OTHERS[name], lambda i: 0.5 - 0.1 * i), steps=4, graphs=None), device()
    )


def test_zero_and_one_are_graphs_of_their_own() -> None:
    values = [0.3, 0.2, 0.0, 0.1, 1.0, 0.4, 0.0, 1.0]
    run = lambda where: run_of(where, DROPPED["module"], lambda i: values[i % len(values)])  # noqa: E731
    assert_parity(Case("ends", run, steps=8, graphs=4 if device().type == "cpu" else None), device())
