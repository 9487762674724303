"""A graph as tasks for a list scheduler: what must be placed in time, and what comes along.

    convert = _to_copy(shard)        on demand: runs right before the gather that it prepares
    g = all_gather(convert)          task: an issue; `g done` is an event
    w = wait_tensor(g)               on demand: after the event, before the first task that reads it
    t = permute(w)                   on demand: runs nothing
    y = mm(x, t)                     task: needs x and the event `g done`

Operators that run nothing, or are computed inside of the kernels of their readers, are placed with the first reader.
Tasks depend on tasks (as executed) and on events (as done), through all that is placed on demand. Effects keep their
order by `ir.effects`; only the order of collectives is free here. Cost: a few walks over the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wholestep.ir.effects import GraphEffects, is_collective, order_edges
from wholestep.ir.graph_walks import epilogue
from wholestep.simulate.step_index import COMPUTE, FREE, INPUT, ISSUE, OUTPUT, READ, WAIT, StepIndex

_INSIDE_US = 0.5
"""What takes no longer is computed inside of the kernels of its readers."""
_MOST_ROOTS = 48


@dataclass(eq=False)
class TaskGraph:
    """Tasks of a graph, by the numbers of their nodes."""

    index: StepIndex
    cost: list[float]
    after: dict[int, list[int]]
    """Beside its sources, the nodes that a node comes after."""
    tasks: list[int]
    """Nodes that are placed in time, in the order of the graph."""
    is_task: list[bool]
    end: list[int]
    """Write-backs and the output, which stay at the end."""
    needs: dict[int, int] = field(default_factory=dict)
    """Of each task, how many tasks and events must come before it."""
    followers: dict[int, list[int]] = field(default_factory=dict)
    """The tasks that need a task to be executed."""
    readers: dict[int, list[int]] = field(default_factory=dict)
    """The tasks that need a collective to be done."""
    tail: list[float] = field(default_factory=list)
    """Of each node, the longest chain from its start to the end of the step."""
    touch: list[tuple[int, ...]] = field(default_factory=list)
    """The storages that each node keeps alive while it runs; a wait those that its collective reads, too."""
    made_bytes: list[int] = field(default_factory=list)
    """Bytes that each node allocates."""
    held_bytes: dict[int, int] = field(default_factory=dict)
    """Of each collective, the bytes that it may free when it is done."""
    is_pull: dict[int, bool] = field(default_factory=dict)
    """Of each collective, whether it takes more memory than it frees: it is issued no earlier than it must be."""

    def __len__(self) -> int:
        return len(self.index)


def task_graph(index: StepIndex, cost: Sequence[float]) -> TaskGraph:
    """Find the tasks of a graph."""
    after = _order(index)
    end = _end_of(index)
    fixed = set(end)
    found = TaskGraph(index, list(cost), after, [], [False] * len(index), end)
    roots = _Roots(found, fixed)
    roots.find()
    sizes = index.sizes.tolist()
    persistent = index.persistent
    found.touch = list(index.seen)
    for wait, held in index.held.items():
        found.touch[wait] = (*index.seen[wait], *held)
    found.made_bytes = [sum(sizes[s] for s in made) if made else 0 for made in index.made]
    for c in index.collectives:
        waits = index.waits.get(c, [])
        found.held_bytes[c] = (
            sum(sizes[s] for s in set(index.held.get(waits[0], ())) if s not in persistent) if waits else 0
        )
        found.is_pull[c] = found.made_bytes[c] > found.held_bytes[c]
    _tails(found)
    return found


def _end_of(index: StepIndex) -> list[int]:
    """Write-backs and the output."""
    end = [index.number[node] for node in epilogue(index.graph)]
    return end + [i for i, kind in enumerate(index.kind) if kind == OUTPUT]


def _order(index: StepIndex) -> dict[int, list[int]]:
    """Edges beside those of values: random draws, writes, effects. Collectives may change places."""
    effects = GraphEffects(index.nodes)
    for node in [node for node in effects.tokens if is_collective(node.target)]:
        del effects.tokens[node]
    edges = order_edges(index.nodes, effects=effects)
    number = index.number
    found = {number[node]: [number[source] for source in before] for node, before in edges.items()}
    if effects.written:
        _after_waits(index, found)
    return found


def _after_waits(index: StepIndex, after: dict[int, list[int]]) -> None:
    """What overwrites an operand comes after the wait, if it does in the graph."""
    for i, before in after.items():
        for source in list(before):
            if index.kind[source] == ISSUE:
                before.extend(wait for wait in index.waits.get(source, ()) if wait < i)


class _Roots:
    """What each node waits for, through nodes that are placed on demand: tasks, and events (as -1 - collective)."""

    def __init__(self, graph: TaskGraph, fixed: set[int]) -> None:
        self._graph, self._index, self._fixed = graph, graph.index, fixed
        self._roots: list[frozenset[int]] = [frozenset()] * len(graph)
        self._on_demand = self._candidates()

    def find(self) -> None:
        graph, index, roots = self._graph, self._index, self._roots
        nothing: frozenset[int] = frozenset()
        kinds, sources_of, after = index.kind, index.sources, graph.after
        for i, kind in enumerate(kinds):
            if kind == INPUT or i in self._fixed:
                continue
            sources = sources_of[i]
            if kind == WAIT and index.issued[i] >= 0:
                known = frozenset((-1 - index.issued[i],))
            elif len(sources) == 1:
                known = roots[sources[0]]
            else:
                known = nothing.union(*[roots[source] for source in sources]) if sources else nothing
            if i in after:
                known = known.union(*[roots[source] for source in after[i] if source not in self._fixed])
            if kind == WAIT or (self._on_demand[i] and len(known) <= _MOST_ROOTS):
                roots[i] = known
                continue
            graph.is_task[i] = True
            graph.tasks.append(i)
            graph.needs[i] = len(known)
            for root in known:
                if root >= 0:
                    graph.followers.setdefault(root, []).append(i)
                else:
                    graph.readers.setdefault(-1 - root, []).append(i)
            roots[i] = frozenset((i,))

    def _candidates(self) -> list[bool]:
        """Nodes that may be placed on demand: what takes no time and is read, and what only prepares a collective."""
        index, graph = self._index, self._graph
        users, kinds, cost = index.users, index.kind, graph.cost
        found = [False] * len(index)
        for i in range(len(index) - 1, -1, -1):
            kind = kinds[i]
            if kind == FREE or (kind == COMPUTE and cost[i] < _INSIDE_US):
                found[i] = bool(users[i]) and users[i][0] not in self._fixed
        for c in index.collectives:
            self._mark_prelude(c, found)
        return found

    def _mark_prelude(self, c: int, found: list[bool]) -> None:
        """Casts, padding and views of inputs, that are there from the start."""
        index, graph = self._index, self._graph
        inside: list[int] = []
        stack = list(index.sources[c])
        while stack:
            i = stack.pop()
            if index.kind[i] == INPUT:
                continue
            if index.kind[i] not in (COMPUTE, FREE) or i in graph.after or len(inside) > 16:
                return
            if index.kind[i] == COMPUTE and graph.cost[i] > max(0.5 * graph.cost[c], _INSIDE_US):
                return
            if any(index.kind[user] == OUTPUT for user in index.users[i]):
                return
            inside.append(i)
            stack += index.sources[i]
        for i in inside:
            found[i] = True


def _tails(graph: TaskGraph) -> None:
    index, cost = graph.index, graph.cost
    tail = [0.0] * len(graph)
    for i in range(len(graph) - 1, -1, -1):
        own = tail[i] = tail[i] + (cost[i] if index.kind[i] in (COMPUTE, ISSUE, READ) else 0.0)
        for source in index.sources[i]:
            if tail[source] < own:
                tail[source] = own
    graph.tail = tail
