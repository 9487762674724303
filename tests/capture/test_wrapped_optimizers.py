"""Optimizers, schedulers, scalers and models that a step reaches only through objects around them."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from capture import wrappers
from capture.wrappers import (
    BehindCode,
    CountingLookahead,
    InPrivateAttribute,
    InSlotDataclass,
    InSlots,
    LikeAccelerate,
    LikeFabric,
    LikeTimmLookahead,
    ModelInSlots,
    SharpnessAware,
)
from cases.parts import adamw, mlp
from harness import (
    Case,
    Run,
    Story,
    assert_frames_equal,
    assert_parity,
    assert_parity_or_refusal,
    assert_same_story,
    batch_of,
    device,
    frame,
    marked_line,
)
from selection import each_now

Wrapper = Callable[[torch.optim.Optimizer], Any]

WRAPPERS: list[Wrapper] = [
    wrappers.InPrivateAttribute,
    wrappers.InSlots,
    wrappers.ByGetattr,
    wrappers.ByGetattrOverSlots,
    wrappers.InSlotDataclass,
    wrappers.AsBoundMethods,
    wrappers.AsPartials,
    wrappers.InDeepLists,
    wrappers.InDeepObjects,
    wrappers.ByWeakReference,
    wrappers.InClassAttribute,
    wrappers.InDeque,
    wrappers.InNamedTuple,
    wrappers.InMappingProxy,
    wrappers.InClosure,
    wrappers.InContextVariable,
    wrappers.InProperty,
    wrappers.InFunctionAttribute,
    wrappers.InCache,
    wrappers.InThreadLocal,
    wrappers.WithSameGroups,
    wrappers.OfTwo,
    wrappers.InTurns,
    wrappers.Accumulating,
    wrappers.LikeAccelerate,
    wrappers.LikeFabric,
    wrappers.CountingLookahead,
]

registry = types.ModuleType("registry")
"""A module of the user's that keeps the optimizer for everybody."""


def step_of_wrapper(model: nn.Module, wrapper: Any, x: torch.Tensor) -> torch.Tensor:
    wrapper.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    wrapper.step()
    return loss


def wrapped_run(
    where: torch.device,
    wrap: Wrapper,
    step: Callable[..., Any] = step_of_wrapper,
    inner: Callable[..., torch.optim.Optimizer] = adamw,
    **watch: Callable[[Any], Any],
) -> Run:
    """The wrapper is what the step gets; the optimizer inside, and what `watch` reads of the wrapper, is compared."""
    model = mlp(where)
    optimizer = inner(model)
    wrapper = wrap(optimizer)
    seen = {name: Watched(wrapper, read) for name, read in watch.items()}
    return Run(
        step=step,
        arguments=lambda i: (model, wrapper, batch_of(where, i, 5, 6)),
        watch={"model": model, "optimizer": optimizer, **seen},
    )


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Watched:
    """Something of an object, for the harness to read after each call."""

    def __init__(self, obj: Any, read: Callable[[Any], Any]) -> None:
        self._obj, self._read = obj, read

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._read(self._obj)}


WRAPPED_NOW = """
    InPrivateAttribute InSlots ByGetattr InSlotDataclass AsBoundMethods InDeepLists ByWeakReference InClassAttribute
    InDeque InMappingProxy InClosure InContextVariable InProperty InCache WithSameGroups OfTwo Accumulating
    LikeAccelerate LikeFabric
""".split()


@pytest.mark.parametrize("wrap", each_now(WRAPPERS, *WRAPPED_NOW), ids=lambda wrap: wrap.__name__)
def test_a_wrapped_optimizer_trains(wrap: Wrapper) -> None:
    assert_parity(Case("wrapped", lambda where: wrapped_run(where, wrap), graphs=None), device())


@pytest.mark.parametrize("wrap", [wrappers.InGenerator, wrappers.InEndlessIterator], ids=lambda wrap: wrap.__name__)
def test_an_optimizer_from_an_iterator_trains_or_is_refused(wrap: Wrapper) -> None:
    assert_parity_or_refusal(Case("wrapped", lambda where: wrapped_run(where, wrap), graphs=None), device())


def test_a_wrapper_needs_no_more_graphs_than_its_optimizer() -> None:
    for wrap in (InPrivateAttribute, InSlots, LikeAccelerate, LikeFabric):
        assert_parity(Case("wrapped", lambda where, wrap=wrap: wrapped_run(where, wrap), graphs=2), device())


def test_wrappers_of_wrappers_train() -> None:
    def wrap(optimizer: torch.optim.Optimizer) -> Any:
        return InSlots(InPrivateAttribute(InSlotDataclass(LikeAccelerate(optimizer))))  # type: ignore[arg-type]

    assert_parity(Case("nested", lambda where: wrapped_run(where, wrap)), device())


def test_lookahead_that_counts_in_param_groups_trains() -> None:
    run = Case("lookahead", lambda where: wrapped_run(where, LikeTimmLookahead), steps=7, graphs=None)
    assert_parity(run, device())


