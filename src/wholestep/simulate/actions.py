"""What a rank does in a pipeline, one action after the other, in the words and the text of torch's schedules.

    2F0          forward of stage 2 on microbatch 0
    2I0, 2W0     backward for the input, and for the weights;  2B0 is both in one
    2SEND_F0     send what 2F0 made to stage 3;  3RECV_F0 takes it there
    2SEND_B0     send what 2B0 (or 2I0) made to stage 1;  1RECV_B0 takes it there
    (2F4;2B0)OVERLAP_F_B          a forward and a backward together
    2UNSHARD, 2RESHARD, 2REDUCE_GRAD        of a stage with sharded parameters

Two are ours, because torch's GPipe and 1F1B are loops and not lists:

    (0SEND_F3;0RECV_B0)EXCHANGE   begin all of these together and go on when all are done
    (0SEND_F3)AWAIT               go on when these, begun earlier, are done
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from wholestep.errors import ScheduleError


class Kind(StrEnum):
    """What kind of action; the values are torch's."""

    F = "F"
    I = "I"  # noqa: E741 (the name in every paper on zero bubbles)
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


COMPUTE = frozenset({Kind.F, Kind.I, Kind.W, Kind.B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
OF_A_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
OF_PARTS = frozenset({Kind.OVERLAP_F_B, Kind.EXCHANGE, Kind.AWAIT})

_BY_TEXT = {kind.value: kind for kind in Kind}
_ONE = re.compile(r"(\d+)(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)")
_MANY = re.compile(r"\((.*)\)(OVERLAP_F_B|EXCHANGE|AWAIT)")


class Action(NamedTuple):
    """One action. `microbatch` is None where none is meant; `parts` are the actions that an action is made of."""

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.kind in OF_PARTS:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    def leaves(self) -> tuple[Action, ...]:
        """The action itself, or the actions it is made of."""
        return self.parts if self.kind in OF_PARTS else (self,)


def parse(text: str) -> Action | None:
    """The action of a cell of a CSV; None for an empty cell, which is a step of waiting. Opposite of `str`."""
    text = text.strip()
    if not text:
        return None
    if one := _ONE.fullmatch(text):
        kind = _BY_TEXT[one[2]]
        if (kind in OF_A_STAGE) == bool(one[3]):
            raise _not_an_action(text)
        return Action(int(one[1]), kind, int(one[3]) if one[3] else None)
    if many := _MANY.fullmatch(text):
        parts = tuple(part for cell in many[1].split(";") if (part := parse(cell)) is not None)
        return _of_parts(_BY_TEXT[many[2]], parts, text)
    raise _not_an_action(text)


def action_of(given: Any) -> Action | None:
    """Ours, from a text, one of ours, or one of torch's (`stage_index`, `computation_type`, `microbatch_index`)."""
    if given is None or isinstance(given, Action):
        return given
    if isinstance(given, str):
        return parse(given)
    kind = _BY_TEXT[given.computation_type.value]
    if given.sub_actions is not None:
        return _of_parts(kind, tuple(part for each in given.sub_actions if (part := action_of(each))), str(given))
    return Action(given.stage_index, kind, given.microbatch_index)


def together(kind: Kind, parts: Sequence[Action]) -> Action:
    """One action made of several."""
    return Action(-1, kind, None, tuple(parts))


def _of_parts(kind: Kind, parts: tuple[Action, ...], text: str) -> Action:
    allowed = COMPUTE if kind is Kind.OVERLAP_F_B else SENDS | RECEIVES
    if not parts or any(part.kind not in allowed for part in parts):
        raise _not_an_action(text)
    return together(kind, parts)


def _not_an_action(text: str) -> ScheduleError:
    fix = "write stage, kind and microbatch as torch does: 2F0, 1SEND_B3, 0UNSHARD, (1F4;1B0)OVERLAP_F_B."
    return ScheduleError(f"{text!r} is not an action of a pipeline schedule.", fix=fix)
