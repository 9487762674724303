"""Held against reality: predicted step times beside the clock, in a modelled world of 8 or 64 ranks on the CPU.

    python benchmarks/simulated_step.py [--json FILE] [--only gpt/full/8] [--steps 20] [--ranks 8 64]

For each model and plan: a compiled step runs in `modelled_world` (one real process, a network that takes its modelled
time and no core), is profiled (`step.profile`), and its graph is simulated with the machine corrected by the profile.
The prediction stands beside the median of real calls. Beside it runs the eager peer (DistributedDataParallel,
`fully_shard`) on the same network. The network is chosen per model so that communication takes 40% of an eager step.

Times are of the clock: run it on a quiet machine, with one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from modelled_world import modelled_world
from models import GPT, Shape
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import wholestep as ws
from wholestep.simulate import Machine
from wholestep.simulate.machine import CollectiveModel, Link

WORDS, LENGTH, BATCH = 512, 64, 4
SHARE = 0.4
"""Of an eager step, communication."""


class Perceptron(nn.Module):
    """Square layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@dataclass(frozen=True)
class Model:
    """How a model, its batch and its loss are made, and which of its modules are gathered one by one."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    modules: str
    styles: Callable[[], dict[str, Any]] | None = None


def _ids() -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids}


def _columns_and_rows(columns: str, rows: str) -> dict[str, Any]:
    return {
        **{name: ColwiseParallel() for name in columns.split()},
        **{name: RowwiseParallel() for name in rows.split()},
    }


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8
        )
    )


MODELS = {
    "perceptron": Model(
        Perceptron,
        lambda: {"x": torch.randn(256, 512)},
        "layers.*",
        lambda: _columns_and_rows("layers.0 layers.2 layers.4 layers.6", "layers.1 layers.3 layers.5 layers.7"),
    ),
    "gpt": Model(
        lambda: GPT(Shape(4, 256, 8, BATCH, LENGTH, WORDS)),
        lambda: dict(zip(("ids", "labels"), [torch.randint(0, WORDS, (BATCH, LENGTH))] * 2, strict=True)),
        "blocks.*",
        lambda: _columns_and_rows("blocks.*.up", "blocks.*.down"),
    ),
    "gpt2": Model(
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=256, n_layer=4, n_head=8)),
        _ids,
        "transformer.h.*",
    ),
    "llama": Model(
        _llama,
        _ids,
        "model.layers.*",
        lambda: _columns_and_rows(
            "model.layers.*.mlp.gate_proj model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"
        ),
    ),
    "bert": Model(
        lambda: BertForMaskedLM(
            BertConfig(
                vocab_size=WORDS, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024
            )
        ),
        _ids,
        "bert.encoder.layer.*",
    ),
    "t5": Model(
        lambda: T5ForConditionalGeneration(
            T5Config(
                vocab_size=WORDS, d_model=256, d_kv=32, d_ff=512, num_layers=2, num_heads=8, decoder_start_token_id=0
            )
        ),
        _ids,
        "encoder.block.*",
    ),
    "vit": Model(
        lambda: ViTForImageClassification(
            ViTConfig(
                hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024, image_size=64
            )
        ),
        lambda: {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 2, (8,))},
        "vit.encoder.layer.*",
    ),
}
PLANS = ("replicate", "full", "hsdp", "full+tp")


def main() -> None:
    """Run what is asked for, print a line each, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64])
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, model in MODELS.items():
        for plan in PLANS:
            for ranks in given.ranks:
                if given.only in f"{name}/{plan}/{ranks}" and (plan != "full+tp" or model.styles):
                    rows.append(
                        {"model": name, "plan": plan, "ranks": ranks, **measured(model, plan, ranks, given.steps)}
                    )
                    print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
                    if given.json:
                        given.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


def measured(model: Model, plan: str, ranks: int, steps: int) -> dict[str, Any]:
    """Milliseconds: of the clock, as predicted, and of the eager peer."""
    machine = network(model, plan, ranks)
    with modelled_world(ranks, machine):
        found = run_compiled(model, plan, ranks, machine, steps)
        if plan != "full+tp":
            found["peer"] = run_eager(model, plan, ranks, steps)
            found["times_of_peer"] = round(found["clock"] / found["peer"], 3)
    return found


def network(model: Model, plan: str, ranks: int) -> Machine:
    """A network of which the eager step takes as long that it is its share of computation and communication."""
    net, batch = model.make(), model.batch()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)
    alone = median_ms(lambda: train(net, optimizer, batch), 10) / 1e3
    size = sum(p.nbytes for p in net.parameters())
    passes = 2.0 if plan == "replicate" else 3.0  # an all-reduce is two; gathers twice and a scatter
    bandwidth = passes * size / (alone * SHARE / (1 - SHARE))
    link = Link(1e-4, 0.0, bandwidth)
    return replace(ws.simulate.CPU, collectives=CollectiveModel(link, link), ranks_per_node=ranks)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """One step."""
    out = net(**batch)
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def mesh_of(plan: str, ranks: int) -> Any:
    """The mesh of a plan."""
    if plan == "hsdp":
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    if plan == "full+tp":
        return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))


def run_compiled(model: Model, plan: str, ranks: int, machine: Machine, steps: int) -> dict[str, Any]:
    """A compiled step: real calls, and the prediction from a profile."""
    torch.manual_seed(0)
    net, batch, mesh = model.make(), model.batch(), mesh_of(plan, ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)
    if plan == "replicate":
        parallel: Any = ws.Replicate(mesh)
    elif plan == "full+tp":
        assert model.styles is not None
        parallel = ws.FullyShard(mesh["dp"], modules=[model.modules], tensor_parallel=(mesh["tp"], model.styles()))
    else:
        parallel = ws.FullyShard(mesh, modules=[model.modules])
    step = ws.compile(train, parallel=parallel, lower="eager", progress=False)
    for _ in range(4):
        step(net, optimizer, batch)
    before = median_ms(lambda: step(net, optimizer, batch), steps)
    profile = step.profile(net, optimizer, batch, steps=steps)
    after = median_ms(lambda: step(net, optimizer, batch), steps)
    corrected = replace(ws.simulate.calibrate(machine, profile), collectives=machine.collectives)
    timeline = ws.simulate.step(step.last, machine=corrected)
    clock = (before + after) / 2
    predicted = timeline.step_us / 1e3
    return {
        "clock": round(clock, 3),
        "predicted": round(predicted, 3),
        "off": round(predicted / clock - 1, 4),
        "computed": round(timeline.compute_us / 1e3, 3),
        "exposed": round(timeline.exposed_us / 1e3, 3),
    }


def run_eager(model: Model, plan: str, ranks: int, steps: int) -> float:
    """The same step in eager, by torch's own wrappers."""
    torch.manual_seed(0)
    net, batch, mesh = model.make(), model.batch(), mesh_of(plan, ranks)
    if plan == "replicate":
        wrapped: nn.Module = DistributedDataParallel(net)
    else:
        pattern = model.modules.removesuffix(".*")
        for layer in net.get_submodule(pattern):
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-5, fused=True)
    return round(median_ms(lambda: train(wrapped, optimizer, batch), steps), 3)


def median_ms(run: Callable[[], Any], steps: int) -> float:
    """The median of the clock, after three calls that do not count."""
    for _ in range(3):
        run()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
