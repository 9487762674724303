"""The simulator's verdict on deadlocks holds for gloo ranks that run the same lists with blocking sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranks import RanksFailed, run_ranks
from wholestep.simulate.pipeline import Network, Schedule, named_schedule, simulate, with_communication
from wholestep.simulate.schedule import RECEIVES, SENDS, ActionKind, counterpart

PLAIN = named_schedule("1F1B", 2, 3).compute_only()


def do_the_list(rank: int, schedule: Schedule) -> int:
    """Sends and receives as listed, computation left out: what was computed at the end."""
    pending: dict[object, dist.Work] = {}
    done = 0
    for action in schedule.ranks[rank]:
        if action.kind in SENDS or action.kind in RECEIVES:
            other = schedule.rank_of[counterpart(action).stage]
            tag = 2 * action.microbatch + (action.kind in (ActionKind.SEND_B, ActionKind.RECV_B))
            if action.kind in SENDS:
                dist.send(torch.ones(1000), other, tag=tag)
            else:
                pending[action] = dist.irecv(torch.zeros(1000), other, tag=tag)
        elif action.kind is not ActionKind.REDUCE_GRAD:
            receive = action._replace(kind=ActionKind.RECV_F if action.kind is ActionKind.F else ActionKind.RECV_B)
            if receive in pending:
                pending.pop(receive).wait()
            done += 1
    return done


def test_a_schedule_predicted_to_complete_completes():
    schedule = with_communication(PLAIN, "torch")
    assert simulate(schedule, network=Network(blocking_sends=True)).deadlock is None
    assert run_ranks(do_the_list, 2, schedule, deadline=20) == [6, 6]


def test_a_predicted_deadlock_blocks_both_ranks():
    schedule = with_communication(PLAIN, "late")
    stuck = simulate(schedule, network=Network(blocking_sends=True)).deadlock
    assert [each.rank for each in stuck.circle] == [0, 1]
    with pytest.raises(RanksFailed) as caught:
        run_ranks(do_the_list, 2, schedule, deadline=2)
    assert set(caught.value.failures) == {0, 1}
