"""A step whose Python needs the values of tensors is refused: branches, numbers, shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from capture.refused import World, assert_points_at, assert_refused, assert_unchanged_and_trainable
from harness import (
    batch_of,
    device,
)


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


def returns_array(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    return model(x).detach().numpy()  # <- here


def test_an_array_that_leaves_the_graph_is_refused_and_the_fix_is_to_return_a_tensor() -> None:
    said = assert_refused(returns_array, ws.errors.ItemError)
    assert_points_at(said, returns_array)
    assert "return" in said


def formats_a_tensor(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> str:
    loss = model(x).square().mean()
    return f"loss {loss:.3f}"


def represents_a_tensor(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> str:
    return repr(model.first.weight)


@pytest.mark.parametrize("step", [formats_a_tensor, represents_a_tensor])
def test_text_of_a_tensor_that_a_step_returns_is_that_of_eager(step: Callable[..., Any]) -> None:
    world = World(fresh=False)
    compiled = ws.compile(step)
    for i in range(3):
        x = batch_of(device(), i, 5, 6)
        torch.manual_seed(i)
        text = compiled(world.model, world.optimizer, x)
        torch.manual_seed(i)
        assert text == step(world.model, world.optimizer, x)


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
    return torch.stack([row * 2 for row in y[y > 0]])  # <- here


def finds_where(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    return torch.stack(torch.nonzero(model(x) > 0).unbind(0))  # <- here


def solves(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lstsq(model(x), x).solution  # <- here


@pytest.mark.parametrize("step", [selects_by_mask, finds_where, solves])
def test_a_shape_that_depends_on_data_is_refused(step: Callable[..., Any]) -> None:
    assert_points_at(assert_refused(step, ws.errors.DataShapeError), step)


def test_capture_refuses_what_compile_refuses() -> None:
    world = World(fresh=True)
    before = world.look()
    with pytest.raises(ws.errors.ControlFlowError) as caught:
        ws.capture(branches_on_the_loss, world.model, world.optimizer, world.batch())
    assert_points_at(str(caught.value), branches_on_the_loss)
    assert_unchanged_and_trainable(world, before, fresh=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_zeros_that_forward_differentiation_makes_are_refused_with_another_form() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def step_with(second: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = torch.vmap(second(lambda a: model(a).sum()))(x).square().mean()
            loss.backward()
            return loss

        return step

    x = torch.randn(2, 3)
    with pytest.raises(ws.errors.UnsupportedError, match=r"jacfwd\(grad\(f\)\)"):
        ws.compile(step_with(torch.func.hessian))(x)
    step = step_with(lambda f: torch.func.jacfwd(torch.func.grad(f)))
    assert torch.equal(ws.compile(step)(x), step(x))


def test_an_operator_that_needs_values_is_to_be_called_outside() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, 16, 4, window=torch.ones(16), return_complex=True)
        return torch.istft(spectrum, 16, 4, window=torch.ones(16))

    with pytest.raises(ws.errors.UnsupportedError, match=r"aten.equal.default.*\n(.*\n)*  fix   call it outside"):
        ws.compile(step)(torch.ones(2, 64))
