"""The simulator gives what is known on paper, exactly, wherever the form is exact; and says where a form is not.

p ranks, m microbatches, v stages per rank; F, I, W and B = I + W are times of one stage. A form for a whole rank of v
stages is v times smaller or larger; here everything is counted in stages.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from wholestep.simulate import pipeline
from wholestep.simulate.pipeline import Times, simulate

SIZES = [(p, m) for p in (1, 2, 3, 4, 7) for m in (p, p + 1, 2 * p, 3 * p + 1)]
LENGTHS = [(1, 1, 1), (3, 4, 2), (2, 5, 1), (Fraction(1, 3), Fraction(2, 7), Fraction(1, 5)), (2, 3, 4)]
MULTIPLES = [(p, m) for p in (2, 3, 4, 5) for m in (2 * p, 3 * p, 5 * p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe(p, m):
    for F, I, W in LENGTHS:  # noqa: E741
        timeline = simulate("GPipe", Times(F=F, I=I, W=W), ranks=p, microbatches=m)
        assert timeline.makespan == (m + p - 1) * (F + I + W)
        assert timeline.bubble == ((p - 1) * (F + I + W),) * p
        assert timeline.peak_activations == (m,) * p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_one_forward_one_backward(p, m):
    for F, I, W in LENGTHS:  # noqa: E741
        timeline = simulate("1F1B", Times(F=F, I=I, W=W), ranks=p, microbatches=m)
        assert timeline.makespan == (m + p - 1) * (F + I + W)
        assert timeline.bubble == ((p - 1) * (F + I + W),) * p
        assert timeline.peak_activations == tuple(p - r for r in range(p))


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), MULTIPLES)
def test_interleaved(p, m, v):
    timeline = simulate("Interleaved1F1B", Times(F=3, B=5), ranks=p, microbatches=m, stages_per_rank=v)
    assert timeline.bubble == ((p - 1) * (3 + 5),) * p  # 1F1B of stages v times as long has v times this bubble
    assert timeline.peak_activations[0] == p * v + p - 1  # of stages: v of them are one of a whole rank
    assert timeline.makespan == m * v * (3 + 5) + timeline.bubble[0]


def test_the_peak_of_interleaved_is_higher_where_ranks_do_not_divide_microbatches():
    timeline = simulate("Interleaved1F1B", ranks=4, microbatches=10, stages_per_rank=2)
    assert timeline.peak_activations[0] == 12 > 4 * 2 + 4 - 1
    assert timeline.bubble == (3 * 3,) * 4  # the bubble is as in the form


@pytest.mark.parametrize("v", [1, 2])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 6), (3, 6), (5, 10)])
def test_zero_bubble_h1(p, m, v):
    for F, I, W in product((1, 2), (1, 3), (1, 2, 4)):  # noqa: E741
        timeline = simulate("InterleavedZeroBubble", Times(F=F, I=I, W=W), ranks=p, microbatches=m, stages_per_rank=v)
        form = (p - 1) * (F + I - W)
        if min(F, I) >= W:
            assert timeline.bubble == (form,) * p
        else:
            assert min(timeline.bubble) > form  # on paper W fills a gap that is too short for it
        assert max(timeline.peak_activations) == p * v


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_zbv_never_waits_between_its_first_and_last_action(p):
    for m in (2 * p - 1, 2 * p, 3 * p + 1, 4 * p):
        timeline = simulate("ZBVZeroBubble", Times(F=7), ranks=p, microbatches=m)
        assert timeline.stall == (0,) * p
        assert timeline.bubble == ((p - 1) * 7,) * p  # ranks begin one after the other
        assert timeline.peak_activations == (2 * p,) * p
    assert max(simulate("ZBVZeroBubble", ranks=p, microbatches=p).stall) > 0  # too few microbatches to fill it


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_dual_pipe_v(p):
    """In the form p is the number of stages, twice that of ranks. It is exact for F = I and F&B = F + B."""
    for m, (F, W) in product((2 * p, 3 * p), ((1, 1), (3, 2), (5, 5))):
        timeline = simulate("DualPipeV", Times(F=F, I=F, W=W, overlap=F + F + W), ranks=p, microbatches=m)
        assert timeline.bubble == ((p - 1) * ((F + F + W) + (F + W) - 3 * W),) * p
        assert timeline.peak_activations == (2 * p + 1,) * p


def test_the_form_of_dual_pipe_v_is_approximate_otherwise():
    timeline = simulate("DualPipeV", Times(F=3, I=4, W=2, overlap=9), ranks=4, microbatches=8)
    assert timeline.bubble == (24,) * 4
    assert (4 - 1) * (9 + 6 - 3 * 2) == 27


@pytest.mark.parametrize("name", pipeline.NAMES)
def test_transfers_that_take_no_time_change_nothing_and_those_that_do_never_help(name):
    alone = simulate(name, Times(F=2, B=4), ranks=4, microbatches=8)
    slow = simulate(name, Times(F=2, B=4, send=1), ranks=4, microbatches=8)
    blocking = pipeline.Network(blocking_sends=True)
    standing = simulate(name, Times(F=2, B=4, send=1), ranks=4, microbatches=8, network=blocking)
    assert alone.makespan < slow.makespan <= standing.makespan
    assert alone.deadlock is slow.deadlock is standing.deadlock is None
