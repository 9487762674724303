"""Rows of "Python around the tensors"."""

from __future__ import annotations

import itertools
import logging
import os
import pathlib
import tempfile
import threading
import time
import types
import uuid
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from docs.rows.page import network, refused, row, run_of, same, same_function, train

CONFIG = types.ModuleType("config")
CONFIG.scale = 1.0  # type: ignore[attr-defined]
CONTEXT: ContextVar[float] = ContextVar("scale", default=1.0)
LOCAL = threading.local()
COUNTER = 0
log = logging.getLogger(__name__)


@row("`if`, `while`, `assert` on a tensor")
def branches_on_the_batch() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        while x.abs().sum() > 10:
            x = x / 2
        return train(model, optimizer, x)

    def check(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        assert x.isfinite().all()
        return train(model, optimizer, x)

    same(loop, graphs=None)
    same(check)


@row("the same on what the step computes")
def branches() -> None:
    def branch(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train(model, optimizer, x)
        return loss if loss > 1 else -loss

    def check(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        assert model(x).isfinite().all()
        return train(model, optimizer, x)

    for body in (branch, check):
        refused("WS-CONTROL-FLOW", body)
    same(check, options={"assume": True})


@row("`.item()`, `.tolist()`, `float(tensor)`, `int(tensor)`")
def values_of_tensors() -> None:
    def values(model: Any, optimizer: Optimizer, x: Tensor) -> Any:
        loss = train(model, optimizer, x).detach()
        model.total = model.total + loss.item()
        mean = x * loss.item() / (x > 0).sum().item()
        return loss.item() / 2, float(loss), int(loss), x[0].tolist(), model.total, mean

    def with_total() -> nn.Module:
        model: Any = network()
        model.total = 0.0
        return model

    same(values, model=with_total, graphs=3)

    def build() -> nn.Module:
        model = network()
        model.register_buffer("calls", torch.zeros(()))
        return model

    def counts(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        model.calls += 1
        return train(model, optimizer, x * 2 if model.calls.item() > 2 else x)

    same(counts, model=build, steps=5, graphs=3)


@row("a branch, comparison that decides, `max`, index, key")
def values_that_are_needed_at_once() -> None:
    for code, take in (
        ("WS-CONTROL-FLOW", lambda loss: 1 if loss.item() > 1 else 2),
        ("WS-CONTROL-FLOW", lambda loss: max(loss.item(), 1.0)),
        ("WS-ITEM", lambda loss: {0: 1}.get(int(loss))),
        ("WS-ITEM", lambda loss: list(range(int(loss)))),
        ("WS-ITEM", lambda loss: np.sqrt(loss.item())),
    ):

        def body(model: nn.Module, optimizer: Optimizer, x: Tensor, take: Any = take) -> Any:
            return take(train(model, optimizer, x).detach())

        refused(code, body)


@row("boolean indexing, `nonzero`, `masked_select`")
def shapes_of_values() -> None:
    for take in (
        lambda y: y[y > 0],
        lambda y: y.nonzero(),
        lambda y: y.masked_select(y > 0).shape[0],
        lambda y: y.round().unique().shape[0] / 2,
        lambda y: torch.repeat_interleave(y, (y[:, 0] > 0).long() + 1, dim=0),
        lambda y: torch.bincount((y > 0).flatten().long()),
        lambda y: y.sum() / max(len(y[y > 0]), 1),
    ):
        same_function(lambda x, take=take: take(x * 2))

    def zeroes(x: Tensor) -> Tensor:
        y = x * 2
        y[y > 0] = 0
        return y

    same_function(zeroes)


@row("a branch on such a size")
def uses_of_sizes_of_values() -> None:
    for code, take in (
        ("WS-CONTROL-FLOW", lambda y: y * 2 if y[y > 0].shape[0] == 0 else y),
        ("WS-DATA-SHAPE", lambda y: [each.sum() for each in y[y > 0]]),
        ("WS-ITEM", lambda y: f"{y[y > 0].shape[0]} rows"),
    ):
        refused(code, lambda model, optimizer, x, take=take: take(model(x)))


@row("a number made into text, a key or an index")
def numbers_that_are_fixed() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        return train(model, optimizer, x), f"{optimizer.param_groups[0]['lr']}"

    def change(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    same(body, between=change, graphs=None)
    scales = {2: 0.5, 3: 0.25}

    def step(x: Tensor, k: int) -> Tensor:
        return x.topk(k).values.view(k, -1) * scales[k] + sum(range(k))

    same_function(step, lambda i: torch.arange(6.0), lambda i: 2 + i % 2, steps=6, graphs=None)


@row("`x[k]`, `x[k:k + 3]`, read and written")
def views_at_a_number() -> None:
    bank = torch.zeros(9, 2)

    def step(x: Tensor, k: int) -> Tensor:
        bank[k : k + 3] = x
        bank[k] += 1
        return bank[k + 1].clone()

    step_of = same_function(step, lambda i: torch.full((3, 2), float(i)), lambda i: i, steps=7, graphs=2)
    assert len(step_of.graphs) == 2


@row("Python attributes on parameters and other tensors")
def attributes_of_tensors() -> None:
    def build() -> nn.Module:
        model = network()
        model[0].weight.no_decay = True  # type: ignore[index]
        return model

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        for p in model.parameters():
            p.scale = getattr(p, "scale", 0.0) + (0.0 if hasattr(p, "no_decay") else 0.5)  # type: ignore[attr-defined]
        return train(model, optimizer, x * sum(p.scale for p in model.parameters()))  # type: ignore[attr-defined]

    same(body, model=build, steps=5, graphs=3)


@row("`type(x)`, `type(p) is nn.Parameter`, `id(p)`")
def types_and_addresses() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        first = next(iter(model.parameters()))
        known = type(x) is Tensor and all(type(p) is nn.Parameter for p in model.parameters())
        same_ones = [p for p in model.parameters() if id(p) == id(first) and p.data_ptr() == first.data_ptr()]
        return train(model, optimizer, x * (len(same_ones) if known else 7))

    same(body)
    refused("WS-ITEM", lambda model, optimizer, x: model(x) * model(x).data_ptr())


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("last", None)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.total += y.detach().sum(0)
        self.last = y.detach()[0] if self.last is None else self.last * 0.5
        self.calls += 1
        return y


@row("buffers: written in place")
def buffers() -> None:
    same(train, model=Buffered, graphs=3)


@row("an attribute of a module or object, a global or a closure variable")
def attributes_that_are_set() -> None:
    class Trainer:
        phase = ""
        last: Any = None

    def build() -> nn.Module:
        model = Buffered()
        model.trainer = Trainer()
        return model

    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        global COUNTER
        COUNTER += 1
        model.trainer.phase = "training"
        model.trainer.last = x.sum()
        return train(model, optimizer, x / model.calls if model.calls else x)

    step = same(body, model=build, steps=6, graphs=4)
    assert len(step.graphs) <= 4


@row("a number in an attribute, closure or global that you change between calls")
def numbers_that_change_between_calls() -> None:
    def build() -> nn.Module:
        model = network()
        model.scale = 1.0
        return model

    def change(i: int, model: Any, optimizer: Optimizer) -> None:
        model.scale += 0.5

    same(lambda model, optimizer, x: train(model, optimizer, x * model.scale), model=build, between=change, graphs=None)
    scale = 1.0

    def step(x: Tensor) -> Tensor:
        return x * scale

    def batch(i: int) -> Tensor:
        nonlocal scale
        scale = 1.0 + i
        return torch.ones(3)

    same_function(step, batch, steps=5, graphs=2)


@row("elements of lists, dicts, sets and NumPy arrays")
def elements_that_change() -> None:
    array, many, deep = np.ones(3), [1.0] * 300, {"a": {"b": [[{"c": 1.0}]]}}

    def step(x: Tensor) -> Tensor:
        return x * float(array[0]) * many[299] * deep["a"]["b"][0][0]["c"]

    def batch(i: int) -> Tensor:
        array[0] = [1.0, 2.0, 1.0, 1.0, 1.0][i]
        many[299] = [1.0, 1.0, 2.0, 1.0, 1.0][i]
        deep["a"]["b"][0][0]["c"] = [1.0, 1.0, 1.0, 3.0, 1.0][i]
        return torch.ones(3)

    same_function(step, batch, steps=5, graphs=None)


@row("modules, optimizers and tensors in closures, globals, `self`")
def objects_that_are_found() -> None:
    holder = {"deep": [types.SimpleNamespace(weight=torch.full((6,), 0.5))]}
    same(lambda model, optimizer, x: train(model, optimizer, x * holder["deep"][0].weight))

    def build() -> nn.Module:
        model = network()
        model.holder = {"weight": torch.full((6,), 0.5)}
        return model

    same(lambda model, optimizer, x: train(model, optimizer, x * model.holder["weight"]), model=build)


@row("dicts and sets that have parameters as keys")
def parameters_as_keys() -> None:
    def build() -> nn.Module:
        model = network()
        model.factors = dict.fromkeys(model.parameters(), 0.9)
        model.biases = {id(parameter) for parameter in model.parameters() if parameter.dim() == 1}
        return model

    def body(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(model.factors[parameter] if id(parameter) in model.biases else 1.0)
        return train(model, optimizer, x)

    same(body, model=build)


@row("a tensor that is in none of these places")
def tensors_that_are_not_found() -> None:
    import ctypes

    hidden = torch.ones(6)
    address = [id(hidden)]

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model, optimizer, x * ctypes.cast(address[0], ctypes.py_object).value)

    refused("WS-CAPTURED-TENSOR", body)
    assert hidden.sum() == 6


class Scaled:
    scale = 1.0
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0

    @property
    def both(self) -> float:
        return self.scale * self.factor


@row("values of classes (through `self`, by name")
def values_outside_of_instances() -> None:
    scaled = Scaled()

    def step(x: Tensor) -> Tensor:
        return x * Scaled.scale * scaled.both * CONFIG.scale * CONTEXT.get() * getattr(LOCAL, "scale", 1.0)

    def batch(i: int) -> Tensor:
        Scaled.scale = [1.0, 2.0, 2.0, 2.0, 2.0, 1.0][i]
        scaled.factor = [1.0, 1.0, 3.0, 3.0, 3.0, 1.0][i]
        CONFIG.scale = [1.0, 1.0, 1.0, 4.0, 4.0, 1.0][i]  # type: ignore[attr-defined]
        CONTEXT.set([1.0, 1.0, 1.0, 1.0, 5.0, 1.0][i])
        LOCAL.scale = [1.0, 1.0, 1.0, 1.0, 5.0, 1.0][i]
        return torch.ones(3)

    same_function(step, batch, steps=6, graphs=None)


class WithDefault:
    def scale(self, *, by: float = 1.0) -> float:
        return by


@row("default arguments of your functions and methods")
def default_arguments() -> None:
    scaled = WithDefault()

    def batch(i: int) -> Tensor:
        WithDefault.scale.__kwdefaults__["by"] = [1.0, 2.0, 3.0, 1.0][i]
        return torch.ones(3)

    same_function(lambda x: x * scaled.scale(), batch, steps=4, graphs=2)


@row("methods of your classes that are replaced between calls")
def methods_that_are_replaced() -> None:
    class Model(nn.Linear):
        def scale(self) -> float:
            return 1.0

    def change(i: int, model: Any, optimizer: Optimizer) -> None:
        Model.scale = (lambda self: 3.0) if i == 2 else (lambda self: 1.0)

    step = same(
        lambda model, optimizer, x: train(model, optimizer, x * model.scale()),
        model=lambda: Model(6, 4),
        between=change,
        steps=5,
        graphs=None,
    )
    assert len(step.graphs) >= 3


@row("environment variables and files that the step reads")
def environment_and_files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "scale"

        def step(x: Tensor) -> Tensor:
            return x * float(os.environ["WS_ROW_SCALE"]) * float(path.read_text())

        def batch(i: int) -> Tensor:
            os.environ["WS_ROW_SCALE"] = "2" if i == 2 else "1"
            if i in (0, 4):
                path.write_text(f"{i + 1.5}")
            return torch.ones(3)

        try:
            same_function(step, batch, steps=6, graphs=3)
        finally:
            del os.environ["WS_ROW_SCALE"]


@row("an iterator, a generator, `itertools.count`")
def iterators() -> None:
    count, floats = itertools.count(1), (x / 2 for x in range(1, 100))

    def counts(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model, optimizer, x / next(count))

    def draws(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model, optimizer, x * next(floats))

    refused("WS-SIDE-EFFECT", counts)
    refused("WS-SIDE-EFFECT", draws)
    assert (next(count), next(floats)) == (1, 0.5)


@row("a file opened for writing, created, renamed or deleted")
def effects_outside() -> None:
    with tempfile.TemporaryDirectory() as folder:

        def writes(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
            (pathlib.Path(folder) / "log").write_text("step")
            return train(model, optimizer, x)

        def sets(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
            os.environ["WS_ROW_SET"] = "1"
            return train(model, optimizer, x)

        def starts(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
            threading.Thread(target=x.sum).start()
            return train(model, optimizer, x)

        def removes(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
            pathlib.Path(folder).rmdir()
            return train(model, optimizer, x)

        for body in (writes, sets, starts, removes):
            refused("WS-SIDE-EFFECT", body)
        assert "WS_ROW_SET" not in os.environ


@row("a clock (`time.time()`, `datetime.now()`, `timeit.default_timer`, `os.times()`) or a measure of memory")
def clocks_in_logs() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        started = time.time()
        loss = train(model, optimizer, x)
        log.info("took %s", time.time() - started)
        return loss

    same(body)


@row("a clock that reaches a tensor")
def clocks_in_tensors() -> None:
    refused("WS-CLOCK", lambda model, optimizer, x: train(model, optimizer, x * time.time()))
    refused("WS-CLOCK", lambda model, optimizer, x: (train(model, optimizer, x), int(time.perf_counter())))


@row("`os.urandom`, `os.getrandom`, `secrets`")
def entropy() -> None:
    refused("WS-RNG", lambda model, optimizer, x: train(model, optimizer, x * os.urandom(1)[0]))
    refused("WS-RNG", lambda model, optimizer, x: (train(model, optimizer, x), uuid.uuid4())[0])


@row("a tensor with an autograd history from outside")
def history_from_outside() -> None:
    history = torch.ones(6, requires_grad=True) * 2
    refused("WS-CAPTURED-TENSOR", lambda model, optimizer, x: train(model, optimizer, x * history))


@row("`torch.from_numpy(...)` in the step")
def arrays() -> None:
    array = np.ones(6, dtype=np.float32)
    refused("WS-CAPTURED-TENSOR", lambda model, optimizer, x: train(model, optimizer, x * torch.from_numpy(array)))


@row("`torch.tensor([1.0, 2.0])` in the step")
def constants() -> None:
    same_function(lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]))


@row("two inputs that share memory")
def shared_memory() -> None:
    whole = torch.zeros(4)

    def build() -> nn.Module:
        model = network()
        model.register_buffer("a", whole[:3])
        model.register_buffer("b", whole[1:])
        return model

    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        model.a += 1
        return train(model, optimizer, x * model.b.sum())

    refused("WS-ALIAS", body, model=build)


@row("`x.t_()`, `x.unsqueeze_(0)` on an argument")
def forms_of_arguments() -> None:
    def step(x: Tensor) -> Tensor:
        x.unsqueeze_(0)
        return x * 2

    same_function(step)


@row("the same on a parameter, buffer or other state, left so")
def forms_of_state() -> None:
    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        with torch.no_grad():
            model[0].weight.t_()
        return x

    refused("WS-SIDE-EFFECT", body)


@row("`y.resize_(..)` of a tensor that the step made")
def resized() -> None:
    same_function(lambda x: x.clone().resize_(2, 3))
    refused("WS-PARAM-DATA", lambda model, optimizer, x: x.clone().resize_(100))


@row("a write through a view that overlaps itself")
def overlapping_write() -> None:
    def through(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        x.clone().view(-1).as_strided((3, 2), (1, 1)).mul_(2)
        return train(model, optimizer, x)

    refused("WS-OVERLAP", through)


def scheduled(order: str, kind: Any = torch.optim.lr_scheduler.StepLR) -> Any:
    schedulers: dict[int, Any] = {}

    def build(model: nn.Module) -> Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()  # so that torch does not warn of a scheduler that is called first
        options: Any = (2, 0.5) if kind is torch.optim.lr_scheduler.StepLR else ()
        schedulers[id(optimizer)] = kind(optimizer, *options)
        return optimizer

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        if order == "before":
            schedulers[id(optimizer)].step()
        loss = train(model, optimizer, x)
        if order == "after":
            schedulers[id(optimizer)].step()
            return loss, schedulers[id(optimizer)].last_epoch
        if order == "with loss":
            schedulers[id(optimizer)].step(loss)
        return loss

    return body, build


@row("`scheduler.step()` after `optimizer.step()`")
def scheduler_after() -> None:
    body, build = scheduled("after")
    same(body, optimizer=build, steps=6)


@row("`scheduler.step()` before a step of its own optimizer")
def scheduler_before() -> None:
    body, build = scheduled("before")
    refused("WS-SIDE-EFFECT", body, optimizer=build)


@row("`ReduceLROnPlateau.step(loss)` in the step")
def plateau() -> None:
    body, build = scheduled("with loss", torch.optim.lr_scheduler.ReduceLROnPlateau)
    refused("WS-ITEM", body, optimizer=build)


@row("an exception of your own code")
def own_exceptions() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        train(model, optimizer, x)
        raise LookupError("mine")

    run = run_of(body)
    before = {key: value.clone() for key, value in run.watch["model"].state_dict().items()}
    with pytest.raises(LookupError, match="mine"):
        ws.compile(run.step)(*run.arguments(0))
    assert all(torch.equal(value, before[key]) for key, value in run.watch["model"].state_dict().items())
    assert not run.watch["optimizer"].state
