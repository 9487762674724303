"""Random numbers and strides equal eager's, also for tensors that are not row-major."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from lower.graphs import graph_of, interpreted
from wholestep.ir.graph_functions import call_on_copies
from wholestep.lower import LowerOptions, partial_lower, plan_regions

__all__ = ["interpreted"]

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 0, 99),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "uniform_": lambda x: x.clone().uniform_(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: (x * 2).t(),
    "permuted": lambda x: (x.view(2, 3, 4) + 1).permute(2, 0, 1) + 0,
    "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(3, 4),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", DRAWS)
def test_random_numbers_are_generated_in_memory_order_as_in_eager(kind: str, layout: str, writes: bool) -> None:
    def work(x: Tensor) -> tuple[Tensor, ...]:
        drawn = DRAWS[kind](LAYOUTS[layout](x)) + 0
        other = x * 3
        return drawn, other.add_(1) if writes else other

    x = torch.rand(6, 4)
    gm = partial_lower(make_fx(work, tracing_mode="fake")(x), options=LowerOptions(min_aten_ops=1, strict=True))
    torch.manual_seed(1)
    got = gm(x)
    torch.manual_seed(1)
    want = work(x)
    assert all(map(torch.equal, got, want))
    assert [value.stride() for value in got] == [value.stride() for value in want]


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, :24],
    "every second": lambda x: x[::2, ::2],
    "one column": lambda x: x[:, -1],
    "rows": lambda x: x[3:],
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("part", PARTS)
def test_random_numbers_written_into_a_part_of_a_tensor_equal_eagers(part: str) -> None:
    """Eager generates normal numbers in vectors for dense memory, and one by one for memory with gaps."""

    def work(x: Tensor) -> Tensor:
        y = x * 2
        PARTS[part](y).normal_()
        return y + 1

    x = torch.rand(32, 48)
    gm = partial_lower(make_fx(work, tracing_mode="fake")(x), options=LowerOptions(min_aten_ops=1, strict=True))
    torch.manual_seed(1)
    got = gm(x)
    torch.manual_seed(1)
    assert torch.equal(got, work(x))


@pytest.mark.usefixtures("interpreted")
def test_results_of_regions_that_write_have_the_strides_of_eager() -> None:
    def work(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        y.mul_(2)
        h = x.t() * y
        return h, h.t().view(-1) + 1

    x, y = torch.randn(6, 4), torch.randn(6, 4).t()
    gm = partial_lower(make_fx(work, tracing_mode="fake")(x, y), options=LowerOptions(min_aten_ops=1, strict=True))
    got, want = gm(x, y.clone()), work(x, y.clone())
    assert all(map(torch.equal, got, want))
    assert got[0].stride() == want[0].stride() == (1, 4)


@pytest.mark.usefixtures("interpreted")
def test_random_ops_on_transposed_tensors_equal_eagers_in_a_step() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> tuple[Tensor, ...]:
            h = model(x)
            first = nn.functional.dropout(h.t(), 0.5)
            second = torch.rand_like(h.t())
            third = nn.functional.dropout(h.view(2, 2, 5).permute(1, 0, 2), 0.2)
            (first.square().mean() + (second * first).sum() + third.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            return first, second, third

        run = (
            ws.compile(step, lower="inductor", lower_options={"strict": True, "min_aten_ops": 1}) if compiled else step
        )
        torch.manual_seed(1)
        results.append([value.detach() for _ in range(3) for value in run(torch.randn(4, 6))])
    torch.testing.assert_close(results[1], results[0])


def test_a_mutating_operator_on_copies_keeps_its_order_among_random_ops() -> None:
    aten = torch.ops.aten
    nodes = {
        "scaled": (aten.mul.Tensor, "x", 2.0),
        "coins": (call_on_copies, aten.bernoulli_.float, [0], "scaled", 0.5),
        "drawn": (aten.rand_like.default, "x"),
    }
    plan = plan_regions(graph_of(nodes, x=torch.rand(3, 3)).graph, min_aten_ops=1)
    order = [node.target for group in plan.groups for node in group.nodes]
    assert order.index(call_on_copies) < order.index(aten.rand_like.default)
    assert any("writes into its arguments" in reason for reason in plan.reasons.values())


def test_attention_without_dropout_is_not_a_random_op_and_is_compiled():
    def attend(x):
        q, k, v = (part.view(2, 8, 2, 4).transpose(1, 2) for part in (x * 1.5).chunk(3, dim=-1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).exp().sin() + 1

    x = torch.randn(2, 8, 24)
    gm = make_fx(attend, tracing_mode="fake")(x)
    partial_lower(gm, options=LowerOptions(min_aten_ops=1))
    assert not [row for row in ws.lower.explain(gm).outside if "attention" in str(row)]
    torch.testing.assert_close(gm(x), attend(x))
