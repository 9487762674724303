"""Say how values travel in a schedule that has only computation.

A value that another rank needs is sent right after it was made. Where its receive stands is a choice:

    "torch"  where torch's runtime puts it: on the receiving rank's list at the moment the send is added to the sender's
    "late"   right before the action that needs it, as in a loop written by hand
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from wholestep.simulate.actions import Action, Kind
from wholestep.simulate.schedule import Schedule
from wholestep.torch_private.pipelining import torchs_action, with_torchs_communication

_OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
_NEEDS_FROM = {Kind.F: (-1, Kind.RECV_F), Kind.B: (1, Kind.RECV_B), Kind.I: (1, Kind.RECV_B)}
_SENDS_TO = {Kind.F: (1, Kind.SEND_F), Kind.B: (-1, Kind.SEND_B), Kind.I: (-1, Kind.SEND_B)}

Receives = Literal["torch", "late"]


def with_communication(schedule: Schedule, receives: Receives = "torch") -> Schedule:
    """The schedule as it is if it communicates already, else with sends and receives.

    Where torch has no place for them, because it would not run the lists, they are late: that shows where ranks stick.
    """
    if schedule.communicates:
        return schedule
    return (_at_torchs_places(schedule) if receives == "torch" else None) or _late(schedule)


def _at_torchs_places(schedule: Schedule) -> Schedule | None:
    if schedule.compute_only() != schedule or not schedule.has_backward:
        return None
    lists = {rank: [torchs_action(str(action)) for action in row] for rank, row in enumerate(schedule.ranks)}
    try:
        lowered = with_torchs_communication(lists, schedule.stages, schedule.microbatches, sharded=False)
    except AssertionError:
        return None
    return Schedule.of(lowered, schedule.name)


def value_needed(action: Action, schedule: Schedule) -> Action | None:
    """The receive that an action needs, if what it works on is made on another rank."""
    return _travelling(action, schedule, _NEEDS_FROM)


def value_sent(action: Action, schedule: Schedule) -> Action | None:
    """The send of what an action makes, if another rank needs it."""
    return _travelling(action, schedule, _SENDS_TO)


def counterpart(action: Action) -> Action:
    """The receive of a send, and the send of a receive."""
    kind, step = _OTHER_END[action.kind]
    return Action(action.stage + step, kind, action.microbatch)


def _travelling(action: Action, schedule: Schedule, table: dict[Kind, tuple[int, Kind]]) -> Action | None:
    if action.kind not in table:
        return None
    step, kind = table[action.kind]
    there = schedule.rank_of.get(action.stage + step)
    if there is None or there == schedule.rank_of[action.stage]:
        return None
    return Action(action.stage, kind, action.microbatch)


def _late(schedule: Schedule) -> Schedule:
    lists = [list(_with_late_receives(schedule, rank)) for rank in range(len(schedule.ranks))]
    return Schedule.of(lists, schedule.name)


def _with_late_receives(schedule: Schedule, rank: int) -> Iterator[Action]:
    for action in schedule.ranks[rank]:
        yield from filter(None, (value_needed(leaf, schedule) for leaf in action.leaves()))
        yield action
        yield from filter(None, (value_sent(leaf, schedule) for leaf in action.leaves()))
