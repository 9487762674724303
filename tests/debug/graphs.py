"""Graphs that fail, and predicates that another process can import."""

from __future__ import annotations

import operator
import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, fx, nn

aten = torch.ops.aten


def chain(length: int, at: int | None = None, odd: Any = aten.mul.Tensor) -> fx.GraphModule:
    """`add` after `add`, with one other operator among them."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    value = x
    for i in range(length):
        value = graph.call_function(odd if i == at else aten.add.Tensor, (value, y))
    graph.output((value,))
    return fx.GraphModule({}, graph)


def has_mul(gm: fx.GraphModule, inputs: list[Any]) -> bool:
    return any(node.target in (operator.mul, torch.mul, aten.mul.Tensor) for node in gm.graph.nodes)


def gives_nan(gm: fx.GraphModule, inputs: list[Any]) -> bool:
    found = gm(*inputs)
    return any(bool(each.isnan().any()) for each in (found if isinstance(found, tuple | list) else [found]))


def rest_follows(gm: fx.GraphModule, inputs: list[Any]) -> bool:
    """Whether a graph that writes its first input has changed its second one."""
    before = inputs[1].clone() if len(inputs) > 1 else None
    gm(*inputs)
    return before is not None and not torch.equal(before, inputs[1])


def die(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return x


def sleep_forever(x: Tensor) -> Tensor:
    time.sleep(100)
    return x


def refuse_negative(x: Tensor, limit: int) -> Tensor:
    if bool((x < 0).any()):
        raise ArithmeticError(f"{int((x < 0).sum())} numbers below zero, limit {limit}")
    return x


class Layers(nn.Module):
    """A module graph: layers, and one that does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.wrong = nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for _ in range(4):
            x = self.first(x) * self.scale
        return {"y": self.wrong(x.tanh()).sum(), "x": x}


@torch.library.custom_op("wholestep_tests::refuses", mutates_args=())
def refuses(x: Tensor) -> Tensor:
    raise RuntimeError("it refuses")


@refuses.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
