"""Cut a graph into k runs of nodes that minimise the cost of the slowest; a collective stays with its wait.

    balanced_cut(gm, 3, cost)          nodes in graph order; a bar is a cut
    linear relu linear | gelu linear norm | linear loss
         12 ms                12.5 ms          11 ms

A run costs the time of its nodes plus that of the bytes that enter at its start: all values computed before it that it,
or a later run, uses. So a value that skips a run crosses two cuts, as it does if stages communicate with their
neighbours only (otherwise this is an upper bound). Inputs and results of the graph do not count as crossing bytes.

Some stretches of nodes are never cut ("pieces"):

    made = split(x)      |  piece: a tuple is unpacked by the partition that computes it
    a = made[0]          |
    b = sin(a)              piece
    c = all_reduce(b)    |  piece: a collective is waited for by the partition that starts it
    d = cos(x)           |
    e = wait_tensor(c)   |

The nodes that unpack a tuple are moved right behind its producer. Inputs and constants are in no piece.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np
from torch import fx, nn

from wholestep.errors import CutError, PartitionError
from wholestep.ir.collectives import comm_block
from wholestep.ir.effects import communicates, shared_inputs
from wholestep.partition.bottleneck import Line, RunMemory, best_cuts, fewest_runs, fits
from wholestep.partition.graph_checks import (
    Cuttable,
    bytes_of,
    error_at,
    graph_of,
    makes_tuple,
    sound_nodes,
    unpacked_from,
    value_of,
)
from wholestep.torch_private.autograd import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED

Cost = Callable[[fx.Node], float] | Mapping[fx.Node, float] | Mapping[str, float]
_EXACT_ADVICE = 4096
"""The number of pieces up to which an error suggests the smallest feasible `max_bytes`; beyond, the search is slow."""


@dataclass(frozen=True)
class BalancedCut:
    """The cuts of a graph; also a callback for `split_module`."""

    partitions: tuple[tuple[fx.Node, ...], ...]
    """The nodes of each partition in graph order, without inputs and constants of the graph."""
    cuts: tuple[fx.Node, ...]
    """The first node of each partition but the first."""
    costs: tuple[float, ...]
    """The cost of each partition: its nodes, and the bytes that enter."""
    bytes_crossing: tuple[int, ...]
    """The bytes that cross each cut."""
    bytes_kept: tuple[int, ...]
    """The bytes that each partition holds, if `max_bytes` was given; else empty."""
    assignment: Mapping[fx.Node, int]
    """The partition of every node; inputs and constants are with their first user, the output is in the last one."""

    def __call__(self, node: fx.Node) -> int:
        """The partition of a node."""
        return self.assignment[node]

    @property
    def slowest(self) -> float:
        """The cost of the most expensive partition."""
        return max(self.costs)


def balanced_cut(
    gm: Cuttable,
    k: int,
    cost: Cost,
    max_bytes: int | None = None,
    *,
    seconds_per_byte: float = 0.0,
    value_bytes: Callable[[fx.Node], int] | None = None,
    cut_inside_modes: bool = False,
) -> BalancedCut:
    """The k runs whose slowest costs least, and of those the ones with the fewest bytes over all cuts. Exact.

    `cost` is the cost of a node, in seconds if `seconds_per_byte` is given: a function, or a mapping by node or name. A
    run costs the sum of its nodes plus `seconds_per_byte` times the bytes that enter it. (At 0, bytes only break ties.)
    Sizes come from `node.meta["val"]`, or from `value_bytes`.

    With `max_bytes`, no run holds more than that: the bytes that enter it, plus the outputs of its nodes (views have
    none, and nothing is freed), plus the parameters, buffers and other inputs that it uses, each once.

    Never separated are a tuple from the nodes that unpack it, a collective from its wait, and, unless
    `cut_inside_modes`, a region of autocast or grad mode. Raises CutError if no cut is feasible, PartitionError for
    invalid arguments.
    """
    _check_options(k, max_bytes, seconds_per_byte)
    nodes = sound_nodes(graph_of(gm))
    pieces = find_pieces(nodes, cut_inside_modes=cut_inside_modes)
    if len(pieces) < k:
        raise _too_few(pieces, k)
    sizes = _Sizes(value_bytes, needed=max_bytes is not None or seconds_per_byte > 0)
    number = pieces.numbers()
    costs, entering = _costs(pieces, cost), _entering(pieces, number, sizes)
    with np.errstate(over="ignore"):
        work = np.concatenate([[0.0], np.cumsum(costs)])
        price = np.array(entering, dtype=np.float64) * seconds_per_byte
    if not np.isfinite(work[-1] + price.max()):
        raise PartitionError("the sum of all costs overflows a float.")
    memory = _memory(nodes, pieces, number, entering, sizes) if max_bytes is not None else None
    reach = np.full(len(pieces), len(pieces)) if memory is None or max_bytes is None else memory.reach(max_bytes)
    line = Line(work, np.array(entering, dtype=np.int64), price, reach)
    bounds = best_cuts(line, k)
    if bounds is None:
        assert memory is not None
        assert max_bytes is not None
        raise _too_large(pieces, memory, k, max_bytes)
    return _result(nodes, pieces, line, bounds, memory)


def _check_options(k: int, max_bytes: int | None, seconds_per_byte: float) -> None:
    if type(k) is not int or k < 1:
        raise PartitionError(f"k must be a number of partitions, at least 1, not {k!r}.")
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 0):
        raise PartitionError(f"max_bytes must be a number of bytes, not {max_bytes!r}.")
    if not _is_amount(seconds_per_byte):
        raise PartitionError(f"seconds_per_byte must be a number, at least 0, not {seconds_per_byte!r}.")


def _costs(pieces: CutPieces, cost: Cost) -> list[float]:
    if not callable(cost) and not isinstance(cost, Mapping):
        raise PartitionError(f"cost must be a function of a node or a mapping, not {cost!r}.")
    found = [_cost(node, cost) for node in pieces.nodes]
    bounds = (*pieces.starts, len(found))
    return [math.fsum(found[start:end]) for start, end in pairwise(bounds)]


def _cost(node: fx.Node, cost: Cost) -> float:
    try:
        if isinstance(cost, Mapping):
            value = cost[node] if node in cost else cost[node.name]  # type: ignore[index]
        else:
            value = cost(node)
    except Exception as error:
        what = "has no entry" if isinstance(cost, Mapping) else f"raised {type(error).__name__}: {error}"
        raise error_at(node, f"cost {what} for {node.name}.", fix="give every node a cost, 0 if it is free.") from error
    if _is_amount(value):
        return float(value)
    raise error_at(node, f"the cost of {node.name} is {value!r}.", fix="a cost is a finite number, at least 0.")


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and bool(0 <= value <= sys.float_info.max)


class _Sizes:
    """The bytes of nodes; raises if they are needed and not known."""

    def __init__(self, value_bytes: Callable[[fx.Node], int] | None, needed: bool) -> None:
        self._given = value_bytes
        self._needed = needed

    def of(self, node: fx.Node) -> int:
        if self._given is not None:
            return self._ask(node, self._given)
        value = value_of(node)
        if value is None and node.op == "get_attr" and isinstance(root := node.graph.owning_module, nn.Module):
            value = attrgetter(str(node.target))(root)
        if value is None and self._needed and "val" not in node.meta:
            raise error_at(
                node,
                f"the size of {node.name} is not known.",
                fix='trace with fake tensors, so that node.meta["val"] is set, or pass value_bytes.',
            )
        return bytes_of(value)

    def _ask(self, node: fx.Node, value_bytes: Callable[[fx.Node], int]) -> int:
        try:
            size = value_bytes(node)
        except Exception as error:
            raise error_at(node, f"value_bytes raised {type(error).__name__}: {error}") from error
        if type(size) is not int or not 0 <= size < 1 << 50:
            raise error_at(node, f"value_bytes returned {size!r} for {node.name}.", fix="return a number of bytes.")
        return size


def _entering(pieces: CutPieces, number: Mapping[fx.Node, int], sizes: _Sizes) -> list[int]:
    """For each piece, the bytes that would cross a cut before it."""
    change = [0] * (len(pieces) + 1)
    for node, own in number.items():
        last = max((number[user] for user in node.users if user in number), default=own)
        if last > own and (size := sizes.of(node)):
            change[own + 1] += size
            change[last + 1] -= size
    return [int(each) for each in np.cumsum(change)[:-1]]


def _memory(
    nodes: Sequence[fx.Node], pieces: CutPieces, number: Mapping[fx.Node, int], entering: Sequence[int], sizes: _Sizes
) -> RunMemory:
    made = [0] * len(pieces)
    for node, piece in number.items():
        # A view shares the memory of its base, which is counted already.
        made[piece] += 0 if shared_inputs(node) else sizes.of(node)
    uses: dict[object, tuple[int, set[int]]] = {}
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            users = {number[user] for user in node.users if user in number}
            if users:
                key = node if node.op == "placeholder" else node.target
                uses.setdefault(key, (sizes.of(node), set()))[1].update(users)
        elif node.op == "call_module" and isinstance(root := node.graph.owning_module, nn.Module):
            module = root.get_submodule(str(node.target))
            for tensor in (*module.parameters(), *module.buffers()):
                uses.setdefault(id(tensor), (bytes_of(tensor), set()))[1].add(number[node])
    return RunMemory(entering, made, [(size, sorted(users)) for size, users in uses.values()])


def _result(
    nodes: Sequence[fx.Node], pieces: CutPieces, line: Line, bounds: Sequence[int], memory: RunMemory | None
) -> BalancedCut:
    place = {node: i for i, node in enumerate(nodes)}
    runs = [pieces.span(start, end) for start, end in pairwise(bounds)]
    partitions = tuple(tuple(sorted(run, key=place.__getitem__)) for run in runs)
    assignment = {node: i for i, run in enumerate(partitions) for node in run}
    for node in reversed(nodes):
        if node.op in NOT_WORK:
            users = [assignment[user] for user in node.users if user in assignment]
            assignment[node] = len(runs) - 1 if node.op == "output" else min(users, default=0)
    starts = np.array(bounds[:-1])
    return BalancedCut(
        partitions=partitions,
        cuts=tuple(run[0] for run in runs[1:]),
        costs=tuple(float(line.costs(starts[i : i + 1], end)[0]) for i, end in enumerate(bounds[1:])),
        bytes_crossing=tuple(int(line.entering[start]) for start in bounds[1:-1]),
        bytes_kept=tuple(memory.of(start, end) for start, end in pairwise(bounds)) if memory is not None else (),
        assignment={node: assignment[node] for node in nodes},
    )


def _too_few(pieces: CutPieces, k: int) -> CutError:
    what = f"the graph can be cut into at most {len(pieces)} partitions, not {k}"
    longest = max((pieces.of(i) for i in range(len(pieces))), key=len, default=())
    if len(longest) > 1:
        what += f"; the longest stretch that is never cut has {len(longest)} nodes, {longest[0]} to {longest[-1]}"
    return CutError(what + ".", fix="ask for fewer, or see the page for what is never cut.")


def _too_large(pieces: CutPieces, memory: RunMemory, k: int, max_bytes: int) -> CutError:
    alone = [memory.of(i, i + 1) for i in range(len(pieces))]
    largest = max(range(len(pieces)), key=alone.__getitem__)
    runs = fewest_runs(memory.reach(max_bytes))
    fix = ""
    if len(pieces) <= _EXACT_ADVICE:
        low, high = max_bytes, memory.most()
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(memory.reach(middle), k) else (middle, high)
        fix = f"with k={k} the smallest max_bytes is {high}"
    if runs is not None and runs != k:
        fix += f"{'; ' if fix else ''}with this max_bytes, k={runs} works"
    node = pieces.of(largest)[0]
    what = f"no cut into {k} partitions holds at most {max_bytes} bytes in each"
    if alone[largest] > max_bytes:
        what += f": {node.name} and the nodes that are not cut from it hold {alone[largest]} alone"
    return CutError(what + ".", fix=(fix or "raise max_bytes or k") + ".", node=node.name)


NOT_WORK = frozenset({"placeholder", "get_attr", "output"})


@dataclass(frozen=True)
class CutPieces:
    """Nodes in an executable order, and where they may be cut."""

    nodes: tuple[fx.Node, ...]
    starts: tuple[int, ...]
    """The index in `nodes` at which each piece begins."""

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, piece: int) -> tuple[fx.Node, ...]:
        """The nodes of one piece."""
        return self.span(piece, piece + 1)

    def span(self, first: int, end: int) -> tuple[fx.Node, ...]:
        """The nodes of the pieces from `first` to before `end`."""
        bounds = (*self.starts[first : first + 1], *self.starts[end : end + 1], len(self.nodes))
        return self.nodes[bounds[0] : bounds[1]]

    def numbers(self) -> dict[fx.Node, int]:
        """The piece of each node."""
        ends = [*self.starts[1:], len(self.nodes)]
        lengths = [end - start for start, end in zip(self.starts, ends, strict=True)]
        return dict(zip(self.nodes, np.repeat(np.arange(len(lengths)), lengths).tolist(), strict=True))


def find_pieces(nodes: Sequence[fx.Node], *, cut_inside_modes: bool = False) -> CutPieces:
    """The pieces of a graph, given all of its nodes."""
    line = _line(nodes)
    place = {node: i for i, node in enumerate(line)}
    joined = np.zeros(len(line) + 1, dtype=np.int64)
    for first, last in _whole(line, cut_inside_modes):
        joined[place[first] + 1] += 1
        joined[place[last] + 1] -= 1
    starts = np.flatnonzero(np.cumsum(joined)[:-1] == 0) if line else np.zeros(0, dtype=np.int64)
    return CutPieces(tuple(line), tuple(starts.tolist()))


def _line(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    behind: dict[fx.Node, list[fx.Node]] = {}
    root: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        producer = unpacked_from(node)
        if producer is not None and producer.op not in NOT_WORK and makes_tuple(producer):
            root[node] = root.get(producer, producer)
            behind.setdefault(root[node], []).append(node)
    return [
        each for node in nodes if node.op not in NOT_WORK and node not in root for each in (node, *behind.get(node, ()))
    ]


def _whole(line: Sequence[fx.Node], cut_inside_modes: bool) -> Iterator[tuple[fx.Node, fx.Node]]:
    """First and last node of each stretch that must not be cut."""
    grad_mode: fx.Node | None = None
    for node in line:
        producer = unpacked_from(node)
        if producer is not None and producer.op not in NOT_WORK:
            yield producer, node
        elif communicates(node):
            for wait in comm_block(node).waits:
                yield node, wait
        elif node.target == EXIT_AUTOCAST and not cut_inside_modes:
            entered = node.args[0]
            if isinstance(entered, fx.Node) and entered.target == ENTER_AUTOCAST:
                yield entered, node
        elif node.target == SET_GRAD_ENABLED and not cut_inside_modes:
            if grad_mode is None:
                grad_mode = node
            elif grad_mode.args[0] != node.args[0]:
                yield grad_mode, node
                grad_mode = None
