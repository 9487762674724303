"""Scalars that change between calls, in compiled steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wholestep as ws
from capture.test_numbers import MEANINGS, SIZES, VALUES, Queue, _run
from harness import batch_of, device
from selection import each_now

NAMES = ("slice-window", "slice-columns", "select", "power-of-tensor", "bit-and", "alpha", "where", "shape-read-back")


@pytest.mark.parametrize("name", each_now(NAMES, "slice-window", "power-of-tensor"))
def test_a_compiled_step_follows_an_int_that_changes(name: str) -> None:
    use = (SIZES | MEANINGS)[name]
    losses: list[list[torch.Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        run = _run(device(), use)
        step: Any = ws.compile(run.step, lower="inductor", lower_options={"strict": True}) if compiled else run.step
        losses.append([step(*run.arguments(i)).detach().clone() for i in range(len(VALUES))])
    for eager, ours in zip(*losses, strict=True):
        torch.testing.assert_close(ours, eager)


def test_a_compiled_queue_is_written_where_eager_writes_it() -> None:
    queues = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Queue()

        def plain(x: torch.Tensor, model: Queue = model) -> torch.Tensor:
            return model(x)

        step: Any = ws.compile(plain, lower="inductor", lower_options={"strict": True}) if compiled else plain
        for i in range(9):
            step(batch_of(device(), i, 5, 4))
        queues.append((model.queue.clone(), model.pointer))
        if compiled:
            assert len(step.graphs) == 2, step.recompiles
    torch.testing.assert_close(queues[1][0], queues[0][0])
    assert queues[0][1] == queues[1][1]
