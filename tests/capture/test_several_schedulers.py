"""Steps with several optimizers, each with its scheduler: eager is the reference, call by call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import wholestep as ws
from harness import Case, Run, assert_parity, batch_of, device
from selection import each_now


class Parts(SimpleNamespace):
    """Two models, their optimizers and schedulers."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    count: int

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedulers": [each.state_dict() for each in self.schedulers],
            "rates": [each.get_last_lr() for each in self.schedulers],
            "groups": [each.param_groups[0]["lr"] for each in self.optimizers],
            "count": self.count,
        }

    def loss(self, k: int, x: Tensor) -> Tensor:
        loss: Tensor = self.models[k](x).square().mean()
        return loss


def parts(make: Callable[[Any], Any], lr: Any = 0.1) -> Parts:
    models = [nn.Linear(4, 4).to(device()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for model in models]
    made = Parts(models=models, optimizers=optimizers, count=0)
    made.schedulers = [make(optimizer) for optimizer in optimizers]
    return made


def together(made: Parts, x: Tensor) -> Any:
    losses = []
    for k, (optimizer, scheduler) in enumerate(zip(made.optimizers, made.schedulers, strict=True)):
        optimizer.zero_grad()
        loss = made.loss(k, x)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return losses


def after_one_backward(made: Parts, x: Tensor) -> Any:
    loss = made.loss(0, x) + made.loss(1, x)
    for optimizer in made.optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer, scheduler in zip(made.optimizers, made.schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    return loss.detach(), [scheduler.get_last_lr() for scheduler in made.schedulers]


def one_reads_the_other(made: Parts, x: Tensor) -> Any:
    """The second loss depends on what the first optimizer made of its model."""
    made.optimizers[0].zero_grad()
    made.loss(0, x).backward()
    made.optimizers[0].step()
    made.schedulers[0].step()
    made.optimizers[1].zero_grad()
    loss = made.loss(1, made.models[0](x).detach())
    loss.backward()
    made.optimizers[1].step()
    made.schedulers[1].step()
    made.count += 1
    return loss.detach()


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}
STEPS = {each.__name__: each for each in (together, after_one_backward, one_reads_the_other)}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step.*:UserWarning")
@pytest.mark.parametrize("kind", each_now(SCHEDULERS, "step", "one cycle"))
@pytest.mark.parametrize("body", STEPS)
def test_each_optimizer_may_step_after_the_scheduler_of_another(body: str, kind: str) -> None:
    def case(where: torch.device) -> Run:
        made = parts(SCHEDULERS[kind])
        watch = {f"model{k}": model for k, model in enumerate(made.models)}
        watch |= {f"optimizer{k}": optimizer for k, optimizer in enumerate(made.optimizers)}

        def step(x: Tensor) -> Any:
            return STEPS[body](made, x)

        return Run(step, lambda i: (batch_of(where, i, 3, 4),), {**watch, "parts": made})

    assert_parity(Case(body, case, steps=6, graphs=3), device())


def _refused(step: Callable[[Tensor], Any], match: str) -> None:
    with pytest.raises(ws.errors.SideEffectError, match=match) as caught:
        ws.compile(step)(torch.ones(3, 4, device=device()))
    assert caught.value.location is not None


def test_an_optimizer_after_its_own_scheduler_is_refused_also_with_another_between() -> None:
    made = parts(SCHEDULERS["step"])

    def step(x: Tensor) -> Any:
        together(made, x)
        made.optimizers[0].step()

    _refused(step, r"schedulers\[0\].step\(\) comes before a step of its optimizer")


def test_two_optimizers_with_one_tensor_as_learning_rate_are_refused() -> None:
    made = parts(SCHEDULERS["step"], lr=torch.tensor(0.1))
    _refused(lambda x: together(made, x), "comes before a step of its optimizer")


def test_state_that_changes_between_schedulers_with_code_of_the_user_is_refused() -> None:
    made = parts(lambda optimizer: None)
    made.schedulers = [lr_scheduler.LambdaLR(each, lambda epoch: 0.5**made.count) for each in made.optimizers]

    def step(x: Tensor) -> None:
        made.loss(0, x).backward()
        made.optimizers[0].step()
        made.schedulers[0].step()
        made.count += 1
        made.schedulers[1].step()

    _refused(step, "changes made.count between two calls of schedulers")
