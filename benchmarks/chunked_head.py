"""Time and peak memory of a GPT with a large vocabulary, its head in chunks: `chunk_head` with `fuse_loss`.

    python benchmarks/chunked_head.py [--rounds 7] [--json FILE]

GPT of 2 layers, d 128, 32,768 words, batch 4x128, fused AdamW, compiled, on one thread. Times are CPU time of the
process, in turns; peaks are what the planner of memory budgets measures (`step.last.memory`).
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
from models import GPT, Shape
from torch import Tensor

import wholestep as ws

SHAPE = Shape(2, 128, 4, 4, 128, 32768)
WAYS: dict[str, Any] = {
    "without": None,
    "fuse_loss": ["fuse_loss"],
    **{f"{n} chunks": [ws.passes.chunk_head(chunks=n), "fuse_loss"] for n in (2, 4, 8)},
}


def step_of(autocast: bool) -> Callable[..., Tensor]:
    """The training step."""

    def train_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss: Tensor = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def measure(autocast: bool, rounds: int) -> dict[str, Any]:
    """All ways, with one dtype."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    ids = torch.randint(0, SHAPE.words, (SHAPE.batch, SHAPE.length))
    runs: dict[str, Callable[[], Tensor]] = {}
    peaks: dict[str, float] = {}
    for name, passes in WAYS.items():
        own = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(own.parameters(), 1e-4, fused=True)
        step = ws.compile(step_of(autocast), lower="inductor", passes=passes, memory_budget="64GiB", progress=False)
        runs[name] = lambda step=step, own=own, optimizer=optimizer: step(own, optimizer, ids, ids.roll(-1, 1))
        for _ in range(3):
            runs[name]()
        assert step.last is not None
        assert step.last.memory is not None
        peaks[name] = round(step.last.memory.planned_peak / 2**20, 1)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    row: dict[str, Any] = {"autocast": autocast, "peak_mib": peaks}
    row["ms"] = {name: round(1e3 * statistics.median(each), 1) for name, each in seconds.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for autocast in (False, True):
        rows.append(measure(autocast, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "threads": 1, "time": "process", "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