def test_counters_of_a_wrapper_count_as_in_eager() -> None:
    def lookahead(where: torch.device) -> Run:
        return wrapped_run(where, CountingLookahead, counter=lambda w: w._counter)

    def accelerated(where: torch.device) -> Run:
        return wrapped_run(where, LikeAccelerate, steps=lambda w: w.steps)

    assert_parity(Case("lookahead", lookahead, graphs=None), device())
    assert_parity(Case("accelerated", accelerated, graphs=None), device())


def test_counters_in_slots_of_a_wrapper_count_as_in_eager() -> None:
    class Counting(InSlots):
        __slots__ = ("calls",)

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer)
            self.calls = 0

        def step(self) -> None:
            self.calls += 1
            super().step()

    def make(where: torch.device) -> Run:
        return wrapped_run(where, Counting, calls=lambda w: w.calls)

    assert_parity(Case("slots", make, graphs=None), device())


def test_a_sharpness_aware_wrapper_trains() -> None:
    def step(model: nn.Module, sam: SharpnessAware, x: torch.Tensor) -> torch.Tensor:
        model(x).square().mean().backward()
        sam.first_step()
        loss = model(x).square().mean()
        loss.backward()
        sam.second_step()
        return loss

    assert_parity(Case("sam", lambda where: wrapped_run(where, SharpnessAware, step, momentum)), device())


def test_an_optimizer_in_a_module_of_the_users_trains() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        registry.optimizer.step()
        registry.optimizer.zero_grad()
        return loss

    def make(where: torch.device) -> Run:
        model = mlp(where)
        registry.optimizer = adamw(model)
        return Run(step, lambda i: (model, batch_of(where, i, 5, 6)), {"model": model, "opt": registry.optimizer})

    assert_parity(Case("registry", make), device())


def swap_private(wrapper: Any, other: Any) -> None:
    wrapper._optimizer = other


def swap_hidden(wrapper: Any, other: Any) -> None:
    object.__setattr__(wrapper, "_hidden", other)


def swap_in_lists(wrapper: Any, other: Any) -> None:
    holder = wrapper.nest
    while isinstance(holder[0], list):
        holder = holder[0]
    holder[0] = other


def swap_in_objects(wrapper: Any, other: Any) -> None:
    holder = wrapper
    while isinstance(holder.next, types.SimpleNamespace):
        holder = holder.next
    holder.next = other


def swap_in_class(wrapper: Any, other: Any) -> None:
    type(wrapper).held = other


def swap_in_queue(wrapper: Any, other: Any) -> None:
    wrapper._queue.append(other)


def swap_accelerated(wrapper: Any, other: Any) -> None:
    wrapper.optimizer = other


def swap_bound(wrapper: Any, other: Any) -> None:
    wrapper.step, wrapper.zero_grad = other.step, other.zero_grad


@pytest.mark.parametrize(
    ("wrap", "swap"),
    [
        (wrappers.InPrivateAttribute, swap_private),
        (wrappers.InSlots, swap_private),
        (wrappers.ByGetattr, swap_hidden),
        (wrappers.ByGetattrOverSlots, swap_hidden),
        (wrappers.InDeepLists, swap_in_lists),
        (wrappers.InDeepObjects, swap_in_objects),
        (wrappers.InClassAttribute, swap_in_class),
        (wrappers.InDeque, swap_in_queue),
        (wrappers.LikeAccelerate, swap_accelerated),
        (wrappers.AsBoundMethods, swap_bound),
        (wrappers.InSlotDataclass, swap_accelerated),
    ],
    ids=lambda value: value.__name__,
)
def test_another_optimizer_inside_of_a_wrapper_is_noticed(wrap: Wrapper, swap: Callable[[Any, Any], None]) -> None:
    def story(told: Story) -> None:
        told.call(3)
        model, wrapper, _ = told.run.arguments(0)
        other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        told.run.watch["other"] = other
        swap(wrapper, other)
        told.call(3)

    assert_same_story(lambda where: wrapped_run(where, wrap), story)


def test_an_inner_wrapper_that_is_replaced_is_noticed() -> None:
    def wrap(optimizer: torch.optim.Optimizer) -> Any:
        return InSlots(InSlots(optimizer))  # type: ignore[arg-type]

    def story(told: Story) -> None:
        told.call(3)
        model, wrapper, _ = told.run.arguments(0)
        other = torch.optim.SGD(model.parameters(), lr=0.5)
        told.run.watch["other"] = other
        wrapper._optimizer = InSlots(other)
        told.call(3)

    assert_same_story(lambda where: wrapped_run(where, wrap), story)


def test_schedulers_and_scalers_that_a_private_object_holds_are_found() -> None:
    class Parts:
        __slots__ = ("optimizer", "scaler", "scheduler")

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(model: nn.Module, parts: Parts, x: torch.Tensor) -> torch.Tensor:
        parts.optimizer.zero_grad()
        loss = model(x).square().mean()
        parts.scaler.scale(loss).backward()
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()
        parts.scheduler.step()
        return loss

    def make(where: torch.device) -> Run:
        return wrapped_run(
            where, Parts, step, scheduler=lambda p: p.scheduler.state_dict(), scaler=lambda p: p.scaler.state_dict()
        )

    step_ = assert_parity(Case("parts", make, graphs=None), device())
    assert len(step_.graphs) <= 3


