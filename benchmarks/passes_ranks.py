"""A real step on two ranks, by torch's own data parallelism and through wholestep with and without passes, in one run.

    python benchmarks/passes_ranks.py [--rounds 15] [--json FILE]

Ranks are forked processes with one thread each that talk by gloo over loopback. All ways take turns, some steps in a
row each (work that crosses iterations needs a next step to hide behind; its flush is part of the time). A round gives
each way one time, that of the slower rank; reported are medians and quartiles over rounds, and the ratio to the first
way of each table, taken round by round so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from wholestep.cross_iteration.pending_updates import suspend
from wholestep.ir.effects import is_collective

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tiny_gpt import Config, TinyGPT

WORLD = 2
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor], Tensor]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, window: Tensor) -> Tensor:
    loss = model(window[:, :-1], window[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass
class Way:
    """One way to train, with a model and optimizer of its own."""

    name: str
    step: Step
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0

    def run(self, windows: list[Tensor]) -> float:
        """Seconds per step on the slower rank; nothing is pending afterwards."""
        dist.barrier()
        started = time.perf_counter()
        for window in windows:
            loss = self.step(self.model, self.optimizer, window)
        if isinstance(self.step, ws.CompiledStep):
            self.step.flush()
        seconds = torch.tensor((time.perf_counter() - started) / len(windows), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        self.loss = loss.item()
        suspend()  # hooks of what was pending, which would slow the next way
        return seconds.item()

    @property
    def collectives(self) -> int | None:
        """Collectives of the graph; None in eager."""
        if not isinstance(self.step, ws.CompiledStep) or self.step.last is None:
            return None
        return sum(is_collective(node.target) for node in self.step.last.gm.graph.nodes)


def no_compiler() -> str:
    """Why torch.compile cannot be measured here; empty if it can."""
    try:
        torch.compile(lambda x: (x + 1).sin())(torch.ones(8))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def replicated(config: Config, mesh: DeviceMesh) -> Iterator[Way]:
    """DistributedDataParallel, in eager and compiled, and ws.Replicate."""
    plan = ws.Replicate(mesh)
    overlapped = [*ws.passes.registry.DEFAULT, ws.passes.overlap_optimizer_with_next_forward]
    yield way("DDP eager", train_step, DistributedDataParallel(fresh(config)))
    if not no_compiler():
        yield way("torch.compile + DDP", train_step, torch.compile(DistributedDataParallel(fresh(config))))
    for name, passes, lower in (
        ("ws.Replicate, no passes, eager", None, "eager"),
        ('ws.Replicate, "default", eager', "default", "eager"),
        ("ws.Replicate, + overlap, eager", overlapped, "eager"),
        ('ws.Replicate, "default"', "default", "inductor"),
    ):
        yield way(name, ws.compile(train_step, parallel=plan, passes=passes, lower=lower), fresh(config))


def sharded(config: Config, mesh: DeviceMesh) -> Iterator[Way]:
    """fully_shard with a unit for each block, and ws.FullyShard."""
    model = fresh(config)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    yield way("fully_shard eager", train_step, fully_shard(model, mesh=mesh))
    plan = ws.FullyShard(mesh)
    for name, passes, lower in (
        ("ws.FullyShard, no passes, eager", None, "eager"),
        ('ws.FullyShard, "default", eager', "default", "eager"),
        ('ws.FullyShard, "default"', "default", "inductor"),
    ):
        yield way(name, ws.compile(train_step, parallel=plan, passes=passes, lower=lower), fresh(config))


def fresh(config: Config) -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(config)


def way(name: str, step: Step, model: nn.Module) -> Way:
    return Way(name, step, model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def measure(ways: list[Way], options: argparse.Namespace, rank: int) -> list[dict[str, Any]]:
    """All ways in turns, each round in another order; the first way is what the others are compared with."""
    generator = torch.Generator().manual_seed(rank)
    order = random.Random(0)
    windows = [
        torch.randint(options.vocab, (options.batch, options.context + 1), generator=generator)
        for _ in range(options.steps)
    ]
    for each in ways:
        for _ in range(2):
            each.run(windows)  # the first step makes optimizer state, the second graph is the one that stays
    for _ in range(options.rounds):
        for each in order.sample(ways, len(ways)):
            each.seconds.append(each.run(windows))
    return [row(each, ways[0]) for each in ways]


def row(each: Way, first: Way) -> dict[str, Any]:
    ratios = [mine / theirs for mine, theirs in zip(each.seconds, first.seconds, strict=True)]
    return {
        "name": each.name,
        "milliseconds": quartiles([1000 * value for value in each.seconds]),
        "ratio": quartiles(ratios),
        "collectives": each.collectives,
        "last_loss": each.loss,
    }


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def rank_main(rank: int, meet: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{meet}", timedelta(minutes=5), rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    config = Config(options.vocab, options.context, options.layers, options.heads, options.width, dropout=0.0)
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "ranks": WORLD,
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "parameters": sum(p.numel() for p in fresh(config).parameters()),
        "load_before": os.getloadavg(),  # of the machine, which others may use
        "torch_compile": no_compiler() or "works",
    }
    if rank == 0:
        print(json.dumps(found), flush=True)
    for kind, make in (("replicated", replicated), ("sharded", sharded)):
        found[kind] = measure(list(make(config, mesh)), options, rank)
        if rank == 0:
            show(found[kind])
    found["load_after"] = os.getloadavg()
    if rank == 0 and options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def show(rows: list[dict[str, Any]]) -> None:
    for each in rows:
        times, ratio = each["milliseconds"], each["ratio"]
        print(
            f"{each['name']:34s} {times['median']:8.1f} ms ({times['low']:.1f} to {times['high']:.1f})"
            f"   {ratio['median']:.3f} times ({ratio['low']:.3f} to {ratio['high']:.3f})"
            f"   collectives {each['collectives'] or '-'}   loss {each['last_loss']:.6f}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="steps in a row of each way")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="passes_ranks") as folder:
        arguments = (str(Path(folder) / "meet"), options)
        ranks = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(WORLD)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    return max(abs(each.exitcode or 0) for each in ranks)


if __name__ == "__main__":
    sys.exit(main())
