"""Draw time against memory from results of memory_budget.py.

    python benchmarks/plot_memory.py RESULTS.json [MORE.json ...] --svg FILE

Each file is one run; times are in times of that run's own first row of torch.compile, so that runs can share a picture.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, EDGE = 760, 460, 64
KINDS = (("wholestep", "#0b6e4f"), ("torch.compile", "#c4572b"), ("eager", "#5b6270"))


@dataclass(frozen=True, order=True)
class Point:
    """A row of the results."""

    bytes: int
    times: float
    label: str


def points_of(paths: list[Path]) -> dict[str, list[Point]]:
    """The points of each kind of row, by memory. Budgets that were refused have none."""
    found: dict[str, list[Point]] = {kind: [] for kind, _ in KINDS}
    for path in paths:
        rows: list[dict[str, Any]] = [row for row in json.loads(path.read_text())["rows"] if "ms" in row]
        peer = next(row["ms"] for row in rows if row["name"].startswith("torch.compile, best"))
        for row in rows:
            kind = next(kind for kind, _ in KINDS if row["name"].startswith(kind))
            label = row["name"].removeprefix(kind).strip(", ") or kind
            size = row.get("peak_bytes") or round(row["peak_gib"] * 2**30)
            found[kind].append(Point(size, row["ms"] / peer, label))
    return {kind: sorted(points) for kind, points in found.items()}


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two, at most so many."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    while (high - low) / step > most:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


class Scale:
    """Where values are in the picture."""

    def __init__(self, values: list[float], start: float, stop: float) -> None:
        margin = 0.08 * (max(values) - min(values)) or 0.1 * max(values)
        self.low, self.high = min(values) - margin, max(values) + margin
        self._start, self._stop = start, stop

    def __call__(self, value: float) -> float:
        return round(self._start + (value - self.low) / (self.high - self.low) * (self._stop - self._start), 1)


def drawing(points: dict[str, list[Point]]) -> str:
    """The SVG."""
    everything = [point for each in points.values() for point in each]
    largest = max(point.bytes for point in everything)
    unit, size = ("GiB", 2**30) if largest > 2**30 else ("MiB", 2**20)
    across = Scale([point.bytes / size for point in everything], EDGE, WIDTH - EDGE)
    up = Scale([point.times for point in everything], HEIGHT - EDGE, EDGE + 24)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 16}" text-anchor="middle">peak memory, {unit}</text>',
        f'<text x="{EDGE}" y="26">time of a step, in times torch.compile (best mode)</text>',
    ]
    for tick in ticks(across.low, across.high, 9):
        x = across(tick)
        lines.append(f'<line x1="{x}" y1="{EDGE}" x2="{x}" y2="{HEIGHT - EDGE}" stroke="#e6e6e6"/>')
        lines.append(f'<text x="{x}" y="{HEIGHT - EDGE + 18}" text-anchor="middle" fill="#555">{tick:g}</text>')
    for tick in ticks(up.low, up.high, 8):
        y = up(tick)
        lines.append(f'<line x1="{EDGE}" y1="{y}" x2="{WIDTH - EDGE}" y2="{y}" stroke="#e6e6e6"/>')
        lines.append(f'<text x="{EDGE - 8}" y="{y + 4}" text-anchor="end" fill="#555">{tick:.2f}</text>')
    taken: list[tuple[float, float, float]] = []
    for number, (kind, color) in enumerate(KINDS):
        places = [(across(point.bytes / size), up(point.times)) for point in points[kind]]
        path = " ".join(f"{x},{y}" for x, y in places)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (x, y), point in zip(places, points[kind], strict=True):
            text = escape(point.label)
            lines.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"><title>{text}</title></circle>')
            height = _free_height(taken, x, y, 3.4 * len(point.label) + 3, above_first=kind == "wholestep")
            halo = 'stroke="#fff" stroke-width="4" paint-order="stroke"'  # readable where it lies on a line
            lines.append(f'<text x="{x}" y="{height}" text-anchor="middle" fill="{color}" {halo}>{text}</text>')
        lines.append(f'<text x="{WIDTH - EDGE}" y="{26 + 16 * number}" text-anchor="end" fill="{color}">{kind}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _free_height(
    taken: list[tuple[float, float, float]], x: float, y: float, half: float, *, above_first: bool
) -> float:
    """Where a label over or under a point hits none of those before; they are remembered."""
    first, second = (-10, 18) if above_first else (18, -10)
    tries = [shift + (13 * k if shift > 0 else -13 * k) for k in range(4) for shift in (first, second)]

    def is_free(height: float) -> bool:
        if not EDGE < height < HEIGHT - EDGE:
            return False  # where the numbers of the axes are
        return all(abs(height - other) >= 12 or abs(x - middle) >= half + its for middle, other, its in taken)

    found = round(next((y + shift for shift in tries if is_free(y + shift)), y + first), 1)
    taken.append((x, found, half))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--svg", type=Path, required=True)
    options = parser.parse_args()
    options.svg.write_text(drawing(points_of(options.results)))
    print(options.svg)


if __name__ == "__main__":
    main()
