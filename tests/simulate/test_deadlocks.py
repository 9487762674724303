"""A schedule that gets stuck says where each rank stands and what it waits for; whether it does is not up to times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholestep.simulate import pipeline
from wholestep.simulate.pipeline import Network, Schedule, Times, named_schedule, simulate, with_communication

NETWORKS = [
    Network(matching, sharing, blocking)
    for matching in ("buffered", "rendezvous", "ordered")
    for sharing in ("nothing", "link", "wire", "port")
    for blocking in (False, True)
]


@pytest.mark.parametrize("name", pipeline.NAMES)
def test_torchs_schedules_end_on_every_network(name):
    for ranks in (2, 3):
        schedule = named_schedule(name, ranks, 2 * ranks)
        for network in NETWORKS:
            assert simulate(schedule, Times(send=1), network=network).deadlock is None


def test_one_forward_one_backward_with_blocking_sends_and_receives_in_turn_gets_stuck_in_a_circle():
    plain = named_schedule("1F1B", 2, 4).compute_only()
    by_hand = with_communication(plain, "late")
    assert simulate(by_hand).deadlock is None
    stuck = simulate(by_hand, network=Network(blocking_sends=True)).deadlock
    assert str(stuck) == (
        "2 ranks wait for ever, in a circle:\n"
        "  rank 0 stands at 0SEND_F1 and waits for 1RECV_F1 of rank 1\n"
        "  rank 1 stands at 1SEND_B0 and waits for 0RECV_B0 of rank 0"
    )


def test_on_an_ordered_network_sends_before_receives_on_both_sides_get_stuck():
    lists = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]
    assert simulate(lists).deadlock is None
    stuck = simulate(lists, network=Network("ordered")).deadlock
    assert [(each.rank, str(each.action)) for each in stuck.circle] == [(0, "0B0"), (1, "1F1")]
    assert "rank 0 stands at 0B0 and waits for 1RECV_F1 of rank 1, since rank 0 began 0SEND_F1 before 0RECV_B0" in str(
        stuck
    )


def test_who_waits_behind_a_circle_is_told_apart():
    lists = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1SEND_F1", "1RECV_B1", "1B1",
         "1SEND_B1"],
        ["2RECV_F0", "2F0", "2B0", "2SEND_B0", "2RECV_F1", "2F1", "2B1", "2SEND_B1"],
    ]  # fmt: skip
    stuck = simulate(lists, network=Network(blocking_sends=True)).deadlock
    assert [each.rank for each in stuck.circle] == [0, 1]
    assert "and behind them:\n  rank 2 stands at 2F1 and waits for 1SEND_F1 of rank 1" in str(stuck)


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        ([["0B0", "0F0"]], "rank 0 stands at 0B0 and waits for 0F0 of itself later in its list"),
        ([["0F0", "0W0", "0I0"]], "rank 0 stands at 0W0 and waits for 0I0 of itself later"),
        ([["0SEND_F0", "0F0"], ["1RECV_F0", "1F0"]], "rank 0 stands at 0SEND_F0 and waits for 0F0 of itself later"),
        ([["0F0"], ["1RECV_F0", "1F0"]], "rank 1 stands at 1F0 and waits for 0SEND_F0, which no rank has in its list"),
        ([["0F0", "0SEND_F0"], ["1F0"]], "rank 1 stands at 1F0 and waits for 1RECV_F0, which rank 1 has not before it"),
        ([["0F0", "0SEND_F0"], ["1F0", "1RECV_F0"]], "1RECV_F0, which rank 1 has not before it (rank 1 has it too"),
        ([["0F0", "(0SEND_F0)EXCHANGE"], ["1F0"]], "0SEND_F0)EXCHANGE and waits for 1RECV_F0, which no rank has"),
        ([["0F0", "0W0"]], "rank 0 stands at 0W0 and waits for 0I0, which rank 0 has not before it"),
    ],
)  # fmt: skip
def test_a_wait_for_what_never_comes_is_named(lists, says):
    stuck = simulate(lists).deadlock
    assert stuck is not None
    assert says in str(stuck)


def test_what_happened_before_a_deadlock_is_in_the_timeline():
    timeline = simulate([["0F0", "0B1", "0F1", "0B0"]])
    assert [str(span.action) for span in timeline.spans] == ["0F0"]
    assert timeline.deadlock is not None


@given(st.data())
def test_whether_a_schedule_ends_does_not_depend_on_times_or_links(data):
    ranks = data.draw(st.integers(2, 3))
    receives = data.draw(st.sampled_from(["late", "torch"]))
    base = with_communication(named_schedule("1F1B", ranks, 3).compute_only(), receives)
    lists = []
    for actions in base.ranks:
        swapped = list(actions)
        for at in data.draw(st.lists(st.integers(0, len(actions) - 2), max_size=3)):
            swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
        lists.append(swapped)
    schedule = Schedule.of(lists)
    matching, blocking = data.draw(st.sampled_from(["buffered", "rendezvous", "ordered"])), data.draw(st.booleans())
    numbers = st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=ranks, max_size=ranks)
    found = set()
    for sharing in ("nothing", "wire", "port"):
        times = Times(F=data.draw(numbers), B=data.draw(numbers), send=data.draw(numbers))
        deadlock = simulate(schedule, times, network=Network(matching, sharing, blocking)).deadlock
        found.add(None if deadlock is None else tuple((each.rank, each.action) for each in deadlock.blocked))
    assert len(found) == 1
