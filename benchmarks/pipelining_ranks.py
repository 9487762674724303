"""What running a stage costs, beside torch's own stage: the same schedule, the same modules, in turns in one run.

    python benchmarks/pipelining_ranks.py [--rounds 30] [--json FILE]

Ranks are forked processes with one thread each that talk by gloo over loopback. The modules do next to nothing, so that
what is left is the cost of actions: messages, bookkeeping, autograd. A round gives each way one time, of the slower
rank; reported are microseconds per action (a forward, a backward or half of one, of one microbatch), medians and
quartiles over rounds, and the ratio to torch's stage, taken round by round so that a busy machine slows both alike.
The time of the thread leaves out what other processes do to the machine, and what is spent in waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from wholestep.pipelining import SharedParameter, build_stage, schedule

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ranks import run_ranks

WORLD = 2
MICROBATCHES = 8
STEPS = 5


class Little(nn.Module):
    """Next to no work, but a parameter and a gradient for each value."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.values = values

    def forward(self, x: Tensor, *passed: Tensor) -> Any:
        y = x + self.shift
        if self.values == 1:
            return y
        return (y, *(value + self.shift for value in (passed or [x] * (self.values - 1))))


class Chain:
    """Modules in a row, as `build_stage` takes them."""

    shared: tuple[SharedParameter, ...] = ()

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        self.stages = list(stages)
        self.num_stages = len(self.stages)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        return self.stages[stage_idx]

    def flatten_inputs(self, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
        return list(args)

    def unflatten_outputs(self, flat: Sequence[Tensor]) -> Any:
        return flat[0] if len(flat) == 1 else tuple(flat)


@dataclass(frozen=True)
class Case:
    """What is measured."""

    kind: str
    width: int
    values: int

    @property
    def name(self) -> str:
        size = 8 * self.width * 4
        shown = f"{size // 2**20} MiB" if size >= 2**20 else f"{max(size // 2**10, 1)} KiB"
        return f"{self.kind}, {self.values} x {shown}"


CASES = [
    Case("GPipe", 32, 1),
    Case("1F1B", 32, 1),
    Case("1F1B", 32, 4),
    Case("1F1B", 4096, 1),
    Case("1F1B", 2**17, 1),
    Case("Interleaved1F1B", 32, 1),
    Case("InterleavedZeroBubble", 32, 1),
    Case("ZBVZeroBubble", 32, 1),
]


def loss_of(result: Any, target: Tensor) -> Tensor:
    return (result if isinstance(result, Tensor) else sum(result)).mean()


def build(case: Case, way: str, rank: int) -> Any:
    single = case.kind in ("GPipe", "1F1B")
    count = WORLD if single else 2 * WORLD
    modules = [Little(case.values) for _ in range(count)]
    mine = [rank] if single else [rank, count - 1 - rank] if case.kind == "ZBVZeroBubble" else [rank, rank + WORLD]
    if way == "torch":
        own = [PipelineStage(modules[i], i, count, torch.device("cpu")) for i in mine]
        return get_schedule_class(case.kind)(own[0] if single else own, MICROBATCHES, loss_of), mine, count
    chain = Chain(modules)
    stages = [build_stage(chain, i, "cpu") for i in mine]
    if way == "wholestep":
        return get_schedule_class(case.kind)(stages[0] if single else stages, MICROBATCHES, loss_of), mine, count
    return schedule(case.kind, stages, MICROBATCHES, loss_of), mine, count


WAYS = ("torch", "wholestep", "ws.pipelining.schedule")


def measure(rank: int, rounds: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Microseconds per action on the slower rank, by case and way: of the clock, and of the thread that runs steps."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case in CASES:
        ways = {way: build(case, way, rank) for way in WAYS}
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        halves = 3 if "ZeroBubble" in case.kind else 2
        x, target = torch.randn(8 * MICROBATCHES, case.width), torch.randn(8 * MICROBATCHES, 1)
        for turn in range(rounds + 1):
            for way in WAYS if turn % 2 else reversed(WAYS):
                steps, mine, count = ways[way]
                dist.barrier()
                begin, thread = time.perf_counter(), time.thread_time()
                for _ in range(STEPS):
                    steps.step(*((x,) if 0 in mine else ()), target=target if count - 1 in mine else None)
                both = (time.perf_counter() - begin, time.thread_time() - thread)
                seconds = torch.tensor(both, dtype=torch.float64) * 1e6 / (STEPS * MICROBATCHES * halves * len(mine))
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if turn:  # the first one sets up
                    times[way].append((seconds[0].item(), seconds[1].item()))
        found[case.name] = times
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run_ranks(measure, WORLD, options.rounds, deadline=900)[0]
    rows = []
    for number, clock in enumerate(("clock", "thread")):
        print(f"{'us per action, ' + clock:38}{'torch':>8}{'ours':>8}{'ratio':>7} (quartiles)    with ws.schedule")
        for case, times in found.items():
            row: dict[str, Any] = {"case": case, "clock": clock}
            for way in WAYS:
                ours = [both[number] for both in times[way]]
                torchs = [both[number] for both in times["torch"]]
                low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, torchs, strict=True)], n=4)
                row[way] = {"us": statistics.median(ours), "ratio": middle, "quartiles": [low, high]}
            plain, more = row["wholestep"], row["ws.pipelining.schedule"]
            low, high = plain["quartiles"]
            print(
                f"{case:38}{row['torch']['us']:8.0f}{plain['us']:8.0f}{plain['ratio']:7.2f} ({low:.2f} to {high:.2f})"
                f"{more['ratio']:12.2f}"
            )
            rows.append(row)
    if options.json is not None:
        about = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
        text = json.dumps({"about": about, "load": os.getloadavg(), "rows": rows}, indent=1)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
