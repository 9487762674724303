"""Steps written for Accelerate, in one process: accumulation, clipping, schedulers, bf16; as Accelerate in eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from selection import each_now

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in classes; other tests see none of it."""
    forget_accelerate()
    yield
    forget_accelerate()


def forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Training:
    """A loop as the pages of Accelerate write it."""

    def __init__(self, batches: int = 7, **options: Any) -> None:
        forget_accelerate()
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        data = [(torch.randn(6), torch.randn(4)) for _ in range(2 * batches)]
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        with self.accelerator.accumulate(self.model):
            norm = None
            loss = F.mse_loss(self.model(x), y)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.detach(), norm

    def run(self, step: Any, epochs: int = 3) -> list[Any]:
        """Train; what a user can see after each call, to the bit."""
        seen: list[Any] = []
        for _ in range(epochs):
            for batch in self.loader:
                result = step(*batch)
                accelerator = self.accelerator
                counts = (accelerator.step, accelerator.sync_gradients, self.scheduler.get_last_lr())
                weights = [p.tolist() for p in self.model.parameters()]
                seen.append((_plain(result), *counts, self.scheduler.scheduler._step_count, weights))
        return seen


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.tolist() if isinstance(value, Tensor) else value


def assert_trains_as_in_eager(**options: Any) -> Any:
    """The compiled step sees and leaves what eager does, in every call. Returns it."""
    eager = Training(**options)
    expected = eager.run(eager.step)
    training = Training(**options)
    step = ws.compile(training.step)
    for call, (want, got) in enumerate(zip(expected, training.run(step), strict=True), 1):
        assert want == got, f"call {call}"
    return step


@pytest.mark.parametrize("steps", each_now([1, 2, 3], "3"))  # two: below
def test_accumulation_of_accelerate_inside_of_the_step_trains_as_in_eager(steps: int) -> None:
    assert_trains_as_in_eager(gradient_accumulation_steps=steps)


def test_accumulation_needs_a_graph_per_kind_of_micro_batch_and_no_more() -> None:
    step = assert_trains_as_in_eager(gradient_accumulation_steps=2)
    # first of two, second of two with and without optimizer state, and the odd one at the end of an epoch
    assert len(step.graphs) <= 5, step.recompiles


def test_bf16_of_accelerate_trains_as_in_eager() -> None:
    assert_trains_as_in_eager(mixed_precision="bf16")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first micro-batch steps only it
def test_a_scheduler_that_is_stepped_with_every_micro_batch_trains_as_in_eager() -> None:
    assert_trains_as_in_eager(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)


def test_another_number_of_accumulation_steps_is_used_by_the_next_call() -> None:
    def story(training: Training, step: Any) -> list[Any]:
        seen = training.run(step, 1)
        training.accelerator.gradient_accumulation_steps = 3
        return [*seen, *training.run(step, 2)]

    eager = Training(gradient_accumulation_steps=2)
    expected = story(eager, eager.step)
    training = Training(gradient_accumulation_steps=2)
    assert story(training, ws.compile(training.step)) == expected


def test_a_checkpoint_of_accelerate_resumes_a_compiled_step(tmp_path: Any) -> None:
    eager = Training()
    eager.run(eager.step, 1)
    expected = eager.run(eager.step, 1)

    before = Training()
    before.run(ws.compile(before.step), 1)
    before.accelerator.save_state(str(tmp_path))
    after = Training()
    step = ws.compile(after.step)
    after.run(step, 1)
    after.accelerator.load_state(str(tmp_path))
    assert after.run(step, 1) == expected
