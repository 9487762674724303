"""Steps of one rank of four, really captured: no rank is there (torch's fake group), every node is.

with four_ranks():
    step = fresh(NAMES[0])      a copy of the graph, captured once
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholestep as ws
from cases.parts import train_step, zero_first
from wholestep.ir import StepGraph
from wholestep.ir.graph_walks import copy_graph

RANKS = 4


@contextlib.contextmanager
def four_ranks() -> Iterator[None]:
    """Graphs know the sizes of their groups only while those are there."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield
    finally:
        _captured.cache_clear()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


class Tied(nn.Module):
    """One weight with two gradients, a buffer, and rows that four ranks cannot share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long() % 5
        result: Tensor = self.out(torch.tanh(self.norm(self.embed(tokens))))
        return result


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 8, bias=False), nn.Linear(8, 3))


def blocks() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])


def clip(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(x).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def _sgd(foreach: bool) -> Callable[[Any], Optimizer]:
    return lambda ps: SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=foreach)


def _adamw(**how: bool) -> Callable[[Any], Optimizer]:
    return lambda ps: AdamW(ps, lr=0.1, **how)  # type: ignore[arg-type]


_Kind = tuple[str, Callable[[], nn.Module], Callable[[Any], Optimizer], Callable[..., Any], int]
"""Plan, model, optimizer, step, and how often it is called: the first call creates the optimizer's state."""

KINDS: dict[str, _Kind] = {
    "replicate, SGD": ("replicate", layers, _sgd(False), train_step, 2),
    "replicate, SGD, foreach, first call": ("replicate", blocks, _sgd(True), zero_first, 1),
    "replicate, AdamW, clipped": ("replicate", blocks, _adamw(foreach=False), clip, 2),
    "replicate, AdamW, foreach, tied": ("replicate", Tied, _adamw(foreach=True), train_step, 2),
    "replicate, AdamW, fused": ("replicate", layers, _adamw(fused=True), zero_first, 2),
    "shard, SGD, foreach": ("shard", layers, _sgd(True), train_step, 2),
    "shard, AdamW, clipped": ("shard", layers, _adamw(foreach=False), clip, 2),
    "shard, AdamW, fused, tied, first call": ("shard", Tied, _adamw(fused=True), train_step, 1),
    "shard blocks, AdamW, foreach": ("blocks", blocks, _adamw(foreach=True), train_step, 2),
    "hybrid, AdamW, fused": ("hybrid", layers, _adamw(fused=True), train_step, 2),
}
NAMES = tuple(KINDS)


def fresh(name: str) -> StepGraph:
    """A copy of a captured step, for somebody to change."""
    captured = _captured(name)
    gm = fx.GraphModule(captured.gm, copy_graph(captured.gm.graph))
    gm.meta.update(captured.gm.meta)
    return StepGraph(gm, captured.signature)


@cache
def _captured(name: str) -> StepGraph:
    plan, model, optimizer, step, calls = KINDS[name]
    torch.manual_seed(0)
    trained = model()
    updates = optimizer(trained.parameters())
    compiled = ws.compile(step, parallel=_plan(plan), passes=None, verify=2)
    for _ in range(calls):
        compiled(trained, updates, torch.randn(5, 6))
    assert compiled.last is not None
    return compiled.last


def _plan(kind: str) -> Any:
    if kind == "hybrid":
        # Names of its own: DTensor's caches know meshes by shape and names, and forked ranks inherit them.
        return ws.FullyShard(init_device_mesh("cpu", (2, 2), mesh_dim_names=("fake_replicate", "fake_shard")))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fake_dp",))
    if kind == "replicate":
        return ws.Replicate(mesh)
    return ws.FullyShard(mesh, modules=["0", "1", "2"]) if kind == "blocks" else ws.FullyShard(mesh)
