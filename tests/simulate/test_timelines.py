"""Start and end of every action: against a longest-path reference, and by hand where networks differ."""

from __future__ import annotations

from fractions import Fraction
from graphlib import TopologicalSorter
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wholestep.errors import OptionError
from wholestep.simulate import pipeline
from wholestep.simulate.pipeline import Network, Times, named_schedule, simulate
from wholestep.simulate.schedule import Action, ActionKind

ONE_WAY = [["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1RECV_F1", "1F0", "1F1"]]


def ends_of_longest_paths(schedule: pipeline.Schedule, length, travel) -> dict[Action, int]:
    """When each computation ends if transfers need nothing but their time."""
    edges: dict[Action, dict[Action, int]] = {}
    lists = [[leaf for action in rank for leaf in action.leaves()] for rank in schedule.compute_only().ranks]
    there = {action for actions in lists for action in actions}
    for actions in lists:
        for before, action in pairwise([None, *actions]):
            edges[action] = {} if before is None else {before: 0}
            forward = action.kind is ActionKind.F
            stage = action.stage + (-1 if forward else 1)
            if action.kind is not ActionKind.W and 0 <= stage < schedule.stages:
                far = schedule.rank_of[stage] != schedule.rank_of[action.stage]
                kinds = (ActionKind.F,) if forward else (ActionKind.B, ActionKind.I)
                made = next(each for kind in kinds if (each := Action(stage, kind, action.microbatch)) in there)
                edges[action][made] = travel(stage, action.microbatch) if far else 0
    end: dict[Action, int] = {}
    for action in TopologicalSorter(edges).static_order():
        ready = max((end[before] + delay for before, delay in edges[action].items()), default=0)
        end[action] = ready + length(action)
    return end


