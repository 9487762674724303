"""What a rank concludes from the heartbeats of the others."""

from __future__ import annotations

from dataclasses import replace

from torch import distributed as dist

from wholestep.ranks.failure import Failure, FailureKind
from wholestep.ranks.peers import Heartbeat, Position, RankState, StoreClient
from wholestep.ranks.watchdog import Watchdog

HERE = Position(RankState.RUNNING, "train_step", 4)


def rank_2_of_3() -> Watchdog:
    return Watchdog(StoreClient(dist.HashStore(), "test", 10.0), 2, 3, 10.0, lambda: True)


def aborted_for(failure: Failure) -> Heartbeat:
    beat = Heartbeat(1, Position(RankState.ABORTED, "train_step", 4), cause=failure.to_json())
    return Heartbeat.from_json(beat.to_json())


def test_a_rank_that_aborted_its_groups_names_the_rank_that_failed() -> None:
    watchdog = rank_2_of_3()
    left = Failure(FailureKind.LEFT, 1, "train_step", 4, "has ended or destroyed its process group")
    watchdog.peers.note(0, aborted_for(left))
    assert watchdog.lost(0, HERE, 1.0) == left


def test_a_rank_that_aborted_its_groups_for_a_disagreement_passes_the_disagreement_on() -> None:
    watchdog = rank_2_of_3()
    for rank in (0, 2):  # the rank that it is about: either side
        apart = Failure(
            FailureKind.DESYNC, rank, "train_step", 4, "Ranks disagree on the graph of call 4 of train_step"
        )
        watchdog.peers.note(0, replace(aborted_for(apart), number=rank + 1))
        assert watchdog.lost(0, HERE, 1.0) == apart


def test_a_rank_that_aborted_its_groups_for_this_one_is_named_itself() -> None:
    watchdog = rank_2_of_3()
    watchdog.peers.note(0, aborted_for(Failure(FailureKind.DIED, 2, "train_step", 4, "died or hangs")))
    found = watchdog.lost(0, HERE, 1.0)
    assert found is not None
    assert (found.kind, found.rank) == (FailureKind.ABORTED, 0)
    assert "died or hangs" in found.text
