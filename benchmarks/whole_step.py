"""A whole step lowered by wholestep beside torch.compile of the model with the same optimizer, in turns in one run.

    python benchmarks/whole_step.py [--device cpu] [--shapes small large] [--optimizer fused] [--json FILE]

A GPT with causal attention, cross entropy and AdamW. CPU: float32, 6 layers, d 128, batch 4x64 (small) and d 512, batch
8x256 (large). CUDA: bf16 autocast, 6 layers, d 256, batch 8x256 (small) and GPT-2 124M, batch 16x1024 (large), where
torch.compile also runs with mode="reduce-overhead" and the best mode counts. Prints the median, the quartiles of the
ratio over rounds, peak memory on CUDA, and the difference of the losses after the same number of steps.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from models import GPT, SHAPES, train_step
from torch import Tensor, nn

import wholestep as ws


class Way:
    """One way to train a fresh copy of a model."""

    def __init__(self, name: str, model: nn.Module, settings: dict[str, Any], step: Callable[..., Tensor]) -> None:
        self.name = name
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **settings)
        self.step = step
        self.forward: Any = self.model
        self.seconds: list[float] = []
        self.clock = time.perf_counter
        self.first = 0.0
        self.peak = 0.0
        self.first_peak = 0.0
        self.loss = 0.0

    def run(self, batch: tuple[Tensor, Tensor], times: int, *, timed: bool) -> None:
        started = self.clock()
        for _ in range(times):
            loss = self.step(self.forward, self.optimizer, *batch)
        _wait(batch[0])
        if timed:
            self.seconds.append((self.clock() - started) / times)
        self.loss = float(loss.detach())

    def warm(self, batch: tuple[Tensor, Tensor]) -> None:
        started = time.perf_counter()
        self.run(batch, 1, timed=False)
        if batch[0].is_cuda:
            self.first_peak = torch.cuda.max_memory_allocated() / 2**30
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        self.run(batch, 4, timed=False)  # recordings are made here, and need the memory that replays use
        self.first = time.perf_counter() - started
        if batch[0].is_cuda:
            self.peak = torch.cuda.max_memory_allocated() / 2**30


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def ways_of(device: str, name: str, optimizer: str, only: str) -> tuple[list[Way], tuple[Tensor, Tensor]]:
    """All ways on one shape (or one of them), and the batch."""
    shape = SHAPES[device, name]
    torch.manual_seed(0)
    model = GPT(shape)
    settings = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}[optimizer]
    ids = torch.randint(0, shape.words, (shape.batch, shape.length)).to(device)
    ways = []
    for each in NAMES[device]:
        if only not in ("", each):
            continue
        step = ws.compile(train_step, lower="inductor") if each == "wholestep" else train_step
        way = Way(each, copy.deepcopy(model).to(device), settings, step)
        if each.startswith("torch.compile"):
            way.forward = torch.compile(way.model, mode=each.split()[1])
        ways.append(way)
    return ways, (ids, ids.roll(-1, 1))


NAMES = {
    "cpu": ("wholestep", "torch.compile default", "eager"),
    "cuda": ("wholestep", "torch.compile default", "torch.compile reduce-overhead", "eager"),
}


def memory_alone(name: str, optimizer: str) -> dict[str, list[float]]:
    """Peak GiB of each way in a process of its own: [from the second call on, in the first call]."""
    found = {}
    for each in ("wholestep", "torch.compile reduce-overhead"):
        command = [sys.executable, __file__, "--shapes", name, "--optimizer", optimizer, "--memory-of", each]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        found[each] = json.loads(answer.stdout.strip().splitlines()[-1])
    return found


def measure(device: str, name: str, optimizer: str, rounds: int, clock: str = "wall") -> dict[str, Any]:
    """All ways on one shape."""
    ways, batch = ways_of(device, name, optimizer, "")
    ours = ways[0]
    for way in ways:
        way.clock = time.perf_counter if clock == "wall" else time.process_time
        way.warm(batch)
    times = 20 if (device == "cuda" and name == "small") else (5 if name == "small" or device == "cuda" else 2)
    for _ in range(rounds):
        for way in ways:
            way.run(batch, times, timed=True)
    best = min((way for way in ways if way.name.startswith("torch")), key=lambda way: statistics.median(way.seconds))
    ratios = [b / a for a, b in zip(ours.seconds, best.seconds, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "shape": name,
        "optimizer": optimizer,
        "clock": clock,
        "ms": {way.name: round(1e3 * statistics.median(way.seconds), 3) for way in ways},
        "first_calls_s": {way.name: round(way.first, 1) for way in ways},
        "best_peer": best.name,
        "times_faster": round(statistics.median(ratios), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "loss": {way.name: way.loss for way in ways},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", default=["small", "large"])
    parser.add_argument("--optimizer", default="fused")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", default="wall", choices=("wall", "process"), help="process: CPU time, one thread")
    parser.add_argument("--json", default="")
    parser.add_argument("--memory", action="store_true", help="CUDA: also peak memory, each way in its own process")
    parser.add_argument("--memory-of", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        ways, batch = ways_of("cuda", options.shapes[0], options.optimizer, options.memory_of)
        ways[0].warm(batch)
        print(json.dumps([round(ways[0].peak, 2), round(ways[0].first_peak, 2)]))
        return
    rows = []
    for name in options.shapes:
        rows.append(measure(options.device, name, options.optimizer, options.rounds, options.clock))
        if options.memory and options.device == "cuda":
            rows[-1]["peak_gib"] = memory_alone(name, options.optimizer)
        print(json.dumps(rows[-1], indent=2), flush=True)
        torch.compiler.reset()
        gc.collect()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