@given(st.sampled_from(pipeline.NAMES[2:-1]), st.integers(2, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_without_contention_every_action_ends_when_the_longest_path_to_it_does(name, ranks, rounds, random):
    schedule = named_schedule(name, ranks, 2 * ranks * rounds)
    size = range(schedule.stages), range(schedule.microbatches)
    table = {kind: [[random.randint(0, 9) for _ in size[1]] for _ in size[0]] for kind in "FIWs"}
    times = Times(F=table["F"], I=table["I"], W=table["W"], send=table["s"])

    def length(action: Action) -> int:
        kinds = "IW" if action.kind is ActionKind.B else action.kind.value
        return sum(table[kind][action.stage][action.microbatch] for kind in kinds)

    expected = ends_of_longest_paths(schedule, length, lambda stage, microbatch: table["s"][stage][microbatch])
    timeline = simulate(schedule, times, network=Network("buffered", "nothing"))
    assert {
        span.action: span.end for span in timeline.spans if span.action.kind is not ActionKind.REDUCE_GRAD
    } == expected


def shown(lists, times: Times, network: Network) -> dict[str, tuple[int, int]]:
    timeline = simulate(lists, times, network=network)
    assert timeline.deadlock is None
    return {str(span.action): (span.start, span.end) for span in (*timeline.spans, *timeline.transfers)}


def test_a_link_carries_one_value_at_a_time():
    times = Times(F=1, send=3)
    free = shown(ONE_WAY, times, Network(sharing="nothing"))
    assert (free["0SEND_F0"], free["0SEND_F1"], free["1F1"]) == ((1, 4), (2, 5), (5, 6))
    link = shown(ONE_WAY, times, Network(sharing="link"))
    assert (link["0SEND_F0"], link["0SEND_F1"], link["1F1"]) == ((1, 4), (4, 7), (7, 8))


def test_both_directions_share_a_wire_but_not_a_link():
    lists = [
        ["0F0", "0SEND_F0", "0RECV_B0", "0F1", "0SEND_F1", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1RECV_F1", "1F0", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1"],
    ]
    times = Times(F=[[1, 5], [1, 1]], B=1, send=3)
    link, wire = (shown(lists, times, Network(sharing=sharing)) for sharing in ("link", "wire"))
    assert (link["1SEND_B0"], link["0SEND_F1"]) == ((6, 9), (6, 9))
    assert sorted((wire["1SEND_B0"], wire["0SEND_F1"])) == [(6, 9), (9, 12)]


def test_all_transfers_of_a_rank_share_its_port():
    lists = [
        ["0F0", "0SEND_F0"],
        ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0"],
        ["2RECV_F0", "2F0", "2B0", "2SEND_B0"],
    ]
    late = [["0F0", "0SEND_F0", "0F1", "0SEND_F1"], [*lists[1][:4], "1RECV_F1", "1B0", "1F1"], lists[2]]
    times = Times(F=[[1, 5], 1, 1], B=1, send=2)  # 1B0's gradient comes from rank 2, 1F1's input from rank 0
    link, port = (shown(late, times, Network(sharing=sharing)) for sharing in ("link", "port"))
    assert (link["0SEND_F1"], link["2SEND_B0"]) == ((6, 8), (8, 10))
    assert (port["0SEND_F1"], port["2SEND_B0"]) == ((6, 8), (8, 10))
    slow = Times(F=[[1, 6], 1, 1], B=1, send=2)
    link, port = (shown(late, slow, Network(sharing=sharing)) for sharing in ("link", "port"))
    assert (link["0SEND_F1"], link["2SEND_B0"]) == ((7, 9), (8, 10))
    assert (port["0SEND_F1"], port["2SEND_B0"]) == ((7, 9), (9, 11))


def test_a_transfer_waits_for_its_receive_unless_it_is_buffered():
    lists = [["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1F0", "1RECV_F1", "1F1"]]
    times = Times(F=[[1, 1], [9, 1]], send=2)
    assert shown(lists, times, Network("buffered"))["0SEND_F1"] == (3, 5)
    assert shown(lists, times, Network("rendezvous"))["0SEND_F1"] == (12, 14)


def test_on_an_ordered_network_a_transfer_waits_for_those_posted_before_it():
    lists = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0"],
        ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0"],
    ]
    times = Times(F=[[1, 6], [1, 1]], B=1, send=1)
    loose, ordered = (shown(lists, times, Network(matching)) for matching in ("rendezvous", "ordered"))
    assert (loose["1SEND_B0"], ordered["1SEND_B0"]) == ((7, 8), (8, 9))


def test_a_blocking_send_blocks_its_rank():
    free, held = (shown(ONE_WAY, Times(F=1, send=3), Network(blocking_sends=blocking)) for blocking in (False, True))
    assert (free["0F1"], held["0F1"]) == ((1, 2), (4, 5))


def test_an_exchange_starts_all_transfers_and_ends_with_the_last():
    lists = [["0F0", "(0SEND_F0;0RECV_B0)EXCHANGE", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]
    found = shown(lists, Times(F=1, B=2, send=1), Network(blocking_sends=True))
    assert (found["0SEND_F0"], found["1SEND_B0"], found["0B0"]) == ((1, 2), (5, 6), (6, 8))


def test_an_overlap_takes_the_given_time_or_the_sum_of_its_parts():
    lists = [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]]
    assert simulate(lists, Times(F=2, B=3)).makespan == 2 + 5 + 3
    together = simulate(lists, Times(F=2, B=3, overlap=4))
    assert together.makespan == 2 + 4 + 3
    assert together.span("(0F1;0B0)OVERLAP_F_B").length == 4


def test_unsharding_overlaps_computation_and_reducing_does_not():
    lists = [["0UNSHARD", "1UNSHARD", "0F0", "1F0", "1B0", "1REDUCE_GRAD", "0B0"]]
    found = shown(lists, Times(F=2, B=2, unshard=3, reduce=5), Network())
    assert (found["0F0"], found["1F0"], found["1REDUCE_GRAD"], found["0B0"]) == ((3, 5), (6, 8), (10, 15), (15, 17))
    assert simulate(lists, Times(F=2, B=2, unshard=3, reduce=5)).makespan == 17  # the first unshard is part of it


@pytest.mark.parametrize("sharing", ["wire", "port"])
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_no_two_transfers_hold_an_exclusive_resource_at_once(name, sharing):
    for matching, blocking in product(("rendezvous", "ordered"), (False, True)):
        assert_alone(name, Network(matching, sharing, blocking))


def assert_alone(name, network):
    times = Times(F=lambda stage, microbatch: 2 + stage % 2, B=3, send=lambda stage, microbatch: 1 + microbatch % 3)
    timeline = simulate(name, times, ranks=4, microbatches=8, network=network)
    lanes: dict[object, list[pipeline.Span]] = {}
    for span in timeline.spans:
        lanes.setdefault(span.rank, []).append(span)
    for span in timeline.transfers:
        for resource in network.resources(span.rank, span.to):
            lanes.setdefault(resource, []).append(span)
    for lane in lanes.values():
        lane.sort(key=lambda span: (span.start, span.end))
        assert all(first.end <= second.start for first, second in pairwise(lane))


def test_results_have_the_type_of_the_given_numbers_and_do_not_drift():
    assert type(simulate("1F1B", Times(F=1, B=2), ranks=2, microbatches=4).makespan) is int
    third = simulate("1F1B", Times(F=Fraction(1, 3), B=Fraction(1, 7)), ranks=3, microbatches=100).makespan
    assert third == 102 * (Fraction(1, 3) + Fraction(1, 7))
    floats = simulate("1F1B", Times(F=0.1, B=0.2), ranks=3, microbatches=998).makespan
    assert floats == float(1000 * (Fraction(0.1) + Fraction(0.2)))
    assert sum([0.1, 0.2] * 1000) != floats  # what adding one after the other would give


def test_numpy_and_torch_numbers_and_tables_are_accepted():
    expected = simulate("GPipe", Times(F=[1.0, 2.0], B=3, send=0.5), ranks=2, microbatches=2).makespan
    numbers = Times(F=np.array([1, 2], np.float32), B=np.int64(3), send=np.float32(0.5))
    assert simulate("GPipe", numbers, ranks=2, microbatches=2).makespan == expected
    tensors = Times(F=torch.tensor([[1, 1], [2, 2]]), B=torch.tensor(3), send=Fraction(1, 2))
    assert simulate("GPipe", tensors, ranks=2, microbatches=2).makespan == expected
    assert simulate([["0F0", "0B0"]], Times(F=np.int64(2**62), B=np.int64(2**62))).makespan == 2**63


def test_missing_backward_times_are_derived_from_the_given_ones():
    def lengths(times: Times) -> list[int]:
        return [simulate([["0F0", "0I0", "0W0"]], times).span(f"0{kind}0").length for kind in "FIW"]

    assert lengths(Times(F=3)) == [3, 3, 3]
    assert lengths(Times(F=3, B=5)) == [3, Fraction(5, 2), Fraction(5, 2)]
    assert lengths(Times(F=3, B=5, I=1)) == [3, 1, 4]
    assert lengths(Times(F=3, B=5, W=1)) == [3, 4, 1]
    assert simulate([["0F0", "0B0"]], Times(F=3, I=2, W=9)).span("0B0").length == 11


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "soon"])
def test_an_invalid_time_is_refused(wrong):
    with pytest.raises(OptionError, match="not a time"):
        simulate("GPipe", Times(F=lambda stage, microbatch: wrong), ranks=2, microbatches=2)


def test_a_table_with_too_few_rows_is_refused():
    with pytest.raises(OptionError, match="no entry for stage 1"):
        simulate("GPipe", Times(F=[1]), ranks=2, microbatches=2)


def test_a_printed_timeline_has_a_row_per_rank():
    timeline = simulate("1F1B", Times(F=1, B=2), ranks=2, microbatches=4, bytes=pipeline.Bytes(activation=10))
    assert str(timeline).splitlines() == [
        "1F1B: makespan 15, bubble 20.0%",
        "rank  busy  bubble  stall  activations  bytes",
        "   0    12       3      3            2     20",
        "   1    12       3      0            1     10",
    ]


def test_an_unknown_network_is_refused():
    with pytest.raises(OptionError, match="matching='telepathy'"):
        Network("telepathy")  # type: ignore[arg-type]
