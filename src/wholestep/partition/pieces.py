"""The pieces of a graph between which it can be cut, in graph order.

    made = split(x)      |  piece: nobody can take a tuple apart that another part made
    a = made[0]          |
    b = sin(a)              piece
    c = all_reduce(b)    |  piece: what was started is waited for in the same part
    d = cos(x)           |
    e = wait_tensor(c)   |

The nodes that take a tuple apart go to right behind what made it, wherever they stand. Inputs and constants are in no
piece. Cost: one walk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from wholestep.ir.comm_block import comm_block, communicates
from wholestep.partition.graphs import makes_tuple, unpacked_from
from wholestep.torch_private.autograd import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED

NOT_WORK = frozenset({"placeholder", "get_attr", "output"})


@dataclass(frozen=True)
class Pieces:
    """Nodes in an order in which they can run, and where that may be cut."""

    nodes: tuple[fx.Node, ...]
    starts: tuple[int, ...]
    """Where in `nodes` each piece begins."""

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


def find_pieces(nodes: Sequence[fx.Node], *, cut_inside_modes: bool = False) -> Pieces:
    """The pieces of a graph, given all of its nodes."""
    line = _line(nodes)
    place = {node: i for i, node in enumerate(line)}
    joined = np.zeros(len(line) + 1, dtype=np.int64)
    for first, last in _whole(line, cut_inside_modes):
        joined[place[first] + 1] += 1
        joined[place[last] + 1] -= 1
    starts = np.flatnonzero(np.cumsum(joined)[:-1] == 0) if line else np.zeros(0, dtype=np.int64)
    return Pieces(tuple(line), tuple(starts.tolist()))


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
