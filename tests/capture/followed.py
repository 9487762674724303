"""Steps that read a value from some place, changed between calls: eager is the reference, call by call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import wholestep as ws
from cases.parts import mlp
from harness import Case, Run, assert_parity, batch_of, device, marked_line

CALLS = 6

Place = tuple[Callable[[], Any], Callable[[int], None]]
"""What the step multiplies its loss by, and what happens between two calls."""


def run_of(read: Callable[[], Any], change: Callable[[int], None], seen: Callable[[], Any] = lambda: None) -> Run:
    """A training step that reads a number with `read`; `change(i)` runs after call i."""
    where = device()
    model = mlp(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # Adam divides most of a factor of the loss out again

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() * read()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    class Seen:
        def state_dict(self) -> dict[str, Any]:
            return {"seen": seen()}

    return Run(
        step,
        lambda i: (model, optimizer, batch_of(where, i, 5, 6)),
        {"model": model, "optimizer": optimizer, "place": Seen()},
        after=lambda i, result: change(i),
    )


def assert_follows(make: Callable[[], tuple[Any, ...]], graphs: int | None = None, steps: int = CALLS) -> Any:
    """Eager and compiled agree in all calls; `make` gives `read`, `change`, and what else must be equal then."""
    return assert_parity(Case("source", lambda where: run_of(*make()), steps=steps, graphs=graphs), device())


def assert_refused(
    step: Callable[..., Any],
    error: type[ws.errors.WholestepError],
    match: str,
    marked: Callable[..., Any] | None = None,
    args: tuple[Any, ...] = (),
) -> ws.errors.WholestepError:
    """A step `f(x)` is refused with the line that carries the marker."""
    with pytest.raises(error, match=match) as caught:
        ws.compile(step)(torch.ones(3), *args)
    if marked is not None:
        assert caught.value.location is not None, caught.value
        assert caught.value.location.line == marked_line(marked), caught.value
    return caught.value
