"""How long it takes to plan a step for a memory budget, by the number of its nodes.

    python benchmarks/memory_planning.py [--layers 10 30 110] [--budget 0.3] [--json FILE]

A transformer whose attention is written out, with SGD, `lower="eager"`, so that no compiler's time is in it: capture,
then the planning alone. The aim is less than 10 s for 20,000 nodes. Seconds of the processor are printed beside those
of the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from models import Block
from torch import Tensor, nn

import wholestep as ws
from wholestep.remat.fit import fit_to_budget
from wholestep.remat.measure import MeasureEager
from wholestep.remat.options import Budget, policy_of


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def row(layers: int, budget: float) -> dict[str, Any]:
    """Seconds of planning, and what came of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16, 4, written_out=True) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_graph = ws.capture(train_step, model, optimizer, torch.randn(2, 8, 16))
    nodes = step_graph.num_nodes
    clock, processor = time.perf_counter(), time.process_time()
    measure = MeasureEager(step_graph)
    memory = fit_to_budget(step_graph, Budget.of(budget) or Budget(), policy_of(None), measure=measure).report
    return {
        "nodes": nodes,
        "seconds": round(time.perf_counter() - clock, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
        "plans_built": memory.plans_tried,
        "recomputed": len(memory.recomputed),
        "peak_of_without": round(memory.planned_peak / memory.peak_without, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", nargs="*", type=int, default=[10, 30, 115])
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    rows = []
    for layers in options.layers:
        rows.append(row(layers, options.budget))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "budget": options.budget, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
