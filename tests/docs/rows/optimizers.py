"""Rows of "Optimizers and hyper-parameters" and "State and gradients"."""

from __future__ import annotations

import copy
import ctypes
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from docs.rows.page import network, refused, row, same, train
from harness import batch_of, device


class Own(Optimizer):
    """An optimizer of the user's; subclasses say how one parameter is updated."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(group, p, self.state[p])

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"])


def own(update: Any, **options: Any) -> Any:
    kind = type("Mine", (Own,), {"update": update})
    return lambda model: kind(model.parameters(), **copy.deepcopy(options))


def slower(i: int, model: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.9


@row("SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, Adafactor, Muon;")
def common_optimizers() -> None:
    for name in "SGD Adam AdamW RMSprop Adagrad NAdam Adafactor".split():
        same(train, optimizer=lambda model, name=name: getattr(torch.optim, name)(model.parameters()), between=slower)
    same(train, optimizer=lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]))
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        same(train, optimizer=lambda model, options=options: torch.optim.AdamW(model.parameters(), **options))


@row("Adadelta, Adamax, ASGD, RAdam, Rprop")
def other_optimizers() -> None:
    for name in "Adadelta Adamax ASGD Rprop".split():
        same(train, optimizer=lambda model, name=name: getattr(torch.optim, name)(model.parameters()))
    step = same(train, optimizer=lambda model: torch.optim.RAdam(model.parameters()), steps=9, graphs=3)
    assert len(step.graphs) == 3


@row("an optimizer of your own")
def own_optimizer() -> None:
    same(train, optimizer=own(Own.update), between=slower)


class Holder:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


@row("an optimizer inside of a wrapper")
def wrapped_optimizer() -> None:
    def body(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        return train(model, holders[id(optimizer)], x)

    holders: dict[int, Any] = {}

    def build(model: nn.Module) -> Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        holders[id(optimizer)] = Holder(optimizer)
        return optimizer

    same(body, optimizer=build, between=slower)


@row("an optimizer that nothing leads to")
def unreachable_optimizer() -> None:
    hidden = []

    def build(model: nn.Module) -> Optimizer:
        hidden.append(torch.optim.Adagrad(model.parameters(), lr=0.1))
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def by_address(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model, _object_at(address[0]), x)

    address: list[int] = []

    def built(model: nn.Module) -> Optimizer:
        optimizer = build(model)
        address[:] = [id(hidden[-1])]
        return optimizer

    refused("WS-CAPTURED-TENSOR", by_address, optimizer=built)


def _object_at(address: int) -> Any:
    """The object with an `id`: nothing that a step can reach leads to it."""
    return ctypes.cast(address, ctypes.py_object).value


@row("`.item()` inside of `optimizer.step()`")
def item_in_an_optimizer() -> None:
    def scaled(self: Any, group: Any, p: Tensor, state: Any) -> None:
        p.sub_(p.grad, alpha=group["lr"] / (1 + p.grad.norm().item()))

    def branches(self: Any, group: Any, p: Tensor, state: Any) -> None:
        if p.grad.norm().item() > 1:
            p.sub_(p.grad, alpha=group["lr"])

    def counts(self: Any, group: Any, p: Tensor, state: Any) -> None:
        state["step"] = state.get("step", torch.zeros(())) + 1
        p.sub_(p.grad, alpha=group["lr"] if state["step"].item() > 2 else 0.5)

    same(train, optimizer=own(scaled))
    same(train, optimizer=own(counts), steps=5, graphs=3)
    refused("WS-CONTROL-FLOW", train, optimizer=own(branches))


@row("lists, tuples, dicts and deques of tensors")
def nested_state() -> None:
    def keeps_lists(self: Any, group: Any, p: Tensor, state: Any) -> None:
        moments = state.setdefault("moments", {"mean": [torch.zeros_like(p)], "steps": (0,)})
        moments["mean"][0].lerp_(p.grad, 0.1)
        moments["steps"] = (moments["steps"][0] + 1,)
        group["rates"][0] = group["rates"][0] * 0.9
        p.sub_(moments["mean"][0], alpha=group["lr"] * group["rates"][0])

    def keeps_a_queue(self: Any, group: Any, p: Tensor, state: Any) -> None:
        queue = state.setdefault("queue", deque(maxlen=2))
        queue.append(p.grad.clone())
        self.state["k"] = self.state["k"] + 1 if "k" in self.state else 1
        p.sub_(queue[0], alpha=group["lr"] / self.state["k"])

    def build(model: nn.Module) -> Optimizer:
        optimizer = own(keeps_lists)(model)
        optimizer.param_groups[0]["rates"] = [1.0, 2.0]
        return optimizer

    same(train, optimizer=build)
    same(train, optimizer=own(keeps_a_queue), graphs=3)


@row("a list or dict that two places of an optimizer share")
def shared_lists() -> None:
    def update(self: Any, group: Any, p: Tensor, state: Any) -> None:
        group["table"][0] = group["table"][0] * 0.9
        p.sub_(p.grad, alpha=group["lr"] * group["table"][0])

    def build(model: nn.Module) -> Optimizer:
        optimizer = type("Two", (Own,), {"update": update})([{"params": [p]} for p in model.parameters()])
        table = [1.0]
        for group in optimizer.param_groups:
            group["table"] = table
        return optimizer

    refused("WS-UNSUPPORTED", train, optimizer=build)


@row("an object with tensors in optimizer state")
def objects_in_state() -> None:
    class Projector:
        def __init__(self, like: Tensor) -> None:
            self.mean = torch.zeros_like(like)

    def update(self: Any, group: Any, p: Tensor, state: Any) -> None:
        state.setdefault("projector", Projector(p)).mean.add_(p.grad)

    refused("WS-SIDE-EFFECT", train, optimizer=own(update))


def steps_with_a_closure(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure)


@row("`optimizer.step(closure)` of an optimizer that calls its closure by a fixed program")
def closures() -> None:
    same(steps_with_a_closure, steps=6)
    same(
        steps_with_a_closure, steps=6, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )


@row("`optimizer.step(closure)` of one that decides by values")
def closures_by_values() -> None:
    for options in ({}, {"max_iter": 1}):
        refused(
            "WS-OPT-CLOSURE",
            steps_with_a_closure,
            optimizer=lambda model, options=options: torch.optim.LBFGS(model.parameters(), **options),
        )


@row("floats and tensors in param groups")
def floats_in_groups() -> None:
    def change(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update(lr=group["lr"] * 0.5, betas=(0.8 + i / 100, 0.99), weight_decay=0.1 + i / 10)

    step = same(train, steps=6, between=change)
    assert len(step.graphs) == 2
    tensors = lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)  # noqa: E731
    same(train, optimizer=tensors, between=slower)


@row("ints in param groups")
def ints_in_groups() -> None:
    def update(self: Any, group: Any, p: Tensor, state: Any) -> None:
        group["k"] += 1
        p.sub_(p.grad, alpha=group["lr"] / group["k"])

    same(train, optimizer=own(update, k=0), steps=6, graphs=3)


@row("bools, strings, None in param groups")
def constants_in_groups() -> None:
    def change(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if i == 2:
            optimizer.param_groups[0]["maximize"] = True
        if i == 3:
            optimizer.param_groups[0]["lr"] = np.float64(0.5)  # type: ignore[assignment]

    step = same(train, steps=5, between=change, graphs=None)
    assert len(step.graphs) >= 3


@row("a branch on a hyper-parameter")
def branch_on_a_hyper_parameter() -> None:
    def update(self: Any, group: Any, p: Tensor, state: Any) -> None:
        if group["decay"] != 0:
            p.mul_(1 - group["decay"])
        p.sub_(p.grad, alpha=group["lr"])

    def change(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["decay"] = [0.0, 0.1, 0.2, 0.0][i % 4]

    step = same(train, optimizer=own(update, decay=0.0), between=change, steps=8, graphs=4)
    assert len(step.graphs) >= 2


@row("`float(lr)` in an optimizer of your own")
def float_of_a_hyper_parameter() -> None:
    def update(self: Any, group: Any, p: Tensor, state: Any) -> None:
        p.sub_(p.grad, alpha=float(group["lr"]))

    same(train, optimizer=own(update), between=slower, graphs=None)


@row("optimizer state that does not exist yet")
def state_is_created() -> None:
    step = same(train, steps=3)
    assert len(step.graphs) == 2


@row("state cleared, loaded or added")
def state_is_exchanged() -> None:
    saved: dict[int, Any] = {}

    def change(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if i == 1:
            saved[id(optimizer)] = copy.deepcopy(optimizer.state_dict())
        if i == 2:
            optimizer.load_state_dict(saved[id(optimizer)])
        if i == 3:
            optimizer.state.clear()
        if i == 4:
            optimizer.add_param_group({"params": [model[0].extra], "lr": 0.5})

    def build() -> nn.Module:
        model = network()
        model[0].extra = nn.Parameter(torch.ones(4))
        return model

    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) * model[0].extra).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    first = lambda model: torch.optim.AdamW([p for n, p in model.named_parameters() if "extra" not in n])  # noqa: E731
    same(body, model=build, optimizer=first, between=change, steps=7, graphs=None)


@row("`param.grad`")
def gradients() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def change(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if i == 2:
            optimizer.zero_grad()

    same(body, between=change, steps=5, graphs=3)


@row("accumulation, several `backward()`")
def ways_to_differentiate() -> None:
    def accumulated(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        for part in x.chunk(2):
            model(part).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return x.sum()

    def penalised(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
        return loss

    same(accumulated)
    same(penalised)


@row("tied, frozen and unused parameters")
def odd_parameters() -> None:
    def build() -> nn.Module:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
        model[1].weight = model[0].weight
        model[1].bias.requires_grad_(False)
        model.unused = nn.Linear(2, 2)
        return model

    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model[1](torch.tanh(model[0](x))).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    same(body, model=build)


@row("sparse gradients")
def sparse_gradients() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.tensor([1, 2])).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    refused(
        "WS-SPARSE",
        body,
        model=lambda: nn.Embedding(5, 3, sparse=True),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


@row("`param.data = ...` that keeps shape")
def replaced_data() -> None:
    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train(model, optimizer, x)
        for p in model.parameters():
            p.data = p.data - 0.1 * p.grad
            p.data.mul_(0.99)
        model[0].bias.data, model[1].bias.data = model[1].bias.data, model[0].bias.data
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters())
        return loss

    def build() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))

    same(body, steps=6, model=build)


@row("`param.data = ...` of another form")
def replaced_parameters() -> None:
    def data(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        model[0].weight.data = model[0].weight.data.half()
        return train(model, optimizer, x)

    def shared(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        model[0].bias.data = model[2].weight.data[0]
        return train(model, optimizer, x)

    def parameter(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        model[0].weight = nn.Parameter(model[0].weight * 0.5)
        return train(model, optimizer, x)

    def converted(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model.to(torch.float64), optimizer, x.double())

    def built(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model, optimizer, nn.Linear(6, 6)(x))

    for body in (data, shared, parameter, converted, built):
        refused("WS-PARAM-DATA", body)


@row("writing into a parameter, also through `.data`")
def written_parameters() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        for p in model.parameters():
            p.data.mul_(0.5)
            with torch.no_grad():
                p.clamp_(-1, 1)
        return train(model, optimizer, x)

    same(body)


@row("`x.requires_grad_()` on an argument")
def requires_grad_of_an_argument() -> None:
    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        x.requires_grad_()
        return train(model, optimizer, x)

    given: list[Tensor] = []

    def batch(i: int) -> Tensor:
        given.append(batch_of(device(), i, 5, 6))
        return given[-1]

    same(body, batch=batch)
    assert all(x.requires_grad and x.grad is not None for x in given)


class OfTheClass:
    mask = torch.zeros(6)


@row("`.requires_grad`, `.grad`, `.data` or a hook set on a tensor in an attribute")
def flags_of_tensors_elsewhere() -> None:
    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        OfTheClass.mask.requires_grad_()
        return train(model, optimizer, x)

    refused("WS-CAPTURED-TENSOR", body)
    assert not OfTheClass.mask.requires_grad


@row("`param.requires_grad_()` in the step")
def requires_grad_in_the_step() -> None:
    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        model[0].weight.requires_grad_(False)
        return train(model, optimizer, x)

    refused("WS-SIDE-EFFECT", body)
