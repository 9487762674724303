"""Place boxes in layers, from top to bottom, so that edges go down and cross little.

1. A box lies one layer below the lowest box that it reads; a box that only feeds others is pulled down next to them.
2. An edge over several layers gets a point in each of them; one over very many is not drawn as a line (`far`).
3. Layers are ordered by the mean place of their neighbours, in a few sweeps up and down.
4. A layer that is too wide becomes several rows; boxes then move towards their neighbours as far as there is space.

Sweeps are linear in boxes and edges but for sorting, so that thousands of boxes take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GAP_X = 18.0
GAP_Y = 34.0
WIDEST = 2600.0
_TO_CENTRE = 0.85
"""The fraction by which boxes move towards their neighbours: a long graph would drift to one side."""
FAR = 14
"""An edge over more layers than this is named at both ends rather than drawn."""


@dataclass
class Placed:
    """Centres and rows of boxes, paths of edges, and the edges that are too long to draw."""

    x: dict[int, float]
    y: dict[int, float]
    paths: dict[tuple[int, int], list[tuple[float, float]]]
    far: list[tuple[int, int]]
    width: float
    height: float


@dataclass
class _Point:
    """A box, or the place where a long edge goes through a layer."""

    width: float
    height: float
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    x: float = 0.0


def place(order: Sequence[int], edges: Sequence[tuple[int, int]], size: Mapping[int, tuple[float, float]]) -> Placed:
    """Place boxes. `order` lists them so that edges go forward; `size` is their width and height."""
    layer = _layers(order, edges)
    points = {key: _Point(*size[key]) for key in order}
    layers: list[list[int]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for key in order:
        layers[layer[key]].append(key)
    chains, far = _chains(edges, layer, points, layers)
    for _ in range(4):
        _sweep(layers, points, upward=False)
        _sweep(layers, points, upward=True)
    rows = [row for each in layers for row in _rows(each, points)]
    y = _place_rows(rows, points)
    left = min((points[key].x - points[key].width / 2 for key in points), default=0.0)
    paths = {edge: [(points[key].x - left, y[key]) for key in chain] for edge, chain in chains.items()}
    return Placed(
        {key: points[key].x - left for key in order},
        {key: y[key] for key in order},
        paths,
        far,
        max((points[key].x + points[key].width / 2 - left for key in points), default=0.0),
        max((y[key] + points[key].height / 2 for key in points), default=0.0),
    )


def _layers(order: Sequence[int], edges: Sequence[tuple[int, int]]) -> dict[int, int]:
    up: dict[int, list[int]] = {key: [] for key in order}
    down: dict[int, list[int]] = {key: [] for key in order}
    for source, target in edges:
        up[target].append(source)
        down[source].append(target)
    layer: dict[int, int] = {}
    for key in order:
        layer[key] = max((layer[each] + 1 for each in up[key]), default=0)
    for key in reversed(order):
        if not up[key] and down[key]:
            layer[key] = max(0, min(layer[each] for each in down[key]) - 1)
    lowest = min(layer.values(), default=0)
    return {key: value - lowest for key, value in layer.items()}


def _chains(
    edges: Sequence[tuple[int, int]], layer: dict[int, int], points: dict[int, _Point], layers: list[list[int]]
) -> tuple[dict[tuple[int, int], list[int]], list[tuple[int, int]]]:
    chains: dict[tuple[int, int], list[int]] = {}
    far: list[tuple[int, int]] = []
    following = -1
    for source, target in edges:
        if layer[target] - layer[source] > FAR:
            far.append((source, target))
            continue
        chain = [source]
        for between in range(layer[source] + 1, layer[target]):
            points[following] = _Point(6.0, 0.0)
            layers[between].append(following)
            chain.append(following)
            following -= 1
        chain.append(target)
        for above, below in pairwise(chain):
            points[above].down.append(below)
            points[below].up.append(above)
        chains[source, target] = chain
    return chains, far


def _sweep(layers: list[list[int]], points: dict[int, _Point], *, upward: bool) -> None:
    place_of = {key: i / max(1, len(each)) for each in layers for i, key in enumerate(each)}
    for each in reversed(layers) if upward else layers:
        mean: dict[int, float] = {}
        for key in each:
            near = points[key].down if upward else points[key].up
            mean[key] = sum(place_of[n] for n in near) / len(near) if near else place_of[key]
        each.sort(key=lambda key: mean[key])
        for i, key in enumerate(each):
            place_of[key] = i / max(1, len(each))


def _rows(layer: list[int], points: dict[int, _Point]) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    width = 0.0
    for key in layer:
        width += points[key].width + GAP_X
        if width > WIDEST and rows[-1]:
            rows.append([])
            width = points[key].width + GAP_X
        rows[-1].append(key)
    return rows


def _place_rows(rows: list[list[int]], points: dict[int, _Point]) -> dict[int, float]:
    for row in rows:
        _pack(row, points, [0.0] * len(row))
    for upward in (False, True, False, True, False):
        for row in reversed(rows) if upward else rows:
            wanted = []
            for key in row:
                near = points[key].down if upward else points[key].up
                wanted.append(_TO_CENTRE * sum(points[n].x for n in near) / len(near) if near else points[key].x)
            _pack(row, points, wanted)
    y: dict[int, float] = {}
    top = 0.0
    for row in rows:
        height = max(points[key].height for key in row)
        for key in row:
            y[key] = top + height / 2
        top += height + GAP_Y
    return y


def _pack(row: list[int], points: dict[int, _Point], wanted: list[float]) -> None:
    """Put the boxes of a row as near as possible to where they want to be, in order and without overlap.

    Neighbours that would overlap become a block, which is placed at the mean of the wanted positions
    of its boxes (least squares).
    """
    blocks: list[tuple[float, int, float]] = []  # sum of wanted starts, number of boxes, width
    for key, centre in zip(row, wanted, strict=True):
        width = points[key].width + GAP_X
        block = (centre - width / 2, 1, width)
        while blocks and blocks[-1][0] / blocks[-1][1] + blocks[-1][2] > block[0] / block[1]:
            total, count, before = blocks.pop()
            block = (total + block[0] - before * block[1], count + block[1], before + block[2])
        blocks.append(block)
    places = iter(row)
    for total, count, _ in blocks:
        start = total / count
        for _ in range(count):
            key = next(places)
            points[key].x = start + (points[key].width + GAP_X) / 2
            start += points[key].width + GAP_X
    left = points[row[0]].x - points[row[0]].width / 2
    right = points[row[-1]].x + points[row[-1]].width / 2
    # Rows that follow their neighbours step by step would drift to one side.
    back = max(0.0, -WIDEST / 2 - left) or min(0.0, WIDEST / 2 - right)
    for key in row if back else ():
        points[key].x += back
