"""Cutting models into stages: how long it takes, and how well the stages are balanced.

    python benchmarks/pipelining.py [--quick] [--json FILE]

Targets: an exported graph of 10,000 nodes in 16 stages in less than 5 s (export, which is torch's, is shown beside it);
the slowest stage within 5% of the best cut, found by trying all, on graphs small enough; and on GPT-2, T5 and a U-Net
at least as good as equal numbers of layers. Times of stages are the estimates that the balance uses: forward, backward
and the bytes that enter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pipelining"))

from models import CASES, UNet, gpt2, numbers, t5, tokens

from wholestep.pipelining import Balance, SplitPoint
from wholestep.pipelining.build.call_form import call_form
from wholestep.pipelining.build.capture import CapturedModel, ModePrograms, capture
from wholestep.pipelining.build.model_state import ModelState
from wholestep.pipelining.build.pipeline import assemble
from wholestep.pipelining.build.split_points import annotate_split_points, stages_by_marks
from wholestep.pipelining.build.staged_graph import example_bytes
from wholestep.pipelining.planning.balance import choose_stages, node_costs


class Deep(nn.Module):
    """Many small layers with skips over 40 of them: about 12 nodes each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [x]
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            h = norm(x)
            h = torch.nn.functional.gelu(layer(h)) * torch.sigmoid(h)
            h = h.view(-1, 4, 4).transpose(1, 2).reshape(-1, 16)
            x = x + h
            if i % 40 == 39:
                x = x + kept[-1]
                kept.append(x)
        return x


def captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], split: Any = None
) -> tuple[Any, CapturedModel]:
    form = call_form(model, args, kwargs)
    with annotate_split_points(model, split or {}):
        return form, capture(model, form, args, kwargs, None)


def cutting(layers: int, stages: int) -> dict[str, Any]:
    model, args = Deep(layers), (numbers(4, 16),)
    start = time.perf_counter()
    form, program = captured(model, args, {})
    exported = time.perf_counter() - start
    state = ModelState(model, [program.constants])

    def choose(graph: fx.Graph, of_one_mode: Any) -> Any:
        return choose_stages(graph, of_one_mode, Balance(stages), args, lambda name: state.entries[name].value, {})

    nodes = len(program.graph.nodes)
    start, cpu = time.perf_counter(), time.process_time()
    pipe = assemble(model, ModePrograms("train", {"train": program}, {}), form, {}, "replicate", choose)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert torch.equal(pipe(*args)[0], model(*args))
    times = {"cut_s": round(seconds, 2), "cut_cpu_s": round(cpu, 2), "export_s": round(exported, 1)}
    return {"nodes": nodes, "stages": pipe.num_stages, **times}


def times(
    program: CapturedModel, model: nn.Module, args: Any, kwargs: Any, stage_of: dict[fx.Node, int]
) -> list[float]:
    """Seconds of each stage, as the balance counts them."""
    balance = Balance(1)
    state = ModelState(model, [program.constants])
    tensors = call_form(model, args, kwargs).flatten(args, kwargs)
    costs = node_costs(program.graph, balance, tensors, lambda name: state.entries[name].value, program.constants)
    stages = [0.0] * (max(stage_of.values()) + 1)
    for node, stage in stage_of.items():
        stages[stage] += costs[node].total
        last = max((stage_of.get(user, stage) for user in node.users), default=stage)
        for later in range(stage + 1, last + 1):
            stages[later] += 2 * example_bytes(node.meta.get("val")) / balance.machine.link
    return stages


def against_layers(
    name: str, model: nn.Module, args: Any, kwargs: Any, layers: list[str], stages: int
) -> dict[str, Any]:
    cuts = {layers[len(layers) * i // stages]: SplitPoint.BEGINNING for i in range(1, stages)}
    _, marked = captured(model, args, kwargs, cuts)
    equal = times(marked, model, args, kwargs, stages_by_marks(marked.graph))
    pipe_form, program = captured(model, args, kwargs)
    state = ModelState(model, [program.constants])
    tensors = pipe_form.flatten(args, kwargs)
    chosen = choose_stages(
        program.graph, set(), Balance(stages), tensors, lambda key: state.entries[key].value, program.constants
    )
    ours = times(program, model, args, kwargs, chosen)
    return {
        "model": name,
        "stages": stages,
        "equal_layers_us": round(max(equal) * 1e6, 1),
        "balanced_us": round(max(ours) * 1e6, 1),
        "ratio": round(max(ours) / max(equal), 3),
    }


def against_all_cuts(name: str, stages: int) -> dict[str, Any]:
    """The slowest stage of our cut beside the best of all cuts between operators."""
    torch.manual_seed(0)
    case = CASES[name]
    model, args, kwargs = case.make(), case.args(), case.kwargs()
    form, program = captured(model, args, kwargs)
    state = ModelState(model, [program.constants])
    tensors = form.flatten(args, kwargs)
    chosen = choose_stages(
        program.graph, set(), Balance(stages), tensors, lambda key: state.entries[key].value, program.constants
    )
    work = list(chosen)
    costs = node_costs(program.graph, Balance(stages), tensors, lambda key: state.entries[key].value, program.constants)
    place = {node: i for i, node in enumerate(work)}
    spans = [
        (place[n], max((place[u] for u in n.users if u in place), default=place[n]), example_bytes(n.meta.get("val")))
        for n in work
    ]
    price = 2 / Balance(1).machine.link
    entering = [sum(size for made, last, size in spans if made < cut <= last) * price for cut in range(len(work) + 1)]
    total = list(itertools.accumulate((costs[node].total for node in work), initial=0.0))

    def slowest(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, len(work))
        return max(total[b] - total[a] + entering[a] for a, b in itertools.pairwise(bounds))

    best = min(slowest(cuts) for cuts in itertools.combinations(range(1, len(work)), stages - 1))
    ours = slowest(tuple(min(place[n] for n in work if chosen[n] == s) for s in range(1, stages)))
    return {"model": name, "operators": len(work), "stages": stages, "over_best": round(ours / best - 1, 4)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"torch": torch.__version__, "cut": [], "all_cuts": [], "layers": []}
    for layers in (100,) if options.quick else (100, 770):
        found["cut"].append(cutting(layers, 16))
        print("cut", found["cut"][-1], flush=True)
    for name, stages in (("skip", 3), ("two_tower", 3), ("unet", 3), ("unet", 4), ("moe", 3)):
        found["all_cuts"].append(against_all_cuts(name, stages))
        print("all cuts", found["all_cuts"][-1], flush=True)
    wide = {"n_layer": 8, "n_embd": 64}
    cases: list[Any] = [
        ("GPT-2", gpt2(**wide, vocab_size=2048), (tokens(2048, 4, 16),), {}, [f"transformer.h.{i}" for i in range(8)]),
        (
            "T5",
            t5(num_layers=4, num_decoder_layers=4, d_model=64, d_ff=256),
            (tokens(32, 4, 16),),
            {"labels": tokens(32, 4, 8)},
            [*(f"encoder.block.{i}" for i in range(4)), *(f"decoder.block.{i}" for i in range(4))],
        ),
        ("U-Net", UNet(16), (numbers(4, 3, 32, 32),), {}, ["enter", "down", "middle", "up", "leave"]),
    ]
    for name, model, args, kwargs, layers in cases:
        for stages in (2, 4):
            found["layers"].append(against_layers(name, model, args, kwargs, layers, stages))
            print("layers", found["layers"][-1], flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
