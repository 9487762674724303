"""The search for a plan: a larger budget never gets a lower peak, whatever the plans really need."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat.test_cut import graphs, make_graph
from wholestep.errors import MemoryBudgetError
from wholestep.remat.budget import Budget
from wholestep.remat.fit import Effort, Fitting
from wholestep.remat.outline import Outline
from wholestep.remat.plans import Candidate, Plans

FRACTIONS = [i / 20 for i in range(21)]


def really(seed: int, error: float):
    """What a plan needs: its estimate, wrong by up to `error`."""

    def peak(candidate: Candidate) -> int:
        draw = random.Random(f"{seed} {sorted(candidate.plan)}").uniform(1 - error, 1 + error)
        return round(candidate.peak * draw)

    return peak


@given(graphs(), st.integers(0, 9), st.sampled_from([0.0, 0.01, 0.3]), st.sampled_from([0.95, 0.99]))
def test_peaks_grow_with_the_budget_even_if_estimates_are_wrong(graph, seed, error, near):
    plans = Plans(Outline.of(graph))
    effort = Effort(levels=4, smallest=2, near=near)
    found = [Fitting(plans, really(seed, error), effort).fit(Budget(fraction=f)) for f in FRACTIONS]
    peaks = [fitted.peak for fitted, _ in found]
    assert peaks == sorted(peaks)
    assert all(fitted.peak <= most for fitted, most in found)
    costs = [fitted.candidate.cost for fitted, _ in found]
    assert costs == sorted(costs, reverse=True)
    in_bytes = [Fitting(plans, really(seed, error), effort).fit(Budget(most=most))[0].peak for _, most in found]
    assert in_bytes == peaks


@given(graphs(), st.integers(0, 9), st.sampled_from([0.0, 0.005, 0.3]), st.sampled_from([None, 10**9]))
def test_so_do_those_of_steps_that_are_slow_to_build(graph, seed, error, least_cut):
    plans = Plans(Outline.of(graph))
    effort = Effort(levels=4, is_slow=True)
    most = [round(plans.front[-1].peak * i / 60) for i in range(20, 80)]
    found = []
    for each in most:
        with contextlib.suppress(MemoryBudgetError):
            found.append((Fitting(plans, really(seed, error), effort).fit(Budget(most=each), least_cut)[0], each))
    assert found
    assert len(found) == 60 - min(i for i, each in enumerate(most) if each == found[0][1])  # refused are the smallest
    assert all(fitted.peak <= each for fitted, each in found)
    peaks = [fitted.peak for fitted, _ in found]
    assert peaks == sorted(peaks)
    costs = [fitted.candidate.cost for fitted, _ in found]
    assert costs == sorted(costs, reverse=True)


@given(graphs(), st.integers(0, 9))
def test_a_step_that_is_slow_to_build_is_built_a_few_times(graph, seed):
    plans = Plans(Outline.of(graph))
    effort = Effort(levels=4, is_slow=True)
    for fraction in (0.0, 0.3, 1.0):
        fitting = Fitting(plans, really(seed, 0.1), effort)
        fitting.fit(Budget(fraction=fraction))
        assert fitting.tried <= 6
    wide = Fitting(plans, really(seed, 0.1), effort)
    wide.fit(Budget(most=10**9))
    assert wide.tried == 1


def test_nothing_fits_into_less_than_the_smallest():
    graph = make_graph([100, 100, 1] * 3, [(i, i) for i in range(9)], [True] * 9)
    plans = Plans(Outline.of(graph, device=torch.device("meta")))
    least = Fitting(plans, really(0, 0.0), Effort(levels=4)).smallest().peak
    assert Fitting(plans, really(0, 0.0), Effort(levels=4)).fit(Budget(most=least))[0].peak == least
    with pytest.raises(MemoryBudgetError, match=str(least)):
        Fitting(plans, really(0, 0.0), Effort(levels=4)).fit(Budget(most=least - 1))
