"""Operators that write in unusual ways: `out=` of factories and random operators, lists of views of one tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wholestep as ws
from capture.followed import assert_refused
from harness import Case, Run, assert_parity, batch_of, device


def into_a_row(x: Tensor) -> Tensor:
    rows = x.clone()
    torch.arange(3, out=rows[1])
    return rows


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "eye": lambda x: torch.eye(3, out=x.new(3, 3)) + x,
    "eye in float64": lambda x: torch.eye(3, 3, out=torch.empty(3, 3, dtype=torch.float64)) + x,
    "eye that resizes": lambda x: torch.eye(3, out=torch.empty(0)) + x,
    "arange": lambda x: torch.arange(3, out=torch.empty(3)) + x,
    "arange into a row": into_a_row,
    "linspace": lambda x: torch.linspace(0, 1, 3, out=torch.empty(3)) + x,
    "zeros": lambda x: torch.zeros(3, out=torch.empty(3)) + x,
    "full": lambda x: torch.full((3,), 2.5, out=torch.empty(3)) + x,
    "randn": lambda x: torch.randn(3, out=torch.empty(3)) + x,
    "rand into another layout": lambda x: torch.rand(3, 3, out=torch.empty(3, 3).t()) + x,
    "randperm": lambda x: torch.randperm(3, out=torch.empty(3, dtype=torch.long)) + x,
    "normal": lambda x: torch.normal(x, 1.0, out=torch.empty(3, 3)),
    "cat": lambda x: torch.cat([x, x], out=torch.empty(6, 3)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_out_arguments_are_written_as_in_eager(name: str) -> None:
    step = FUNCTIONS[name]
    case = Case(name, lambda where: Run(step, lambda i: (batch_of(where, i, 3, 3),), {}), steps=3, graphs=1)
    assert_parity(case, device())


def scaled_parts(x: Tensor, k: int) -> Tensor:
    parts = (x + 0).unbind()
    torch._foreach_mul_(parts, [1.0 / k, 2.0 / k, 3.0 / k])
    return torch.stack(parts)


def added_parts(x: Tensor, k: int) -> Tensor:
    parts = list(x.clone().split(1))
    torch._foreach_add_(parts, [x[:1]] * 3, alpha=0.5 * k)
    return torch.cat(parts)


def lerped_parts(x: Tensor, k: int) -> Tensor:
    whole = x.clone()
    torch._foreach_lerp_([whole[0], whole[1]], [x[1], x[2]], 1.0 / k)
    return whole


def raised_parts(x: Tensor, k: int) -> Tensor:
    whole = x.abs()
    torch._foreach_pow_([whole[:1], whole[1:]], [0.5 * k, 0.25 * k])
    return whole


def the_same_twice(x: Tensor, k: int) -> Tensor:
    whole = x.clone()
    torch._foreach_mul_([whole, whole], [1.0 / k, 3.0])
    return whole


@pytest.mark.parametrize("part", [scaled_parts, added_parts, lerped_parts, raised_parts, the_same_twice])
def test_list_operators_on_views_of_one_tensor_use_numbers_that_change(part: Callable[[Tensor, int], Tensor]) -> None:
    def make(where: torch.device) -> Run:
        k = 1

        def step(x: Tensor) -> Tensor:
            nonlocal k
            k += 1
            return part(x, k)

        return Run(step, lambda i: (batch_of(where, i, 3, 3),), {})

    assert_parity(Case(part.__name__, make, steps=6), device())


def shrunk(x: Tensor) -> Tensor:
    return x.clone().resize_(2, 3)


def shrunk_like(x: Tensor) -> Tensor:
    return x.clone().resize_as_(x[0]) * 2


def shrunk_view(x: Tensor) -> Tensor:
    whole = x.clone()
    part = whole[1:].resize_(2, 2).mul_(3)
    return whole.sum() + part


def turned(x: Tensor) -> Tensor:
    x.t_()
    return x.add_(1) * 2


def turned_and_back(x: Tensor) -> Tensor:
    x.t_().add_(1).t_()
    return x * 2


def deeper(x: Tensor) -> Tensor:
    return x.unsqueeze_(0).sum()


@pytest.mark.parametrize("change", [shrunk, shrunk_like, shrunk_view, turned, turned_and_back, deeper])
def test_a_tensor_gets_another_form_in_place(change: Callable[[Tensor], Tensor]) -> None:
    step = ws.compile(change, lower="eager")
    for i in range(3):
        mine, theirs = (batch_of(device(), i, 3, 3) for _ in range(2))
        got, want = step(mine), change(theirs)
        assert got.shape == want.shape
        assert torch.equal(got, want)
        assert mine.stride() == theirs.stride()
        assert torch.equal(mine, theirs)


STATE = torch.zeros(2, 3)


def grow(x: Tensor) -> Tensor:
    return x.clone().resize_(5, 5)  # <- here


def resize_state(x: Tensor) -> Tensor:
    STATE.add_(1)
    return STATE.resize_(3) + x.sum()  # <- here


def turn_state(x: Tensor) -> Tensor:
    return STATE.t_().sum() + x  # <- here


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (grow, ws.errors.ParameterDataError),
        (resize_state, ws.errors.ParameterDataError),
        (turn_state, ws.errors.SideEffectError),
    ],
)
def test_another_form_that_a_replay_cannot_give_is_refused(
    step: Callable[[Tensor], Tensor], error: type[ws.errors.WholestepError]
) -> None:
    assert_refused(step, error, "storage|sizes or strides", step)
    assert STATE.shape == (2, 3)
    assert not STATE.any()
