"""Simulated against measured: stages that sleep, on four gloo ranks, under every schedule of torch.

    python benchmarks/pipeline_simulation.py [--milliseconds 50] [--rounds 3] [--json FILE] [--svg DIR]

A stage computes almost nothing and then sleeps until its time is over, which differs between stages, so the machine's
speed does not matter and its load little. The times that the simulator gets are the times asked for, not those
measured; a send takes none. Measured is from the begin of the first action to the end of the last one, over all ranks,
by the machine's clock; each schedule runs several steps and the first is left out. Reported are median and extremes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ranks import run_ranks
from wholestep.simulate import pipeline

RANKS = 4
WIDTH = 4
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class SleepingStage(PipelineStage):
    """Sleeps after each computation until its time is over: `seconds` by kind."""

    seconds: dict[str, float]

    def forward_one_chunk(self, *args: Any, **named: Any) -> Any:
        with self._lasting("F"):
            return super().forward_one_chunk(*args, **named)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        with self._lasting("B" if full_backward else "I"):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, *args: Any, **named: Any) -> Any:
        with self._lasting("W"):
            return super().backward_weight_one_chunk(*args, **named)

    @contextlib.contextmanager
    def _lasting(self, kind: str) -> Iterator[None]:
        end = time.perf_counter() + self.seconds[kind]
        yield
        time.sleep(max(0.0, end - time.perf_counter()))


def seconds_of(stage: int, unit: float) -> dict[str, float]:
    """Uneven on purpose: on even stages many wrong simulators are right."""
    F = unit * (1 + 0.25 * (stage % 3))
    return {"F": F, "I": F, "W": 0.75 * F, "B": 1.75 * F}


def stages_of_rank(name: str, rank: int) -> list[int]:
    if name in ("GPipe", "1F1B"):
        return [rank]
    return [rank, 2 * RANKS - 1 - rank] if name in V_SHAPED else [rank, RANKS + rank]


def rank_code(rank: int, name: str, microbatches: int, unit: float, steps: int) -> list[pipeline.Record]:
    torch.manual_seed(0)
    own = stages_of_rank(name, rank)
    count = RANKS * len(own)
    stages = []
    for index in own:
        stage = SleepingStage(nn.Linear(WIDTH, WIDTH), index, count, torch.device("cpu"))
        stage.seconds = seconds_of(index, unit)
        stages.append(stage)
    cls = torchs.get_schedule_class(name)
    loss = nn.functional.mse_loss
    made = cls(stages[0] if len(stages) == 1 else stages, microbatches, loss)
    x, y = torch.randn(2 * microbatches, WIDTH), torch.randn(2 * microbatches, WIDTH)
    recorder = pipeline.Recorder(*stages)
    for step in range(steps + 1):
        given: tuple[Tensor, ...] = (x,) if 0 in own else ()
        target = y if count - 1 in own else None
        torch.distributed.barrier()
        if step == 0:
            made.step(*given, target=target)
        else:
            with recorder:
                made.step(*given, target=target)
    return recorder.records


def compare(name: str, microbatches: int, unit: float, steps: int, pictures: Path | None) -> dict[str, Any]:
    each = len(stages_of_rank(name, 0))
    times = [seconds_of(stage, unit) for stage in range(RANKS * each)]
    table = {kind: [one[kind] for one in times] for kind in "FIWB"}
    predicted = pipeline.simulate(name, pipeline.Times(**table), ranks=RANKS, microbatches=microbatches)
    found = run_ranks(rank_code, RANKS, name, microbatches, unit, steps, deadline=300)
    records = [record for rank in found for record in rank]
    measured = [pipeline.timeline_of(records, predicted.schedule, step) for step in range(steps)]
    spans = sorted(each.makespan for each in measured)
    if pictures is not None:
        both = (predicted, measured[len(measured) // 2])
        titles = (f"{name}, predicted", f"{name}, measured")
        pipeline.write_svg(pictures / f"{name}.svg", *both, titles=titles)
        pipeline.write_perfetto(pictures / f"{name}.json", *both, titles=titles)
    middle = statistics.median(spans)
    return {
        "schedule": name,
        "predicted_s": predicted.makespan,
        "measured_s": middle,
        "measured_least_s": spans[0],
        "measured_most_s": spans[-1],
        "off_percent": 100 * (middle / predicted.makespan - 1),
        "bubble_predicted": predicted.bubble_fraction,
        "bubble_measured": statistics.median(each.bubble_fraction for each in measured),
    }


def speed() -> dict[str, Any]:
    """How fast the simulator itself is on a large schedule."""
    begin = time.process_time()
    schedule = pipeline.named_schedule("Interleaved1F1B", 64, 256)
    listed = time.process_time()
    timeline = pipeline.simulate(schedule, pipeline.Times(F=1.1, B=2.3, send=0.1))
    end = time.process_time()
    assert timeline.deadlock is None
    actions = sum(map(len, schedule.ranks))
    print(
        f"64 ranks, 128 stages, 256 microbatches: {actions} actions simulated in {end - listed:.2f} CPU seconds "
        f"({(end - listed) / actions * 1e6:.1f} us each), after {listed - begin:.2f} s for torch's lists"
    )
    return {"actions": actions, "lists_s": listed - begin, "simulation_s": end - listed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--milliseconds", type=float, default=50.0, help="a forward of stage 0")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="steps per schedule")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="a folder for pictures and traces")
    options = parser.parse_args()
    if options.svg is not None:
        options.svg.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = []
    print(f"{'schedule':22} {'predicted':>10} {'measured':>10} {'least':>8} {'most':>8} {'off':>7}  bubble")
    for name in pipeline.NAMES:
        row = compare(name, options.microbatches, options.milliseconds / 1000, options.rounds, options.svg)
        rows.append(row)
        print(
            f"{name:22} {row['predicted_s']:9.3f}s {row['measured_s']:9.3f}s {row['measured_least_s']:7.3f}s "
            f"{row['measured_most_s']:7.3f}s {row['off_percent']:+6.2f}%  "
            f"{row['bubble_predicted']:.1%} predicted, {row['bubble_measured']:.1%} measured",
            flush=True,
        )
    large = speed()
    worst = max(abs(row["off_percent"]) for row in rows)
    print(f"the farthest off is {worst:.2f}%; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json is not None:
        machine = {"torch": torch.__version__, "cpu": platform.processor(), "cores": os.cpu_count()}
        options.json.write_text(
            json.dumps({"machine": machine, "load": os.getloadavg()[0], "rows": rows, "large": large}, indent=1)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
