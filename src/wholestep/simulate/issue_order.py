"""Whether ranks can wait for each other in a circle because they issue collectives in different orders.

    rank 0    all_reduce of (0, 1)      all_reduce of (0, 2)         0 waits for 1, which waits for 2,
    rank 1    all_reduce of (1, 2)      all_reduce of (0, 1)         which waits for 0
    rank 2    all_reduce of (0, 2)      all_reduce of (1, 2)

Each group has a stream of its own, but streams share what runs collectives (the SMs of a GPU, the threads of gloo): one
that has started may keep another from starting. A schedule is safe whatever they share if there is one order of all
collectives that every rank's own order is a part of, and only then: if the order of issue has no cycle.
Cost: linear in the number of collectives of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import fx

from wholestep.errors import OptionError
from wholestep.ir.effects import communicates
from wholestep.ir.groups import group_of
from wholestep.ir.step_graph import StepGraph
from wholestep.simulate.step_index import graph_of, plain
from wholestep.torch_private.distributed import process_group_ranks


class Issue(NamedTuple):
    """One collective that a rank issues."""

    ranks: tuple[int, ...]
    """The ranks of its group."""
    what: str = ""
    """What it does: the same on all of them."""


@dataclass(frozen=True)
class IssueConflict:
    """Why ranks may wait for each other for ever."""

    kind: str
    """`cycle`: they issue in orders that contradict each other; `mismatch`: they do not issue the same."""
    steps: tuple[tuple[int, str, str], ...]
    """Of a cycle: rank, what it issues first, what it issues later. Of a mismatch: rank, what it issues, and what
    the first rank of the group issues."""

    def __str__(self) -> str:
        if self.kind == "mismatch":
            lines = [f"rank {rank} issues {own}, its group {other}" for rank, own, other in self.steps]
            return "ranks of one group issue different collectives:\n  " + "\n  ".join(lines)
        lines = [f"rank {rank} issues {first} before {later}" for rank, first, later in self.steps]
        return "ranks can wait for each other in a circle:\n  " + "\n  ".join(lines)


def issues_of(
    given: StepGraph | fx.GraphModule | fx.Graph, groups: Mapping[str, Iterable[int]] | None = None
) -> list[Issue]:
    """The collectives of a graph in the order in which it issues them. `groups`: the ranks of process groups by name,
    where torch.distributed does not know them."""
    known: dict[str, tuple[int, ...]] = {name: tuple(ranks) for name, ranks in (groups or {}).items()}
    found = []
    for node in graph_of(given).nodes:
        if not communicates(node):
            continue
        name = group_of(node) or ""
        if name not in known:
            known[name] = process_group_ranks(name)
        if not known[name]:
            raise OptionError(
                f"the ranks of the process group {name!r} are not known.",
                fix=f"give groups={{{name!r}: [0, 1, ..]}}.",
            )
        found.append(Issue(known[name], plain(node.target)))
    return found


def deadlock(orders: Mapping[int, Sequence[Issue]]) -> IssueConflict | None:
    """None if the ranks can never wait for each other in a circle; otherwise why they can.

    `orders`: what each rank issues, in its order. The k-th collective of a group is the same one on all its ranks.
    """
    numbered = {rank: _numbered(issues) for rank, issues in orders.items()}
    return _mismatch(orders) or _cycle(numbered)


_Instance = tuple[tuple[int, ...], int]
"""A collective: its group, and which of the group's collectives it is."""


def _numbered(issues: Sequence[Issue]) -> list[_Instance]:
    count: dict[tuple[int, ...], int] = {}
    found = []
    for issue in issues:
        found.append((issue.ranks, count.get(issue.ranks, 0)))
        count[issue.ranks] = found[-1][1] + 1
    return found


def _mismatch(orders: Mapping[int, Sequence[Issue]]) -> IssueConflict | None:
    by_group: dict[tuple[int, ...], dict[int, list[str]]] = {}
    for rank, issues in orders.items():
        for issue in issues:
            if rank not in issue.ranks:
                return IssueConflict("mismatch", ((rank, _said(issue.ranks, issue.what), "does not have that rank"),))
            by_group.setdefault(issue.ranks, {}).setdefault(rank, []).append(issue.what)
    for ranks, issued in by_group.items():
        present = [rank for rank in ranks if rank in orders]
        expected = issued.get(present[0], [])
        for rank in present[1:]:
            own = issued.get(rank, [])
            if own != expected:
                at = next((k for k, (a, b) in enumerate(zip(own, expected, strict=False)) if a != b), -1)
                at = at if at >= 0 else min(len(own), len(expected))
                return IssueConflict("mismatch", ((rank, _at(ranks, own, at), _at(ranks, expected, at)),))
    return None


def _at(ranks: tuple[int, ...], issued: Sequence[str], at: int) -> str:
    return _said(ranks, issued[at]) if at < len(issued) else f"nothing as number {at} of {ranks}"


def _cycle(numbered: Mapping[int, list[_Instance]]) -> IssueConflict | None:
    after: dict[_Instance, list[tuple[_Instance, int]]] = {}
    open_edges: dict[_Instance, int] = {}
    for rank, issued in numbered.items():
        for each in issued:
            open_edges.setdefault(each, 0)
        for first, later in pairwise(issued):
            after.setdefault(first, []).append((later, rank))
            open_edges[later] += 1
    ready = deque(each for each, count in open_edges.items() if not count)
    while ready:
        for later, _ in after.get(ready.popleft(), ()):
            open_edges[later] -= 1
            if not open_edges[later]:
                ready.append(later)
    stuck = {each for each, count in open_edges.items() if count}
    return IssueConflict("cycle", _walk(stuck, after)) if stuck else None


def _walk(
    stuck: set[_Instance], after: Mapping[_Instance, list[tuple[_Instance, int]]]
) -> tuple[tuple[int, str, str], ...]:
    """One cycle: every collective that is stuck comes after another one that is, so going back must come round."""
    before: dict[_Instance, tuple[_Instance, int]] = {}
    for first in stuck:
        for later, rank in after.get(first, ()):
            if later in stuck:
                before.setdefault(later, (first, rank))
    each = min(stuck)
    seen: dict[_Instance, int] = {}
    path: list[tuple[int, _Instance, _Instance]] = []
    while each not in seen:
        seen[each] = len(path)
        first, rank = before[each]
        path.append((rank, first, each))
        each = first
    return tuple((rank, _said(*first), _said(*later)) for rank, first, later in reversed(path[seen[each] :]))


def _said(ranks: tuple[int, ...], what: str | int) -> str:
    shown = f"number {what}" if isinstance(what, int) else what or "a collective"
    return f"{shown} of {ranks}"
