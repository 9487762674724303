"""split_module against torch's: CPU seconds and memory, and how both grow with nodes, placeholders and partitions.

    python benchmarks/split.py [--quick] [--json FILE]

Each measurement runs in a process of its own, forked from this one, so that memory is that of one call; ours and
torch's take turns. Targets: 16k nodes in 256 partitions at least 3 times faster; 64k nodes with one partition each at
least 3 times faster with at most 0.75 of the memory; time linear in nodes, placeholders and partitions.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module as torchs_split_module

from wholestep.partition import split_module

Split = Callable[..., fx.GraphModule]
FUNCTIONS: dict[str, Split] = {"ours": split_module, "torch": torchs_split_module}


def chain(nodes: int, placeholders: int = 1) -> fx.GraphModule:
    """`nodes` additions in a row; the other placeholders are added one by one."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(placeholders)]
    value = inputs[0]
    for i in range(nodes):
        other: Any = inputs[i % placeholders] if placeholders > 1 else 1.0
        value = graph.call_function(torch.ops.aten.add.Tensor, (value, other))
        value.meta = {"stack_trace": "train.py:1", "val": None}
    graph.output(value)
    return fx.GraphModule({}, graph)


def measure(split: Split, gm: fx.GraphModule, parts: int, options: dict[str, Any], result: Connection) -> None:
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    number = {node: i * parts // len(calls) for i, node in enumerate(calls)}
    split(chain(4), None, lambda node: 0)  # what is made once for a process
    gc.collect()
    gc.freeze()
    before = _peak()
    started = time.process_time()
    made = split(gm, None, number.__getitem__, **options)
    taken = time.process_time() - started
    result.send((taken, _peak() - before, sum(1 for _ in made.children())))


def run(name: str, gm: fx.GraphModule, parts: int, **options: Any) -> tuple[float, float]:
    """CPU seconds and the growth of the process's peak memory in MB, measured in a fork."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=measure, args=(FUNCTIONS[name], gm, parts, options, there))
    process.start()
    there.close()
    seconds, memory, children = here.recv()
    process.join()
    assert children == parts
    return seconds, memory


def compare(nodes: int, parts: int, rounds: int, placeholders: int = 1, **options: Any) -> dict[str, Any]:
    gm = chain(nodes, placeholders)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in FUNCTIONS}
    for _ in range(rounds):
        for name, results in found.items():
            results.append(run(name, gm, parts, **options))
    row: dict[str, Any] = {"nodes": nodes, "partitions": parts, "placeholders": placeholders, **options}
    for name, results in found.items():
        row[f"{name}_s"] = round(statistics.median(seconds for seconds, _ in results), 3)
        row[f"{name}_mb"] = round(statistics.median(memory for _, memory in results), 1)
    ratios = [t[0] / o[0] for t, o in zip(found["torch"], found["ours"], strict=True)]
    row["times_faster"] = round(statistics.median(ratios), 2)
    row["times_faster_from_to"] = [round(min(ratios), 2), round(max(ratios), 2)]
    if row["torch_mb"] > 50:  # less says nothing: the process had room
        row["memory_ratio"] = round(row["ours_mb"] / row["torch_mb"], 3)
    return row


def growth(rounds: int, sizes: list[int]) -> list[dict[str, Any]]:
    """Only ours: microseconds a node, which stay the same where time is linear."""
    rows = []
    for size in sizes:
        plain, many = chain(size), chain(size, size)
        cases: dict[str, tuple[fx.GraphModule, int, dict[str, Any]]] = {
            "nodes": (plain, 16, {}),
            "partitions": (plain, size, {}),
            "placeholders": (many, 16, {}),
            "placeholders, keep_original_order": (many, 16, {"keep_original_order": True}),
        }
        row: dict[str, Any] = {"size": size}
        for name, (gm, parts, options) in cases.items():
            seconds = statistics.median(run("ours", gm, parts, **options)[0] for _ in range(rounds))
            row[f"{name}: us"] = round(seconds / size * 1e6, 1)
        rows.append(row)
    return rows


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the sizes")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scale = 4 if options.quick else 1
    k = 1024 // scale
    found: dict[str, Any] = {"torch": torch.__version__, "compared": []}
    cases: list[tuple[int, int, int, int, dict[str, Any]]] = [
        (16 * k, 2, 5, 1, {}),
        (16 * k, 256, 5, 1, {}),
        (64 * k, 64 * k, 1, 1, {}),
        (16 * k, 16, 1, 16 * k, {"keep_original_order": True}),
    ]
    for nodes, parts, rounds, placeholders, extra in cases:
        found["compared"].append(compare(nodes, parts, rounds, placeholders, **extra))
        print(json.dumps(found["compared"][-1]), flush=True)
    found["growth"] = growth(3, [4 * k, 16 * k, 64 * k])
    for row in found["growth"]:
        print(json.dumps(row), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
