"""A pipeline schedule: the list of actions of each rank, in the notation of torch's schedules.

    2F0          forward of stage 2 on microbatch 0
    2I0, 2W0     backward for the input, and for the weights;  2B0 is both in one
    2SEND_F0     send the output of 2F0 to stage 3, which receives it with 3RECV_F0
    2SEND_B0     send the gradients of 2B0 (or 2I0) to stage 1, which receives them with 1RECV_B0
    (2F4;2B0)OVERLAP_F_B                    a forward and a backward together
    2UNSHARD, 2RESHARD, 2REDUCE_GRAD        of a stage with sharded parameters

Two kinds are ours, because torch's GPipe and 1F1B are loops, not lists:

    (0SEND_F3;0RECV_B0)EXCHANGE   start all of these together and wait for all of them
    (0SEND_F3)AWAIT               wait for these, which were started earlier

The CSV form is torch's: one line per rank, one cell per action. Empty cells, which are idle steps, are dropped, because
a simulated rank waits for its inputs and not for a tick.

A schedule with computation only gets its sends and receives by `with_communication`. Each value that another rank needs
is sent right after the action that computes it. Its receive is placed

    "torch"  where torch's runtime puts it: when the send is appended to the sender's list
    "late"   right before the action that needs the value, as in a hand-written loop

The duration of each action, and an exact clock.

A duration is a number, one per stage, one per stage and microbatch, or a function of both. The simulator counts integer
ticks: every number, also a float, is an exact fraction, and a tick is one over their common denominator. So sums do not
drift and do not depend on their order. Results have the type of the numbers that were given.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from numbers import Rational, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wholestep.errors import OptionError, ScheduleError
from wholestep.torch_private.pipelining import schedules_have_waits, torchs_action, with_torchs_communication


class ActionKind(StrEnum):
    """The kind of an action; the values are torch's."""

    F = "F"
    I = "I"  # noqa: E741 (the name in every paper on zero-bubble schedules)
    W = "W"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"
    EXCHANGE = "EXCHANGE"
    AWAIT = "AWAIT"


COMPUTE = frozenset({ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B})
SENDS = frozenset({ActionKind.SEND_F, ActionKind.SEND_B})
RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
STAGE_WIDE = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD})
COMPOUND = frozenset({ActionKind.OVERLAP_F_B, ActionKind.EXCHANGE, ActionKind.AWAIT})

_BY_TEXT = {kind.value: kind for kind in ActionKind}
_ONE = re.compile(r"(\d+)(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)")
_WAIT = re.compile(r"\d+(WAIT_SEND_F\d+|WAIT_SEND_B\d+|WAIT_REDUCE_GRAD)")  # since torch 2.15
_MANY = re.compile(r"\((.*)\)(OVERLAP_F_B|EXCHANGE|AWAIT)")


class Action(NamedTuple):
    """One action. `microbatch` is None for actions of a whole stage; `parts` are the actions of a compound action."""

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.kind in COMPOUND:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    def leaves(self) -> tuple[Action, ...]:
        """The action itself, or the parts of a compound action."""
        return self.parts if self.kind in COMPOUND else (self,)


def parse(text: str) -> Action | None:
    """The action in a CSV cell; None for an empty cell (an idle step) and for one that only ends what an earlier one
    began: that is implied here. Inverse of `str`."""
    text = text.strip()
    if not text or _WAIT.fullmatch(text):
        return None
    if one := _ONE.fullmatch(text):
        kind = _BY_TEXT[one[2]]
        if (kind in STAGE_WIDE) == bool(one[3]):
            raise _not_an_action(text)
        return Action(int(one[1]), kind, int(one[3]) if one[3] else None)
    if many := _MANY.fullmatch(text):
        parts = tuple(part for cell in many[1].split(";") if (part := parse(cell)) is not None)
        return _compound(_BY_TEXT[many[2]], parts, text)
    raise _not_an_action(text)


