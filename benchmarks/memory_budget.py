"""Time against memory: wholestep with memory budgets beside torch.compile with activation_memory_budget.

    python benchmarks/memory_budget.py [--device cuda] [--budgets 0.0 8.4GiB half peer torch:0.5] [--json FILE]
    python benchmarks/memory_budget.py --small --json FILE                the same on a CPU, in minutes
    python benchmarks/memory_budget.py --json FILE --resume --stop-after 480     go on where a run was killed
    python benchmarks/memory_budget.py --json FILE --resume --turns peer half    those and torch.compile in turns

The GPT of models.py with fused AdamW (CUDA: GPT-2 124M, batch 16x1024, bf16 autocast). `half` is half of the memory
that eager has above parameters and state, `peer` the peak of torch.compile in its best mode. torch.compile runs in its
default mode at each of its budgets, and as it comes in its best mode, which is 1.0 of all ratios. Each row is printed
and written to the file at once, with the time that it took to compile. plot_memory.py draws the file. Rows follow each
other, so a machine that becomes slower changes their ratios: `--turns` trains all that it names side by side.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from models import GPT, SHAPES, train_step
from torch import Tensor

import wholestep as ws
from wholestep.errors import MemoryBudgetError
from wholestep.remat.measure import bytes_at_most

Row = dict[str, Any]
Way = Callable[[Any], tuple[Any, Callable[..., Tensor]]]

TORCHS = "torch:0.8 torch:0.6 torch:0.5 torch:0.4 torch:0.2".split()
BUDGETS = ["10GiB", "peer", "half", "7.5GiB", "7GiB", "6.5GiB", "6GiB", "5.5GiB", *TORCHS]
"""Eight of ours and five of torch's, for GPT-2 on a GPU."""
BUDGETS_ANYWHERE = ["1.0", "peer", "half", "0.6", "0.4", "0.2", "0.1", "0.0", *TORCHS]
"""As many that make sense for any model."""


class Bench:
    """One model and batch; a fresh copy for each row."""

    def __init__(self, device: str, shape: str, rounds: int) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.shape = SHAPES[device, shape]
        self.rounds = rounds
        torch.manual_seed(0)
        self.ids = torch.randint(0, self.shape.words, (self.shape.batch, self.shape.length)).to(self.device)

    def row(self, name: str, make: Way) -> Row:
        """Median milliseconds, the peak of the calls after compiling, and the time of those that compile."""
        torch.manual_seed(0)
        model = GPT(self.shape).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        forward, step = make(model)
        again = functools.partial(step, forward, optimizer, self.ids, self.ids.roll(-1, 1))
        held = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
        started = time.perf_counter()
        again()  # makes the state of the optimizer
        if isinstance(step, ws.CompiledStep):
            again()  # the step with that state is compiled here, and recorded later; torch.compile records here
        self._wait()
        compiled = time.perf_counter() - started
        print(f"  {name}: compiled in {compiled:.1f} s", flush=True)
        _, peak = bytes_at_most(lambda: [again() for _ in range(3)], self.device)  # recordings are made here
        first = time.perf_counter() - started
        times = []
        for _ in range(self.rounds):
            self._wait()
            begun = time.perf_counter()
            for _ in range(3):
                loss = again()
            self._wait()
            times.append((time.perf_counter() - begun) / 3)
        found: Row = {
            "name": name,
            "ms": round(1e3 * statistics.median(times), 2),
            "held_gib": round(held / 2**30, 3),
            "peak_gib": round(((peak or 0) + held) / 2**30, 3),
            "held_bytes": held,
            "peak_bytes": (peak or 0) + held,
            "compile_s": round(compiled, 1),
            "first_calls_s": round(first, 1),
            "loss": round(float(loss.detach()), 4),
        }
        memory = step.last.memory if isinstance(step, ws.CompiledStep) and step.last is not None else None
        if memory is not None:
            found["budget_gib"] = round(memory.budget / 2**30, 3)
            found["planned_gib"] = round(memory.planned_peak / 2**30, 3)
            found["measured_gib"] = round((memory.measured_peak or 0) / 2**30, 3)
            found["within"] = (memory.measured_peak or 0) <= memory.budget
            found["recomputed"] = len(memory.recomputed)
            found["plans_built"] = memory.plans_tried
            found["cut"] = "plan" if memory.shed is None else f"torch's, {memory.shed / 2**30:.3f} GiB less"
        return found

    def turns(self, ways: dict[str, Way]) -> Row:
        """The ways side by side, a few steps each in turn: medians, and quartiles of the ratio to the first one."""
        torch.manual_seed(0)
        model = GPT(self.shape)
        steps: dict[str, Callable[[], Tensor]] = {}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for name, make in ways.items():
            own = copy.deepcopy(model).to(self.device)
            forward, step = make(own)
            optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True)
            steps[name] = functools.partial(step, forward, optimizer, self.ids, self.ids.roll(-1, 1))
            for _ in range(5):
                steps[name]()
            print(f"  {name}: warm", flush=True)
        for _ in range(3 * self.rounds):
            for name, again in steps.items():
                self._wait()
                begun = time.perf_counter()
                for _ in range(5):
                    again()
                self._wait()
                times[name].append((time.perf_counter() - begun) / 5)
        first = times[next(iter(ways))]
        return {
            name: {
                "ms": round(1e3 * statistics.median(each), 3),
                "times_peer": [round(at, 4) for at in statistics.quantiles(map(truediv, each, first), n=4)],
            }
            for name, each in times.items()
        }

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Table:
    """The rows so far, in a file that is complete after each."""

    def __init__(self, path: str, about: dict[str, str], *, resume: bool) -> None:
        self._path = Path(path) if path else None
        self._about = about
        self.rows: list[Row] = []
        self._turns: Row | None = None
        if resume and self._path is not None and self._path.exists():
            before = json.loads(self._path.read_text())
            other = [key for key in about if before.get(key) != about[key]]
            if other:
                raise SystemExit(f"{path} is of another {' and '.join(other)}: not resumed.")
            self.rows = before["rows"]
            self._turns = before.get("turns")
            print(f"{len(self.rows)} rows are there already: {', '.join(row['name'] for row in self.rows)}", flush=True)

    def find(self, name: str) -> Row | None:
        return next((row for row in self.rows if row["name"] == name), None)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        peer = self.find(PEER)
        row["times_peer"] = round(row["ms"] / peer["ms"], 3) if peer is not None and "ms" in row else None
        print(json.dumps(row), flush=True)
        self._write()

    def add_turns(self, found: Row) -> None:
        self._turns = found
        print(json.dumps(found, indent=1), flush=True)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            turns = {} if self._turns is None else {"turns": self._turns}
            unfinished = self._path.with_suffix(".part")
            unfinished.write_text(json.dumps({**self._about, "rows": self.rows, **turns}, indent=1))
            os.replace(unfinished, self._path)


