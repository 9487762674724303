"""What `import wholestep` adds to `import torch`, each in fresh processes, in turns, in one run.

    python benchmarks/import_time.py [--repeats 7] [--json FILE]

Both are imported in one process, torch first; the time of each is taken inside of it. `first_use` is what the first
look at `ws.compile` costs on top, which loads the stages of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PROGRAM = """
import sys, time
started = time.perf_counter()
import torch
torch_done = time.perf_counter()
import wholestep
done = time.perf_counter()
wholestep.compile
print(torch_done - started, done - torch_done, time.perf_counter() - done)
"""


def seconds() -> tuple[float, float, float]:
    """`import torch`, `import wholestep` after it, and the first use, in a fresh process."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{PROGRAM}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    torch_seconds, ours, first_use = map(float, done.stdout.split())
    return torch_seconds, ours, first_use


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    seconds()  # bytecode and file cache
    runs = [seconds() for _ in range(options.repeats)]
    found = {}
    for name, values in zip(("torch", "wholestep", "first_use"), zip(*runs, strict=True), strict=True):
        found[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        print(f"{name:10} {found[name]['median']:.4f} s ({found[name]['min']:.4f} to {found[name]['max']:.4f})")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))
    if found["wholestep"]["median"] > 0.4:
        sys.exit("`import wholestep` adds more than 0.4 s to `import torch`.")


if __name__ == "__main__":
    main()
