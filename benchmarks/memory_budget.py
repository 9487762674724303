"""Time against memory: wholestep with memory budgets beside torch.compile with activation_memory_budget.

    python benchmarks/memory_budget.py [--device cuda] [--budgets 0.0 8.4GiB half peer torch:0.5] [--json FILE]

The GPT of whole_step.py with fused AdamW (CUDA: GPT-2 124M, batch 16x1024, bf16 autocast). `half` is half of the memory
that eager has above parameters and state, `peer` the peak of torch.compile in its best mode. torch.compile runs in its
default mode at each of its budgets, and as it comes in its best mode, which is 1.0 of all ratios. Each row is written
to the file at once.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from whole_step import GPT, SHAPES, train_step

import wholestep as ws
from wholestep.memory.measure import bytes_at_most

BUDGETS = "10GiB peer half 7.5GiB 7GiB 6.5GiB 6GiB 5.5GiB torch:0.8 torch:0.6 torch:0.5 torch:0.4 torch:0.2".split()
"""Eight of ours and five of torch's, for GPT-2 on a GPU."""


class Bench:
    """One model and batch; a fresh copy for each row."""

    def __init__(self, device: str, shape: str, rounds: int) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.shape = SHAPES[device, shape]
        self.rounds = rounds
        torch.manual_seed(0)
        self.ids = torch.randint(0, self.shape.words, (self.shape.batch, self.shape.length)).to(self.device)

    def row(self, name: str, make: Callable[[Any], tuple[Any, Callable[..., Tensor]]]) -> dict[str, Any]:
        """Median milliseconds, the peak of the second and of later calls, and the time of the first ones."""
        torch.manual_seed(0)
        model = GPT(self.shape).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        forward, step = make(model)
        labels = self.ids.roll(-1, 1)
        started = time.perf_counter()
        loss = step(forward, optimizer, self.ids, labels)
        held = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
        again = functools.partial(step, forward, optimizer, self.ids, labels)
        if self.device.type == "cpu":
            again()  # planning and compiling need memory too
        _, peak = bytes_at_most(lambda: [again() for _ in range(3)], self.device)  # recordings are made here
        first = time.perf_counter() - started
        times = []
        for _ in range(self.rounds):
            self._wait()
            begun = time.perf_counter()
            for _ in range(3):
                loss = step(forward, optimizer, self.ids, labels)
            self._wait()
            times.append((time.perf_counter() - begun) / 3)
        found: dict[str, Any] = {
            "name": name,
            "ms": round(1e3 * statistics.median(times), 2),
            "held_gib": round(held / 2**30, 3),
            "peak_gib": round(((peak or 0) + held) / 2**30, 3),
            "first_calls_s": round(first, 1),
            "loss": round(float(loss.detach()), 4),
        }
        memory = step.last.memory if isinstance(step, ws.CompiledStep) and step.last is not None else None
        if memory is not None:
            found["budget_gib"] = round(memory.budget / 2**30, 3)
            found["planned_gib"] = round(memory.planned_peak / 2**30, 3)
            found["measured_gib"] = round((memory.measured_peak or 0) / 2**30, 3)
            found["recomputed"] = len(memory.recomputed)
            found["plans_built"] = memory.plans_tried
            found["cut"] = "plan" if memory.shed is None else f"torch's, {memory.shed / 2**30:.3f} GiB less"
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def torchs(budget: float | None, mode: str) -> Callable[[Any], tuple[Any, Callable[..., Tensor]]]:
    """torch.compile of the model, with its own budget."""

    def make(model: Any) -> tuple[Any, Callable[..., Tensor]]:
        import torch._functorch.config as config

        config.activation_memory_budget = 1.0 if budget is None else budget
        return torch.compile(model, mode=mode), train_step

    return make


def ours(budget: Any) -> Callable[[Any], tuple[Any, Callable[..., Tensor]]]:
    """The whole step, with a budget of bytes of peak memory."""

    def make(model: Any) -> tuple[Any, Callable[..., Tensor]]:
        import torch._functorch.config as config

        config.activation_memory_budget = 1.0  # torch's own setting is for torch's own rows
        return model, ws.compile(train_step, lower="inductor", memory_budget=budget)

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="large")
    parser.add_argument("--budgets", nargs="*", default=BUDGETS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    bench = Bench(options.device, options.shape, options.rounds)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        torch.compiler.reset()
        gc.collect()
        rows.append(row)
        peers = [r["ms"] for r in rows if r["name"].startswith("torch.compile, best")]
        row["times_peer"] = round(row["ms"] / min(peers), 3) if peers else None
        print(json.dumps(row), flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"torch": torch.__version__, "device": _name(bench.device), "rows": rows}, file, indent=1)

    add(bench.row("eager", lambda model: (model, train_step)))
    half = (rows[0]["peak_gib"] + rows[0]["held_gib"]) / 2
    add(
        bench.row(
            "torch.compile, best mode", torchs(None, "reduce-overhead" if options.device == "cuda" else "default")
        )
    )
    for text in options.budgets:
        if text.startswith("torch:"):
            add(bench.row(f"torch.compile {text[6:]}", torchs(float(text[6:]), "default")))
            continue
        named = {"half": f"{half}GiB", "peer": f"{rows[1]['peak_gib']}GiB"}
        budget: Any = named.get(text) or (float(text) if text.replace(".", "").isdigit() else text)
        add(bench.row(f"wholestep {text}", ours(budget)))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