PEER = "torch.compile, best mode"


@contextmanager
def torchs_budget(budget: float) -> Iterator[None]:
    """torch's own setting, for torch's own rows."""
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=budget):
        yield


def torchs(mode: str) -> Way:
    """torch.compile of the model."""
    return lambda model: (torch.compile(model, mode=mode), train_step)


def ours(budget: Any) -> Way:
    """The whole step, with a budget of bytes of peak memory."""
    return lambda model: (model, ws.compile(train_step, lower="inductor", memory_budget=budget))


def row_of(text: str, bench: Bench, table: Table) -> Row:
    """The row of one budget."""
    if text.startswith("torch:"):
        with torchs_budget(float(text[6:])):
            return bench.row(name_of(text), torchs("default"))
    try:
        return bench.row(name_of(text), ours(budget_of(text, table)))
    except MemoryBudgetError as error:
        return {"name": name_of(text), "refused": str(error).splitlines()[0]}


def budget_of(text: str, table: Table) -> Any:
    """What `memory_budget` gets, in bytes where the rows before say it."""
    eager, peer = table.find("eager"), table.find(PEER)
    assert eager is not None
    assert peer is not None
    half = (eager["peak_bytes"] + eager["held_bytes"]) // 2
    named = {"half": half, "peer": peer["peak_bytes"]}
    return named.get(text) or (float(text) if text.replace(".", "").isdigit() else text)


def name_of(text: str) -> str:
    return f"torch.compile {text[6:]}" if text.startswith("torch:") else f"wholestep {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="large", choices=["tiny", "small", "large"])
    parser.add_argument("--small", action="store_true", help="a tiny model, budgets that fit any, three rounds")
    parser.add_argument("--budgets", nargs="*")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", default="")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --json, and run the others")
    parser.add_argument("--turns", nargs="*", default=[], help="budgets to time in turns with torch.compile at the end")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which no row begins")
    options = parser.parse_args()
    started = time.perf_counter()
    shape, rounds = ("tiny", 3) if options.small else (options.shape, options.rounds)
    on_gpu = options.device == "cuda"
    budgets = options.budgets or (BUDGETS if on_gpu and shape == "large" else BUDGETS_ANYWHERE)
    bench = Bench(options.device, shape, rounds)
    about = {"torch": torch.__version__, "device": _name(bench.device), "shape": shape}
    table = Table(options.json, about, resume=options.resume)
    mode = "reduce-overhead" if on_gpu else "default"
    ways: dict[str, Callable[[], Row]] = {
        "eager": lambda: bench.row("eager", lambda model: (model, train_step)),
        PEER: lambda: bench.row(PEER, torchs(mode)),
        **{name_of(text): functools.partial(row_of, text, bench, table) for text in budgets},
    }
    for number, (name, make) in enumerate(ways.items(), 1):
        if table.find(name) is not None:
            continue
        now = time.perf_counter() - started
        if now > options.stop_after:
            print(f"stopped after {now:.0f} s, {len(ways) - len(table.rows)} rows are left: use --resume", flush=True)
            return
        print(f"row {number} of {len(ways)}, {now:.0f} s: {name}", flush=True)
        table.add(make())
        torch.compiler.reset()
        gc.collect()
    if options.turns:
        found = bench.turns(
            {PEER: torchs(mode)} | {name_of(text): ours(budget_of(text, table)) for text in options.turns}
        )
        table.add_turns(found)
    print(f"all {len(ways)} rows, {time.perf_counter() - started:.0f} s in this run", flush=True)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
