"""Capture under a plan for 1024 ranks (fake process group) against a capture in a single process.

    python benchmarks/capture_ranks.py [--ranks 1024] [--json FILE]

The best of several captures of each, in turns, in CPU seconds. Target: at most 1.2 times.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from overhead import Transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholestep as ws


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("dp",))
    plans: dict[str, Any] = {"single": None, "Replicate": ws.Replicate(mesh), "FullyShard": ws.FullyShard(mesh)}
    x = torch.randn(2, 16, 64)
    runs: dict[str, tuple[Any, nn.Module, torch.optim.Optimizer]] = {}
    for name, plan in plans.items():
        model = Transformer(options.layers, 64)
        runs[name] = (
            ws.compile(train_step, parallel=plan, passes=None, lower="eager"),
            model,
            torch.optim.AdamW(model.parameters(), 0.1),
        )
    found: dict[str, Any] = {"ranks": options.ranks, "torch": torch.__version__}
    for name, (step, model, optimizer) in runs.items():
        found[f"{name}_nodes"] = ws.capture(step, model, optimizer, x).num_nodes
    for _ in range(options.rounds):
        for name, (step, model, optimizer) in runs.items():
            gc.collect()
            started = time.process_time()
            ws.capture(step, model, optimizer, x)
            taken = time.process_time() - started
            found[f"{name}_s"] = min(found.get(f"{name}_s", taken), taken)
    for name in ("Replicate", "FullyShard"):
        found[f"{name}_ratio"] = found[f"{name}_s"] / found["single_s"]
    print(json.dumps(found, indent=2))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
