"""Bucketing, wait scheduling and verification on whole steps of growing size, beside torch's own bucketing passes.

    python benchmarks/passes.py [--layers 18 90] [--json FILE]

Steps of a pre-norm transformer with AdamW inside, world of 8 (fake process group), FullyShard and Replicate. Each row
gives nodes and collectives before and after, seconds of ours (passes with verification after each) and of torch's
(bucketing alone, with its own bucket sizes and with ours), what recomputing the metadata of changed nodes costs (times
the seconds of the same passes without it, the smallest of three each), the share of surviving nodes that changed their
relative order, and peak memory of the process.
Targets: time(50k nodes) <= 7x time(10k nodes); at 10k nodes at least 10x faster than torch; at most 5% displaced.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholestep as ws
from wholestep.ir.effects import is_collective
from wholestep.ir.graph_walks import copy_graph
from wholestep.passes.engine.dump import displaced

WORLD = 8
BUCKET_MB = 25.0


class Block(nn.Module):
    """Attention and two matrices, with norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def captured(layers: int, width: int, plan: Any) -> ws.StepGraph:
    model = nn.Sequential(*(Block(width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return ws.capture(
        ws.compile(train_step, parallel=plan, passes=None, lower="eager"), model, optimizer, torch.randn(2, 8, width)
    )


def collectives(graph: fx.Graph) -> int:
    return sum(is_collective(node.target) for node in graph.nodes)


def ours(step: ws.StepGraph) -> float:
    passes = ws.passes
    chosen = [
        passes.comm_fusion_with_concat(bucket_size_mb=BUCKET_MB),
        passes.bucket_reduce_scatter(bucket_size_mb=BUCKET_MB),
        passes.bucket_all_gather(bucket_size_mb=BUCKET_MB),
        passes.schedule_comm_wait,
    ]
    started = time.process_time()
    passes.run_passes(step, [each if isinstance(each, passes.BoundPass) else each() for each in chosen])
    return time.process_time() - started


def metadata_check(step: ws.StepGraph) -> float:
    """How much longer our passes take because the metadata of what they changed is computed anew."""
    verifier = sys.modules["wholestep.ir.verify"]
    check = verifier.propagate_changed
    seconds: dict[Any, list[float]] = {check: [], _no_check: []}
    try:
        for _ in range(3):
            for each, found in seconds.items():
                verifier.propagate_changed = each  # type: ignore[attr-defined]
                found.append(ours(step.copy()))
    finally:
        verifier.propagate_changed = check  # type: ignore[attr-defined]
    return min(seconds[check]) / min(seconds[_no_check])


def _no_check(*given: Any) -> None: ...


def torchs(gm: fx.GraphModule, *, same_caps: bool) -> tuple[float, int]:
    """Seconds and collectives of torch's own bucketing on a copy of the graph, as it comes or with our bucket sizes."""
    from torch._inductor.fx_passes import bucketing

    cap = (lambda _: BUCKET_MB) if same_caps else None
    started = time.process_time()
    bucketing.bucket_all_gather(gm, cap)
    bucketing.bucket_reduce_scatter(gm, cap)
    if hasattr(bucketing, "bucket_all_reduce"):
        bucketing.bucket_all_reduce(gm, cap)
    return time.process_time() - started, collectives(gm.graph)


def row(kind: str, layers: int, width: int, plan: Any, compare: bool) -> dict[str, Any]:
    step = captured(layers, width, plan)
    before = copy_graph(step.gm.graph)
    found: dict[str, Any] = {"kind": kind, "nodes": len(before.nodes), "collectives": collectives(before)}
    copies = [fx.GraphModule(step.gm, copy_graph(step.gm.graph)) for _ in range(2 if compare else 0)]
    found["times_without_metadata_check"] = metadata_check(step)
    found["seconds"] = ours(step)
    found["collectives_after"] = collectives(step.gm.graph)
    names = {node.name for node in before.nodes}
    survivors = sum(node.name in names for node in step.gm.graph.nodes)
    found["displaced"] = displaced(before, step.gm.graph) / max(survivors, 1)
    found["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    for copied, kind_of_caps in zip(copies, ("", "_same_caps"), strict=False):
        seconds, left = torchs(copied, same_caps=bool(kind_of_caps))
        found[f"torch_seconds{kind_of_caps}"], found[f"torch_collectives_after{kind_of_caps}"] = seconds, left
        found[f"times_faster{kind_of_caps}"] = seconds / found["seconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[26, 130])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--compare-up-to", type=int, default=30, help="layers up to which torch's passes run too")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    rows = []
    for kind, plan in (("FullyShard", ws.FullyShard(mesh)), ("Replicate", ws.Replicate(mesh))):
        for layers in options.layers:
            rows.append(row(kind, layers, options.width, plan, layers <= options.compare_up_to))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
