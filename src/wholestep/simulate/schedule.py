"""A pipeline schedule: for each rank the list of its actions, and what follows from the lists alone.

A list either says how values travel (SEND and RECV actions) or has only computation; then `with_communication` adds it.
The CSV form is torch's: one line per rank, one cell per action, empty cells are steps of waiting and are left out here,
because a rank waits for what it needs and not for a tick.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wholestep.errors import ScheduleError
from wholestep.simulate.actions import COMPUTE, OF_A_STAGE, OF_PARTS, RECEIVES, SENDS, Action, Kind, action_of

_NEIGHBOUR = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}

Lists = Mapping[int, Sequence[Any]] | Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Schedule:
    """What each rank does, in order. Make one with `Schedule.of`, which checks it."""

    ranks: tuple[tuple[Action, ...], ...]
    name: str = "schedule"

    @classmethod
    def of(cls, lists: Lists, name: str = "schedule") -> Schedule:
        """From lists per rank of actions: texts, ours or torch's; None is left out."""
        if isinstance(lists, Mapping):
            if sorted(lists) != list(range(len(lists))):
                raise ScheduleError(f"the lists of {name} are of ranks {sorted(lists)}, not of 0 to {len(lists) - 1}.")
            lists = [lists[rank] for rank in range(len(lists))]
        made = cls(tuple(tuple(made for each in one if (made := action_of(each)) is not None) for one in lists), name)
        _check(made)
        return made

    @classmethod
    def read_csv(cls, path: str | Path) -> Schedule:
        """From a file that torch's `_dump_csv` or our `write_csv` wrote, with or without communication."""
        return cls.from_csv(Path(path).read_text(encoding="utf-8"), Path(path).stem)

    @classmethod
    def from_csv(cls, text: str, name: str = "schedule") -> Schedule:
        return cls.of([row for row in csv.reader(io.StringIO(text)) if row], name)

    def to_csv(self) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([str(action) for action in rank] for rank in self.ranks)
        return out.getvalue()

    def write_csv(self, path: str | Path) -> None:
        Path(path).write_text(self.to_csv(), encoding="utf-8")

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {leaf.stage: rank for rank, leaf in self.leaves() if leaf.kind in COMPUTE}

    @cached_property
    def stages(self) -> int:
        return max(self.rank_of, default=-1) + 1

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((leaf.microbatch or 0 for _, leaf in self.leaves() if leaf.kind is Kind.F), default=-1)

    @cached_property
    def communicates(self) -> bool:
        """Whether the lists say how values travel."""
        return any(leaf.kind in SENDS or leaf.kind in RECEIVES for _, leaf in self.leaves())

    @cached_property
    def has_backward(self) -> bool:
        return any(leaf.kind in COMPUTE and leaf.kind is not Kind.F for _, leaf in self.leaves())

    def leaves(self) -> Iterable[tuple[int, Action]]:
        """Each action that is not made of others, with its rank, in the order of the lists."""
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.kind in OF_PARTS:
                    for part in action.parts:
                        yield rank, part
                else:
                    yield rank, action

    def compute_only(self) -> Schedule:
        """The same without communication, sharding and reductions."""
        kept = (tuple(a for a in rank if a.kind in COMPUTE or a.kind is Kind.OVERLAP_F_B) for rank in self.ranks)
        return Schedule(tuple(kept), self.name)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.ranks))


def _check(schedule: Schedule) -> None:
    """Things that are wrong whatever the times: what is only in a wrong order shows as a deadlock instead."""
    if not schedule.ranks or not any(schedule.ranks):
        raise ScheduleError(f"{schedule.name} has no actions.")
    seen: set[Action] = set()
    home: dict[int, int] = {}
    _check_travels(schedule)
    for rank, leaf in schedule.leaves():
        if leaf.kind in OF_A_STAGE:
            continue
        if leaf.microbatch is None:
            raise ScheduleError(f"{leaf} of rank {rank} names no microbatch.", fix=f"write {leaf}0 for microbatch 0.")
        if leaf.kind in COMPUTE:
            if leaf in seen:
                raise ScheduleError(f"{leaf} is in {schedule.name} twice.", fix="each rank computes an action once.")
            if home.setdefault(leaf.stage, rank) != rank:
                where = f"ranks {home[leaf.stage]} and {rank}"
                raise ScheduleError(f"stage {leaf.stage} is on {where}.", fix="a stage lives on one rank.")
            seen.add(leaf)
    for action in seen:
        full = action._replace(kind=Kind.B)
        if action.kind in (Kind.I, Kind.W) and full in seen:
            raise ScheduleError(f"{action} and {full} are both there.", fix="B is I and W in one: give one or the two.")
    for rank, leaf in schedule.leaves():
        if leaf.kind in _NEIGHBOUR:
            other = home.get(leaf.stage + _NEIGHBOUR[leaf.kind])
            if home.get(leaf.stage) != rank or other is None or other == rank:
                where = "the same rank" if other == rank else "no rank" if other is None else f"rank {other}"
                what = f"{leaf} of rank {rank}: stage {leaf.stage} is on rank {home.get(leaf.stage)}"
                raise ScheduleError(f"{what}, the other end on {where}.", fix="values travel between two ranks.")
    if missing := sorted(set(range(schedule.stages)) - set(home)):
        raise ScheduleError(f"no rank has stage {missing[0]} of {schedule.stages}.", fix="list its actions on a rank.")


def _check_travels(schedule: Schedule) -> None:
    """A value is sent once and received once; an AWAIT only names what was begun."""
    seen: set[Action] = set()
    for actions in schedule.ranks:
        for action in actions:
            for leaf in action.leaves() if action.kind is not Kind.AWAIT else ():
                if leaf.kind in _NEIGHBOUR and leaf in seen:
                    raise ScheduleError(f"{leaf} is in {schedule.name} twice.", fix="send and receive a value once.")
                seen.add(leaf)
