"""Keeping less than torch's cut: which values are made again, that they are the same, and budgets met by it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from remat.steps import Trained
from wholestep.errors import OptionError
from wholestep.lower.cut_budget import CutSearch
from wholestep.lower.options import LowerOptions
from wholestep.lower.remat import Cut
from wholestep.lower.shed import plan, shed, sheddable
from wholestep.torch_private.inductor import keeps_order_of_draws

aten = torch.ops.aten


def forward(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The result, then what is kept: a product, two pointwise values of it, noise, a view."""
    product = x @ w
    gelu = torch.nn.functional.gelu(product)
    half = gelu.to(torch.float64) * 2
    noisy = product + torch.rand_like(product)
    return product.sum(), product, gelu, half, noisy, half.t()


def traced(function: Any, *inputs: Tensor) -> fx.GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()
    return gm


def halves() -> tuple[fx.GraphModule, fx.GraphModule]:
    """A forward and a backward that takes what it keeps, under the same names."""
    first = traced(forward, torch.randn(8, 8), torch.randn(8, 8))
    kept = first.graph.output_node().args[0][1:]
    graph = fx.Graph()
    inputs = []
    for value in dict.fromkeys(kept):
        node = graph.placeholder(value.name)
        node.meta = dict(value.meta)
        inputs.append(node)
    sums = [graph.call_function(aten.sum.default, (node,)) for node in inputs]
    graph.output(tuple(sums))
    return first, fx.GraphModule({}, graph)


def test_only_values_that_are_pointwise_in_kept_ones_are_made_again():
    first, _ = halves()
    recipes = plan(first, 1)
    # The product is the source, noise is drawn once, and the memory of `half` is that of its view too.
    assert [str(recipe.value.target) for recipe in recipes] == ["aten.gelu.default"]
    assert sheddable(first, 1) == (8 * 8 * 4,)


def test_the_backward_makes_the_same_values_from_fewer_inputs():
    first, second = halves()
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    names = [node.name for node in second.graph.find_nodes(op="placeholder")]
    values = dict(zip([v.name for v in first.graph.output_node().args[0]], first(x, w), strict=True))
    expected = second(*(values[name] for name in names))
    assert shed(first, second, 1, 1) == 8 * 8 * 4
    second.graph.lint()
    left = [node.name for node in second.graph.find_nodes(op="placeholder")]
    assert len(left) == len(names) - 1
    kept = [value.name for value in first.graph.output_node().args[0]]
    assert set(left) <= set(kept)
    for want, have in zip(expected, second(*(values[name] for name in left)), strict=True):
        assert torch.equal(want, have)


def test_a_longer_list_begins_with_the_shorter_one():
    def many(x: Tensor) -> tuple[Tensor, ...]:
        rows = [x * i + 1 for i in range(1, 5)]
        chained = torch.relu(rows[0])
        return x.sum(), *rows, chained

    gm = traced(many, torch.randn(16, 16))
    wanted = [16 * 16 * 4 * i for i in range(1, 6)]
    lists = [[recipe.value for recipe in plan(gm, 1, each)] for each in wanted]
    assert [len(each) for each in lists] == [1, 2, 3, 4, 5]
    assert all(lists[i] == lists[4][: i + 1] for i in range(5))
    for recipe in plan(gm, 1):  # all are made of the input in the end
        assert all(source.op == "placeholder" for source in recipe.sources)


def test_the_first_level_that_fits_wins_and_hopeless_ones_are_not_built():
    built = []

    def build(less: int) -> tuple[int, tuple[Cut, ...]]:
        built.append(less)
        return 12800 - less // 2, (Cut({}, (), (100,) * 16),)

    search = CutSearch(build)
    assert search.within(12800).shed == 0
    assert search.within(20000).shed == 0
    assert built == [0]
    assert search.within(11000) is None  # not even if every byte counted
    assert built == [0]
    assert search.within(12750).shed == 100  # half of what is shed counts at the peak
    assert search.within(12450).shed == 700
    assert built == [0, 100, 400, 1600, 600, 700]
    assert search.within(11900) is None
    assert search.within(12750, least=12760) is None
    assert search.can_shed
    assert search.least_built == 12000
    assert CutSearch(lambda less: (100, ())).within(1000) is None


