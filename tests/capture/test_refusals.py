"""What cannot be replayed is refused: a code, the user's line, a fix, and nothing of the user's changed."""

from __future__ import annotations

import contextlib
import math
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from cases.parts import adamw, mlp, plain_run
from harness import (
    Case,
    Frame,
    Run,
    assert_frames_equal,
    assert_parity,
    assert_parity_or_refusal,
    batch_of,
    device,
    frame,
    marked_line,
)

HERE = Path(__file__).name


class Net(nn.Module):
    """Something of everything that a failed call could disturb: weights, a buffer, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(torch.relu(self.norm(self.first(x))), 0.2))


class World:
    """A model in the middle of training: optimizer state and gradients exist. A fresh one has neither."""

    def __init__(self, *, fresh: bool) -> None:
        torch.manual_seed(11)
        self.model = Net().to(device())
        self.optimizer = adamw(self.model)
        self.calls = 0
        if not fresh:
            self.train()

    def train(self) -> None:
        """Two steps in eager; the gradients stay."""
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(self.batch()).square().mean().backward()
            self.optimizer.step()
            self.calls += 1

    def batch(self) -> torch.Tensor:
        return batch_of(device(), self.calls, 5, 6)

    def look(self) -> Frame:
        return frame(f"look after {self.calls} calls", None, {"model": self.model, "optimizer": self.optimizer})


def assert_unchanged_and_trainable(world: World, before: Frame, *, fresh: bool) -> None:
    """A call that failed left no trace, and eager goes on as if it had never been made."""
    assert_frames_equal([before], [world.look()])
    world.train()
    twin = World(fresh=fresh)
    twin.train()
    assert_frames_equal([twin.look()], [world.look()])


def assert_refused(step: Callable[..., Any], *kinds: type[ws.errors.CaptureError], fresh: bool = False) -> str:
    """`step(model, optimizer, x)` is refused with one of these errors. Returns what the error says."""
    world = World(fresh=fresh)
    before = world.look()
    with pytest.raises(kinds) as caught:
        ws.compile(step)(world.model, world.optimizer, world.batch())
    assert_unchanged_and_trainable(world, before, fresh=fresh)
    said = str(caught.value)
    assert f"[{caught.value.code}]" in said
    assert caught.value.fix
    assert caught.value.fix in said
    assert f"docs/errors/{caught.value.code}.md" in said
    return said


def assert_points_at(said: str, function: Callable[..., Any]) -> None:
    assert f"{HERE}:{marked_line(function)}" in said, said


def branches_on_the_loss(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    if loss < 100:  # <- here
        optimizer.step()
    return loss


def loops_on_a_tensor(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    while y.abs().max() > 0.1:  # <- here
        y = y / 2
    return y


def asserts_on_a_tensor(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    assert torch.isfinite(loss)  # <- here
    loss.backward()
    optimizer.step()
    return loss


def asks_for_any(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    broken = any(bool(p.grad.isnan().any()) for p in model.parameters() if p.grad is not None)  # <- here
    return loss * 0 if broken else loss


def takes_the_smaller_of_two(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return min(y.sum(), y.abs().sum())  # <- here


def drops_layers_at_random(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    if torch.rand([]) < 0.5:  # <- here
        x = x * 2
    return model(x).sum()


def branches_after_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if model.first.weight.norm() > 1:  # <- here
        loss = loss * 2
    return loss


@pytest.mark.parametrize("fresh", [False, True], ids=["mid_training", "fresh"])
@pytest.mark.parametrize(
    "step",
    [
        branches_on_the_loss,
        loops_on_a_tensor,
        asserts_on_a_tensor,
        asks_for_any,
        takes_the_smaller_of_two,
        drops_layers_at_random,
        branches_after_the_optimizer,
    ],
)
def test_python_that_branches_on_a_tensor_is_refused(step: Callable[..., Any], fresh: bool) -> None:
    said = assert_refused(step, ws.errors.ControlFlowError, fresh=fresh)
    assert_points_at(said, step)
    assert "torch.where" in said


def test_the_line_of_a_branch_inside_a_module_is_the_modules() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return y if y.sum() > 0 else -y  # <- here

    model = Branching()
    with pytest.raises(ws.errors.ControlFlowError) as caught:
        ws.compile(lambda x: model(x).sum())(batch_of(device(), 0, 5, 6))
    assert_points_at(str(caught.value), Branching.forward)


def returns_item(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()  # <- here


def returns_float(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    loss = model(x).square().mean()
    return float(loss)  # <- here


def returns_int(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> int:
    return int((model(x) > 0).sum())  # <- here


def returns_list(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[Any]:
    return model(x).tolist()  # <- here


def returns_array(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    return model(x).detach().numpy()  # <- here


def prints_a_tensor(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    print(loss)  # <- here
    return loss


def formats_a_tensor(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> str:
    loss = model(x).square().mean()
    return f"loss {loss:.3f}"  # <- here


def represents_a_tensor(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> str:
    return repr(model.first.weight)  # <- here


def gives_a_tensor_to_math(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    return x * math.exp(model(x).mean())  # <- here


@pytest.mark.parametrize(
    "step",
    [
        returns_item,
        returns_float,
        returns_int,
        returns_list,
        returns_array,
        prints_a_tensor,
        formats_a_tensor,
        represents_a_tensor,
        gives_a_tensor_to_math,
    ],
)
def test_a_value_that_leaves_the_graph_is_refused_and_the_fix_is_to_return_a_tensor(step: Callable[..., Any]) -> None:
    said = assert_refused(step, ws.errors.ItemError)
    assert_points_at(said, step)
    assert "return" in said


def branches_on_an_item(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    if loss.item() > 1e6:  # <- here
        loss = loss * 0
    return loss


def test_a_branch_on_an_item_is_refused() -> None:
    said = assert_refused(branches_on_an_item, ws.errors.ItemError, ws.errors.ControlFlowError)
    assert_points_at(said, branches_on_an_item)


def selects_by_mask(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return y[y > 0] * 2  # <- here


def finds_where(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(model(x) > 0)  # <- here


def finds_what_is_unique(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    return torch.unique(model(x).round())  # <- here


@pytest.mark.parametrize("step", [selects_by_mask, finds_where, finds_what_is_unique])
def test_a_shape_that_depends_on_data_is_refused(step: Callable[..., Any]) -> None:
    assert_points_at(assert_refused(step, ws.errors.DataShapeError), step)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


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
        return plain_step(model, optimizer, x)

    world = World(fresh=False)
    handles.append(HOOKS[kind](world.model, world.optimizer))
    before = world.look()
    try:
        with pytest.raises(ws.errors.HookError, match=r"\[WS-HOOK\]") as caught:
            ws.compile(step)(world.model, world.optimizer, world.batch())
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
        ws.compile(plain_step)(world.model, world.optimizer, world.batch())
    assert "first" in str(caught.value)
    assert "last.bias" in str(caught.value)


def test_a_hook_added_between_steps_is_refused_then_and_its_removal_brings_the_graph_back() -> None:
    world = World(fresh=False)
    step = ws.compile(plain_step)
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
    step = ws.compile(plain_step)
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


def test_a_tensor_that_no_later_call_could_find_again_is_refused() -> None:
    world = World(fresh=False)
    stream = iter([batch_of(device(), i, 5, 6) for i in range(3)])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        x = next(stream)
        return model(x).square().mean()  # <- here

    before = world.look()
    with pytest.raises(ws.errors.CapturedTensorError, match=r"\[WS-CAPTURED-TENSOR\]") as caught:
        ws.compile(step)(world.model, world.optimizer)
    assert HERE in str(caught.value)
    assert "argument" in caught.value.fix
    assert_unchanged_and_trainable(world, before, fresh=False)


def test_an_array_behind_a_tensor_is_never_baked_in() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        array = np.ones(4, dtype=np.float32)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            loss = (model(x) * torch.from_numpy(array)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def after(i: int, result: Any) -> None:
            array[:] = i

        return plain_run(where, model, adamw(model), step, after=after)

    assert_parity_or_refusal(Case("array", make, steps=4, graphs=None), device())


def steps_with_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure)  # <- here


def test_an_optimizer_step_with_a_closure_is_refused() -> None:
    assert_points_at(assert_refused(steps_with_a_closure, ws.errors.OptimizerClosureError), steps_with_a_closure)


def test_lbfgs_is_refused() -> None:
    model = mlp(device())
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ws.errors.OptimizerClosureError):
        ws.compile(steps_with_a_closure)(model, optimizer, batch_of(device(), 0, 5, 6))


def writes_through_windows(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    y = model(x).detach()
    y.unfold(1, 2, 1).mul_(2)  # <- here
    return y


def writes_through_overlapping_strides(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> torch.Tensor:
    y = model(x).detach()
    y.as_strided((3, 3), (1, 2)).add_(1)  # <- here
    return y


@pytest.mark.parametrize("step", [writes_through_windows, writes_through_overlapping_strides])
def test_a_write_through_overlapping_views_is_refused(step: Callable[..., Any]) -> None:
    assert_points_at(assert_refused(step, ws.errors.OverlapError), step)


def test_a_write_through_an_expanded_view_fails_as_in_eager_or_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.expand(5, 6).add_(1)
        return x

    x = batch_of(device(), 0, 1, 6)
    before = x.clone()
    with pytest.raises((RuntimeError, ws.errors.OverlapError)):
        ws.compile(step)(x)
    assert torch.equal(x, before)


def test_inputs_that_share_memory_are_equal_to_eager_or_refused() -> None:
    def make(where: torch.device) -> Run:
        def step(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            part.add_(1)
            return x.sum() + part.sum()

        def arguments(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            x = batch_of(where, i, 5, 6)
            return x, x[1:3]

        return Run(step, arguments, {})

    assert_parity_or_refusal(Case("aliases", make, steps=3, graphs=None), device())


def test_inputs_that_begin_to_share_memory_are_equal_to_eager_or_refused() -> None:
    def make(where: torch.device) -> Run:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return x.sum() + y.sum()

        def arguments(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            x = batch_of(where, i, 5, 6)
            return (x, batch_of(where, 50 + i, 5, 6)) if i < 2 else (x, x)

        return Run(step, arguments, {})

    assert_parity_or_refusal(Case("aliases", make, steps=4, graphs=None), device())


@pytest.mark.parametrize("kind", ["embedding", "bag"])
def test_sparse_gradients_are_refused(kind: str) -> None:
    model: nn.Module = nn.Embedding(11, 4, sparse=True)
    if kind == "bag":
        model = nn.EmbeddingBag(11, 4, sparse=True, mode="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = frame("look", None, {"model": model, "optimizer": optimizer})

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(ws.errors.SparseError, match=r"\[WS-SPARSE\]") as caught:
        ws.compile(step)(torch.arange(6).view(2, 3))
    assert HERE in str(caught.value)
    assert_frames_equal([before], [frame("look", None, {"model": model, "optimizer": optimizer})])


def replaces_data(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        p.data = p.data - 0.1 * p.grad  # <- here
    return loss


def replaces_a_parameter(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    model.last.weight = nn.Parameter(model.last.weight * 2)  # <- here
    return model(x).sum()


def casts_the_model(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    model.double()  # <- here
    return model(x.double()).sum()


@pytest.mark.parametrize("step", [replaces_data, replaces_a_parameter, casts_the_model])
def test_a_step_that_replaces_the_storage_of_a_parameter_is_refused(step: Callable[..., Any]) -> None:
    assert_points_at(assert_refused(step, ws.errors.ParameterDataError), step)


class StepError(Exception):
    """An exception of the user's own."""


