"""Simulated step times: as captured, with the default list, with `overlap_communication`, and the bound.

    python benchmarks/overlap.py [--models gpt llama] [--plans sharded hsdp replicated] [--ranks 8 64 256 1024]
                                 [--judge FOLDER [--torch]] [--json FILE]

Whole steps (forward, backward, AdamW) are captured on a fake process group and simulated on `ws.simulate.H100`.
`--judge`: the folder of `overlap_eval.py`; its graphs are replayed by it, not by our simulator, with its costs.
`--torch` adds torch's own scheduler there. Nothing runs on a GPU. No name of a node or layer is looked at.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT, Shape
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholestep as ws

SHAPE = Shape(layers=8, width=1024, heads=16, batch=4, length=2048, words=32768)
GIB = 2**30
JUDGED = ("graph", "pass", "step_ms", "bound_ms", "chain_ms", "peak_gib", "displaced", "kept", "pass_s", "check")


class LlamaBlock(nn.Module):
    """Attention with fewer keys than queries, and a gated product; RMS norms before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, heads // 4
        head = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, self.groups * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 7 * width // 2, bias=False) for _ in range(2))
        self.down = nn.Linear(7 * width // 2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (each(h).view(batch, length, self.groups, -1).transpose(1, 2) for each in (self.k, self.v))
        k, v = (each.repeat_interleave(self.heads // self.groups, dim=1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Words in, the loss out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.Sequential(*(LlamaBlock(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.words(ids))))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


MODELS = {"gpt": GPT, "llama": Llama}


def plan_of(name: str, ranks: int) -> Any:
    """A plan of wholestep on all ranks."""
    if name == "hsdp":
        mesh = init_device_mesh("cpu", (ranks // 8, 8), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    if name == "replicated":
        return ws.Replicate(mesh)
    return ws.FullyShard(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def captured(model_name: str, plan_name: str, ranks: int) -> Any:
    """The graph of a whole step, without passes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    torch.manual_seed(0)
    model = MODELS[model_name](SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    ids = torch.zeros(SHAPE.batch, SHAPE.length, dtype=torch.long)
    return ws.compile(train_step, parallel=plan_of(plan_name, ranks), passes=None).capture(ids, ids)


def row(name: str, ranks: int, graph: Any) -> dict[str, Any]:
    """Times of one graph, in milliseconds, and peaks in GiB."""
    machine = ws.simulate.H100
    as_is = ws.simulate.step(graph, machine=machine)
    default, ours = graph.copy(), graph.copy()
    ws.passes.run_passes(default, "default")
    begin = time.perf_counter()
    ws.passes.run_passes(ours, [ws.passes.overlap_communication(machine=machine)])
    took = time.perf_counter() - begin
    by_default, by_us = ws.simulate.step(default, machine=machine), ws.simulate.step(ours, machine=machine)
    return {
        "graph": name,
        "ranks": ranks,
        "nodes": len(graph.gm.graph.nodes),
        "as_captured": _shown(as_is),
        "default_list": _shown(by_default),
        "overlap_communication": _shown(by_us),
        "bound_ms": round(min(as_is.bounds.largest, by_us.bounds.largest) / 1e3, 3),
        "pass_s": round(took, 2),
    }


def _shown(timeline: Any) -> dict[str, float]:
    return {"ms": round(timeline.step_us / 1e3, 3), "peak_gib": round(timeline.peak_bytes / GIB, 3)}


def judged(folder: Path, with_torch: bool) -> Iterator[dict[str, Any]]:
    """The graphs beside the judge, replayed by it."""
    spec = importlib.util.spec_from_file_location("overlap_eval", folder / "overlap_eval.py")
    assert spec is not None
    assert spec.loader is not None
    judge = importlib.util.module_from_spec(spec)
    sys.modules["overlap_eval"] = judge
    spec.loader.exec_module(judge)

    def ours(gm: Any, cost: Any) -> Any:
        ws.passes.overlap_communication(gm, cost=cost)
        return gm

    passes = {"as_captured": None, "overlap_communication": ours} | (
        {"torch": judge.torch_overlap} if with_torch else {}
    )
    for path in sorted((folder / "graphs").glob("repro_*.py")):
        name = path.stem.removeprefix("repro_")
        for title, each in passes.items():
            line = judge.flatten(judge.evaluate(name, each, str(folder / "graphs")), title)
            kept = (
                "graph",
                "pass",
                "step_ms",
                "bound_ms",
                "chain_ms",
                "peak_gib",
                "displaced",
                "kept",
                "pass_s",
                "check",
            )
            yield {key: line[key] for key in kept}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--plans", nargs="*", default=["sharded", "hsdp", "replicated"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.judge:
        for line in judged(given.judge, given.torch):
            rows.append(line)
            print(line, flush=True)
    for model in given.models:
        for plan in given.plans:
            for ranks in given.ranks:
                if plan == "hsdp" and ranks < 16:
                    continue
                rows.append(row(f"{model}, {plan}", ranks, captured(model, plan, ranks)))
                print(rows[-1], flush=True)
                if given.json:
                    _write(given.json, rows)
    if given.json:
        _write(given.json, rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    about = {"torch": torch.__version__, "machine": platform.processor() or platform.machine(), "shape": str(SHAPE)}
    path.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
