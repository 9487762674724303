"""Graphs that write into tensors, and tensors that share memory, on both sides of the boundaries of regions.

`sin` stays outside, so that each function has regions before and after it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import wholestep as ws
from lower.graphs import ANYTHING, assert_runs_as, aten, graph_of, interpreted, lowered, report
from selection import each_now
from wholestep.lower import LowerOptions, partial_lower
from wholestep.lower.partial_lower import read_written_tensors
from wholestep.torch_private.inductor import keeps_order_of_random_ops

__all__ = ["interpreted"]


def written_then_read(x: Tensor, y: Tensor) -> Any:
    a = x.add_(1)
    return a * 2, torch.sin(a) + a, x.mul_(y)


def through_views(x: Tensor, y: Tensor) -> Any:
    v = x.view(-1)
    v.mul_(2)
    z = x + y
    x.add_(torch.sin(v).view(4, 4))
    return v * 1, z, x


def read_before_and_behind(x: Tensor, y: Tensor) -> Any:
    before = x * 2
    part = x[1]
    s = torch.sin(y)
    x.relu_()
    part.add_(s[0])
    return before, x + 1, part * 3


def a_view_outlives_a_write_outside(x: Tensor, y: Tensor) -> Any:
    a = x * 2
    b = a.view(-1)
    a.add_(torch.sin(y))
    return b * 1, a


def parts_of_a_split(x: Tensor, y: Tensor) -> Any:
    a, b = x.split(2)
    c = a * 2
    a.add_(torch.sin(b))
    return x * 1, c, a


def a_local_tensor(x: Tensor, y: Tensor) -> Any:
    z = torch.zeros(4, 4)
    z[0] = x[0]
    z[:, 1].add_(torch.sin(y[0]))
    z[2:].copy_(y[2:])
    return z, z.t()


def swapped(x: Tensor, y: Tensor) -> Any:
    x.copy_(y)
    y.copy_(x + 1)
    return x.sum()


def returned_as_they_are(x: Tensor, y: Tensor) -> Any:
    a = x.t()
    b = a + 1
    return a, x, b, b.t(), b.t().view(2, 8), y.copy_(b * 2)


def running_statistics(x: Tensor, y: Tensor) -> Any:
    out = torch.nn.functional.batch_norm(x, y[0], y[1].abs_(), training=True)
    return out * 2, y[0] * 3


def lists(x: Tensor, y: Tensor) -> Any:
    torch._foreach_add_([x, y], 1.0)
    s = torch.sin(x)
    torch._foreach_mul_([x, y], [s, s])
    return x + y


def given_memory(x: Tensor, y: Tensor) -> Any:
    out = torch.empty(4, 4)
    torch.add(x, y, out=out)
    return out * 2, out, torch.sin(out)


def reshaped_in_place(x: Tensor, y: Tensor) -> Any:
    z = x * 2
    z.t_()
    return z + y, torch.sin(z), z


FUNCTIONS = [
    written_then_read,
    through_views,
    read_before_and_behind,
    a_view_outlives_a_write_outside,
    parts_of_a_split,
    a_local_tensor,
    swapped,
    returned_as_they_are,
    running_statistics,
    lists,
    given_memory,
    reshaped_in_place,
]


def two() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4)


NOW = ("read_before_and_behind", "through_views", "running_statistics", "lists", "given_memory", "swapped")


@pytest.mark.parametrize("function", each_now(FUNCTIONS, *NOW), ids=lambda function: function.__name__)
def test_results_memory_and_inputs_are_those_of_eager(function: Any) -> None:
    gm = lowered(function, *two())
    assert report(gm).regions
    assert_runs_as(function, gm, *two())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_one_region_per_node_gives_the_same_results(function: Any) -> None:
    names: list[str] = []
    gm = lowered(function, *two(), node_predicate=lambda node: bool(names.append(node.name)) or len(names) % 2 == 0)
    assert_runs_as(function, gm, *two())


@pytest.mark.parametrize("same", each_now(["the same tensor", "overlapping views"], "overlapping views"))
def test_aliased_inputs_are_detected_when_one_is_written(same: str) -> None:
    def work(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        y.mul_(2)
        return x + y, x.exp()

    gm = lowered(work, *two())
    assert len(report(gm).regions) == 1
    assert report(gm).regions[0].writes == 2
    assert_runs_as(work, gm, *two())
    base, other = torch.randn(5, 4), torch.empty(5, 4)
    other.copy_(base)
    pairs = [(b[:4], b[:4] if same == "the same tensor" else b[1:]) for b in (base, other)]
    torch.testing.assert_close(gm(*pairs[0]), work(*pairs[1]))
    assert torch.equal(base, other)


@pytest.mark.usefixtures("interpreted")
def test_scalar_inputs_are_the_same_for_a_call_that_runs_operator_by_operator() -> None:
    nodes = {"scaled": (aten.mul.Tensor, "y", "n"), "sum": (aten.add_.Tensor, "x", "scaled")}
    nodes |= {"double": (aten.mul.Tensor, "d", "n"), "late": (aten.mul.Tensor, "y", "k")}
    given = {"x": torch.randn(3), "y": torch.randn(3), "d": torch.randn(3, dtype=torch.float64)}
    gm = partial_lower(graph_of(nodes, **given, n=0.5, k=2.0), options=LowerOptions(min_aten_ops=1, strict=True))
    x, d = torch.randn(3), torch.randn(3, dtype=torch.float64)
    before = x.clone()
    scaled, total, double, late = gm(x, x, d, 0.3, 1 / 3)
    torch.testing.assert_close(scaled, before * 0.3)
    torch.testing.assert_close(total, before + before * 0.3)
    assert torch.equal(double, d * 0.3)
    torch.testing.assert_close(late, (before + before * 0.3) / 3)


@pytest.mark.usefixtures("interpreted")
def test_write_backs_at_the_end_do_not_pass_reads_of_other_inputs() -> None:
    def work(x: Tensor, y: Tensor) -> Any:
        new = x * 2
        s = torch.sin(new)
        later = y + s
        x.copy_(new)
        return later

    gm = lowered(work, *two())
    assert_runs_as(work, gm, *two())
    ours, theirs = torch.ones(4, 4), torch.ones(4, 4)
    torch.testing.assert_close(gm(ours, ours), work(theirs, theirs))
    assert torch.equal(ours, theirs)


def test_readers_of_an_in_place_result_read_the_written_tensor() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    added = graph.call_function(aten.add_.Tensor, (x, 1))
    turned = graph.call_function(aten.t_.default, (added,))
    graph.output((added, turned))
    read_written_tensors(graph)
    assert graph.output_node().args[0] == (x, turned)
    assert turned.args == (x,)


@pytest.mark.usefixtures("interpreted")
def test_random_ops_run_in_the_order_of_eager() -> None:
    def work(x: Tensor) -> Any:
        a = torch.nn.functional.dropout(x, 0.5)
        s = torch.sin(a)
        b = torch.rand_like(x) + torch.randn(4)
        c = torch.nn.functional.dropout(s, 0.1)
        return a, b, c, torch.bernoulli(x.sigmoid()), torch.randperm(4), x.clone().uniform_(), torch.normal(x, 1.0)

    gm = lowered(work, torch.randn(4, 4))
    assert len(report(gm).regions) == (2 if keeps_order_of_random_ops() else 5)
    _assert_same_draws(work, gm)


def test_dropout_masks_of_compiled_code_equal_eagers_on_the_cpu() -> None:
    def work(x: Tensor) -> Any:
        for _ in range(3):
            x = torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)
        return x, torch.randn(3)

    gm = lowered(work, torch.randn(4, 4), **ANYTHING)
    assert len(report(gm).regions) == (1 if keeps_order_of_random_ops() else 7)
    _assert_same_draws(work, gm)


def _assert_same_draws(work: Any, gm: fx.GraphModule) -> None:
    x = torch.randn(4, 4)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected, after = work(x), torch.get_rng_state()
        torch.manual_seed(seed)
        actual = gm(x)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        assert torch.equal(torch.get_rng_state(), after)


def test_a_step_of_ws_compile_does_not_pay_for_checks_of_aliases() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @ws.compile(lower="inductor", lower_options={"min_aten_ops": 1, "strict": True})
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(3):
        step(torch.randn(8, 4))
    executable = step.executable
    regions = [module for name, module in executable.named_children() if name.startswith("subgraph")]
    assert regions
    assert all(region.added == [] and region._assumptions is None for region in regions)
    assert ws.lower.explain(step).regions[-1].writes >= 4
