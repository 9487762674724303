"""A deadlock is reported with the action of each blocked rank and what it waits for; it does not depend on times."""

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
def test_torchs_schedules_complete_on_every_network(name):
    for ranks in (2, 3):
        schedule = named_schedule(name, ranks, 2 * ranks)
        for network in NETWORKS:
            assert simulate(schedule, Times(send=1), network=network).deadlock is None


def test_1f1b_with_blocking_sends_deadlocks_in_a_cycle():
    plain = named_schedule("1F1B", 2, 4).compute_only()
    by_hand = with_communication(plain, "late")
    assert simulate(by_hand).deadlock is None
    stuck = simulate(by_hand, network=Network(blocking_sends=True)).deadlock
    assert str(stuck) == (
        "deadlock: 2 ranks wait in a cycle:\n"
        "  rank 0 is blocked at 0SEND_F1, waiting for 1RECV_F1 of rank 1\n"
        "  rank 1 is blocked at 1SEND_B0, waiting for 0RECV_B0 of rank 0"
    )


def test_sends_before_receives_on_both_ranks_deadlock_on_an_ordered_network():
    lists = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]
    assert simulate(lists).deadlock is None
    stuck = simulate(lists, network=Network("ordered")).deadlock
    assert [(each.rank, str(each.action)) for each in stuck.circle] == [(0, "0B0"), (1, "1F1")]
    assert (
        "rank 0 is blocked at 0B0, waiting for 1RECV_F1 of rank 1, because rank 0 posted 0SEND_F1 before 0RECV_B0"
        in str(stuck)
    )


def test_ranks_that_wait_for_a_cycle_are_listed_separately():
    lists = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1SEND_F1", "1RECV_B1", "1B1",
         "1SEND_B1"],
        ["2RECV_F0", "2F0", "2B0", "2SEND_B0", "2RECV_F1", "2F1", "2B1", "2SEND_B1"],
    ]  # fmt: skip
    stuck = simulate(lists, network=Network(blocking_sends=True)).deadlock
    assert [each.rank for each in stuck.circle] == [0, 1]
    assert "and, waiting for these:\n  rank 2 is blocked at 2F1, waiting for 1SEND_F1 of rank 1" in str(stuck)


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        ([["0B0", "0F0"]], "rank 0 is blocked at 0B0, waiting for 0F0 of itself later in its list"),
        ([["0F0", "0W0", "0I0"]], "rank 0 is blocked at 0W0, waiting for 0I0 of itself later"),
        ([["0SEND_F0", "0F0"], ["1RECV_F0", "1F0"]], "rank 0 is blocked at 0SEND_F0, waiting for 0F0 of itself later"),
        ([["0F0"], ["1RECV_F0", "1F0"]], "rank 1 is blocked at 1F0, waiting for 0SEND_F0, which no rank lists"),
        ([["0F0", "0SEND_F0"], ["1F0"]], "blocked at 1F0, waiting for 1RECV_F0, which rank 1 does not list before it"),
        ([["0F0", "0SEND_F0"], ["1F0", "1RECV_F0"]], "which rank 1 does not list before it (rank 1 lists it too late"),
        ([["0F0", "(0SEND_F0)EXCHANGE"], ["1F0"]], "0SEND_F0)EXCHANGE, waiting for 1RECV_F0, which no rank lists"),
        ([["0F0", "0W0"]], "rank 0 is blocked at 0W0, waiting for 0I0, which rank 0 does not list before it"),
    ],
)  # fmt: skip
def test_a_wait_for_an_action_that_never_runs_names_it(lists, says):
    stuck = simulate(lists).deadlock
    assert stuck is not None
    assert says in str(stuck)


def test_the_timeline_of_a_deadlock_has_the_actions_that_ran():
    timeline = simulate([["0F0", "0B1", "0F1", "0B0"]])
    assert [str(span.action) for span in timeline.spans] == ["0F0"]
    assert timeline.deadlock is not None


@given(st.data())
def test_a_deadlock_does_not_depend_on_times_or_links(data):
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