def _csv_of(rows: Iterable[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _with_waits(row: Sequence[Action]) -> list[str]:
    """The cells of a rank with torch's waits: of a reduction right after it, of sends at the end, when each peer has
    posted its receive."""
    found: list[str] = []
    sent: list[str] = []
    for action in row:
        found.append(str(action))
        if action.kind is ActionKind.REDUCE_GRAD:
            found.append(f"{action.stage}WAIT_REDUCE_GRAD")
        elif action.kind in SENDS:
            sent.append(f"{action.stage}WAIT_{action.kind.value}{action.microbatch}")
    return found + sent


def action_of(given: Any) -> Action | None:
    """An action from text, from an `Action`, or from torch's `_Action` (`stage_index`, `computation_type`, ...)."""
    if given is None or isinstance(given, Action):
        return given
    if isinstance(given, str):
        return parse(given)
    if given.computation_type.value.startswith("WAIT_"):
        return None
    kind = _BY_TEXT[given.computation_type.value]
    if given.sub_actions is not None:
        return _compound(kind, tuple(part for each in given.sub_actions if (part := action_of(each))), str(given))
    return Action(given.stage_index, kind, given.microbatch_index)


def compound_action(kind: ActionKind, parts: Sequence[Action]) -> Action:
    """A compound action."""
    return Action(-1, kind, None, tuple(parts))


def _compound(kind: ActionKind, parts: tuple[Action, ...], text: str) -> Action:
    allowed = COMPUTE if kind is ActionKind.OVERLAP_F_B else SENDS | RECEIVES
    if not parts or any(part.kind not in allowed for part in parts):
        raise _not_an_action(text)
    return compound_action(kind, parts)


def _not_an_action(text: str) -> ScheduleError:
    fix = "write stage, kind and microbatch as torch does: 2F0, 1SEND_B3, 0UNSHARD, (1F4;1B0)OVERLAP_F_B."
    return ScheduleError(f"{text!r} is not an action of a pipeline schedule.", fix=fix)


_NEIGHBOUR = {ActionKind.SEND_F: 1, ActionKind.RECV_F: -1, ActionKind.SEND_B: -1, ActionKind.RECV_B: 1}

Lists = Mapping[int, Sequence[Any]] | Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order. Create one with `Schedule.of`, which validates it."""

    ranks: tuple[tuple[Action, ...], ...]
    name: str = "schedule"

    @classmethod
    def of(cls, lists: Lists, name: str = "schedule") -> Schedule:
        """From one list of actions per rank: text, `Action` or torch's `_Action`; None is dropped."""
        if isinstance(lists, Mapping):
            if sorted(lists) != list(range(len(lists))):
                raise ScheduleError(f"{name} lists ranks {sorted(lists)} instead of 0 to {len(lists) - 1}.")
            lists = [lists[rank] for rank in range(len(lists))]
        made = cls(tuple(tuple(made for each in one if (made := action_of(each)) is not None) for one in lists), name)
        _check(made)
        return made

    @classmethod
    def read_csv(cls, path: str | Path) -> Schedule:
        """From a file written by torch's `_dump_csv` or by `write_csv`, with or without communication."""
        return cls.from_csv(Path(path).read_text(encoding="utf-8"), Path(path).stem)

    @classmethod
    def from_csv(cls, text: str, name: str = "schedule") -> Schedule:
        return cls.of([row for row in csv.reader(io.StringIO(text)) if row], name)

    def to_csv(self) -> str:
        return _csv_of([str(action) for action in rank] for rank in self.ranks)

    def write_csv(self, path: str | Path) -> None:
        """A file for `_load_csv` of the installed torch: since 2.15 it has the waits that are implied here."""
        rows = map(_with_waits, self.ranks) if schedules_have_waits() else ([str(a) for a in row] for row in self.ranks)
        Path(path).write_text(_csv_of(rows), encoding="utf-8")

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {leaf.stage: rank for rank, leaf in self.leaves() if leaf.kind in COMPUTE}

    @cached_property
    def stages(self) -> int:
        return max(self.rank_of, default=-1) + 1

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((leaf.microbatch or 0 for _, leaf in self.leaves() if leaf.kind is ActionKind.F), default=-1)

    @cached_property
    def communicates(self) -> bool:
        """True if the lists contain sends or receives."""
        return any(leaf.kind in SENDS or leaf.kind in RECEIVES for _, leaf in self.leaves())

    @cached_property
    def has_backward(self) -> bool:
        return any(leaf.kind in COMPUTE and leaf.kind is not ActionKind.F for _, leaf in self.leaves())

    def leaves(self) -> Iterable[tuple[int, Action]]:
        """Each simple action and each part of a compound one, with its rank, in the order of the lists."""
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.kind in COMPOUND:
                    for part in action.parts:
                        yield rank, part
                else:
                    yield rank, action

    def compute_only(self) -> Schedule:
        """The same schedule without communication, sharding and reductions."""
        computing = (
            tuple(a for a in rank if a.kind in COMPUTE or a.kind is ActionKind.OVERLAP_F_B) for rank in self.ranks
        )
        return Schedule(tuple(computing), self.name)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.ranks))


