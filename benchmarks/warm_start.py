"""From a built model to the end of the fourth call of a training step: in a first process, and in a second one.

    python benchmarks/warm_start.py [--shape tiny] [--layers 3] [--lower inductor] [--repeats 3] [--json FILE]

Each number is taken in a process of its own, in turns, in one run; the clock starts after imports with the model and
the optimizer built. Caches on disk (ours, Inductor's) are in one new folder per turn and variant.

    wholestep     ws.compile(train_step, cache=folder): the whole step
    artefact      ws.load(file, train_step), made by the first process of `wholestep`; Inductor's cache as it left it
    torch         torch.compile(model), optimizer in eager: what most people run
    torch+opt     the same, with a compiled optimizer.step
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VARIANTS = ("wholestep", "artefact", "torch", "torch+opt")
CALLS = 4


def measure(variant: str, shape: str, layers: int, lower: str, folder: str, *, is_first: bool) -> dict[str, Any]:
    """Run in a process of its own: the seconds to the end of each call, and the last loss."""
    import torch
    from models import GPT, SHAPES, train_step

    import wholestep as ws

    ws.compile  # noqa: B018  (loads the stages)
    import torch._dynamo

    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    sizes = dataclasses.replace(SHAPES[where, shape], layers=layers)
    model = GPT(sizes).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(sizes.words, (sizes.batch, sizes.length), device=where)
    path = f"{folder}/step.ws"
    started = time.perf_counter()
    called, step = model, train_step
    if variant == "wholestep" or (variant == "artefact" and is_first):
        step = ws.compile(train_step, lower=lower, cache=f"{folder}/ws", progress=False)
    elif variant == "artefact":
        step = ws.load(path, train_step)
    else:
        called = torch.compile(model)
        if variant == "torch+opt":
            optimizer.step = torch.compile(optimizer.step)
    ends = []
    for _ in range(CALLS):
        loss = float(step(called, optimizer, ids, ids))  # waits for the device
        ends.append(time.perf_counter() - started)
    if variant == "artefact" and is_first:
        step.save(path)
    return {"seconds": ends, "loss": loss, "traced": getattr(step, "capture_seconds", None)}


def run(variant: str, options: argparse.Namespace, folder: str, *, is_first: bool) -> dict[str, Any]:
    """`measure` in a fresh process."""
    arguments = [variant, options.shape, str(options.layers), options.lower, folder, str(int(is_first))]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")]),
    }
    command = [sys.executable, __file__, "--process", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--process"]:
        variant, shape, layers, lower, folder, is_first = sys.argv[2:]
        print(json.dumps(measure(variant, shape, int(layers), lower, folder, is_first=is_first == "1")))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lower", default="inductor")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.variants}
    for _ in range(options.repeats):
        for variant in options.variants:
            with tempfile.TemporaryDirectory() as folder:
                first = run(variant, options, folder, is_first=True)
                second = run(variant, options, folder, is_first=False)
            assert not second["traced"], "the second process traced"
            runs[variant].append({"first": first, "second": second})
    found: dict[str, Any] = {"options": vars(options), "runs": runs, "medians": {}}
    for name, each in runs.items():
        medians = {
            process: statistics.median(one[process]["seconds"][-1] for one in each) for process in ("first", "second")
        }
        found["medians"][name] = medians
        print(f"{name:10} first process {medians['first']:6.2f} s   second process {medians['second']:6.2f} s")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
