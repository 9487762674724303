"""Split policies by the size of parameters."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from wholestep.errors import OptionError
from wholestep.pipelining import Pipe, pipeline, split_into_equal_size, split_on_size_threshold
from wholestep.pipelining.build.split_points import places_by_threshold, places_of_equal_size


class Shared(nn.Module):
    """Five operators with parameters of about the same size; two parameters are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.layer = nn.Linear(8, 8)
        self.register_buffer("shift", torch.randn(9, 8))

    def forward(self, x):
        x = torch.mm(x, self.weight) + self.shift[: x.shape[0]]
        skip = x
        x = torch.mm(torch.relu(x), self.weight)
        x = torch.relu(self.layer(x)) + skip
        return self.layer(torch.mm(x, self.other))


@pytest.mark.parametrize("policy", [split_into_equal_size(5), split_on_size_threshold(80)])
@pytest.mark.parametrize("with_example", [True, False])
def test_each_large_operator_becomes_a_stage(policy, with_example):
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(4, 8)
    if with_example:
        pipe = pipeline(model, (x,), split_policy=policy)
        assert torch.equal(pipe(x)[0], model(x))
    else:
        pipe = Pipe.from_tracing(model, split_policy=policy)
        assert torch.equal(pipe(x), model(x))
    assert pipe.num_stages == 5


def test_one_stage_has_no_cut_and_too_many_stages_are_refused():
    x = torch.randn(4, 8)
    assert pipeline(Shared(), (x,), split_policy=split_into_equal_size(1)).num_stages == 1
    with pytest.raises(OptionError, match="5 operators have parameters"):
        pipeline(Shared(), (x,), split_policy=split_into_equal_size(6))
    for wrong in (split_into_equal_size, split_on_size_threshold):
        with pytest.raises(OptionError):
            wrong(0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_the_largest_stage_is_as_small_as_possible(sizes, stages):
    assume(sum(size > 0 for size in sizes) >= stages)
    places = places_of_equal_size(sizes, stages)
    assert len(places) == stages - 1
    assert places == sorted(set(places))

    def largest(cuts):
        ends = [0, *cuts, len(sizes)]
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise(ends))

    best = min(largest(cuts) for cuts in itertools.combinations(range(len(sizes) + 1), stages - 1))
    assert largest(places) == best
    assert all(sum(sizes[a:b]) for a, b in itertools.pairwise([0, *places, len(sizes)]))


def test_a_stage_is_over_the_threshold_only_if_one_operator_is():
    assert places_by_threshold([3, 0, 3, 3, 9, 1], 6) == [3, 4, 5]