def raises_in_the_middle(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    raise StepError("out of luck", 7)


def raises_at_the_end(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    plain_step(model, optimizer, x)
    raise StepError("out of luck", 7)


def has_a_wrong_shape(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + torch.zeros(3, 7) @ x


def is_interrupted(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    plain_step(model, optimizer, x)
    raise KeyboardInterrupt


@pytest.mark.parametrize("fresh", [False, True], ids=["mid_training", "fresh"])
@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (raises_in_the_middle, StepError),
        (raises_at_the_end, StepError),
        (has_a_wrong_shape, RuntimeError),
        (is_interrupted, KeyboardInterrupt),
    ],
)
def test_an_exception_of_the_users_code_surfaces_with_its_traceback_and_changes_nothing(
    step: Callable[..., Any], kind: type[BaseException], fresh: bool
) -> None:
    world = World(fresh=fresh)
    before = world.look()
    with pytest.raises(kind) as caught:
        ws.compile(step)(world.model, world.optimizer, world.batch())
    assert type(caught.value) is kind
    assert step.__name__ in {each.name for each in traceback.extract_tb(caught.value.__traceback__)}
    if kind is StepError:
        assert caught.value.args == ("out of luck", 7)
    assert_unchanged_and_trainable(world, before, fresh=fresh)


def test_an_exception_on_a_later_path_leaves_the_graphs_usable() -> None:
    world = World(fresh=False)

    def fails_when_told(x: torch.Tensor, fail: bool) -> torch.Tensor:
        loss = plain_step(world.model, world.optimizer, x)
        if fail:
            raise StepError("told so")
        return loss

    step = ws.compile(fails_when_told)
    step(world.batch(), False)
    step(world.batch(), False)
    before, graphs = world.look(), len(step.graphs)
    with pytest.raises(StepError):
        step(world.batch(), True)
    assert_frames_equal([before], [world.look()])
    step(world.batch(), False)
    assert len(step.graphs) == graphs


def test_an_exception_that_the_user_catches_inside_the_step_is_the_users_business() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(StepError):
                raise StepError
            return plain_step(model, optimizer, x)

        return plain_run(where, model, adamw(model), step)

    assert_parity(Case("caught", make, steps=3), device())


class Caching(nn.Module):
    """Keeps what it saw in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.cache: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = x.detach() * 2
        self.calls += 1
        return self.inner(x)


def test_a_tensor_kept_in_an_attribute_is_equal_or_refused_and_never_a_tracing_tensor() -> None:
    model = Caching()
    with contextlib.suppress(ws.errors.CaptureError):
        ws.compile(lambda x: model(x).sum())(batch_of(device(), 0, 5, 6))
    assert model.cache is None or type(model.cache) is torch.Tensor
    assert isinstance(model.calls, int)


class Counter:
    """State of the user's own, in Python."""

    def __init__(self) -> None:
        self.calls = 0
        self.losses: list[Any] = []
        self.kept: dict[str, Any] = {}


CALLS = 0


def counts_in_an_attribute(counter: Counter, loss: torch.Tensor) -> None:
    counter.calls += 1


def appends_a_tensor(counter: Counter, loss: torch.Tensor) -> None:
    counter.losses.append(loss.detach())


def appends_a_number(counter: Counter, loss: torch.Tensor) -> None:
    counter.losses.append(len(counter.losses))


def keeps_a_tensor(counter: Counter, loss: torch.Tensor) -> None:
    counter.kept["loss"] = loss.detach()


def counts_in_a_global(counter: Counter, loss: torch.Tensor) -> None:
    global CALLS
    CALLS += 1
    counter.calls = CALLS


@pytest.mark.parametrize("reach", ["argument", "closure"])
@pytest.mark.parametrize(
    "effect", [counts_in_an_attribute, appends_a_tensor, appends_a_number, keeps_a_tensor, counts_in_a_global]
)
def test_python_state_changed_by_the_step_is_equal_or_refused(effect: Callable[..., None], reach: str) -> None:
    def make(where: torch.device) -> Run:
        global CALLS
        CALLS = 0
        model = mlp(where)
        optimizer = adamw(model)
        counter = Counter()

        def given(counter: Counter, x: torch.Tensor) -> torch.Tensor:
            loss = plain_step(model, optimizer, x)
            effect(counter, loss)
            return loss

        def closed(x: torch.Tensor) -> torch.Tensor:
            loss = plain_step(model, optimizer, x)
            effect(counter, loss)
            return loss

        def arguments(i: int) -> tuple[Any, ...]:
            x = batch_of(where, i, 5, 6)
            return (counter, x) if reach == "argument" else (x,)

        return Run(given if reach == "argument" else closed, arguments, {"model": model, "counter": vars(counter)})

    assert_parity_or_refusal(Case(effect.__name__, make, steps=4, graphs=None), device())


@pytest.fixture
def seeded_python() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


@pytest.mark.usefixtures("seeded_python")
@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: random.choice([1.0, 2.0, 3.0])], ids=["random", "numpy", "choice"]
)
def test_random_numbers_of_python_and_numpy_are_equal_or_refused(draw: Callable[[], float]) -> None:
    def make(where: torch.device) -> Run:
        random.seed(3)
        np.random.seed(3)
        return Run(lambda x: x.sum() * float(draw()), lambda i: (batch_of(where, i, 5, 6),), {})

    assert_parity_or_refusal(Case("python randomness", make, steps=4, graphs=None), device())


def test_capture_refuses_what_compile_refuses() -> None:
    world = World(fresh=True)
    before = world.look()
    with pytest.raises(ws.errors.ControlFlowError) as caught:
        ws.capture(branches_on_the_loss, world.model, world.optimizer, world.batch())
    assert_points_at(str(caught.value), branches_on_the_loss)
    assert_unchanged_and_trainable(world, before, fresh=True)


def test_a_refused_step_can_be_called_again_after_the_cause_is_gone() -> None:
    world = World(fresh=False)
    careful = {"on": True}

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = plain_step(world.model, world.optimizer, x)
        if careful["on"] and loss > 100:
            raise StepError
        return loss

    compiled = ws.compile(step)
    with pytest.raises(ws.errors.ControlFlowError):
        compiled(world.batch())
    careful["on"] = False
    compiled(world.batch())
    assert len(compiled.graphs) == 1
