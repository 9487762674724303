"""Discrete-event simulation of a schedule: an event is the end of a computation, of a transfer or of an unshard.

Ranks run their operations in order, a condition that holds once holds for ever, and a transfer that has started always
ends. So the set of operations that are reached does not depend on the times, or on which transfer gets a shared link
first: if one run of a schedule completes, every run does; if it deadlocks, every run blocks at the same operations. One
simulation is therefore a proof.

Explain a deadlock: for each blocked rank its action, and the action of which rank it waits for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from wholestep.simulate.schedule import Action
from wholestep.simulate.schedule_program import AWAITING, COMPUTING, RECEIVING, SENDING, Network, ScheduleProgram

UNSET = -1


@dataclass(frozen=True)
class Run:
    """Start and end of each condition in ticks; UNSET if it never happened."""

    began: list[int]
    ended: list[int]
    sent: list[int]
    received: list[int]
    reached: list[int]  # per rank: the index of the operation it is blocked at; their number if it finished
    end: int
    queues: dict[tuple[int, int], list[list[int]]]  # pending transfers of a rank with another, in the order posted


class Engine:
    """Runs one program once."""

    def __init__(self, program: ScheduleProgram, network: Network) -> None:
        self.program, self.network = program, network
        self.transfer0, self.unshard0 = program.first_transfer, program.first_unshard
        conditions = program.first_never + len(program.never)
        self.began = [UNSET] * conditions
        self.ended = [UNSET] * conditions
        self.sent = [UNSET] * len(program.transfers)
        self.received = [UNSET] * len(program.transfers)
        self.place = [0] * len(program.ops)
        self.waiters: dict[int, list[int]] = {}  # condition -> the ranks that wait for it
        self.events: list[tuple[int, int, int]] = []
        self.order = count()
        self.now = 0
        self.runnable: deque[int] = deque(range(len(program.ops)))
        self.resources = [network.resources(each.sender, each.receiver) for each in program.transfers]
        self.busy: set[tuple[str, int, int]] = set()
        self.queued: dict[tuple[str, int, int], deque[int]] = {}
        self.ordered = network.matching == "ordered"
        self.in_order: dict[tuple[int, int], deque[tuple[int, set[int]]]] = {}
        self.channel_free = [0] * len(program.ops)

    def run(self) -> Run:
        while True:
            while self.runnable:
                self._advance(self.runnable.popleft())
            if not self.events:
                break
            self.now, _, condition = heapq.heappop(self.events)
            self._happens(condition)
        queues = {pair: [sorted(group) for _, group in queue] for pair, queue in self.in_order.items()}
        return Run(self.began, self.ended, self.sent, self.received, self.place, self.now, queues)

    def _advance(self, rank: int) -> None:
        """Run a rank until it computes, waits for a condition, or has finished."""
        operations, ended = self.program.ops[rank], self.ended
        needs, length, made_by = self.program.needs, self.program.length, self.program.made_by
        place = self.place[rank]
        while place < len(operations):
            code, about, group = operations[place]
            missing = UNSET
            if code == COMPUTING:
                assert isinstance(about, int)
                if ended[about] == UNSET:
                    for need in needs[about]:
                        if ended[need] == UNSET:
                            missing = need
                            break
                    else:
                        self.began[about] = self.now
                        if length[about]:
                            missing = about
                            heapq.heappush(self.events, (self.now + length[about], next(self.order), about))
                        else:
                            ended[about] = self.now
            elif code == AWAITING:
                assert isinstance(about, tuple)
                missing = next((self.transfer0 + t for t in about if ended[self.transfer0 + t] == UNSET), UNSET)
            elif code == SENDING:
                assert isinstance(about, int)
                if ended[made_by[about]] == UNSET:
                    missing = made_by[about]
                else:
                    self.sent[about] = self.now
                    self._posted_by(rank, about, group)
            elif code == RECEIVING:
                assert isinstance(about, int)
                self.received[about] = self.now
                self._posted_by(rank, about, group)
            else:
                assert isinstance(about, int)
                self._unshard(rank, about)
            if missing != UNSET:
                self.waiters.setdefault(missing, []).append(rank)
                break
            place += 1
        self.place[rank] = place

    def _happens(self, condition: int) -> None:
        """A computation, transfer or unshard has ended."""
        self.ended[condition] = self.now
        self.runnable.extend(self.waiters.pop(condition, ()))
        if self.transfer0 <= condition < self.unshard0:
            self._arrived(condition - self.transfer0)

    def _posted_by(self, rank: int, transfer: int, group: int) -> None:
        """A rank has posted its side of a transfer."""
        if self.ordered:
            each = self.program.transfers[transfer]
            queue = self.in_order.setdefault((rank, each.receiver if rank == each.sender else each.sender), deque())
            if queue and queue[-1][0] == group:
                queue[-1][1].add(transfer)
            else:
                queue.append((group, {transfer}))
        self._start_if_possible(transfer)

    def _start_if_possible(self, transfer: int) -> None:
        if self.sent[transfer] == UNSET or self.began[self.transfer0 + transfer] != UNSET:
            return
        if self.network.matching != "buffered" and self.received[transfer] == UNSET:
            return
        if self.ordered and not self._is_first_on_both_sides(transfer):
            return
        resources = self.resources[transfer]
        if self.busy.isdisjoint(resources):
            self._start(transfer)
        else:
            for resource in resources:
                self.queued.setdefault(resource, deque()).append(transfer)

    def _is_first_on_both_sides(self, transfer: int) -> bool:
        each = self.program.transfers[transfer]
        pairs = (each.sender, each.receiver), (each.receiver, each.sender)
        return all(transfer in self.in_order[pair][0][1] for pair in pairs)

    def _start(self, transfer: int) -> None:
        condition = self.transfer0 + transfer
        self.busy.update(self.resources[transfer])
        self.began[condition] = self.now
        heapq.heappush(self.events, (self.now + self.program.transfers[transfer].length, next(self.order), condition))

    def _arrived(self, transfer: int) -> None:
        """Start the transfers that waited for the resources of this one, or for their turn."""
        self.busy.difference_update(self.resources[transfer])
        for resource in self.resources[transfer]:
            self._serve(resource)
        if self.ordered:
            each = self.program.transfers[transfer]
            for pair in ((each.sender, each.receiver), (each.receiver, each.sender)):
                queue = self.in_order[pair]
                queue[0][1].discard(transfer)
                if not queue[0][1]:
                    queue.popleft()
                    for following in sorted(queue[0][1]) if queue else ():
                        self._start_if_possible(following)

    def _serve(self, resource: tuple[str, int, int]) -> None:
        """Start the first queued transfer whose other resources are free too; drop those that have started."""
        queue = self.queued.get(resource)
        if not queue:
            return
        blocked: deque[int] = deque()
        while queue:
            transfer = queue.popleft()
            if self.began[self.transfer0 + transfer] != UNSET:
                continue
            if self.busy.isdisjoint(self.resources[transfer]):
                self._start(transfer)
                break
            blocked.append(transfer)
        queue.extendleft(reversed(blocked))

    def _unshard(self, rank: int, condition: int) -> None:
        """Collectives of a rank run one after the other, in parallel with its computation."""
        self.began[condition] = max(self.now, self.channel_free[rank])
        end = self.channel_free[rank] = self.began[condition] + self.program.unshards[condition - self.unshard0][2]
        heapq.heappush(self.events, (end, next(self.order), condition))


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
