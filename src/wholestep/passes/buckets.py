"""Which collectives share a bucket, so that one collective does the work of many (`comm_fusion.py` rewrites the graph).

A collective has a place where its operand is ready and a place where its result is first needed. Collectives may share
a bucket if the last operand is ready before the first result is needed: then nothing else has to move, and no cycle
can arise. Where a result is used at once by elementwise followers (a division, a cast), these may move down with it
(`LateUses`). `plan_buckets` packs collectives in graph order; one that cannot join the open bucket opens the next one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.collectives import CollectiveBlock, comm_block, is_part
from wholestep.ir.effects import WriteWindows, sharing_with_outputs
from wholestep.ir.graph_walks import epilogue, reachable
from wholestep.ir.groups import group_of

aten = torch.ops.aten
comm = torch.ops._c10d_functional

MEBIBYTE = 2**20
FIRST_BUCKET = 1.0
"""MiB of the first bucket: communication starts early."""


@dataclass(eq=False)
class Member:
    """One collective that may share a bucket."""

    block: CollectiveBlock
    ready: int
    """Position of its last input."""
    needed: float
    """Position of the first node that reads its result, through waits and views."""
    bytes: int
    key: Any
    followers: list[fx.Node] = field(default_factory=list)
    """Views behind its wait, which move along."""
    prelude: list[fx.Node] = field(default_factory=list)
    """Casts, padding and views that compute the operand of this collective (for a gather, possibly of others too); they
    move along. A rank with a shorter shard pads where others do not, and must arrive at the same buckets."""
    overwritten: float = math.inf
    """Position of the next write into its operand."""
    pushed: bool = False
    """Whether elementwise followers have to move down for `needed` to be true."""
    is_alone: bool = False
    """Whether its result needs memory of its own: another node writes to it, or it leaves the graph."""

    @property
    def node(self) -> fx.Node:
        return self.block.collective

    @property
    def operand(self) -> fx.Node:
        operand = self.node.args[0]
        assert isinstance(operand, fx.Node)
        return operand

    @property
    def sources(self) -> list[fx.Node]:
        """The nodes that the operand is computed from."""
        return (self.prelude[0] if self.prelude else self.node).all_input_nodes

    @property
    def wait(self) -> fx.Node:
        return self.block.waits[0]

    @property
    def is_gather(self) -> bool:
        return self.node.target is comm.all_gather_into_tensor.default

    @property
    def twin_key(self) -> Any:
        """Equal for two members that make the same operand from the same source, and may share the result."""
        if self.is_alone:
            return self.node
        steps = [(node.target, str(node.args[1:]), str(node.kwargs)) for node in self.prelude]
        return (self.sources[0], *steps)


class Positions:
    """Positions of nodes, and the first reader of each value; from one walk over the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.of = dict(zip(self.nodes, range(len(self.nodes)), strict=True))
        self.inputs = max((self.of[node] for node in graph.find_nodes(op="placeholder", sort=False)), default=-1)
        """Position of the last input: no node may move before it."""
        self.end = len(self.nodes) - 1 - len(epilogue(graph))
        """Position of the first write-back, or of the output: no node may move past it."""

        self.windows = WriteWindows(self.nodes, self.end)

    def having(self, target: Any) -> list[fx.Node]:
        """The nodes with a target, in graph order."""
        return [node for node in self.nodes if node.target is target]

    def ready(self, node: fx.Node) -> int:
        """The position after which a node may be placed."""
        return max((self.of[source] for source in node.all_input_nodes), default=-1)

    def needed(self, bucket: list[Member]) -> int:
        """The position before which the results of a bucket are needed."""
        return int(min(self.end, *(member.needed for member in bucket)))

    def follow(self, wait: fx.Node) -> tuple[float, list[fx.Node]]:
        """The position where the result of a wait is first read by other than a view, and the views in between."""
        shown = reachable([wait], lambda node: filter(is_part, node.users))
        first = min((self.of[user] for node in shown for user in node.users if user not in shown), default=math.inf)
        del shown[wait]
        return first, sorted(shown, key=self.of.__getitem__)


def find_members(graph: fx.Graph, positions: Positions, op: Any) -> list[Member]:
    """The collectives of one operator that can share a bucket, in graph order."""
    found = []
    leaving = sharing_with_outputs(graph)
    for node in positions.having(op):
        if not isinstance(node.args[0], fx.Node):
            continue
        val = node.args[0].meta.get("val")
        block = comm_block(node)
        result = node.meta.get("val")
        if (
            not isinstance(val, Tensor)
            or not isinstance(result, Tensor)
            or len(block.waits) != 1
            or block.parts
            or block.misused
            or any(user.target is not aten.sym_size.int for user in block.measures)
        ):
            continue
        needed, followers = positions.follow(block.waits[0])
        prelude, (last_write, next_write) = _prelude(node, positions)
        key = (node.target, *map(str, (*node.args[1:], group_of(node), val.dtype, str(val.device))))
        size = max(_bytes(val), _bytes(result))
        first = prelude[0] if prelude else node
        ready, needed = max(positions.ready(first), last_write), min(needed, next_write)
        alone = block.waits[0] in leaving or positions.windows.around(block.waits, -1)[1] != math.inf
        found.append(Member(block, ready, needed, size, key, followers, prelude, next_write, is_alone=alone))
    return found