def _check(schedule: Schedule) -> None:
    """Raise for what is wrong with any times. A wrong order is reported by the simulation, as a deadlock."""
    if not schedule.ranks or not any(schedule.ranks):
        raise ScheduleError(f"{schedule.name} has no actions.")
    seen: set[Action] = set()
    home: dict[int, int] = {}
    _check_transfers(schedule)
    for rank, leaf in schedule.leaves():
        if leaf.kind in STAGE_WIDE:
            continue
        if leaf.microbatch is None:
            raise ScheduleError(f"{leaf} of rank {rank} has no microbatch.", fix=f"write {leaf}0 for microbatch 0.")
        if leaf.kind in COMPUTE:
            if leaf in seen:
                raise ScheduleError(f"{leaf} is in {schedule.name} twice.", fix="each rank computes an action once.")
            if home.setdefault(leaf.stage, rank) != rank:
                where = f"ranks {home[leaf.stage]} and {rank}"
                raise ScheduleError(f"stage {leaf.stage} is on {where}.", fix="list each stage on one rank.")
            seen.add(leaf)
    for action in seen:
        full = action._replace(kind=ActionKind.B)
        if action.kind in (ActionKind.I, ActionKind.W) and full in seen:
            raise ScheduleError(f"both {action} and {full} are scheduled.", fix="B is I and W: list B, or I and W.")
    for rank, leaf in schedule.leaves():
        if leaf.kind in _NEIGHBOUR:
            other = home.get(leaf.stage + _NEIGHBOUR[leaf.kind])
            if home.get(leaf.stage) != rank or other is None or other == rank:
                where = "the same rank" if other == rank else "no rank" if other is None else f"rank {other}"
                what = f"{leaf} of rank {rank}: stage {leaf.stage} is on rank {home.get(leaf.stage)}"
                raise ScheduleError(f"{what}, the other end on {where}.", fix="send between two different ranks.")
    if missing := sorted(set(range(schedule.stages)) - set(home)):
        raise ScheduleError(f"no rank has stage {missing[0]} of {schedule.stages}.", fix="list its actions on a rank.")


def _check_transfers(schedule: Schedule) -> None:
    """Raise if a value is sent or received twice. An AWAIT only refers to transfers that were started."""
    seen: set[Action] = set()
    for actions in schedule.ranks:
        for action in actions:
            for leaf in action.leaves() if action.kind is not ActionKind.AWAIT else ():
                if leaf.kind in _NEIGHBOUR and leaf in seen:
                    raise ScheduleError(f"{leaf} is in {schedule.name} twice.", fix="send and receive a value once.")
                seen.add(leaf)


