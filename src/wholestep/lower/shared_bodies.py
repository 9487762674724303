"""Compile the pieces of a graph that are equal once, and call that one body for each with its own tensors.

    graph      embedding, layer, layer, layer, loss
    compiled   first(..), body(..), body(..), body(..), last(..)

Recognition is exact (`pieces.py`), so sharing changes no operator and no order of random numbers. What it may change is
which operators are fused: where the graph is cut is chosen in `repeats.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep.lower.pieces import GraphPiece, PieceGraph, can_be_cut, row_size
from wholestep.lower.repeats import RepeatPlan, plan_repeats

log = logging.getLogger("wholestep.lower")

Compiled = Callable[[list[Any]], Any]
CompileBody = Callable[[fx.GraphModule, list[Any], Sequence[int]], Compiled]
"""Takes a graph, examples of its inputs, and the positions of those whose memory it may use."""


@dataclass
class BodyCache:
    """Compiled bodies by what they compute, for all regions of a step."""

    share: bool = True
    """Share wherever something is repeated (`repeat="share"`), instead of where it is worth it."""
    _known: dict[Any, tuple[Compiled, list[Any]]] = field(default_factory=dict)
    """With the objects that keys have the ids of."""

    def compile(
        self, graph: PieceGraph, piece: GraphPiece, given: Collection[fx.Node], how: Hashable, do: CompileBody
    ) -> Compiled:
        """The compiled form of a piece, or of an equal one that was compiled the same way."""
        key = (how, *graph.key(piece, given))
        found = self._known.get(key)
        if found is None:
            gm, inputs = graph.module(piece)
            away = [i for i, node in enumerate(piece.inputs) if node in given]
            found = self._known[key] = (do(gm, inputs, away), graph.constants(piece))
        return found[0]


def compile_shared(
    gm: fx.GraphModule,
    inputs: list[Any],
    do: CompileBody,
    bodies: BodyCache | None,
    *,
    how: Hashable = None,
    given_away: Sequence[int] = (),
) -> Compiled:
    """Compile a graph, what is repeated in it once. `how`: what `do` depends on besides its arguments."""
    graph = PieceGraph(gm) if bodies is not None and can_be_cut(gm) else None
    plan = None if graph is None or not graph.order else plan_repeats(graph)
    if bodies is None or graph is None or plan is None or not _is_shared(plan, bodies):
        return do(gm, inputs, given_away)
    log.info(
        "%d pieces of one region: %d operators are not compiled; seams move %d of %d bytes",
        len(plan.pieces),
        plan.saved,
        plan.seam_bytes,
        plan.moved,
    )
    return _program(graph, plan, do, bodies, how, given_away)


def _is_shared(plan: RepeatPlan, bodies: BodyCache) -> bool:
    return plan.saved > 0 if bodies.share else plan.is_worth_it


@dataclass(frozen=True)
class SharedBodies:
    """How a region is compiled in pieces."""

    calls: int = 0
    bodies: int = 0
    repeated: tuple[tuple[int, int], ...] = ()
    """For each body that is called more than once: how often, and its operators."""

    @classmethod
    def of(cls, *parts: Compiled) -> SharedBodies:
        """Of the parts of a region; nothing for parts that are one piece."""
        calls = [c for part in parts if isinstance(part, SharedProgram) for c in part.calls if c.operators]
        count = Counter(id(call.body) for call in calls)
        operators = {id(call.body): call.operators for call in calls}
        often = sorted(((n, operators[body]) for body, n in count.items() if n > 1), key=lambda x: -x[0] * x[1])
        return cls(len(calls), len(count), tuple(often))

    def __str__(self) -> str:
        often = ", ".join(f"{times} x {operators}" for times, operators in self.repeated)
        return f"{self.calls} calls of {self.bodies} compiled bodies ({often} operators)"


@dataclass(frozen=True)
class BodyCall:
    """One call of a program: of a body, with values by their places."""

    body: Compiled
    takes: tuple[int, ...]
    frees: tuple[int, ...]
    """Values that are not read again."""
    makes: tuple[int, ...]
    operators: int = 0


class SharedProgram:
    """Calls compiled bodies in a row. Takes one list, which it empties."""

    def __init__(self, calls: list[BodyCall], values: int, results: list[int | None]) -> None:
        """`values`: how many there are, the inputs and what the calls make."""
        self.calls = calls
        self.shared = SharedBodies.of(self)
        self._results = results
        self._count = values

    def __call__(self, tensors: list[Any]) -> tuple[Any, ...]:
        values = tensors + [None] * (self._count - len(tensors))
        tensors.clear()
        for call in self.calls:
            given = [values[i] for i in call.takes]
            for i in call.frees:
                values[i] = None
            for i, made in zip(call.makes, call.body(given), strict=True):
                values[i] = made
        return tuple([None if i is None else values[i] for i in self._results])


class _TakeRows:
    """Takes the elements of a one-dimensional tensor that pieces read: a row for each piece."""

    def __init__(self, rows: Sequence[Sequence[int]], device: torch.device) -> None:
        self._sizes = [row_size(len(row)) for row in rows]
        places = [i for row, size in zip(rows, self._sizes, strict=True) for i in (*row, *[0] * (size - len(row)))]
        self._places = torch.tensor(places, dtype=torch.int64, device=device)

    def __call__(self, given: list[Any]) -> tuple[torch.Tensor, ...]:
        return given.pop().index_select(0, self._places).split(self._sizes)  # type: ignore[no-any-return]


def _program(
    graph: PieceGraph, plan: RepeatPlan, do: CompileBody, bodies: BodyCache, how: Hashable, given_away: Sequence[int]
) -> SharedProgram:
    results: Any = graph.gm.graph.output_node().args[0]
    place: dict[Any, int] = {}
    """Of nodes, and of rows: (piece, tensor)."""
    for node in graph.gm.graph.find_nodes(op="placeholder"):
        place[node] = len(place)
    donated = {node for node, i in place.items() if i in set(given_away)}
    last: dict[fx.Node, int] = {}
    rows: dict[fx.Node, list[int]] = {}
    """The pieces that read elements of a tensor."""
    for number, piece in enumerate(plan.pieces):
        last.update(dict.fromkeys((*piece.inputs, *piece.outputs), number))
        for base in piece.elements:
            rows.setdefault(base, []).append(number)
    last.update({node: len(plan.pieces) for node in (*rows, *results) if isinstance(node, fx.Node)})
    calls: list[BodyCall] = []

    def make(values: Sequence[Any]) -> tuple[int, ...]:
        start = len(place)
        place.update({value: start + i for i, value in enumerate(values)})
        return tuple(range(start, start + len(values)))

    def take_rows(base: fx.Node) -> None:
        take = _TakeRows([graph.places(plan.pieces[i], base) for i in rows[base]], base.meta["val"].device)
        calls.append(BodyCall(take, (place[base],), (), make([(i, base) for i in rows[base]])))

    for base in rows:
        if base in place:
            take_rows(base)
    for number, piece in enumerate(plan.pieces):
        mine = [place[number, base] for base in piece.elements]
        takes = (*(place[node] for node in piece.inputs), *mine)
        body = bodies.compile(graph, piece, [n for n in piece.inputs if n in donated and last[n] == number], how, do)
        over = [place[node] for node in piece.inputs if last[node] == number]
        calls.append(BodyCall(body, takes, (*over, *mine), make(piece.outputs), len(piece.nodes)))
        for node in piece.outputs:
            if node in rows:
                take_rows(node)
    found = [place[value] if isinstance(value, fx.Node) else None for value in results]
    return SharedProgram(calls, len(place), found)
