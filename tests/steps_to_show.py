"""Steps to show: a small GPT on one process and on ranks that do not exist, and a graph of any size."""

from __future__ import annotations

from typing import Any

import torch

import wholestep as ws
from simulate.sharded_steps import fully_sharded
from tiny_gpt import Config, TinyGPT
from wholestep.compiled_step import CompiledStep
from wholestep.ir import StepGraph
from wholestep.ir.meta import update_node_meta


def gpt_step(calls: int = 2, **options: Any) -> CompiledStep[..., torch.Tensor]:
    """A compiled step of a GPT of two layers that has run."""
    step, batch = make_gpt_step(**options)
    for _ in range(calls):
        step(*batch)
    return step


def make_gpt_step(**options: Any) -> tuple[CompiledStep[..., torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The step and a batch for it."""
    model = TinyGPT(Config(vocab=17, context=8, layers=2, heads=2, width=16, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(idx, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = ws.compile(train_step, **{"lower": "eager"} | options)
    return step, (torch.randint(17, (4, 8)), torch.randint(17, (4, 8)))


def large_step(layers: int) -> StepGraph:
    """Some 17 nodes for each layer, with a module for every layer, and all phases."""
    graph = fully_sharded(layers=layers)
    nodes = [node for node in graph.gm.graph.nodes if node.op == "call_function"]
    writes = len(graph.signature.write_backs)
    for i, node in enumerate(nodes):
        part = "epilogue" if i >= len(nodes) - writes else "forward" if i < len(nodes) // 3 else "backward"
        path = "" if part == "epilogue" else f"model.layers.{i * layers // len(nodes)}.{('attention', 'mlp')[i % 2]}"
        update_node_meta(node, phase=part, module_path=path)
    return graph


def sharded_gpt(mesh: Any) -> StepGraph:
    """The graph of one of several ranks that share the parameters."""
    step, batch = make_gpt_step(parallel=ws.FullyShard(mesh))
    return step.capture(*batch)