_OTHER_END = {
    ActionKind.SEND_F: (ActionKind.RECV_F, 1),
    ActionKind.RECV_F: (ActionKind.SEND_F, -1),
    ActionKind.SEND_B: (ActionKind.RECV_B, -1),
    ActionKind.RECV_B: (ActionKind.SEND_B, 1),
}
_NEEDS_FROM = {
    ActionKind.F: (-1, ActionKind.RECV_F),
    ActionKind.B: (1, ActionKind.RECV_B),
    ActionKind.I: (1, ActionKind.RECV_B),
}
_SENDS_TO = {
    ActionKind.F: (1, ActionKind.SEND_F),
    ActionKind.B: (-1, ActionKind.SEND_B),
    ActionKind.I: (-1, ActionKind.SEND_B),
}

Receives = Literal["torch", "late"]


def with_communication(schedule: Schedule, receives: Receives = "torch") -> Schedule:
    """The schedule itself if it communicates already, else the schedule with sends and receives.

    For lists that torch would refuse to run the receives are "late", so that the simulation shows where ranks deadlock.
    """
    if schedule.communicates:
        return schedule
    return (_placed_by_torch(schedule) if receives == "torch" else None) or _placed_late(schedule)


def _placed_by_torch(schedule: Schedule) -> Schedule | None:
    if schedule.compute_only() != schedule or not schedule.has_backward:
        return None
    lists = {rank: [torchs_action(str(action)) for action in row] for rank, row in enumerate(schedule.ranks)}
    try:
        lowered = with_torchs_communication(lists, schedule.stages, schedule.microbatches, sharded=False)
    except AssertionError:
        return None
    return Schedule.of(lowered, schedule.name)


def value_needed(action: Action, schedule: Schedule) -> Action | None:
    """The receive that an action needs, if its input is computed on another rank."""
    return _transfer_of(action, schedule, _NEEDS_FROM)


def value_sent(action: Action, schedule: Schedule) -> Action | None:
    """The send of an action's result, if another rank needs it."""
    return _transfer_of(action, schedule, _SENDS_TO)


def counterpart(action: Action) -> Action:
    """The receive that matches a send, or the send that matches a receive."""
    kind, step = _OTHER_END[action.kind]
    return Action(action.stage + step, kind, action.microbatch)


def _transfer_of(action: Action, schedule: Schedule, table: dict[ActionKind, tuple[int, ActionKind]]) -> Action | None:
    if action.kind not in table:
        return None
    step, kind = table[action.kind]
    there = schedule.rank_of.get(action.stage + step)
    if there is None or there == schedule.rank_of[action.stage]:
        return None
    return Action(action.stage, kind, action.microbatch)


def _placed_late(schedule: Schedule) -> Schedule:
    lists = [list(_with_late_receives(schedule, rank)) for rank in range(len(schedule.ranks))]
    return Schedule.of(lists, schedule.name)


def _with_late_receives(schedule: Schedule, rank: int) -> Iterator[Action]:
    for action in schedule.ranks[rank]:
        yield from filter(None, (value_needed(leaf, schedule) for leaf in action.leaves()))
        yield action
        yield from filter(None, (value_sent(leaf, schedule) for leaf in action.leaves()))


Number = int | float | Fraction
Time = Number | Sequence[Number] | Sequence[Sequence[Number]] | Callable[[int, int], Number]


