"""tqdm, rich's progress and a logger in the way of wandb, called in the step: the same is shown as in eager."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from tqdm import tqdm

import wholestep as ws

CALLS = 4
Shown = Callable[[], Any]


class Logger:
    """What wandb's run does with metrics: a step count of its own, a history and a summary of plain numbers."""

    def __init__(self) -> None:
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.step = self.step + 1 if step is None else step
        self.history.append({"_step": self.step, **metrics})
        self.summary.update(metrics)


def with_tqdm() -> tuple[Callable[[Tensor], None], Shown]:
    out = io.StringIO()
    bar = tqdm(total=CALLS, file=out, mininterval=0, position=0, bar_format="{desc} {n_fmt}/{total_fmt}{postfix}")

    def show(loss: Tensor) -> None:
        bar.set_description(f"loss {loss.item():.4f}")
        bar.set_postfix(loss=loss.item())
        bar.update()

    return show, lambda: (bar.n, bar.desc, bar.postfix, re.split(r"[\r\n]+", out.getvalue().strip())[-1])


def with_rich() -> tuple[Callable[[Tensor], None], Shown]:
    progress = Progress(console=Console(file=io.StringIO()), auto_refresh=False)
    task = progress.add_task("training", total=CALLS, loss=0.0)

    def show(loss: Tensor) -> None:
        progress.update(task, advance=1, loss=loss.item())

    return show, lambda: (progress.tasks[0].completed, progress.tasks[0].fields, progress.finished)


def with_logger() -> tuple[Callable[[Tensor], None], Shown]:
    logger = Logger()

    def show(loss: Tensor) -> None:
        logger.log({"loss": loss.item(), "perplexity": loss.exp().item()})

    return show, lambda: (logger.step, logger.history, logger.summary)


@pytest.mark.parametrize("make", [with_tqdm, with_rich, with_logger], ids=lambda make: make.__name__)
def test_progress_and_metrics_are_those_of_eager_after_every_call(make: Any) -> None:
    def shown(compiles: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        show, state = make()

        def step(x: Tensor) -> None:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            show(loss)

        run = ws.compile(step, lower="eager") if compiles else step
        found = []
        for i in range(CALLS):
            run(torch.full((3, 4), float(i)))
            found.append(repr(state()))
        if compiles:
            assert len(run.graphs) <= 2  # type: ignore[attr-defined]
        return found

    assert shown(True) == shown(False)
