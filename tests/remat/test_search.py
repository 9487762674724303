"""The search for a candidate: a larger budget never gets a lower peak, however wrong the estimates are."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat.test_minimum_cut import graphs, make_graph
from wholestep.errors import MemoryBudgetError
from wholestep.remat.measure import Measured
from wholestep.remat.options import Budget
from wholestep.remat.pointwise_recompute import RegionCut
from wholestep.remat.problem import RematProblem
from wholestep.remat.search import Candidate, CutSearch, Effort, ParetoFront, PlanSearch

FRACTIONS = [i / 20 for i in range(21)]


def measured(seed: int, error: float):
    """A measure whose peaks are the estimates, wrong by up to `error`."""

    def build(candidate: Candidate) -> Measured[None]:
        factor = random.Random(f"{seed} {sorted(candidate.plan)}").uniform(1 - error, 1 + error)
        return Measured(round(candidate.peak * factor))

    return build


@given(graphs(), st.integers(0, 9), st.sampled_from([0.0, 0.01, 0.3]), st.sampled_from([0.95, 0.99]))
def test_peaks_grow_with_the_budget_even_if_estimates_are_wrong(graph, seed, error, near):
    front = ParetoFront(RematProblem.of(graph))
    effort = Effort(levels=4, smallest=2, near=near)
    found = [PlanSearch(front, measured(seed, error), effort).fit(Budget(fraction=f)) for f in FRACTIONS]
    peaks = [trial.peak for trial, _ in found]
    assert peaks == sorted(peaks)
    assert all(trial.peak <= most for trial, most in found)
    costs = [trial.candidate.cost for trial, _ in found]
    assert costs == sorted(costs, reverse=True)
    in_bytes = [PlanSearch(front, measured(seed, error), effort).fit(Budget(most=most))[0].peak for _, most in found]
    assert in_bytes == peaks


@given(graphs(), st.integers(0, 9), st.sampled_from([0.0, 0.005, 0.3]), st.sampled_from([None, 10**9]))
def test_peaks_grow_with_the_budget_for_steps_that_are_slow_to_build(graph, seed, error, least_cut):
    front = ParetoFront(RematProblem.of(graph))
    effort = Effort(levels=4, is_slow=True)
    most = [round(front.candidates[-1].peak * i / 60) for i in range(20, 80)]
    found = []
    for each in most:
        with contextlib.suppress(MemoryBudgetError):
            found.append((PlanSearch(front, measured(seed, error), effort).fit(Budget(most=each), least_cut)[0], each))
    assert found
    assert len(found) == 60 - min(i for i, each in enumerate(most) if each == found[0][1])  # refused are the smallest
    assert all(trial.peak <= each for trial, each in found)
    peaks = [trial.peak for trial, _ in found]
    assert peaks == sorted(peaks)
    costs = [trial.candidate.cost for trial, _ in found]
    assert costs == sorted(costs, reverse=True)


@given(graphs(), st.integers(0, 9))
def test_a_step_that_is_slow_to_build_is_built_a_few_times(graph, seed):
    front = ParetoFront(RematProblem.of(graph))
    effort = Effort(levels=4, is_slow=True)
    for fraction in (0.0, 0.3, 1.0):
        search = PlanSearch(front, measured(seed, 0.1), effort)
        search.fit(Budget(fraction=fraction))
        assert search.tried <= 6
    wide = PlanSearch(front, measured(seed, 0.1), effort)
    wide.fit(Budget(most=10**9))
    assert wide.tried == 1


def test_nothing_fits_into_less_than_the_smallest():
    graph = make_graph([100, 100, 1] * 3, [(i, i) for i in range(9)], [True] * 9)
    front = ParetoFront(RematProblem.of(graph, device=torch.device("meta")))
    least = PlanSearch(front, measured(0, 0.0), Effort(levels=4)).smallest().peak
    assert PlanSearch(front, measured(0, 0.0), Effort(levels=4)).fit(Budget(most=least))[0].peak == least
    with pytest.raises(MemoryBudgetError, match=str(least)):
        PlanSearch(front, measured(0, 0.0), Effort(levels=4)).fit(Budget(most=least - 1))


def test_the_first_cut_that_fits_wins_and_hopeless_ones_are_not_built():
    built = []

    def build(candidate: Candidate) -> Measured[None]:
        built.append(candidate.shed)
        return Measured(12800 - candidate.shed // 2, cuts=(RegionCut({}, (), (100,) * 16),))

    search = CutSearch(build)
    assert search.within(12800).candidate.shed == 0
    assert search.within(20000).candidate.shed == 0
    assert built == [0]
    assert search.within(11000) is None  # not even if every byte counted
    assert built == [0]
    assert search.within(12750).candidate.shed == 100  # half of what is shed counts at the peak
    assert search.within(12450).candidate.shed == 700
    assert built == [0, 100, 400, 1600, 600, 700]
    assert search.within(11900) is None
    assert search.within(12750, least=12760) is None
    assert search.has_cuts
    assert search.least_built == 12000
    assert CutSearch(lambda candidate: Measured(100)).within(1000) is None


def test_values_are_shed_one_by_one():
    # Steps are 16 apart, and the first value has 250 bytes.
    def build(candidate: Candidate) -> Measured[None]:
        less = 0 if not candidate.shed else 250 if candidate.shed <= 250 else 256
        return Measured(12800 - less, cuts=(RegionCut({}, (), (250, 6)),))

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
def test_a_larger_budget_never_sheds_more_or_gets_a_lower_peak(sizes, counts, seed):
    """As long as the peak falls by no more than what is shed."""
    cuts = tuple(RegionCut({}, (), each) for each in sizes)
    total = sum(map(sum, sizes))
    draw = random.Random(seed)
    falls = [draw.random() <= counts for _ in range(total)]

    def build(candidate: Candidate) -> Measured[None]:
        return Measured(5000 - sum(falls[: sum(shed_of(each, candidate.shed) for each in sizes)]), cuts=cuts)

    found = [CutSearch(build).within(most) for most in range(5000 - total - 20, 5020, 10)]
    first = next(i for i, trial in enumerate(found) if trial is not None)
    met = [trial for trial in found[first:] if trial is not None]
    assert len(met) == len(found) - first
    shed = [trial.candidate.shed for trial in met]
    assert shed == sorted(shed, reverse=True)
    peaks = [trial.peak for trial in met]
    assert peaks == sorted(peaks)


def shed_of(sizes: tuple[int, ...], asked: int) -> int:
    before = [sum(sizes[:i]) for i in range(len(sizes))]
    return sum(size for size, total in zip(sizes, before, strict=True) if total < asked)
