"""How fast the page of a step of 50,000 nodes is: writing it, its first paint, and what a person does in it.

    python benchmarks/report_page.py [--layers 2945] [--repeats 5] [--json FILE]

In a headless Chromium, from disk, without a GPU. First paint is from navigation to the frame in which the page has
drawn its first view. An interaction is from the event to the frame that shows its result. Aims: 2 s and 200 ms.
Needs selenium, chromium and chromedriver (see tests/browser.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "tests", "examples")]

import wholestep as ws  # noqa: E402
from browser import Browser, chromium  # noqa: E402
from steps_to_show import large_step  # noqa: E402

AND_PAINT = (
    "return new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now() - started))))"
)
ACTIONS = {
    "open timeline": "app.views.delete('timeline'); app.go('timeline')",
    "zoom timeline": "canvas().dispatchEvent(new WheelEvent('wheel', {deltaY: -300, clientX: 700, cancelable: true}))",
    "select in timeline": "app.select(20000)",
    "open memory": "app.views.delete('memory'); app.go('memory')",
    "move in memory": "canvas().dispatchEvent(new KeyboardEvent('keydown', {key: 'PageDown', cancelable: true}))",
    "open graph": "app.views.delete('graph'); app.go('graph')",
    "select in graph": "app.select(31000)",
    "open modules": "app.views.delete('modules'); app.go('modules')",
    "search": "search.value = 'mm_28'; search.dispatchEvent(new Event('input'))",
}


def paints(browser: Browser, page: Path) -> float:
    """Milliseconds from navigation to the first frame of the page."""
    browser.open(page)
    found: float = browser.run("return performance.getEntriesByName('painted')[0].startTime")
    return found


def acts(browser: Browser, action: str) -> float:
    """Milliseconds from an event to the frame that shows its result."""
    found: float = browser.run(
        "const canvas = () => document.querySelector('#view canvas');"
        f"const started = performance.now(); {{ {action} }} {AND_PAINT}"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2945)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    graph = large_step(options.layers)
    found: dict[str, object] = {"nodes": graph.num_nodes}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        started = time.perf_counter()
        page = ws.inspect.report(graph, Path(folder) / "step.html")
        found["write_seconds"] = time.perf_counter() - started
        found["bytes"] = page.stat().st_size
        runs: dict[str, list[float]] = {"first paint": [paints(browser, page) for _ in range(options.repeats)]}
        for name, action in ACTIONS.items():
            runs[name] = [acts(browser, action) for _ in range(options.repeats)]
    print(f"{graph.num_nodes} nodes: written in {found['write_seconds']:.1f} s, {page_size(found):.2f} MB")
    for name, each in runs.items():
        found[name] = {"median": statistics.median(each), "min": min(each), "max": max(each)}
        print(f"{name:20} {statistics.median(each):8.1f} ms ({min(each):.1f} to {max(each):.1f})")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


def page_size(found: dict[str, object]) -> float:
    size = found["bytes"]
    assert isinstance(size, int)
    return size / 1e6


if __name__ == "__main__":
    main()
