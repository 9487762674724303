"""partition_by_support beside torch's CapabilityBasedPartitioner, and balanced_cut, on graphs of growing size.

    python benchmarks/partition.py [--compare 1024 4096] [--sizes 4096 65536] [--repeats 3] [--json FILE]

One node in 16 is unsupported. `chain` is one long chain; `layers` is a chain with skips over 30 nodes and a weight,
scaled when used, for every eighth node. Both partitioners run in this process on the same graph, seconds are of the
CPU; ours is the median of `--repeats` with its spread, torch's runs once (it takes minutes, without the time to make
its table of dependencies). Targets: 200 times faster than torch's at 4k nodes; 64k nodes in less than 5 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from wholestep.partition import balanced_cut, fuse_partitions, partition_by_support


def chain(size: int) -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for i in range(size):
        value = graph.call_function(torch.cos if i % 16 == 15 else torch.sin, (value,))
    graph.output(value)
    return fx.GraphModule(nn.Module(), graph)


def layers(size: int) -> fx.GraphModule:
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    weights = [graph.placeholder(f"w{i}") for i in range(size // 8 + 1)]
    for i in range(size):
        last = values[-1]
        if i % 16 == 15:
            values.append(graph.call_function(torch.cos, (last,)))
        elif i % 8 == 0:
            values.append(graph.call_function(torch.mul, (weights[i // 8], 2.0)))
        elif i % 8 == 1:
            values.append(graph.call_function(torch.add, (last, values[max(0, i - 30)])))
        else:
            values.append(graph.call_function(torch.sub, (last, values[max(0, i - 2)])))
    graph.output(values[-1])
    return fx.GraphModule(nn.Module(), graph)


class NoCosine(OperatorSupportBase):
    """What a backend without cosine says."""

    def is_node_supported(self, submodules: Any, node: fx.Node) -> bool:
        return node.op == "call_function" and node.target is not torch.cos


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = function()
    return time.process_time() - started, result


def by_support(kind: str, gm: fx.GraphModule, compare: bool, repeats: int) -> dict[str, Any]:
    times: list[float] = []
    for _ in range(repeats):
        taken, found = seconds(lambda: partition_by_support(gm, NoCosine()))
        times.append(taken)
    row: dict[str, Any] = {
        "what": "partition_by_support",
        "graph": kind,
        "nodes": len(gm.graph.nodes),
        "partitions": len(found),
        "seconds": statistics.median(times),
        "spread": [min(times), max(times)],
    }
    if compare:
        partitioner = CapabilityBasedPartitioner(gm, NoCosine(), allows_single_node_partition=True)
        row["torch_seconds"], theirs = seconds(partitioner.propose_partitions)
        row["torch_partitions"] = len(theirs)
        row["times_faster"] = row["torch_seconds"] / row["seconds"]
        row["times_faster_spread"] = [row["torch_seconds"] / max(times), row["torch_seconds"] / min(times)]
    row["fuse_seconds"], _ = seconds(lambda: fuse_partitions(gm, found))
    return row


def balanced(kind: str, gm: fx.GraphModule, k: int) -> dict[str, Any]:
    cost = {node.name: 1.0 + i % 7 for i, node in enumerate(gm.graph.nodes)}
    taken, found = seconds(
        lambda: balanced_cut(gm, k, cost, 1 << 40, seconds_per_byte=1e-3, value_bytes=lambda node: 64)
    )
    even = sum(cost[node.name] for part in found.partitions for node in part) / k
    return {
        "what": "balanced_cut",
        "graph": kind,
        "nodes": len(gm.graph.nodes),
        "k": k,
        "seconds": taken,
        "slowest": found.slowest,
        "slowest_over_even": found.slowest / even,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=int, nargs="*", default=[1024, 4096], help="sizes at which torch's runs too")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--k", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for kind, make in (("chain", chain), ("layers", layers)):
        for size in options.sizes:
            for k in options.k:
                rows.append(balanced(kind, make(size), k))
                print(json.dumps(rows[-1]), flush=True)
            rows.append(by_support(kind, make(size), size in options.compare, options.repeats))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
