"""The rows of docs/captured-and-refused.md, and the small programs that hold the page to them.

@row("`param.grad`")          the beginning of the first cell; longer where two rows begin alike
def gradients() -> None:
    same(...)                 captured: bit-equal with eager over several calls
    refused("WS-ITEM", ...)   refused: that code, with a line, and nothing changed
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from harness import Case, Run, assert_frames_equal, assert_parity, batch_of, device, frame

PAGE = Path(__file__).parents[3] / "docs" / "captured-and-refused.md"
Body = Callable[[nn.Module, Optimizer, Tensor], Any]
Between = Callable[[int, nn.Module, Optimizer], None]

PROGRAMS: dict[str, Callable[[], None]] = {}


def row(beginning: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the program of the row whose first cell begins like that."""

    def register(program: Callable[[], None]) -> Callable[[], None]:
        assert beginning not in PROGRAMS, f"two programs for {beginning!r}"
        PROGRAMS[beginning] = program
        return program

    return register


def rows_of_page() -> list[str]:
    """The first cells of all tables of the page."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [line.strip("|").split(" | ")[0].strip() for line in lines]
    return [cell for cell in cells if cell != "what"]


def programs_of(cell: str) -> list[str]:
    """The keys that name a row."""
    return [key for key in PROGRAMS if cell.startswith(key)]


def network() -> nn.Module:
    """A small model, the same in every call."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(device())


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """An ordinary step."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def run_of(
    body: Body,
    model: Callable[[], nn.Module] = network,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    between: Between = lambda i, model, optimizer: None,
    batch: Callable[[int], Any] = lambda i: batch_of(device(), i, 5, 6),
    watch: dict[str, Any] | None = None,
) -> Run:
    net = model()
    opt = optimizer(net)

    def step(x: Tensor) -> Any:
        return body(net, opt, x)

    seen = {"model": net, "optimizer": opt, **(watch or {})}
    return Run(step, lambda i: (batch(i),), seen, after=lambda i, result: between(i, net, opt))


def same(
    body: Body, *, steps: int = 4, graphs: int | None = 2, options: dict[str, Any] | None = None, **run: Any
) -> Any:
    """The step is equal to eager to the last bit over several calls. Returns the compiled step."""
    made = Case("row", lambda where: run_of(body, **run), steps=steps, graphs=graphs, options=options or {})
    return assert_parity(made, device())


def same_function(step: Callable[..., Any], *batches: Callable[[int], Any], steps: int = 3, **case: Any) -> Any:
    """The same for a function of its arguments alone."""
    arguments = batches or (lambda i: batch_of(device(), i, 4, 4),)
    made = Case("row", lambda where: Run(step, lambda i: tuple(b(i) for b in arguments), {}), steps=steps, **case)
    return assert_parity(made, device())


def refused(code: str, body: Body, *, options: dict[str, Any] | None = None, **run: Any) -> None:
    """The first call is refused with a code and a line, and nothing is changed."""
    torch.manual_seed(7)
    made = run_of(body, **run)
    before = frame("before", None, made.watch)
    with pytest.raises(ws.errors.WholestepError) as caught:
        ws.compile(made.step, **(options or {}))(*made.arguments(0))
    assert caught.value.code == code, caught.value
    assert caught.value.location is not None, caught.value
    assert_frames_equal([before], [frame("before", None, made.watch)])