@dataclass(frozen=True)
class Times:
    """Durations of computations and transfers.

    Defaults: a full backward `B` takes `I + W`; if only `B` is given, `I` and `W` are half of it each; without any,
    `I` and `W` take as long as `F`. `send` is the time of a transfer to the next stage, `send_back` to the previous one
    (default: `send`). `overlap` is the time of an OVERLAP_F_B, by the stage and microbatch of its forward; without it
    its parts run one after the other, as in torch. `unshard` overlaps computation, `reduce` (of gradients) does not.
    """

    F: Time = 1
    I: Time | None = None  # noqa: E741
    W: Time | None = None
    B: Time | None = None
    send: Time = 0
    send_back: Time | None = None
    overlap: Time | None = None
    unshard: Time = 0
    reduce: Time = 0

    def __post_init__(self) -> None:
        """Convert arrays and tensors to nested lists."""
        for each in fields(self):
            if hasattr(value := getattr(self, each.name), "tolist"):
                object.__setattr__(self, each.name, value.tolist())

    def lengths(self, kind: ActionKind, stage: int, microbatch: int) -> tuple[Number, ...]:
        """The duration of an action, as numbers to be added."""
        if kind is ActionKind.F:
            return (at(self.F, stage, microbatch),)
        if kind is ActionKind.I:
            return (self._one_backward(self.I, self.W, stage, microbatch),)
        if kind is ActionKind.W:
            return (self._one_backward(self.W, self.I, stage, microbatch),)
        if kind is ActionKind.B:
            if self.B is not None:
                return (at(self.B, stage, microbatch),)
            return self.lengths(ActionKind.I, stage, microbatch) + self.lengths(ActionKind.W, stage, microbatch)
        if kind is ActionKind.SEND_F:
            return (at(self.send, stage, microbatch),)
        if kind is ActionKind.SEND_B:
            return (at(self.send if self.send_back is None else self.send_back, stage, microbatch),)
        if kind is ActionKind.UNSHARD:
            return (at(self.unshard, stage, microbatch),)
        return (at(self.reduce, stage, microbatch),) if kind is ActionKind.REDUCE_GRAD else ()

    def _one_backward(self, given: Time | None, other: Time | None, stage: int, microbatch: int) -> Number:
        if given is not None:
            return at(given, stage, microbatch)
        if self.B is None:
            return at(self.F, stage, microbatch)
        full = at(self.B, stage, microbatch)
        return half(full) if other is None else full - at(other, stage, microbatch)


def at(time: Time, stage: int, microbatch: int) -> Number:
    """The value of a duration for a stage and a microbatch."""
    if callable(time):
        return time(stage, microbatch)
    if isinstance(time, Sequence):
        try:
            of_stage = time[stage]
            return of_stage[microbatch] if isinstance(of_stage, Sequence) else of_stage
        except IndexError:
            what = f"stage {stage} and microbatch {microbatch}"
            raise OptionError(f"a table of times has no entry for {what}.", fix="pass one row per stage.") from None
    return time


def half(number: Number) -> Number:
    """Exactly half; of an odd integer, a Fraction."""
    if isinstance(number, float):
        return number / 2
    halved = Fraction(number) / 2
    return int(halved) if halved.denominator == 1 else halved


class Clock:
    """Converts numbers to integer ticks and back."""

    def __init__(self, numbers: Iterable[Number]) -> None:
        exact = {number: _exact(number) for number in set(numbers)}
        self._per_unit = math.lcm(*(each.denominator for each in exact.values()))
        self._ticks = {number: int(value * self._per_unit) for number, value in exact.items()}
        self._float = any(not isinstance(number, Rational) for number in exact)
        self._fraction = any(isinstance(number, Fraction) for number in exact)

    def ticks(self, numbers: Iterable[Number]) -> int:
        """The sum of numbers that the clock was created for, in ticks."""
        return sum([self._ticks[number] for number in numbers])

    def number(self, ticks: int) -> Number:
        """Ticks as a number of the type that was given."""
        if self._float:
            return ticks / self._per_unit  # rounded once, to the nearest float
        return Fraction(ticks, self._per_unit) if self._fraction else ticks


def _exact(number: Any) -> Fraction:
    if not isinstance(number, Real) or not math.isfinite(number) or number < 0:
        raise OptionError(f"{number!r} is not a time.", fix="times are finite, non-negative numbers.")
    if isinstance(number, Rational):
        return Fraction(int(number.numerator), int(number.denominator))  # numpy's integers would overflow
    return Fraction(float(number))
