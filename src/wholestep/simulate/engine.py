"""Discrete-event simulation of a schedule: an event is the end of a computation, of a transfer or of an unshard.

Ranks run their operations in order, a condition that holds once holds for ever, and a transfer that has started always
ends. So the set of operations that are reached does not depend on the times, or on which transfer gets a shared link
first: if one run of a schedule completes, every run does; if it deadlocks, every run blocks at the same operations. One
simulation is therefore a proof.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from itertools import count

from wholestep.simulate.program import AWAITING, COMPUTING, RECEIVING, SENDING, Network, ScheduleProgram

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
