"""How much a rank keeps at a time: microbatches whose activations are alive, and bytes.

A rank does its actions in order, so what it keeps before and after each of them follows from its list alone, whatever
the times are. An activation lives from the begin of its forward to the end of its backward: of B, or of W where they
are apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wholestep.simulate.actions import COMPUTE, RECEIVES, Action, Kind
from wholestep.simulate.schedule import Schedule
from wholestep.simulate.times import Number, Time, at


@dataclass(frozen=True)
class Bytes:
    """Bytes per stage (or per stage and microbatch).

    `static`: parameters, gradients, optimizer state, always there. `activation`: what a forward keeps for its backward.
    `for_weights`: the part of it that stays between I and W (all of it where not given). `arriving` and
    `arriving_back`: a received activation and gradient, from its receive on to the end of what uses it.
    """

    static: Time = 0
    activation: Time = 0
    for_weights: Time | None = None
    arriving: Time = 0
    arriving_back: Time = 0


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per rank the largest number of (stage, microbatch) pairs whose activations it keeps at one time."""
    return tuple(int(_peak(0, _activations(actions))) for actions in schedule.ranks)


def peak_bytes(schedule: Schedule, size: Bytes) -> tuple[Number, ...]:
    """Per rank the largest number of bytes that it keeps at one time."""
    static: list[Number] = [0] * len(schedule.ranks)
    for stage, rank in schedule.rank_of.items():
        static[rank] += at(size.static, stage, 0)
    return tuple(_peak(static[rank], _bytes(actions, size)) for rank, actions in enumerate(schedule.ranks))


def _peak(start: Number, changes: Iterator[Number]) -> Number:
    now = highest = start
    for change in changes:
        now += change
        highest = max(highest, now)
    return highest


def _activations(actions: Sequence[Action]) -> Iterator[Number]:
    for action in actions:
        for leaf in action.parts or (action,):
            if leaf.kind is Kind.F:
                yield 1
        for leaf in action.parts or (action,):
            if leaf.kind is Kind.B or leaf.kind is Kind.W:
                yield -1


def _bytes(actions: Sequence[Action], size: Bytes) -> Iterator[Number]:
    """Growth before, and release after, each action; the parts of one action grow together."""
    waiting: set[Action] = set()
    for action in actions:
        leaves = action.leaves()
        if leaves[0].kind in RECEIVES or action.kind is Kind.EXCHANGE:
            for leaf in leaves:
                if leaf.kind in RECEIVES:
                    waiting.add(leaf)
                    yield _arriving(leaf, size)
        elif leaves[0].kind in COMPUTE:
            yield from (_kept(leaf, size) for leaf in leaves if leaf.kind is Kind.F)
            for leaf in leaves:
                yield -_released(leaf, size)
                receive = leaf._replace(kind=Kind.RECV_F if leaf.kind is Kind.F else Kind.RECV_B)
                if leaf.kind is not Kind.W and receive in waiting:
                    waiting.remove(receive)
                    yield -_arriving(receive, size)


def _kept(leaf: Action, size: Bytes) -> Number:
    return at(size.activation, leaf.stage, leaf.microbatch or 0)


def _for_weights(leaf: Action, size: Bytes) -> Number:
    return at(size.activation if size.for_weights is None else size.for_weights, leaf.stage, leaf.microbatch or 0)


def _released(leaf: Action, size: Bytes) -> Number:
    if leaf.kind is Kind.B:
        return _kept(leaf, size)
    if leaf.kind is Kind.I:
        return _kept(leaf, size) - _for_weights(leaf, size)
    return _for_weights(leaf, size) if leaf.kind is Kind.W else 0


def _arriving(receive: Action, size: Bytes) -> Number:
    table = size.arriving if receive.kind is Kind.RECV_F else size.arriving_back
    return at(table, receive.stage, receive.microbatch or 0)
