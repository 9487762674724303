"""The duration of each action, and an exact clock.

A duration is a number, one per stage, one per stage and microbatch, or a function of both. The simulator counts integer
ticks: every number, also a float, is an exact fraction, and a tick is one over their common denominator. So sums do not
drift and do not depend on their order. Results have the type of the numbers that were given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

from wholestep.errors import OptionError
from wholestep.simulate.schedule import ActionKind

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
