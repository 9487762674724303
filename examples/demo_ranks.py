"""Train a small GPT on several ranks, by torch's own data parallelism in eager and through wholestep, and compare.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/demo_ranks.py

DistributedDataParallel beside `ws.Replicate`, then `fully_shard` beside `ws.FullyShard`. Ranks talk over loopback; with
a GPU for each rank they use NCCL, otherwise gloo on the CPU. Exits with 1 if a single bit differs on any rank.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from side_by_side import (
    Batch,
    Corpus,
    Row,
    Run,
    add_arguments,
    comparison,
    make_deterministic,
    make_run,
    train,
    train_step,
    verdict,
)


def clip_by_largest(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """`train_step` with a norm that does not depend on the order of additions, so that every bit can be compared."""
    loss = model(**batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def replicate(mesh: DeviceMesh, corpus: Corpus, args: argparse.Namespace, console: Console) -> bool:
    """DistributedDataParallel beside ws.Replicate; whether they agree to the last bit on every rank."""
    config, rank = corpus.config(args), mesh.get_rank()
    step = ws.compile(train_step, parallel=ws.Replicate(mesh), passes="default", lower="eager")
    torchs = make_run("DDP", train_step, config, args, DistributedDataParallel, rank)
    ours = make_run("ws.Replicate", step, config, args, rank=rank)
    train(torchs, ours, corpus.batches(args, rank), args.steps, console)
    loss, losses_equal = loss_row(torchs, ours)
    parameters, parameters_equal = parameters_row(torchs, ours)
    rows = [loss, parameters, communication_row(step)]
    console.print(comparison("DistributedDataParallel in eager beside ws.Replicate", torchs, ours, rows, step))
    return losses_equal and parameters_equal


def shard(mesh: DeviceMesh, corpus: Corpus, args: argparse.Namespace, console: Console) -> bool:
    """torch's fully_shard beside ws.FullyShard; whether they agree to the last bit on every rank."""
    config, rank = corpus.config(args), mesh.get_rank()
    step = ws.compile(clip_by_largest, parallel=ws.FullyShard(mesh), passes="default", lower="eager")
    torchs = make_run("fully_shard", clip_by_largest, config, args, lambda model: shard_blocks(model, mesh), rank)
    ours = make_run("ws.FullyShard", step, config, args, rank=rank)
    whole = bytes_held(ours) * 3  # parameters and, once AdamW has run, its two moments
    train(torchs, ours, corpus.batches(args, rank), args.steps, console)
    loss, losses_equal = loss_row(torchs, ours)
    parameters, parameters_equal = parameters_row(torchs, ours)
    held = [bytes_held(run) for run in (torchs, ours)]
    memory: Row = (
        "memory at rest",
        kilobytes(held[0]),
        kilobytes(held[1]),
        f"{held[1] / whole:.0%} of {kilobytes(whole)}",
    )
    rows = [loss, parameters, memory, communication_row(step)]
    console.print(comparison("fully_shard in eager beside ws.FullyShard", torchs, ours, rows, step))
    console.print("Memory at rest is what this rank holds of parameters and optimizer state.", style="dim")
    return losses_equal and parameters_equal


def shard_blocks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As FSDP2 is mostly used: a unit for each block and one for the rest."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_row(torchs: Run, ours: Run) -> tuple[Row, bool]:
    """The loss of the last step, as the mean of ranks, and whether every loss on every rank is the same."""
    most, last = apart(torchs, ours), [mean_over_ranks(run.losses[-1]) for run in (torchs, ours)]
    shown = verdict(True) if most == 0 else f"{most:.1e} apart at most"
    return ("final loss (mean)", f"{last[0]:.9f}", f"{last[1]:.9f}", shown), most == 0


def apart(torchs: Run, ours: Run) -> float:
    """The largest difference of two losses, in any step on any rank; NaN counts as one."""
    return largest(
        [math.inf if math.isnan(a - b) else abs(a - b) for a, b in zip(torchs.losses, ours.losses, strict=True)]
    )


def parameters_row(torchs: Run, ours: Run) -> tuple[Row, bool]:
    pairs = list(zip(torchs.model.parameters(), ours.model.parameters(), strict=True))
    equal = largest([float(not torch.equal(local(a), local(b))) for a, b in pairs]) == 0
    elements = f"{sum(b.numel() for _, b in pairs):,}"
    return ("parameters", elements, elements, verdict(equal)), equal


def communication_row(step: ws.CompiledStep) -> Row:
    """How many collectives the graph has, of which kind."""
    assert step.last is not None
    names = [str(node.target) for node in step.last.gm.graph.nodes if node.op == "call_function"]
    starts = [
        name.split(".")[1] for name in names if name.startswith("_c10d_functional.") and "wait_tensor" not in name
    ]
    kinds = Counter(name.removesuffix("_tensor").removesuffix("_into") for name in starts)
    return ("collectives", "", str(len(starts)), "\n".join(f"{count} {kind}" for kind, count in kinds.items()))


def bytes_held(run: Run) -> int:
    """Parameters and optimizer state on this rank."""
    state = [value for entries in run.optimizer.state.values() for value in entries.values()]
    tensors = [*run.model.parameters(), *(value for value in state if isinstance(value, Tensor))]
    return sum(local(tensor).nbytes for tensor in tensors)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def kilobytes(size: int) -> str:
    return f"{size / 1000:,.0f} kB"


def largest(values: Sequence[float]) -> float:
    """Over all values of all ranks."""
    most = torch.tensor(max(values), dtype=torch.float64, device=_device())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64, device=_device())
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def start() -> DeviceMesh:
    """The process group that torchrun describes, and a mesh of all its ranks."""
    world = int(os.environ["WORLD_SIZE"])
    use_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        make_deterministic()
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(seconds=60))
    return init_device_mesh("cuda" if use_cuda else "cpu", (world,), mesh_dim_names=("dp",))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, steps=100, batch=8)
    parser.add_argument(
        "--shard-steps", type=int, default=40, help="training steps of each run with sharded parameters"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if "WORLD_SIZE" not in os.environ:
        print(
            "start this with torchrun:\n    python -m torch.distributed.run --standalone --nproc-per-node 2", __file__
        )
        return 2
    mesh = start()
    args.device = mesh.device_type
    console = Console(quiet=mesh.get_rank() != 0)
    corpus = Corpus.read()
    console.print(
        f"\n{mesh.size()} ranks on {args.device} ({dist.get_backend()}), one thread each; "
        f"{args.steps} and {args.shard_steps} steps of {args.batch} x {args.context} on each rank"
    )
    equal = replicate(mesh, corpus, args, console)
    args.steps = args.shard_steps
    sharded_equal = shard(mesh, corpus, args, console)
    dist.destroy_process_group()
    return 0 if equal and sharded_equal else 1


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
