"""Hooks that a replay would not fire are refused and named; those that trace are in the graph when asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from capture.refused import World, assert_unchanged_and_trainable
from cases.parts import adamw, mlp, plain_run, train_step
from harness import (
    Case,
    Run,
    assert_frames_equal,
    assert_parity,
    assert_parity_or_refusal,
    device,
)
from wholestep.torch_private.autograd import tensor_hooks
from wholestep.torch_private.modules_and_optimizers import hook_registries


def note_the_call(*args: Any, **kwargs: Any) -> None:
    """A hook for its side effect only."""


HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda model, optimizer: model.first.register_forward_hook(note_the_call),
    "forward_pre": lambda model, optimizer: model.first.register_forward_pre_hook(note_the_call),
    "full_backward": lambda model, optimizer: model.last.register_full_backward_hook(note_the_call),
    "full_backward_pre": lambda model, optimizer: model.last.register_full_backward_pre_hook(note_the_call),
    "parameter": lambda model, optimizer: model.first.weight.register_hook(note_the_call),
    "post_accumulate": lambda model, optimizer: model.first.weight.register_post_accumulate_grad_hook(note_the_call),
    "every_module": lambda model, optimizer: nn.modules.module.register_module_forward_hook(note_the_call),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_would_only_fire_while_tracing_is_refused_and_named(kind: str) -> None:
    handles: list[Any] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        return train_step(model, optimizer, x)

    world = World(fresh=False)
    handles.append(HOOKS[kind](world.model, world.optimizer))
    before = world.look()
    try:
        with pytest.raises(ws.errors.HookError, match=r"\[WS-HOOK\]") as caught:
            ws.compile(step, hooks="refuse")(world.model, world.optimizer, world.batch())
    finally:
        handles[0].remove()
    assert "note_the_call" in str(caught.value)
    assert caught.value.fix
    assert_unchanged_and_trainable(world, before, fresh=False)


def test_every_hook_is_listed() -> None:
    world = World(fresh=False)
    world.model.first.register_forward_hook(note_the_call)
    world.model.last.bias.register_hook(note_the_call)
    with pytest.raises(ws.errors.HookError) as caught:
        ws.compile(train_step, hooks="refuse")(world.model, world.optimizer, world.batch())
    assert "first" in str(caught.value)
    assert "last.bias" in str(caught.value)


def test_a_hook_added_between_steps_is_refused_then_and_its_removal_brings_the_graph_back() -> None:
    world = World(fresh=False)
    step = ws.compile(train_step, hooks="refuse")
    step(world.model, world.optimizer, world.batch())
    step(world.model, world.optimizer, world.batch())
    graphs = len(step.graphs)
    handle = world.model.first.register_forward_hook(note_the_call)
    before = world.look()
    with pytest.raises(ws.errors.HookError):
        step(world.model, world.optimizer, world.batch())
    assert_frames_equal([before], [world.look()])
    handle.remove()
    step(world.model, world.optimizer, world.batch())
    assert len(step.graphs) == graphs


def test_a_parameter_hook_added_between_steps_is_refused_then() -> None:
    world = World(fresh=False)
    step = ws.compile(train_step, hooks="refuse")
    step(world.model, world.optimizer, world.batch())
    world.model.first.weight.register_hook(lambda grad: grad * 2)
    before = world.look()
    with pytest.raises(ws.errors.HookError):
        step(world.model, world.optimizer, world.batch())
    assert_frames_equal([before], [world.look()])


def doubling_hook(model: nn.Module, kind: str) -> None:
    """Hooks that do the same to every tensor that passes, and so can be traced."""
    first: Any = model[0]
    last: Any = model[3]

    def double_gradient(p: torch.Tensor) -> None:
        p.grad.mul_(2)

    if kind == "forward":
        first.register_forward_hook(lambda module, args, out: out * 2)
    elif kind == "forward_pre":
        first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    elif kind == "full_backward":
        last.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
    elif kind == "parameter":
        first.weight.register_hook(lambda grad: grad * 2)
    else:
        first.weight.register_post_accumulate_grad_hook(double_gradient)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "parameter", "post_accumulate"])
def test_hooks_that_trace_are_part_of_the_graph_when_asked_for(kind: str) -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        doubling_hook(model, kind)
        return plain_run(where, model, adamw(model))

    assert_parity(Case(kind, make, steps=4, options={"hooks": "trace"}), device())


@pytest.mark.parametrize("kind", ["step_pre", "step_post"])
@pytest.mark.parametrize("effect", ["tensor", "python"])
def test_optimizer_step_hooks_run_or_are_refused(kind: str, effect: str) -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        optimizer = adamw(model)
        seen: list[int] = []

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if effect == "python":
                seen.append(1)
                return
            with torch.no_grad():
                for p in optimizer.param_groups[0]["params"]:
                    p.mul_(0.9)

        if kind == "step_pre":
            optimizer.register_step_pre_hook(hook)
        else:
            optimizer.register_step_post_hook(hook)
        return plain_run(where, model, optimizer, watch={"seen": seen})

    assert_parity_or_refusal(Case(kind, make, steps=5), device())


def tensor_hook(h: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h


def node_hook(h: torch.Tensor) -> torch.Tensor:
    h.grad_fn.register_hook(lambda grad_in, grad_out: tuple(None if g is None else g * 2 for g in grad_in))
    return h


def retained_gradient(h: torch.Tensor) -> torch.Tensor:
    h.retain_grad()
    return h


def packed(h: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        return h * h.sin()


@pytest.mark.parametrize("hook", [tensor_hook, node_hook, retained_gradient, packed])
def test_hooks_on_tensors_of_the_step_are_equal_or_refused(hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
            hidden = model[0](x)
            loss = model[3](hook(hidden)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss, hidden.grad if hook is retained_gradient else None

        return plain_run(where, model, adamw(model), step)

    assert_parity_or_refusal(Case(hook.__name__, make, steps=4), device())


def _on_all_modules(model: Any, handles: Any) -> None:
    torch.nn.modules.module.register_module_forward_hook(lambda module, given, out: out * 1.1)


LEFT: dict[str, Callable[[Any, Any], Any]] = {
    "a gradient hook": lambda model, handles: model.first.weight.register_hook(lambda grad: grad * 0.9),
    "after accumulation": lambda model, handles: model.last.bias.register_post_accumulate_grad_hook(note_the_call),
    "on all modules": _on_all_modules,
    "one is removed": lambda model, handles: handles[0].remove(),
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_step_that_leaves_other_hooks_than_it_found_is_refused_with_the_line(kind: str) -> None:
    world = World(fresh=False)
    before = world.look()
    handles = [world.model.first.weight.register_hook(lambda grad: grad * 0.5)]
    held = hooks_of(world.model)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        LEFT[kind](model, handles)  # <- here
        return train_step(model, optimizer, x)

    with pytest.raises(ws.errors.SideEffectError, match="a hook") as caught:
        ws.compile(step, lower="eager")(world.model, world.optimizer, world.batch())
    assert caught.value.location is not None
    assert caught.value.location.file == __file__
    assert hooks_of(world.model) == held
    handles[0].remove()
    assert_unchanged_and_trainable(world, before, fresh=False)


def test_hooks_that_the_step_removes_again_are_captured() -> None:
    eager, compiled = World(fresh=True), World(fresh=True)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        handle = model.first.weight.register_hook(lambda grad: grad * 0.9)
        x = x.detach().requires_grad_()
        x.register_hook(lambda grad: grad * 2)
        loss = train_step(model, optimizer, x)
        handle.remove()
        return loss

    ours = ws.compile(step, lower="eager")
    for i in range(3):
        batch = eager.batch()
        torch.manual_seed(i)
        expected = step(eager.model, eager.optimizer, batch)
        torch.manual_seed(i)
        assert torch.equal(ours(compiled.model, compiled.optimizer, batch), expected)


def hooks_of(model: Any) -> Any:
    dicts = hook_registries([], [])
    return [list(d) for d in dicts], [list(map(id, tensor_hooks(p))) for p in model.parameters()]
