"""Contradicting orders of collectives are found; orders that agree never are."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.collectives import Build
from wholestep.errors import OptionError
from wholestep.simulate import Issue, deadlock, issues_of

Orders = dict[int, list[Issue]]


def legal(seed: int) -> Orders:
    """Orders of all ranks that are parts of one order; groups overlap in any way."""
    choose = random.Random(seed)
    ranks = choose.randint(2, 8)
    groups = [g for size in range(2, ranks + 1) for g in combinations(range(ranks), size)]
    groups = choose.sample(groups, min(len(groups), choose.randint(1, 6)))
    whole = [Issue(choose.choice(groups), choose.choice(("all_reduce", "all_gather"))) for _ in range(12)]
    return {rank: [issue for issue in whole if rank in issue.ranks] for rank in range(ranks)}


def cyclic(seed: int) -> Orders:
    """Ranks in a ring: each issues the collective with its left before that with its right neighbour, somewhere between
    collectives of all ranks; the one with the ring's last rank comes the other way round."""
    choose = random.Random(seed)
    ranks = choose.randint(2, 8)
    everybody = tuple(range(ranks))
    if ranks == 2:
        one, other = Issue((0, 1), "a"), Issue((1, 0), "b")
        return {0: [one, other], 1: [other, one]}
    pair = [Issue(tuple(sorted((r, (r + 1) % ranks))), "all_reduce") for r in range(ranks)]
    before = [Issue(everybody, "all_gather")] * choose.randint(0, 3)
    return {r: [*before, pair[r], pair[r - 1]] for r in range(ranks)}


def test_ten_thousand_legal_orders_are_all_accepted() -> None:
    assert [seed for seed in range(10_000) if deadlock(legal(seed)) is not None] == []


def test_orders_with_a_cycle_are_all_rejected() -> None:
    for seed in range(500):
        found = deadlock(cyclic(seed))
        assert found is not None
        assert found.kind == "cycle"
        # Each rank of the cycle really issues in that order, and the end meets the beginning.
        assert found.steps[0][1] == found.steps[-1][2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_exchanging_two_collectives_of_one_rank_is_found_unless_they_are_independent(seed: int, pick: int) -> None:
    orders = legal(seed)
    choose = random.Random(pick)
    rank = choose.choice([r for r, issues in orders.items() if len(issues) > 1] or [0])
    issues = orders[rank]
    if len(issues) < 2:
        return
    at = choose.randrange(len(issues) - 1)
    one, other = issues[at], issues[at + 1]
    issues[at], issues[at + 1] = other, one
    shared = set(one.ranks) & set(other.ranks) - {rank}
    if one != other and shared:
        assert deadlock(orders) is not None


def test_the_message_names_ranks_and_groups() -> None:
    two, three = Issue((0, 1), "all_reduce"), Issue((0, 1, 2), "all_gather_into_tensor")
    found = deadlock({0: [two, three], 1: [three, two], 2: [three]})
    assert found is not None
    assert "rank 0 issues number 0 of (0, 1) before number 0 of (0, 1, 2)" in str(found)
    assert "in a circle" in str(found)


def test_ranks_that_issue_different_collectives_of_a_group_are_found() -> None:
    reduce, gather = Issue((0, 1), "all_reduce"), Issue((0, 1), "all_gather_into_tensor")
    found = deadlock({0: [reduce, gather], 1: [gather, reduce]})
    assert found is not None
    assert str(found).endswith("rank 1 issues all_gather_into_tensor of (0, 1), its group all_reduce of (0, 1)")
    missing = deadlock({0: [reduce], 1: []})
    assert missing is not None
    assert "nothing as number 0" in str(missing)
    assert deadlock({0: [Issue((1, 2), "all_reduce")]}) is not None  # rank 0 is not in that group


def test_the_order_of_a_graph_is_read_from_its_collectives() -> None:
    build = Build()
    x = build.input("x", 4, 2)
    gathered = build.wait(build.gather(x, "0"))
    reduced = build.wait(build.reduce(gathered, "sum", "1"))
    step = build.finish(reduced)
    groups = {"0": [0, 1], "1": [0, 2]}
    assert issues_of(step, groups) == [Issue((0, 1), "all_gather_into_tensor"), Issue((0, 2), "all_reduce")]
    with pytest.raises(OptionError, match="process group '0'"):
        issues_of(step)
