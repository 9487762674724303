"""Steps of sharded models made by hand, of any depth and size: forward, backward and update, no data.

fully_sharded   gathers parameters, scatters gradients                         one group
tensor_parallel the same, and gathers and scatters activations in every layer  two groups
experts         tokens go to experts and come back, and parameters are gathered two groups
"""

from __future__ import annotations

import torch
from torch import fx

from ir.collectives import Build, comm
from ir.step_graphs import aten
from wholestep.ir import StepGraph

BF16 = torch.bfloat16


class _Model:
    """A chain of square layers on `rows` rows; `ranks` per group."""

    def __init__(self, layers: int, rows: int, width: int, ranks: int) -> None:
        self.build = Build()
        self.layers, self.width, self.ranks = layers, width, ranks
        self.shards = [self.build.input(f"w{i}", width // ranks, width, dtype=BF16) for i in range(layers)]
        self.x = self.build.input("x", rows, width, dtype=BF16)
        self.updated: list[fx.Node] = []

    def weight(self, layer: int) -> fx.Node:
        return self.build.wait(self.build.gather(self.shards[layer], "0", self.ranks))

    def mm(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.build.call(aten.mm.default, a, b)

    def t(self, a: fx.Node) -> fx.Node:
        return self.build.call(aten.t.default, a)

    def update(self, layer: int, gradient: fx.Node) -> None:
        scattered = self.build.wait(self.build.scatter(gradient, "avg", "0", self.ranks))
        step = self.build.call(aten.mul.Tensor, scattered, 0.1)
        self.updated.append(self.build.call(aten.sub.Tensor, self.shards[layer], step))

    def finish(self, loss: fx.Node) -> StepGraph:
        for shard, value in zip(reversed(self.shards), self.updated, strict=True):
            self.build.write_back(shard, value)
        return self.build.finish(loss)


def fully_sharded(layers: int = 4, rows: int = 8192, width: int = 4096, ranks: int = 8) -> StepGraph:
    model = _Model(layers, rows, width, ranks)
    build, hidden, saved = model.build, model.x, list[fx.Node]()
    for layer in range(layers):
        saved.append(hidden)
        hidden = build.call(aten.relu.default, model.mm(hidden, model.weight(layer)))
    loss = build.call(aten.sum.default, hidden)
    gradient = build.call(aten.ones_like.default, hidden)
    for layer in reversed(range(layers)):
        before = model.mm(gradient, model.t(model.weight(layer)))
        model.update(layer, model.mm(model.t(saved[layer]), gradient))
        gradient = build.call(aten.threshold_backward.default, before, saved[layer], 0)
    return model.finish(loss)


def tensor_parallel(layers: int = 4, rows: int = 8192, width: int = 4096, ranks: int = 8) -> StepGraph:
    model = _Model(layers, rows // ranks, width, ranks)
    build, hidden, saved = model.build, model.x, list[fx.Node]()

    def whole(rows_of_rank: fx.Node) -> fx.Node:
        return build.wait(build.gather(rows_of_rank, "1", ranks))

    for layer in range(layers):
        inside = whole(hidden)
        saved.append(inside)
        partial = build.call(aten.relu.default, model.mm(inside, model.weight(layer)))
        hidden = build.call(aten.add.Tensor, hidden, build.wait(build.scatter(partial, "sum", "1", ranks)))
    loss = build.call(aten.sum.default, hidden)
    gradient = build.call(aten.ones_like.default, hidden)
    for layer in reversed(range(layers)):
        behind = whole(gradient)
        model.update(layer, model.mm(model.t(saved[layer]), behind))
        before = model.mm(behind, model.t(model.weight(layer)))
        scattered = build.wait(build.scatter(before, "sum", "1", ranks))
        gradient = build.call(aten.add.Tensor, gradient, scattered)
    return model.finish(loss)


def experts(layers: int = 4, rows: int = 8192, width: int = 4096, ranks: int = 8) -> StepGraph:
    """Every layer sends tokens to experts and, beside them, runs an expert that all tokens share."""
    model = _Model(layers, rows, width, ranks)
    build, hidden = model.build, model.x
    splits = [rows // ranks] * ranks

    def exchanged(tokens: fx.Node) -> fx.Node:
        return build.wait(build.call(comm.all_to_all_single.default, tokens, splits, splits, "1"))

    saved: list[tuple[fx.Node, fx.Node]] = []
    for layer in range(layers):
        weight = model.weight(layer)
        there = exchanged(hidden)
        back = exchanged(build.call(aten.relu.default, model.mm(there, weight)))
        shared = model.mm(hidden, model.t(weight))
        saved.append((there, hidden))
        hidden = build.call(aten.add.Tensor, back, shared)
    loss = build.call(aten.sum.default, hidden)
    gradient = build.call(aten.ones_like.default, hidden)
    for layer in reversed(range(layers)):
        there, before = saved[layer]
        weight = model.weight(layer)
        behind = exchanged(gradient)
        own = build.call(aten.add.Tensor, model.mm(model.t(there), behind), model.mm(model.t(before), gradient))
        model.update(layer, own)
        back = exchanged(model.mm(behind, model.t(weight)))
        gradient = build.call(aten.add.Tensor, back, model.mm(gradient, weight))
    return model.finish(loss)
