"""Copies that a step makes of tensors: recorded where they are values, refused where a replay would not make them."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from capture.refused import Use, World, assert_points_at, assert_unchanged_and_trainable, step_with
from cases.parts import mlp, plain_run
from harness import Run, assert_same_story


class Copying(torch.optim.Optimizer):
    """Begins its state with a copy of the parameter, as AccSGD and A2Grad do."""

    def __init__(self, params: Any, begin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.begin = begin

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = self.begin(p)
                state["average"].lerp_(p - group["lr"] * p.grad, 0.5)
                p.sub_(p.grad, alpha=group["lr"]).lerp_(state["average"], 0.1)


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "deepcopy_data": lambda p: copy.deepcopy(p.data),
    "deepcopy_detached": lambda p: copy.deepcopy(p.detach()),
    "deepcopy_of_a_list": lambda p: copy.deepcopy([p.data, 1])[0],
    "deepcopy_twice": lambda p: copy.deepcopy(copy.deepcopy({"a": p.data}))["a"],
    "deepcopy_of_the_same_twice": lambda p: sum(copy.deepcopy([p.data] * 2)) / 2,
    "deepcopy_of_a_transposed": lambda p: copy.deepcopy(p.data.t()).t().contiguous(),
    "deepcopy_of_a_part": lambda p: copy.deepcopy(p.data[:1]).expand_as(p).clone(),
    "deepcopy_of_the_parameter": lambda p: copy.deepcopy(p).detach(),
    "copy_of_data": lambda p: copy.copy(p.data).clone(),
    "copy_of_a_clone": lambda p: copy.copy(p.data.clone()),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_tensor_is_a_recorded_clone(name: str) -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        return plain_run(where, model, Copying(model.parameters(), COPIES[name]), step_with(lambda h: h))

    step = assert_same_story(make, lambda it: it.call(5))
    assert len(step.graphs) == 2


def test_a_deep_copy_has_the_strides_and_the_flags_that_eager_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(sys.modules, "out_of_sight", ModuleType("out_of_sight"))

    def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
        flags = (tensor.requires_grad, tensor.is_leaf, isinstance(tensor, nn.Parameter), tensor.grad is not None)
        return (tuple(tensor.shape), tensor.stride(), tensor.dtype, flags)

    def step(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        leaf = torch.ones(3, 2, dtype=torch.float64).t().requires_grad_()
        tensors = (weight, x, x.t(), x[:, ::2], x[1:], x[:, 1], leaf)
        copies = [copy.deepcopy(each) for each in tensors] + [copy.copy(each) for each in tensors[:3]]
        sys.modules["out_of_sight"].told = str([describe(each) for each in copies])  # type: ignore[attr-defined]
        return sum(each.sum().double() for each in copies)

    weight, x = nn.Parameter(torch.randn(4, 3)), torch.randn(4, 6)
    for each in (step, ws.compile(step)):
        result = each(weight, x).detach()
        seen.append((result, sys.modules["out_of_sight"].told))  # type: ignore[attr-defined]
    assert seen[0][1] == seen[1][1]
    assert torch.equal(seen[0][0], seen[1][0])


def test_deepcopy_of_a_tensor_with_history_raises_as_in_eager() -> None:
    world = World(fresh=False)
    before = world.look()
    with pytest.raises(RuntimeError, match="graph leaves"):
        ws.compile(step_with(copy.deepcopy))(world.model, world.optimizer, world.batch())
    assert_unchanged_and_trainable(world, before, fresh=False)


def pickled(h: torch.Tensor) -> torch.Tensor:
    pickle.dumps(h)  # <- here
    return h


def saved(h: torch.Tensor) -> torch.Tensor:
    torch.save({"h": h.detach()}, io.BytesIO())  # <- here
    return h


def saved_copies(h: torch.Tensor) -> torch.Tensor:
    both = [h.detach(), h.detach()[0]]
    copy.deepcopy(both)  # <- here
    return h


@pytest.mark.parametrize("use", [pickled, saved, saved_copies])
def test_pickling_and_copies_that_share_memory_are_refused_with_the_line(use: Use) -> None:
    world = World(fresh=False)
    before = world.look()
    with pytest.raises(ws.errors.CaptureError) as caught:
        ws.compile(step_with(use))(world.model, world.optimizer, world.batch())
    assert_points_at(str(caught.value), use)
    assert_unchanged_and_trainable(world, before, fresh=False)


def test_optimizer_state_that_requires_grad_is_refused() -> None:
    model = mlp(torch.device("cpu"))
    optimizer = Copying(model.parameters(), copy.deepcopy)
    with pytest.raises(ws.errors.SideEffectError, match="requires grad"):
        ws.compile(step_with(lambda h: h))(model, optimizer, torch.ones(5, 6))
    assert not optimizer.state
    step_with(lambda h: h)(model, optimizer, torch.ones(5, 6))


class Packed(torch.Tensor):
    """A wrapper subclass, like the state of low-bit optimizers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [each.inner if isinstance(each, Packed) else each for each in args]
        out = func(*plain, **(kwargs or {}))
        return args[0] if func is torch.ops.aten.lerp_.Scalar else out


def test_optimizer_state_of_a_tensor_subclass_is_refused_and_eager_continues() -> None:
    model = mlp(torch.device("cpu"))
    optimizer = Copying(model.parameters(), lambda p: Packed(p.data.clone()))
    with pytest.raises(ws.errors.UnsupportedError, match="Packed; tensor subclasses are not captured") as caught:
        ws.compile(step_with(lambda h: h))(model, optimizer, torch.ones(5, 6))
    assert caught.value.location is not None
    assert caught.value.location.file == __file__
    assert not optimizer.state
    step_with(lambda h: h)(model, optimizer, torch.ones(5, 6))
    assert all(type(state["average"]) is Packed for state in optimizer.state.values())
