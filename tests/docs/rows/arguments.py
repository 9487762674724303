"""Rows of "Arguments, results, shapes" and of "What capture does not see"."""

from __future__ import annotations

import dataclasses
import types
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from docs.rows.page import network, row, run_of, same, same_function, train
from harness import batch_of, device

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Registered:
    x: Tensor


@dataclasses.dataclass
class NotRegistered:
    x: Tensor


torch.utils._pytree.register_dataclass(Registered)


def some(i: int) -> Tensor:
    return batch_of(device(), i, 5, 6)


@row("arguments: dicts, lists, tuples, named tuples")
def structures() -> None:
    def step(batch: dict[str, Any], pair: Pair, items: list[Any]) -> Tensor:
        return batch["x"] + pair.y + items[0][0] + items[1].x

    same_function(
        step,
        lambda i: {"x": some(i), "name": "a"},
        lambda i: Pair(some(i + 1), some(i + 2)),
        lambda i: [(some(i),), Registered(some(i + 3))],
        graphs=1,
    )


@row("Python ints and floats in the arguments")
def numbers_as_arguments() -> None:
    step = lambda it, x, beta: x * beta / (it + 1)  # noqa: E731
    same_function(step, lambda i: i, some, lambda i: 1.0 + i / 7, steps=6, graphs=2)


@row("bools, strings, None in the arguments")
def plain_arguments() -> None:
    mode = lambda i: ["a", True, None][i % 3]  # noqa: E731
    step = same_function(lambda x, mode: x * 2 if mode == "a" else x, some, mode, steps=6, graphs=3)
    assert len(step.graphs) == 3


@row("a batch object that is not a pytree")
def other_batches() -> None:
    for kind in (NotRegistered, types.SimpleNamespace):
        step = same_function(lambda batch: batch.x * 2, lambda i, kind=kind: kind(x=some(i)), steps=3, graphs=3)
        assert len(step.graphs) == 3
    array = lambda i: np.full(6, float(i), dtype=np.float32)  # noqa: E731
    same_function(lambda x, array: x * float(array[0]), some, array, steps=3, graphs=3)


@row("results: any pytree")
def results() -> None:
    step = ws.compile(lambda x: {"double": x * 2, "name": ["text", (1, None)]})
    first, second = step(torch.ones(3)), step(torch.ones(3))
    assert first["name"] == second["name"] == ["text", (1, None)]
    assert first["double"] is not second["double"]
    same_function(lambda x: Pair(x + 1, {"deep": [x]}), some)


@row("`backward()` outside of the step on a result")
def backward_outside() -> None:
    run = run_of(lambda model, optimizer, x: model(x).sum())
    loss = ws.compile(run.step)(*run.arguments(0))
    with pytest.raises(RuntimeError, match=r"\[WS-NO-GRAPH\]"):
        loss.backward()


@row("a parameter or argument that is returned")
def returned_objects() -> None:
    run = run_of(lambda model, optimizer, x: (train(model, optimizer, x), model[0].weight, x))
    step = ws.compile(run.step)
    for i in range(3):
        (x,) = run.arguments(i)
        _, weight, same_x = step(x)
        assert weight is run.watch["model"][0].weight
        assert same_x is x


@row("a second size of a dimension")
def second_sizes() -> None:
    step = same_function(lambda x: x * 2 + 1, lambda i: torch.ones(3 + i, 4), steps=4, graphs=2)
    assert len(step.graphs) == 2
    one_each = ws.compile(lambda x: x * 2, dynamic=False)
    for size in (2, 3, 4):
        one_each(torch.ones(size))
    assert len(one_each.graphs) == 3


@row("a new dtype, stride, device, `requires_grad` or number of dimensions")
def new_forms() -> None:
    forms = [torch.ones(3, 4), torch.ones(5, 4), torch.ones(3, 4, dtype=torch.float64), torch.ones(4, 3).t()]
    step = same_function(lambda x: x * 2 + 1, lambda i: forms[i % 4], steps=8, graphs=4)
    assert len(step.graphs) == 4
    few = ws.compile(lambda x: x * 2, max_recompiles=1, dynamic=False)
    few(torch.ones(2))
    few(torch.ones(3))
    with pytest.warns(ws.RecompileWarning):
        few(torch.ones(4))


@row('`dynamic={"batch": {0: ws.Dim(1, 64)}}`')
def dynamic_sizes() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model, optimizer, x if x.shape[0] < 20 else x * 2)

    def batch(i: int) -> Tensor:
        return batch_of(device(), i, [5, 9, 7, 32, 33, 6][i], 6)

    step = same(body, batch=batch, steps=6, graphs=3, options={"dynamic": {"x": {0: ws.Dim(1, 64)}}})
    assert len(step.graphs) == 3


@row("a size out of range, a step that fits one size only")
def refused_sizes() -> None:
    dynamic = {"dynamic": {"x": {0: ws.Dim(1, 64)}}}

    def code(batch: Tensor, body: Any = train, options: Any = dynamic) -> str:
        run = run_of(body)
        with pytest.raises(ws.errors.WholestepError) as caught:
            ws.compile(run.step, **options)(batch)
        return caught.value.code

    one_size = lambda model, optimizer, x: train(model, optimizer, x + torch.ones(5, 6))  # noqa: E731
    assert code(torch.ones(65, 6)) == "WS-DYNAMIC"
    assert code(torch.ones(5, 6), one_size) == "WS-DYNAMIC"
    assert code(torch.ones(5, 6), train, {"dynamic": {"nothing": {0: ws.Dim(1, 64)}}}) == "WS-DYNAMIC"
    assert code(torch.ones(6, 5).t()) == "WS-DYNAMIC"


class Mine(nn.Parameter):
    def doubled(self) -> Tensor:
        return self * 2


@row("a parameter of a class of your own")
def own_parameters() -> None:
    def model() -> nn.Module:
        made: Any = network()
        made[0].weight = Mine(made[0].weight.data)
        return made

    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        assert isinstance(model[0].weight, Mine)
        model[0].weight.doubled().sum().backward()
        return train(model, optimizer, x)

    same(body, model=model, graphs=None)


@row("sparse tensors, tensor subclasses with a dispatch or functions of their own")
def odd_tensors() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    subclass = type("T", (Tensor,), {})
    for batch in (torch.eye(3).to_sparse(), jagged, torch.ones(3).as_subclass(subclass)):
        with pytest.raises(ws.errors.WholestepError) as caught:
            ws.compile(lambda x: x * 2)(batch)
        assert caught.value.code in ("WS-SPARSE", "WS-UNSUPPORTED")
