"""The input of the simulation engine: a schedule with its exchanges and overlaps taken apart into coded operations.

Beside it the network between ranks. Conditions are numbered: first the computations, then the transfers, then the
unshards, then actions that no list contains and that therefore never happen. An operation is a code with
a condition or a tuple of transfers:

    (COMPUTING, c)    wait until all of `needs[c]` have happened, then compute for `length[c]`
    (SENDING, t)      wait until the value has been computed, then post the send of transfer t
    (RECEIVING, t)    post the receive of transfer t
    (AWAITING, ts)    wait until these transfers have ended
    (UNSHARDING, c)   start it, on the rank's own channel for collectives

Sends and receives of one EXCHANGE share a number in `group`; all others have a number of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from wholestep.errors import OptionError
from wholestep.simulate.schedule import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Clock,
    Number,
    Schedule,
    Times,
    at,
    counterpart,
    value_needed,
)

COMPUTING, SENDING, RECEIVING, AWAITING, UNSHARDING = range(5)

Operation = tuple[int, int, int] | tuple[int, tuple[int, ...], int]
"""Code, condition or transfers, and group (-1 for operations without one)."""


@dataclass
class Transfer:
    """One value sent between two ranks, identified by the action that sends it."""

    send: Action
    sender: int
    receiver: int
    length: int = 0
    has_send: bool = False
    has_receive: bool = False

    @property
    def receive(self) -> Action:
        return counterpart(self.send)


@dataclass
class ScheduleProgram:
    """A schedule as the engine runs it. Read-only once it is built."""

    schedule: Schedule
    clock: Clock
    ops: list[list[Operation]] = field(default_factory=list)
    action_at: list[list[int]] = field(default_factory=list)  # per rank and operation: the index of its action
    blocks: list[tuple[int, Action]] = field(default_factory=list)  # rank and action of each computation
    length: list[int] = field(default_factory=list)
    needs: list[tuple[int, ...]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    made_by: list[int] = field(default_factory=list)  # the computation whose result a transfer carries
    unshards: list[tuple[int, Action, int]] = field(default_factory=list)  # rank, action, length
    never: list[Action] = field(default_factory=list)

    @property
    def first_transfer(self) -> int:
        return len(self.blocks)

    @property
    def first_unshard(self) -> int:
        return self.first_transfer + len(self.transfers)

    @property
    def first_never(self) -> int:
        return self.first_unshard + len(self.unshards)


def build_program(schedule: Schedule, times: Times, network: Network) -> ScheduleProgram:
    """Lower a schedule that communicates."""
    return _ProgramBuilder(schedule, times, network).program


class _ProgramBuilder:
    def __init__(self, schedule: Schedule, times: Times, network: Network) -> None:
        self.schedule, self.times, self.network = schedule, times, network
        self.block_of: dict[Action, int] = {}
        self.transfer_of: dict[Action, int] = {}
        self.never_of: dict[Action, int] = {}
        self.groups = 0
        blocks = [(rank, block) for rank, actions in enumerate(schedule.ranks) for block in self._blocks(actions)]
        lengths = [self._numbers(block) for _, block in blocks]
        sends = dict.fromkeys(self._send_of(leaf) for _, leaf in schedule.leaves() if leaf.kind in SENDS | RECEIVES)
        travel = {send: times.lengths(send.kind, send.stage, send.microbatch or 0) for send in sends}
        shards = [(rank, leaf) for rank, leaf in schedule.leaves() if leaf.kind is ActionKind.UNSHARD]
        opening = [times.lengths(ActionKind.UNSHARD, leaf.stage, 0) for _, leaf in shards]
        clock = Clock(number for numbers in (*lengths, *travel.values(), *opening) for number in numbers)

        ticks = [clock.ticks(each) for each in lengths]
        made = self.program = ScheduleProgram(schedule, clock, blocks=blocks, length=ticks)
        for index, (_, block) in enumerate(blocks):
            for leaf in block.leaves():
                self.block_of[leaf] = index
        made.transfers = [self._transfer(send, clock.ticks(travel[send])) for send in sends]
        self.transfer_of = {send: index for index, send in enumerate(sends)}
        made.unshards = [(*each, clock.ticks(opening[index])) for index, each in enumerate(shards)]
        made.needs = [()] * len(blocks)
        self.next_block = self.next_unshard = 0
        for rank in range(len(schedule.ranks)):
            self._list_of(rank)
        made.made_by = [self._result(transfer.send) for transfer in made.transfers]

    def _blocks(self, actions: tuple[Action, ...]) -> Iterator[Action]:
        """The actions that take time on a rank; the parts of an overlap one by one unless `times.overlap` is given."""
        for action in actions:
            if action.kind in COMPUTE or action.kind is ActionKind.REDUCE_GRAD:
                yield action
            elif action.kind is ActionKind.OVERLAP_F_B:
                yield from (action,) if self.times.overlap is not None else action.parts

    def _numbers(self, block: Action) -> tuple[Number, ...]:
        if block.kind is ActionKind.OVERLAP_F_B:
            assert self.times.overlap is not None
            first = next((part for part in block.parts if part.kind is ActionKind.F), block.parts[0])
            return (at(self.times.overlap, first.stage, first.microbatch or 0),)
        return self.times.lengths(block.kind, block.stage, block.microbatch or 0)

    def _send_of(self, leaf: Action) -> Action:
        return leaf if leaf.kind in SENDS else counterpart(leaf)

    def _transfer(self, send: Action, length: int) -> Transfer:
        rank_of = self.schedule.rank_of
        receiver = rank_of.get(counterpart(send).stage, -1)
        return Transfer(send, rank_of.get(send.stage, -1), receiver, length)

    def _result(self, send: Action) -> int:
        """The computation whose result is sent."""
        kinds = (ActionKind.F,) if send.kind is ActionKind.SEND_F else (ActionKind.B, ActionKind.I)
        return self._block(*(send._replace(kind=kind) for kind in kinds))

    def _block(self, *leaves: Action) -> int:
        found = [self.block_of[leaf] for leaf in leaves if leaf in self.block_of]
        return found[0] if found else self._never(leaves[0])

    def _never(self, action: Action) -> int:
        """The condition of an action that no list contains."""
        if action not in self.never_of:
            self.never_of[action] = len(self.never_of)
            self.program.never.append(action)
        return self.program.first_never + self.never_of[action]

    def _list_of(self, rank: int) -> None:
        self.ops: list[Operation] = []
        self.received: set[Action] = set()
        self.unshard_of: dict[int, int] = {}
        action_at: list[int] = []
        for place, action in enumerate(self.schedule.ranks[rank]):
            self._operations(action)
            action_at += [place] * (len(self.ops) - len(action_at))
        self.program.ops.append(self.ops)
        self.program.action_at.append(action_at)

    def _operations(self, action: Action) -> None:
        if action.kind in SENDS or action.kind in RECEIVES:
            transfer = self._travel(action)
            if self.network.blocking_sends and action.kind in SENDS:
                self.ops.append((AWAITING, (transfer,), -1))
            self.groups += 1
        elif action.kind is ActionKind.EXCHANGE:
            begun = tuple(self._travel(part) for part in action.parts)
            self.groups += 1
            self.ops.append((AWAITING, begun, -1))
        elif action.kind is ActionKind.AWAIT:
            waited = tuple(self.transfer_of[self._send_of(part)] for part in action.parts)
            self.ops.append((AWAITING, waited, -1))
        elif action.kind is ActionKind.UNSHARD:
            index = self.program.first_unshard + self.next_unshard
            self.unshard_of[action.stage] = index
            self.ops.append((UNSHARDING, index, -1))
            self.next_unshard += 1
        elif action.kind is not ActionKind.RESHARD:
            for block in (action,) if action.kind is not ActionKind.OVERLAP_F_B else self._blocks((action,)):
                self.program.needs[self.next_block] = tuple(self._needs(block))
                self.ops.append((COMPUTING, self.next_block, -1))
                self.next_block += 1

    def _travel(self, action: Action) -> int:
        index = self.transfer_of[self._send_of(action)]
        if action.kind in SENDS:
            self.program.transfers[index].has_send = True
            self.ops.append((SENDING, index, self.groups))
        else:
            self.program.transfers[index].has_receive = True
            self.received.add(action)
            self.ops.append((RECEIVING, index, self.groups))
        return index

    def _needs(self, block: Action) -> Iterator[int]:
        """Conditions of a computation, local ones first, so that a rank that waits for itself is reported as such."""
        parts = set(block.leaves())
        for leaf in block.leaves():
            if leaf.stage in self.unshard_of and leaf.kind is not ActionKind.REDUCE_GRAD:
                yield self.unshard_of[leaf.stage]
            yield from (self._block(*options) for options in self._local_needs(leaf) if not parts & set(options))
        for leaf in block.leaves():
            receive = value_needed(leaf, self.schedule)
            if receive is None:
                continue
            if receive in self.received:
                yield self.program.first_transfer + self.transfer_of[counterpart(receive)]
            else:
                yield self._never(receive)

    def _local_needs(self, leaf: Action) -> Iterator[tuple[Action, ...]]:
        """Computations of the same rank that must have ended, each as the alternatives that satisfy it."""
        rank_of = self.schedule.rank_of
        if leaf.kind is ActionKind.W:
            yield (leaf._replace(kind=ActionKind.I),)
        elif leaf.kind in (ActionKind.B, ActionKind.I):
            yield (leaf._replace(kind=ActionKind.F),)
        if leaf.kind is ActionKind.F and rank_of.get(leaf.stage - 1) == rank_of[leaf.stage]:
            yield (leaf._replace(stage=leaf.stage - 1),)
        if leaf.kind in (ActionKind.B, ActionKind.I) and rank_of.get(leaf.stage + 1) == rank_of[leaf.stage]:
            after = leaf._replace(stage=leaf.stage + 1)
            yield after._replace(kind=ActionKind.B), after._replace(kind=ActionKind.I)


Matching = Literal["buffered", "rendezvous", "ordered"]
Sharing = Literal["nothing", "link", "wire", "port"]


@dataclass(frozen=True)
class Network:
    """How transfers start, and what they share.

    `matching`: a transfer may start when

    - `"buffered"`: its send is posted;
    - `"rendezvous"`: its send and its receive are posted (gloo);
    - `"ordered"`: also every transfer that either rank posted earlier to the other has ended (NCCL: a queue per pair).

    `sharing`: transfers that contend for bandwidth, first come first served:

    - `"nothing"`: none;
    - `"link"`: those from one rank to another, each direction separately;
    - `"wire"`: those between two ranks, both directions together;
    - `"port"`: those that leave a rank, and those that enter a rank, to and from any other.

    `blocking_sends`: a send blocks its rank until the value has arrived.
    """

    matching: Matching = "rendezvous"
    sharing: Sharing = "link"
    blocking_sends: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("matching", self.matching, get_args(Matching)),
            ("sharing", self.sharing, get_args(Sharing)),
        ):
            if value not in known:
                raise OptionError(f"{name}={value!r} is not known.", fix=f"one of {', '.join(map(repr, known))}.")

    def resources(self, sender: int, receiver: int) -> tuple[tuple[str, int, int], ...]:
        """The resources that a transfer holds exclusively while it lasts."""
        if self.sharing == "nothing":
            return ()
        if self.sharing == "link":
            return (("link", sender, receiver),)
        if self.sharing == "wire":
            return (("wire", min(sender, receiver), max(sender, receiver)),)
        return (("out", sender, -1), ("in", receiver, -1))