_PREPARES = frozenset(
    {
        aten._to_copy.default,
        aten.constant_pad_nd.default,
        aten.clone.default,
        aten.view.default,
        aten.reshape.default,
        aten.slice.Tensor,
    }
)


def _prelude(collective: fx.Node, positions: Positions) -> tuple[list[fx.Node], tuple[int, float]]:
    """The nodes that only compute the operand, and the writes before and after to what all of them are computed from.

    Empty if their source is written before the collective starts: they then read an older value.
    """
    chain = _chain(collective)
    read = [*(chain or [collective])[0].all_input_nodes, *chain]
    window = positions.windows.around(read, positions.of[collective])
    if chain and window[0] > positions.of[chain[0]]:
        return [], positions.windows.around(collective.all_input_nodes, positions.of[collective])
    return chain, window


def _chain(collective: fx.Node) -> list[fx.Node]:
    """Gathers may share it: they only ever move up, which does not affect other readers of the same cast or padding."""
    shared = collective.target is comm.all_gather_into_tensor.default
    chain: list[fx.Node] = []
    node = collective.args[0]
    while isinstance(node, fx.Node) and node.target in _PREPARES and len(node.all_input_nodes) == 1:
        if not shared and len(node.users) > 1:
            break
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[::-1]


def _bytes(val: Tensor) -> int:
    total = val.element_size()
    sizes: list[Any] = list(val.shape)
    for size in sizes:
        total *= size if type(size) is int else int(size.node.hint or 1)
    return total


def plan_buckets(
    members: list[Member],
    bucket_size_mb: float,
    *,
    small_first: bool = True,
    late: Callable[[fx.Node], float] | None = None,
) -> list[list[Member]]:
    """Buckets of the members of each key, in the order in which they begin.

    `late` returns the latest position at which the result of a wait is needed, if elementwise uses move; called only if
    that lets another collective join.
    """
    keyed: dict[Any, list[Member]] = {}
    for member in members:
        keyed.setdefault(member.key, []).append(member)
    pack = _pack_small_first if small_first else _pack
    done = [bucket for alike in keyed.values() for bucket in pack(alike, bucket_size_mb * MEBIBYTE, late)]
    return [bucket for bucket in done if len(bucket) > 1]


def _pack_small_first(members: list[Member], cap: float, late: Callable[[fx.Node], float] | None) -> list[list[Member]]:
    """A small first bucket lets communication start early; it is used if it does not cost a collective.

    First try a first bucket of `FIRST_BUCKET`; if that makes one more bucket, one of the size that would remain for the
    last; if nothing would remain, because all are full, `FIRST_BUCKET` after all.
    """
    plain = _pack(members, cap, late)
    if len(plain) == 1:
        return plain
    small = _pack(members, cap, late, first=min(cap, FIRST_BUCKET * MEBIBYTE))
    if len(small) <= len(plain):
        return small
    rest = _pack(members, cap, late, first=sum(member.bytes for member in plain[-1]))
    return rest if len(rest) <= len(plain) and len(rest[0]) < len(plain[0]) else small


def _pack(
    members: list[Member], cap: float, late: Callable[[fx.Node], float] | None, first: float | None = None
) -> list[list[Member]]:
    """Pack members of one key in graph order; one that cannot join the open bucket opens the next."""
    done: list[_Open] = []
    for member in members:
        limit = first if first is not None and len(done) == 1 else cap
        if not done or not done[-1].take(member, limit):
            done.append(_Open(member, late))
    return [bucket.members for bucket in done]


class _Open:
    """A bucket that other collectives may still join."""

    def __init__(self, first: Member, late: Callable[[fx.Node], float] | None) -> None:
        self.members = [first]
        self._bytes, self._begun, self._late = first.bytes, first.ready, late
        self._sent = {first.twin_key} if first.is_gather else set()
        self._needed = [(first.needed, 0)]
        """Heap of the positions where results are needed, with the index of the member."""

    def take(self, member: Member, limit: float) -> bool:
        """Add a member if it fits and no result is needed before the bucket begins."""
        begun = max(self._begun, member.ready)
        bytes_ = 0 if member.is_gather and member.twin_key in self._sent else member.bytes
        if self._bytes + bytes_ > limit:
            return False
        later: list[tuple[float, int]] = []
        while self._needed and self._needed[0][0] <= begun:
            number = heapq.heappop(self._needed)[1]
            later.append((self._later(self.members[number]), number))
            if later[-1][0] <= begun:
                return False
        joining = member if member.needed > begun else replace(member, needed=self._later(member), pushed=True)
        if joining.needed <= begun:
            return False
        for needed, number in later:
            self.members[number] = replace(self.members[number], needed=needed, pushed=True)
            heapq.heappush(self._needed, (needed, number))
        heapq.heappush(self._needed, (joining.needed, len(self.members)))
        self.members.append(joining)
        self._bytes, self._begun = self._bytes + bytes_, begun
        if member.is_gather:
            self._sent.add(member.twin_key)
        return True

    def _later(self, member: Member) -> float:
        if self._late is None or member.pushed:
            return member.needed
        return min(self._late(member.wait), member.overwritten)
