"""Param groups that something beside the optimizer holds: `self.param_groups = optimizer.param_groups`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from harness import Case, Run, assert_parity, batch_of, device
from selection import each_now

Get = Callable[[], dict[str, Any]]


class Hidden:
    """A wrapper from whose attributes nothing leads to the optimizer but a closure."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._step = lambda: optimizer.step()
        self._zero = lambda: optimizer.zero_grad()
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self._step()

    def zero_grad(self) -> None:
        self._zero()


def by_variable(o: Optimizer) -> Get:
    group = o.param_groups[0]
    return lambda: group


def by_attribute(o: Optimizer) -> Get:
    holder = SimpleNamespace(group=o.param_groups[0], groups=o.param_groups)
    return lambda: holder.group if holder.groups else {}


def by_dict(o: Optimizer) -> Get:
    places = {"a": o.param_groups}
    return lambda: places["a"][0]


def by_list(o: Optimizer) -> Get:
    places = [o.param_groups[0]]
    return lambda: places[0]


def by_tuple(o: Optimizer) -> Get:
    places = (o.param_groups,)
    return lambda: places[0][0]


def by_default(o: Optimizer) -> Get:
    return lambda groups=o.param_groups: groups[0]  # type: ignore[misc]


def by_partial(o: Optimizer) -> Get:
    return functools.partial(lambda groups: groups[0], o.param_groups)


WAYS = [by_variable, by_attribute, by_dict, by_list, by_tuple, by_default, by_partial]


def before_forward(group: dict[str, Any], loss: Tensor | None) -> None:
    if loss is None:
        group["lr"] = group["lr"] * 0.9


def from_the_loss(group: dict[str, Any], loss: Tensor | None) -> None:
    if loss is not None:
        group["lr"] = 0.05 / (1 + abs(loss.detach().item()))


def make_run(way: Callable[[Optimizer], Get], change: Callable[[dict[str, Any], Tensor | None], None]) -> Run:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    get = way(optimizer)

    def step(x: Tensor) -> Tensor:
        change(get(), None)
        loss = model(x).square().mean()
        loss.backward()
        change(get(), loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss * get()["lr"]

    def between(i: int, result: Any) -> None:
        if i == 3:
            optimizer.param_groups[0]["lr"] = 0.02

    watch = {"model": model, "optimizer": optimizer}
    return Run(step, lambda i: (batch_of(device(), i, 4, 4),), watch, after=between)


@pytest.mark.parametrize("way", each_now(WAYS, "by_variable", "by_attribute", "by_dict", "by_tuple", "by_default"))
@pytest.mark.parametrize("change", [before_forward])
def test_a_rate_that_the_step_sets_before_is_that_of_this_update(way: Any, change: Any) -> None:
    assert_parity(Case("elsewhere", lambda where: make_run(way, change), steps=6, graphs=2), device())


@pytest.mark.parametrize("way", each_now(WAYS, "by_variable", "by_list", "by_partial"))
@pytest.mark.parametrize("change", [from_the_loss])
def test_a_rate_that_the_step_sets_elsewhere_is_that_of_this_update(way: Any, change: Any) -> None:
    assert_parity(Case("elsewhere", lambda where: make_run(way, change), steps=6, graphs=2), device())


@pytest.mark.parametrize("change", each_now([before_forward, from_the_loss], "before_forward"))
def test_a_wrapper_that_shares_the_groups_of_a_hidden_optimizer(change: Any) -> None:
    def make(where: torch.device) -> Run:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(where)
        wrapper = Hidden(torch.optim.Adam(model.parameters(), lr=0.1))

        def step(x: Tensor) -> Tensor:
            change(wrapper.param_groups[0], None)
            loss = model(x).square().mean()
            loss.backward()
            change(wrapper.param_groups[0], loss)
            wrapper.step()
            wrapper.zero_grad()
            return loss

        return Run(step, lambda i: (batch_of(where, i, 4, 4),), {"model": model, "groups": wrapper.param_groups})

    assert_parity(Case("hidden", make, steps=6, graphs=2), device())


def test_a_group_in_a_tuple_that_the_step_writes_is_refused() -> None:
    def way(o: Optimizer) -> Get:
        places = (o.param_groups[0],)
        return lambda: places[0]

    with pytest.raises(ws.errors.SideEffectError, match="places"):
        ws.compile(make_run(way, before_forward).step, lower="eager")(batch_of(device(), 0, 4, 4))


def test_a_group_in_a_tuple_is_refused_where_the_step_sets_it_by_the_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    places = (optimizer.param_groups[0],)

    def step(x: Tensor) -> Tensor:
        optimizer.param_groups[0]["lr"] = 0.3
        return model(x).sum() * places[0]["lr"]

    with pytest.raises(ws.errors.SideEffectError, match="a tuple or default argument holds the same param group"):
        ws.compile(step, lower="eager")(batch_of(device(), 0, 4, 4))