def test_what_is_shed_comes_in_pieces():
    # Levels are 16 apart, and the first piece is 250.
    def build(less: int) -> tuple[int, tuple[Cut, ...]]:
        return 12800 - (0 if not less else 250 if less <= 250 else 256), (Cut({}, (), (250, 6)),)

    search = CutSearch(build)
    peaks = [search.within(most).peak for most in (12800, 12799, 12600, 12550, 12549, 12544)]
    assert peaks == [12800, 12550, 12550, 12550, 12544, 12544]
    assert search.within(12543) is None
    assert search.tried == 3


@given(
    st.lists(st.lists(st.integers(1, 300), max_size=8).map(tuple), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.integers(0, 9),
)
def test_a_larger_budget_never_gets_a_lower_level_or_a_lower_peak(sizes, counts, seed):
    """As long as the peak falls by no more than what is shed."""
    cuts = tuple(Cut({}, (), each) for each in sizes)
    total = sum(map(sum, sizes))
    draw = random.Random(seed)
    falls = [draw.random() <= counts for _ in range(total)]

    def build(less: int) -> tuple[int, tuple[Cut, ...]]:
        return 5000 - sum(falls[: sum(shed_of(each, less) for each in sizes)]), cuts

    found = [CutSearch(build).within(most) for most in range(5000 - total - 20, 5020, 10)]
    first = next(i for i, level in enumerate(found) if level is not None)
    met = [level for level in found[first:] if level is not None]
    assert len(met) == len(found) - first
    levels = [level.shed for level in met]
    assert levels == sorted(levels, reverse=True)
    peaks = [level.peak for level in met]
    assert peaks == sorted(peaks)


def shed_of(sizes: tuple[int, ...], asked: int) -> int:
    before = [sum(sizes[:i]) for i in range(len(sizes))]
    return sum(size for size, total in zip(sizes, before, strict=True) if total < asked)


@pytest.mark.parametrize("wrong", [-1, 0.5, "1GiB", True])
def test_bytes_to_shed_are_a_number(wrong: Any) -> None:
    with pytest.raises(OptionError, match="shed"):
        LowerOptions(shed=wrong)


def test_shedding_goes_further_than_remat_and_needs_it() -> None:
    with pytest.raises(OptionError, match="remat=False"):
        LowerOptions(shed=1, remat=False)
    assert not LowerOptions(remat=False).shed


@pytest.mark.skipif(
    not keeps_order_of_draws(), reason="this torch has dropout outside of regions, so there is no one cut"
)
def test_a_budget_near_the_usual_peak_is_met_by_the_usual_cut():
    eager = Trained(eager=True, steps=3)
    usual = Trained(memory_budget="1GiB", lower="inductor", steps=3)
    assert usual.memory.shed == 0
    assert usual.memory.saved
    assert usual.memory.measured_peak == usual.memory.planned_peak
    budget = int(0.97 * usual.memory.planned_peak)
    less = Trained(memory_budget=budget, lower="inductor", steps=3)
    assert less.memory.shed
    assert less.memory.planned_peak <= budget
    for memory in (usual.memory, less.memory):  # estimates do not contradict what was built
        assert memory.smallest_peak <= memory.planned_peak <= memory.peak_without
    assert abs(less.memory.measured_peak - less.memory.planned_peak) <= 0.02 * budget
    assert less.memory.saved_bytes < usual.memory.saved_bytes
    torch.testing.assert_close(torch.stack(less.losses), torch.stack(eager.losses))
    for name, value in eager.model.state_dict().items():
        torch.testing.assert_close(less.model.state_dict()[name], value, atol=1e-4, rtol=1e-4)
