"""Cut a graph into k runs of nodes so that the slowest is as fast as possible: stages of a pipeline, say.

    balanced_cut(gm, 3, cost)          nodes in graph order; a bar is a cut
    linear relu linear | gelu linear norm | linear loss
         12 ms                12.5 ms          11 ms

A run takes the time of its nodes, and of the bytes that come in at its start: all values that nodes before it made and
that it, or a run behind it, uses. So a value that skips a run crosses two cuts, as it does where stages talk to their
neighbours only (and where they do not, this is an upper bound). Inputs of the graph and results are no crossing bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np
from torch import fx, nn

from wholestep.errors import CutError, PartitionError
from wholestep.ir.effects import shared_inputs
from wholestep.partition.bottleneck import Line, best_cuts, fewest_runs, fits
from wholestep.partition.graphs import Cuttable, bytes_of, error_at, graph_of, sound_nodes, value_of
from wholestep.partition.kept import Keeping
from wholestep.partition.pieces import NOT_WORK, Pieces, find_pieces

Cost = Callable[[fx.Node], float] | Mapping[fx.Node, float] | Mapping[str, float]
_EXACT_ADVICE = 4096
"""Pieces up to which an error says the smallest `max_bytes` that would do; beyond, finding it takes too long."""


@dataclass(frozen=True)
class BalancedCut:
    """Where a graph is cut; also a callback for `split_module`."""

    partitions: tuple[tuple[fx.Node, ...], ...]
    """The nodes of each partition in graph order, without inputs and constants of the graph."""
    cuts: tuple[fx.Node, ...]
    """The first node of each partition but the first."""
    costs: tuple[float, ...]
    """What each partition costs: its nodes, and the bytes that enter."""
    bytes_crossing: tuple[int, ...]
    """The bytes that cross each cut."""
    bytes_kept: tuple[int, ...]
    """What each partition keeps, where `max_bytes` was given; else empty."""
    assignment: Mapping[fx.Node, int]
    """Every node's partition; inputs and constants count to their first user, the output to the last partition."""

    def __call__(self, node: fx.Node) -> int:
        """The partition of a node."""
        return self.assignment[node]

    @property
    def slowest(self) -> float:
        """What the most expensive partition costs."""
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

    `cost` gives a node's cost, in seconds if `seconds_per_byte` is given: a function, or a mapping by node or name. A
    run costs the sum of its nodes plus `seconds_per_byte` times the bytes that enter it. (At 0, bytes only decide
    between equals.) Sizes come from `node.meta["val"]`, or from `value_bytes`.

    With `max_bytes`, no run keeps more than that: what enters it, plus what its nodes make (views make nothing, and
    nothing is freed), plus the parameters, buffers and other inputs that it uses, each once.

    Not cut are a tuple from the nodes that take it apart, a collective from its wait, and, unless `cut_inside_modes`,
    regions of autocast and grad mode. Raises CutError where no cut fits, PartitionError for input that has no meaning.
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
        raise PartitionError("the costs of all nodes together are too large for a number.")
    keeping = _keeping(nodes, pieces, number, entering, sizes) if max_bytes is not None else None
    reach = np.full(len(pieces), len(pieces)) if keeping is None or max_bytes is None else keeping.reach(max_bytes)
    line = Line(work, np.array(entering, dtype=np.int64), price, reach)
    bounds = best_cuts(line, k)
    if bounds is None:
        assert keeping is not None
        assert max_bytes is not None
        raise _too_large(pieces, keeping, k, max_bytes)
    return _result(nodes, pieces, line, bounds, keeping)


def _check_options(k: int, max_bytes: int | None, seconds_per_byte: float) -> None:
    if type(k) is not int or k < 1:
        raise PartitionError(f"k must be a number of partitions, at least 1, not {k!r}.")
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 0):
        raise PartitionError(f"max_bytes must be a number of bytes, not {max_bytes!r}.")
    if not _is_amount(seconds_per_byte):
        raise PartitionError(f"seconds_per_byte must be a number, at least 0, not {seconds_per_byte!r}.")


def _costs(pieces: Pieces, cost: Cost) -> list[float]:
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
        raise error_at(
            node, f"cost {what} for {node.name}.", fix="give every node a cost, 0 where it is free."
        ) from error
    if _is_amount(value):
        return float(value)
    raise error_at(node, f"the cost of {node.name} is {value!r}.", fix="a cost is a finite number, at least 0.")


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and bool(0 <= value <= sys.float_info.max)


class _Sizes:
    """The bytes of nodes, and a complaint where they are needed and not known."""

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
                f"how many bytes {node.name} has is not known.",
                fix='trace with fake tensors, so that node.meta["val"] is there, or give value_bytes.',
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


def _entering(pieces: Pieces, number: Mapping[fx.Node, int], sizes: _Sizes) -> list[int]:
    """For each piece, the bytes that would cross a cut before it."""
    change = [0] * (len(pieces) + 1)
    for node, own in number.items():
        last = max((number[user] for user in node.users if user in number), default=own)
        if last > own and (size := sizes.of(node)):
            change[own + 1] += size
            change[last + 1] -= size
    return [int(each) for each in np.cumsum(change)[:-1]]


def _keeping(
    nodes: Sequence[fx.Node], pieces: Pieces, number: Mapping[fx.Node, int], entering: Sequence[int], sizes: _Sizes
) -> Keeping:
    made = [0] * len(pieces)
    for node, piece in number.items():
        # What shares memory was counted where the memory was made.
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
    return Keeping(entering, made, [(size, sorted(users)) for size, users in uses.values()])


def _result(
    nodes: Sequence[fx.Node], pieces: Pieces, line: Line, bounds: Sequence[int], keeping: Keeping | None
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
        bytes_kept=tuple(keeping.of(start, end) for start, end in pairwise(bounds)) if keeping is not None else (),
        assignment={node: assignment[node] for node in nodes},
    )


def _too_few(pieces: Pieces, k: int) -> CutError:
    what = f"the graph can be cut into at most {len(pieces)} partitions, not {k}"
    longest = max((pieces.of(i) for i in range(len(pieces))), key=len, default=())
    if len(longest) > 1:
        what += f"; the longest stretch that stays whole has {len(longest)} nodes, {longest[0]} to {longest[-1]}"
    return CutError(what + ".", fix="ask for fewer, or see the page for what is not cut.")


def _too_large(pieces: Pieces, keeping: Keeping, k: int, max_bytes: int) -> CutError:
    alone = [keeping.of(i, i + 1) for i in range(len(pieces))]
    largest = max(range(len(pieces)), key=alone.__getitem__)
    runs = fewest_runs(keeping.reach(max_bytes))
    fix = ""
    if len(pieces) <= _EXACT_ADVICE:
        low, high = max_bytes, keeping.most()
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(keeping.reach(middle), k) else (middle, high)
        fix = f"with k={k} the smallest max_bytes is {high}"
    if runs is not None and runs != k:
        fix += f"{'; ' if fix else ''}with this max_bytes, k={runs} works"
    node = pieces.of(largest)[0]
    what = f"no cut into {k} partitions keeps at most {max_bytes} bytes in each"
    if alone[largest] > max_bytes:
        what += f": {node.name} and what stays with it keep {alone[largest]} alone"
    return CutError(what + ".", fix=(fix or "raise max_bytes or k") + ".", node=node.name)
