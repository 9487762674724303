"""Explain a deadlock: for each blocked rank its action, and the action of which rank it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wholestep.simulate.engine import UNSET, Run
from wholestep.simulate.program import AWAITING, COMPUTING, SENDING, ScheduleProgram
from wholestep.simulate.schedule import Action


@dataclass(frozen=True)
class Blocked:
    """A rank that is blocked at `action` until `of_rank` (None: no rank does) has run `waits_for`."""

    rank: int
    action: Action
    waits_for: Action
    of_rank: int | None
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} is blocked at {self.action}, waiting for {self.waits_for}{self.why}"


@dataclass(frozen=True)
class Deadlock:
    """All blocked ranks; `circle`: those that form a cycle of waits (empty: a rank waits for what no rank runs)."""

    blocked: tuple[Blocked, ...]
    circle: tuple[Blocked, ...]

    def __str__(self) -> str:
        rest = [each for each in self.blocked if each not in self.circle]
        head = "in a cycle" if self.circle else "on actions that never run"
        first, others = (self.circle, rest) if self.circle else (self.blocked, [])
        lines = [f"deadlock: {len(self.blocked)} ranks wait {head}:", *(f"  {each}" for each in first)]
        return "\n".join(lines + (["and, waiting for these:"] if others else []) + [f"  {each}" for each in others])


def find_deadlock(program: ScheduleProgram, run: Run) -> Deadlock | None:
    """The deadlock of a run; None if every rank reached the end of its list."""
    stuck = [rank for rank, place in enumerate(run.reached) if place < len(program.ops[rank])]
    if not stuck:
        return None
    blocked = tuple(_Explainer(program, run).explain(rank) for rank in stuck)
    return Deadlock(blocked, _circle(blocked))


class _Explainer:
    def __init__(self, program: ScheduleProgram, run: Run) -> None:
        self.program, self.run = program, run

    def explain(self, rank: int) -> Blocked:
        place = self.run.reached[rank]
        action = self.program.schedule.ranks[rank][self.program.action_at[rank][place]]
        condition = next(self._unfulfilled(rank, place))
        first_transfer, first_unshard = self.program.first_transfer, self.program.first_unshard
        if condition >= self.program.first_never:
            never = self.program.never[condition - self.program.first_never]
            why = f", which rank {rank} does not list before it" + self._elsewhere(never)
            return Blocked(rank, action, never, None, why)
        if first_transfer <= condition < first_unshard:
            return self._transfer(rank, action, condition - first_transfer)
        owner, needed = self.program.blocks[condition]
        where = "itself later in its list" if owner == rank else f"rank {owner}"
        return Blocked(rank, action, needed, owner, f" of {where}")

    def _unfulfilled(self, rank: int, place: int) -> Iterator[int]:
        code, about, _ = self.program.ops[rank][place]
        conditions: tuple[int, ...]
        if code == COMPUTING:
            assert isinstance(about, int)
            conditions = self.program.needs[about]
        elif code == SENDING:
            assert isinstance(about, int)
            conditions = (self.program.made_by[about],)
        else:
            assert code == AWAITING
            assert isinstance(about, tuple)
            conditions = tuple(self.program.first_transfer + each for each in about)
        return (each for each in conditions if self.run.ended[each] == UNSET)

    def _elsewhere(self, action: Action) -> str:
        holders = [rank for rank, leaf in self.program.schedule.leaves() if leaf == action]
        return f" (rank {holders[0]} lists it too late)" if holders else ""

    def _transfer(self, rank: int, action: Action, transfer: int) -> Blocked:
        """A pending transfer: one side is not posted, or other transfers come first."""
        each = self.program.transfers[transfer]
        if self.run.sent[transfer] == UNSET:
            if not each.has_send:
                return Blocked(rank, action, each.send, None, ", which no rank lists")
            return Blocked(rank, action, each.send, each.sender, f" of {self._name(each.sender, rank)}")
        if self.run.received[transfer] == UNSET:
            if not each.has_receive:
                return Blocked(rank, action, each.receive, None, ", which no rank lists")
            return Blocked(rank, action, each.receive, each.receiver, f" of {self._name(each.receiver, rank)}")
        return self._behind(rank, action, transfer)

    def _behind(self, rank: int, action: Action, transfer: int) -> Blocked:
        """Both sides are posted, but on one of them another transfer between the two ranks comes first."""
        each = self.program.transfers[transfer]
        for owner, peer in ((each.sender, each.receiver), (each.receiver, each.sender)):
            first = self.run.queues[owner, peer][0]
            if transfer not in first:
                before = self.program.transfers[first[0]]
                earlier = before.send if before.sender == owner else before.receive
                mine = each.send if each.sender == owner else each.receive
                other_end = before.receive if before.sender == owner else before.send
                why = f" of rank {peer}, because rank {owner} posted {earlier} before {mine}"
                return Blocked(rank, action, other_end, peer, why)
        raise AssertionError("a transfer that is first on both sides starts")

    def _name(self, owner: int, rank: int) -> str:
        return "itself later in its list" if owner == rank else f"rank {owner}"


def _circle(blocked: tuple[Blocked, ...]) -> tuple[Blocked, ...]:
    """Ranks that form a cycle of waits, the lowest first; () if every chain ends at an action that no rank runs."""
    by_rank = {each.rank: each for each in blocked}
    for start in blocked:
        chain: list[Blocked] = []
        at: Blocked | None = start
        while at is not None and at not in chain:
            chain.append(at)
            at = by_rank.get(at.of_rank) if at.of_rank is not None else None
        if at is not None:
            circle = chain[chain.index(at) :]
            low = min(range(len(circle)), key=lambda index: circle[index].rank)
            return tuple(circle[low:] + circle[:low])
    return ()
