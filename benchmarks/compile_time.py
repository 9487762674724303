"""Seconds of compiling a step by depth: wholestep with repeated layers compiled once and without, and torch.compile.

    python benchmarks/compile_time.py [--device cpu] [--layers 6 12 24] [--ways auto inline torch] [--json FILE]

A GPT (float32 on the CPU, bf16 autocast on CUDA) with AdamW (foreach), cold: each in a process of its own with an empty
cache. `torch` compiles model and optimizer, `torch-model` the model only. Prints the seconds in Inductor
(`compile_fx_inner`), how often it was called, the seconds to the end of the fourth call, and the milliseconds of CPU
time (CUDA: of time) that a step takes afterwards, the least of 20.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def measure(way: str, layers: int, device: str, width: int) -> dict[str, Any]:
    """In this process, whose caches are empty."""
    import torch
    from models import GPT, Shape, train_step
    from torch._inductor import compile_fx

    import wholestep as ws

    calls: list[float] = []
    compile_inner = compile_fx._compile_fx_inner  # what torch.compile calls too

    def timed(*args: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        try:
            return compile_inner(*args, **keywords)
        finally:
            calls.append(time.perf_counter() - started)

    compile_fx._compile_fx_inner = timed
    torch.manual_seed(0)
    model: Any = GPT(Shape(layers, width, 4, 4, 64, 256)).to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    ids = torch.randint(0, 256, (4, 64), device=device)
    step: Any = train_step
    if way.startswith("torch"):
        model = torch.compile(model)
        if way == "torch":
            optimizer.step = torch.compile(optimizer.step)
    else:
        step = ws.compile(train_step, lower="inductor", lower_options={"repeat": way})
    started = time.perf_counter()
    for _ in range(4):
        loss = float(step(model, optimizer, ids, ids))
    ready = time.perf_counter() - started
    clock = time.process_time if device == "cpu" else time.perf_counter
    times = []
    for _ in range(20):
        begin = clock()
        float(step(model, optimizer, ids, ids))
        times.append(clock() - begin)
    return {
        "way": way,
        "layers": layers,
        "inductor": round(sum(calls), 1),
        "calls": len(calls),
        "to_fourth_call": round(ready, 1),
        "step_ms": round(min(times) * 1e3, 2),
        "loss": loss,
    }


def in_a_new_process(way: str, layers: int, device: str, width: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": paths}
        one = [
            sys.executable,
            __file__,
            "--one",
            way,
            "--layers",
            str(layers),
            "--device",
            device,
            "--width",
            str(width),
        ]
        done = subprocess.run(one, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24])
    parser.add_argument("--ways", nargs="+", default=["auto", "inline", "torch", "torch-model"])
    parser.add_argument("--json", default="")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.layers[0], options.device, options.width)))
        return
    found = []
    print(f"{'way':12} layers  Inductor s  calls  to 4th call s  step ms  loss")
    for layers in options.layers:
        for way in options.ways:
            one = in_a_new_process(way, layers, options.device, options.width)
            found.append(one)
            print(
                f"{way:12} {layers:6} {one['inductor']:11.1f} {one['calls']:6} {one['to_fourth_call']:14.1f} "
                f"{one['step_ms']:8.2f}  {one['loss']:.4f}",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(
            json.dumps({"width": options.width, "device": options.device, "runs": found}, indent=1)
        )


if __name__ == "__main__":
    main()
