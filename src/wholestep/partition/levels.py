"""Give every node a level so that supported nodes of one level can run together.

    x -> [mul] -> [add] -> (print) -> [sin]        level of a node: how often a path to it comes out of supported nodes,
                    \\---------------> [cos]        through an unsupported one, and into supported nodes again
          0        0        0          1
                                      0 (cos)

Two supported nodes on a path through an unsupported one can never be in one partition, so the longest such path is a
lower bound on their number; one partition for each level reaches it. Along every edge levels only grow, and grow where
an unsupported node hands to a supported one, so partitions and unsupported nodes stand in a line without cycles.

Cost: each edge is looked at two or three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitGraph:
    """Things that stay whole (a node with the nodes that unpack it), numbered so that edges go from low to high."""

    supported: Sequence[bool]
    sources: Sequence[Sequence[int]]
    """For each unit, the units that must run before it."""
    movable: Sequence[bool]
    """Units without effects that use nothing but inputs of the graph, or what only they use: they may run later."""


def levels(units: UnitGraph) -> list[int]:
    """The earliest level of each unit; -1 for unsupported units that no supported one comes before."""
    supported = units.supported
    found: list[int] = []
    for unit, sources in enumerate(units.sources):
        level = 0 if supported[unit] else -1
        if supported[unit]:
            for source in sources:
                level = max(level, found[source] + (not supported[source]))
        else:
            for source in sources:
                level = max(level, found[source])
        found.append(level)
    return found


def sink(units: UnitGraph, level: list[int]) -> None:
    """Raise movable units to the level of their first user: a cast of a weight need not wait there for ten levels."""
    limit: list[int | None] = [None] * len(level)
    for unit in range(len(level) - 1, -1, -1):
        latest = limit[unit]
        if units.movable[unit] and latest is not None:
            level[unit] = max(level[unit], latest)
        for source in units.sources[unit]:
            allowed = level[unit] - (units.supported[unit] and not units.supported[source])
            known = limit[source]
            limit[source] = allowed if known is None else min(known, allowed)


def components(units: UnitGraph, level: list[int]) -> list[int]:
    """For each supported unit the lowest unit that it is connected to within its level; -1 for the others.

    A group that nothing at its level needs goes up to the first group that uses it, if that is where it can go.
    Raising changes `level`.
    """
    joined = _Joined(len(level))
    supported = units.supported
    for unit, sources in enumerate(units.sources):
        for source in sources:
            if supported[unit] and supported[source] and level[unit] == level[source]:
                joined.join(source, unit)
    _raise_groups(units, level, joined)
    return [joined.find(unit) if supported[unit] else -1 for unit in range(len(level))]


def _raise_groups(units: UnitGraph, level: list[int], joined: _Joined) -> None:
    users: list[list[int]] = [[] for _ in level]
    for unit, sources in enumerate(units.sources):
        for source in sources:
            users[source].append(unit)
    groups: dict[int, list[int]] = {}
    for unit, supported in enumerate(units.supported):
        if supported:
            groups.setdefault(joined.find(unit), []).append(unit)
    # From the last level backwards: what a group can join has found its own place by then.
    for root in sorted(groups, key=lambda root: -level[root]):
        members = groups[root]
        inside = set(members)
        outside = [(user, unit) for unit in members for user in users[unit] if user not in inside]
        latest = min((level[user] for user, _ in outside), default=-1)
        joins = [(user, unit) for user, unit in outside if level[user] == latest and units.supported[user]]
        if latest > level[root] and joins:
            for unit in members:
                level[unit] = latest
            for user, unit in joins:
                joined.join(user, unit)


class _Joined:
    """Union-find whose representative is the lowest member."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def find(self, unit: int) -> int:
        parent = self._parent
        root = unit
        while parent[root] != root:
            root = parent[root]
        while parent[unit] != root:
            parent[unit], unit = root, parent[unit]
        return root

    def join(self, unit: int, other: int) -> None:
        unit, other = self.find(unit), self.find(other)
        self._parent[max(unit, other)] = min(unit, other)