def test_a_model_behind_slots_is_found() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where, dropout=0.1)
        optimizer = adamw(model)
        holder, held = ModelInSlots(model), InSlots(optimizer)
        return Run(
            step_of_wrapper,
            lambda i: (holder, held, batch_of(where, i, 5, 6)),
            {"model": model, "optimizer": optimizer},
        )

    assert_parity(Case("model", make), device())


def test_a_model_behind_slots_that_is_switched_to_eval_is_noticed() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where, dropout=0.5)
        optimizer = adamw(model)
        holder = ModelInSlots(model)
        return Run(step_of_wrapper, lambda i: (holder, optimizer, batch_of(where, i, 5, 6)), {"model": model})

    def story(told: Story) -> None:
        told.call(2)
        told.run.watch["model"].eval()
        told.call(2)

    assert_same_story(make, story)


def test_clipping_over_a_hidden_list_of_parameters_sees_their_gradients() -> None:
    class Clip:
        __slots__ = ("parameters",)

        def __init__(self, parameters: list[nn.Parameter]) -> None:
            self.parameters = parameters

    def step(model: nn.Module, optimizer: Any, clip: Clip, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(clip.parameters, 0.01)
        optimizer.step()
        return norm

    def make(where: torch.device) -> Run:
        model = mlp(where)
        optimizer = adamw(model)
        clip = Clip(list(model.parameters()))
        return Run(
            step, lambda i: (model, optimizer, clip, batch_of(where, i, 5, 6)), {"model": model, "opt": optimizer}
        )

    assert_parity(Case("clip", make), device())


def test_gradients_cleared_through_hidden_parameters_are_cleared() -> None:
    class Hidden:
        __slots__ = ("parameters",)

        def __init__(self, parameters: list[nn.Parameter]) -> None:
            self.parameters = parameters

        def clear(self) -> None:
            for parameter in self.parameters:
                parameter.grad = None

    def step(model: nn.Module, optimizer: Any, hidden: Hidden, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        hidden.clear()
        return loss

    def make(where: torch.device) -> Run:
        model = mlp(where)
        optimizer = adamw(model)
        hidden = Hidden(list(model.parameters()))
        return Run(step, lambda i: (model, optimizer, hidden, batch_of(where, i, 5, 6)), {"model": model})

    assert_parity(Case("clear", make), device())


def test_an_error_that_the_step_swallows_hides_no_optimizer() -> None:
    def step(model: nn.Module, wrapper: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        try:
            wrapper.step()
        except BaseException:  # as bad code does
            return loss
        wrapper.zero_grad()
        return loss

    assert_parity(Case("swallow", lambda where: wrapped_run(where, wrappers.InDeepLists, step)), device())


def test_a_learning_rate_that_a_hidden_optimizer_is_given_in_the_step_is_used() -> None:
    def step(model: nn.Module, wrapper: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for group in wrapper._optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        wrapper.step()
        wrapper.zero_grad()
        return loss

    assert_parity(Case("rate", lambda where: wrapped_run(where, InSlots, step), graphs=None), device())


def test_tracing_twice_leaves_counters_of_objects_on_the_way_as_they_were() -> None:
    class Counter(wrappers.InDeepLists):
        calls = 0

        def step(self) -> None:
            self.calls += 1
            super().step()

    def make(where: torch.device) -> Run:
        return wrapped_run(where, Counter, calls=lambda w: w.calls)

    assert_parity(Case("counter", make, graphs=None), device())


def test_an_optimizer_that_nothing_leads_to_is_refused_with_the_line() -> None:
    def step(model: nn.Module, wrapper: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        wrapper.inner().step()  # <- here
        return loss

    model = mlp(device())
    optimizer = adamw(model)
    watch = {"model": model, "optimizer": optimizer}
    before = frame("before", None, watch)
    with pytest.raises(ws.errors.CaptureError) as caught:
        ws.compile(step)(model, BehindCode(optimizer), batch_of(device(), 0, 5, 6))
    assert_frames_equal([before], [frame("before", None, watch)])
    assert f"{Path(__file__).name}:{marked_line(step)}" in str(caught.value)


def test_an_optimizer_that_the_step_does_not_call_is_no_condition() -> None:
    class Both:
        __slots__ = ("other", "used")

        def __init__(self, optimizer: Any) -> None:
            self.used = optimizer
            self.other = torch.optim.SGD(mlp(device()).parameters(), lr=0.1, momentum=0.9)

        def step(self) -> None:
            self.used.step()

        def zero_grad(self) -> None:
            self.used.zero_grad()

    run = wrapped_run(device(), Both)
    step = ws.compile(run.step)
    step(*run.arguments(0))
    step(*run.arguments(1))
    other = run.arguments(0)[1].other
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    other.step()  # has state from now on
    step(*run.arguments(2))
    assert len(step.graphs) == 2
