"""A step of a head with cross entropy: with `fuse_loss`, without it, and torch.compile, in turns in one process.

    python benchmarks/fused_loss.py [--rounds 9] [--json FILE]

Times are CPU time of the process (one thread), so that other work on the machine counts less. Prints the median of each
and by how much the first is faster than the others, with the quartiles over rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws

SHAPES = ((256, 64, 512), (4096, 64, 512), (512, 32, 32768), (512, 32, 50304))
"""Tokens, width, classes."""


class Head(nn.Module):
    """A layer, the head and its loss."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(width, width), nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(x)), labels)


def step_of(autocast: bool) -> Callable[..., Tensor]:
    """The training step."""

    def train_step(forward: Any, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss: Tensor = forward(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def measure(tokens: int, width: int, classes: int, autocast: bool, rounds: int) -> dict[str, Any]:
    """All ways on one shape."""
    torch.manual_seed(0)
    model = Head(width, classes)
    batch = torch.randn(tokens, width), torch.randint(0, classes, (tokens,))
    runs: dict[str, Callable[[], Tensor]] = {}
    for name in ("fuse_loss", "without", "torch.compile"):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), 1e-4)
        plain, forward = step_of(autocast), torch.compile(own) if name == "torch.compile" else own
        passes = ["fuse_loss"] if name == "fuse_loss" else None
        step = plain if name == "torch.compile" else ws.compile(plain, lower="inductor", passes=passes, progress=False)
        runs[name] = lambda step=step, forward=forward, optimizer=optimizer: step(forward, optimizer, *batch)
    for run in runs.values():
        for _ in range(3):
            run()
    times = max(1, 20_000_000 // (tokens * classes))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.process_time()
            for _ in range(times):
                run()
            seconds[name].append((time.process_time() - started) / times)
    row: dict[str, Any] = {"tokens": tokens, "width": width, "classes": classes, "autocast": autocast}
    row["ms"] = {name: round(1e3 * statistics.median(each), 3) for name, each in seconds.items()}
    for name in ("without", "torch.compile"):
        ratios = [b / a for a, b in zip(seconds["fuse_loss"], seconds[name], strict=True)]
        row[f"times_faster_than_{name}"] = [round(q, 3) for q in statistics.quantiles(ratios, n=4)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        for autocast in (False, True):
            rows.append(measure(*shape, autocast, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
            torch.compiler.reset()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "threads": 1, "time": "process", "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
