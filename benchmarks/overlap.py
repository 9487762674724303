"""Simulated step times: as captured, with the default list, with torch's scheduler, with ours, and the bound.

    python benchmarks/overlap.py [--models gpt llama mixtral] [--plans sharded hsdp sharded_tp replicated]
                                 [--ranks 8 64 256 1024] [--made] [--judge FOLDER] [--torch] [--json FILE]

The graphs are those of `overlap_graphs.py`: steps that are captured on fake process groups, and (`--made`) graphs made
by hand. They are simulated on `ws.simulate.H100`. `--judge`: the folder of `overlap_eval.py`; its graphs are replayed
by it, not by our simulator, with its costs. `--torch` adds torch's own scheduler, with the same costs.
Nothing runs on a GPU. No name of a node or layer is looked at.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from overlap_graphs import MODELS, PLANS, SHAPE, captured, experts, sharded_layers
from torch import fx

import wholestep as ws
from wholestep.simulate.cost_model import node_costs, sent_bytes, spread_of
from wholestep.simulate.step_index import index_step, plain

GIB = 2**30
MACHINE = ws.simulate.H100
MADE: dict[str, Callable[[], fx.GraphModule]] = {
    "sharded layers (8B parameters), 64": lambda: sharded_layers(477, 8192, 4096, 64),
    "experts, 8": lambda: experts(16, 16384, 4096, 8),
    "experts and more rows, 8": lambda: experts(16, 65536, 4096, 8),
}


def torch_overlap(gm: fx.GraphModule) -> fx.GraphModule:
    """torch's scheduler with buckets, with our costs."""
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    index = index_step(gm)
    known = dict(zip(index.nodes, node_costs(index, MACHINE), strict=True))

    def milliseconds(node: fx.Node, override_size: int | None = None) -> float:
        number = index.number.get(node, -1)
        if override_size is not None and number >= 0 and index.group[number] >= 0:
            group = index.group[number]
            spread = spread_of(index.groups[group], index.group_ranks[group], MACHINE)
            size = override_size or min(sent_bytes(node), 1)
            return MACHINE.collectives.seconds(plain(node.target), spread, size) * 1e3
        return known.get(node, 0.0) / 1e3

    with ExitStack() as stack:
        for patch in _without_gpu():
            stack.enter_context(patch)
        found: fx.GraphModule = schedule_overlap_bucketing(
            gm,
            collective_bucketing=True,
            insert_overlap_deps=False,
            custom_runtime_estimation=milliseconds,
            compute_estimator="analytical",
            collective_estimator="analytical",
            enable_fusion_regions=False,
        )
    return found


def _without_gpu() -> Iterator[Any]:
    """What torch's scheduler asks a GPU for, as that of `MACHINE` answers; all costs come from us."""
    import torch._inductor.comm_analysis as analysis
    import torch._inductor.utils as utils
    import torch.utils._runtime_estimation as estimation

    yield mock.patch.object(analysis, "get_gpu_type", return_value=analysis.NVIDIA_GPU_TYPE.HOPPER)
    for module in (utils, estimation):
        yield mock.patch.object(module, "get_gpu_dram_gbps", return_value=MACHINE.memory / 1e9)
        yield mock.patch.object(module, "get_device_tflops", return_value=MACHINE.rate(True) / 1e12)


def row(name: str, graph: Any, with_torch: bool) -> dict[str, Any]:
    """Times of one graph, in milliseconds, and peaks in GiB."""
    as_is = ws.simulate.step(graph, machine=MACHINE)
    default, ours = _copy(graph), _copy(graph)
    ws.passes.run_passes(default, "default")
    begin = time.perf_counter()
    ws.passes.run_passes(ours, [ws.passes.overlap_communication(machine=MACHINE)])
    took = time.perf_counter() - begin
    by_us = ws.simulate.step(ours, machine=MACHINE)
    begin = time.perf_counter()
    parts = _copy(graph)
    chosen = [ws.passes.collective_matmul(machine=MACHINE), ws.passes.overlap_communication(machine=MACHINE)]
    ws.passes.run_passes(parts, chosen)
    both_took = time.perf_counter() - begin
    found = {
        "graph": name,
        "nodes": len(as_is.index),
        "as_captured": _shown(as_is),
        "default_list": _shown(ws.simulate.step(default, machine=MACHINE)),
        "overlap_communication": _shown(by_us),
        "collective_matmul_too": _shown(ws.simulate.step(parts, machine=MACHINE)),
        "bound_ms": round(min(as_is.bounds.largest, by_us.bounds.largest) / 1e3, 3),
        "chain_ms": round(as_is.bounds.chain / 1e3, 3),
        "pass_s": round(took, 2),
        "both_s": round(both_took, 2),
    }
    return found | (_by_torch(graph) if with_torch else {})


def _by_torch(graph: Any) -> dict[str, Any]:
    gm = copy.deepcopy(getattr(graph, "gm", graph))
    begin = time.perf_counter()
    try:
        made = torch_overlap(gm)
    except Exception as error:  # whatever its pass raises is its result
        return {"torch": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    return {"torch": _shown(ws.simulate.step(made, machine=MACHINE)), "torch_s": round(time.perf_counter() - begin, 2)}


def _copy(graph: Any) -> Any:
    return graph.copy() if isinstance(graph, ws.StepGraph) else copy.deepcopy(graph)


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

    def in_parts(gm: Any, cost: Any) -> Any:
        ws.passes.collective_matmul(gm, cost=cost)
        return ours(gm, cost)

    passes = {"as_captured": None, "overlap_communication": ours, "collective_matmul too": in_parts} | (
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
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--made", action="store_true")
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.judge:
        for line in judged(given.judge, given.torch):
            rows.append(line)
            print(line, flush=True)
    made = MADE if given.made else {}
    todo = [*made.items()] + [
        (f"{model}, {plan}, {ranks}", functools.partial(captured, model, plan, ranks))
        for model in given.models
        for plan in given.plans
        for ranks in given.ranks
        if (plan != "hsdp" or ranks >= 16) and not (model == "gpt" and plan == "sharded_tp")
    ]
    for name, make in todo:
        rows.append(row(name, make(), given.torch))
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
