"""Draw time against memory from results of memory_budget.py.

    python benchmarks/plot_memory.py RESULTS.json [MORE.json ...] --svg FILE

Each file is one run; times are in times of that run's own first row of torch.compile, so that runs can share a picture.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, EDGE = 760, 440, 64
KINDS = (("wholestep", "#0b6e4f"), ("torch.compile", "#c4572b"), ("eager", "#5b6270"))


def points_of(paths: list[Path]) -> dict[str, list[tuple[float, float, str]]]:
    """(GiB, times the peer, label) for each kind of row, by memory."""
    found: dict[str, list[tuple[float, float, str]]] = {kind: [] for kind, _ in KINDS}
    for path in paths:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
        peer = next(row["ms"] for row in rows if row["name"].startswith("torch.compile, best"))
        for row in rows:
            kind = next(kind for kind, _ in KINDS if row["name"].startswith(kind))
            label = row["name"].removeprefix(kind).strip(", ") or kind
            found[kind].append((row["peak_gib"], row["ms"] / peer, label))
    return {kind: sorted(points) for kind, points in found.items()}


def drawing(points: dict[str, list[tuple[float, float, str]]]) -> str:
    """The SVG."""
    everything = [point for each in points.values() for point in each]
    low, high = min(p[0] for p in everything) - 0.3, max(p[0] for p in everything) + 0.8
    least, most = min(p[1] for p in everything) - 0.02, max(p[1] for p in everything) + 0.03

    def place(point: tuple[float, float, str]) -> tuple[float, float]:
        x = EDGE + (point[0] - low) / (high - low) * (WIDTH - 2 * EDGE)
        y = HEIGHT - EDGE - (point[1] - least) / (most - least) * (HEIGHT - 2 * EDGE)
        return round(x, 1), round(y, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 16}" text-anchor="middle">peak memory, GiB</text>',
        f'<text x="{EDGE}" y="26">time of a step, in times torch.compile (best mode)</text>',
    ]
    for tick in range(int(low) + 1, int(high) + 1):
        x, _ = place((tick, least, ""))
        lines.append(f'<line x1="{x}" y1="{EDGE - 20}" x2="{x}" y2="{HEIGHT - EDGE}" stroke="#e6e6e6"/>')
        lines.append(f'<text x="{x}" y="{HEIGHT - EDGE + 18}" text-anchor="middle" fill="#555">{tick}</text>')
    for step in range(round(least * 20), round(most * 20) + 1):
        if not least <= step / 20 <= most:
            continue
        _, y = place((low, step / 20, ""))
        lines.append(f'<line x1="{EDGE}" y1="{y}" x2="{WIDTH - EDGE}" y2="{y}" stroke="#e6e6e6"/>')
        lines.append(f'<text x="{EDGE - 8}" y="{y + 4}" text-anchor="end" fill="#555">{step / 20:.2f}</text>')
    for number, (kind, color) in enumerate(KINDS):
        places = [place(point) for point in points[kind]]
        path = " ".join(f"{x},{y}" for x, y in places)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (x, y), point in zip(places, points[kind], strict=True):
            lines.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"><title>{escape(point[2])}</title></circle>')
            above = -10 if kind == "wholestep" else 18
            lines.append(f'<text x="{x}" y="{y + above}" text-anchor="middle" fill="{color}">{escape(point[2])}</text>')
        lines.append(f'<text x="{WIDTH - EDGE}" y="{26 + 16 * number}" text-anchor="end" fill="{color}">{kind}</text>')
    return "\n".join([*lines, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--svg", type=Path, required=True)
    options = parser.parse_args()
    options.svg.write_text(drawing(points_of(options.results)))
    print(options.svg)


if __name__ == "__main__":
    main()
