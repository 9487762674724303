"""Learning-rate schedulers, outside and inside the step, with float and tensor lr, and hand-made schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from cases.optimizers import CHANGED_BETWEEN_STEPS, FORMS, build
from cases.parts import mlp, plain_run
from harness import Case, Run, batch_of, case

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=6),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 4)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


def optimizer_for(model: nn.Module, name: str, form: str, tensor_lr: bool) -> torch.optim.Optimizer:
    options = FORMS[name][form][0]
    where = next(model.parameters()).device
    lr = torch.tensor(0.01, device=where) if tensor_lr else 0.01
    return build(name, model.parameters(), **{**CHANGED_BETWEEN_STEPS[name], **options, "lr": lr})


def scheduler_outside(where: torch.device, scheduler: str, name: str, form: str, tensor_lr: bool = False) -> Run:
    model = mlp(where)
    optimizer = optimizer_for(model, name, form, tensor_lr)
    schedule = SCHEDULERS[scheduler](optimizer)
    return plain_run(where, model, optimizer, watch={"schedule": schedule}, after=lambda i, result: schedule.step())


def plateau_outside(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = optimizer_for(model, "SGD", "foreach", False)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    return plain_run(
        where, model, optimizer, watch={"schedule": schedule}, after=lambda i, loss: schedule.step(loss.item())
    )


def scheduler_inside(where: torch.device, scheduler: str, name: str, form: str, tensor_lr: bool = False) -> Run:
    model = mlp(where)
    optimizer = optimizer_for(model, name, form, tensor_lr)
    schedule = SCHEDULERS[scheduler](optimizer)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    watch = {"model": model, "optimizer": optimizer, "schedule": schedule}
    return Run(step, lambda i: (model, optimizer, schedule, batch_of(where, i, 5, 6)), watch)


def scheduler_inside_reached_by_closure(where: torch.device, reported: bool) -> Run:
    model = mlp(where)
    optimizer = optimizer_for(model, "AdamW", "foreach", False)
    schedule = SCHEDULERS["CosineAnnealingLR"](optimizer)

    def step(x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return (loss, schedule.get_last_lr()[0]) if reported else loss

    watch = {"model": model, "optimizer": optimizer, "schedule": schedule}
    return Run(step, lambda i: (batch_of(where, i, 5, 6),), watch)


def scheduler_inside_only_on_some_steps(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = optimizer_for(model, "SGD", "single", False)
    schedule = SCHEDULERS["StepLR"](optimizer)

    def step(x: torch.Tensor, end_of_epoch: bool) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if end_of_epoch:
            schedule.step()
        return loss

    watch = {"model": model, "optimizer": optimizer, "schedule": schedule}
    return Run(step, lambda i: (batch_of(where, i, 5, 6), i % 3 == 2), watch)


def weight_decay_schedule(where: torch.device, name: str, form: str) -> Run:
    model = mlp(where)
    optimizer = optimizer_for(model, name, form, False)

    def after(i: int, result: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.05 + 0.04 * math.cos(i)

    return plain_run(where, model, optimizer, after=after)


def tensor_lr_written_in_place(where: torch.device, name: str, form: str) -> Run:
    model = mlp(where)
    optimizer = optimizer_for(model, name, form, True)

    def after(i: int, result: Any) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.9)

    return plain_run(where, model, optimizer, after=after)


def tensor_lr_replaced(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = optimizer_for(model, "AdamW", "single", True)

    def after(i: int, result: Any) -> None:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.01 / (i + 1), device=where)

    return plain_run(where, model, optimizer, after=after)


def lr_that_falls_to_zero(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = optimizer_for(model, "AdamW", "foreach", False)

    def after(i: int, result: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if i == 3 else 0.01

    return plain_run(where, model, optimizer, after=after)


CASES: list[Case] = [
    *(case(scheduler_outside, scheduler, "SGD", "foreach") for scheduler in SCHEDULERS),
    case(scheduler_outside, "CosineAnnealingLR", "AdamW", "single"),
    case(scheduler_outside, "OneCycleLR", "AdamW", "fused"),
    case(scheduler_outside, "StepLR", "Adagrad", "fused", devices=("cpu",)),
    *(
        case(scheduler_outside, "CosineAnnealingLR", name, form, True)
        for name, form in [("SGD", "single"), ("SGD", "fused"), ("AdamW", "single"), ("AdamW", "fused")]
    ),
    case(plateau_outside),
    *(case(scheduler_inside, scheduler, "SGD", "foreach") for scheduler in SCHEDULERS),
    case(scheduler_inside, "OneCycleLR", "AdamW", "fused"),
    case(scheduler_inside, "CosineAnnealingLR", "AdamW", "single", True),
    case(scheduler_inside_reached_by_closure, False),
    case(scheduler_inside_only_on_some_steps, graphs=3),
    *(case(weight_decay_schedule, "AdamW", form) for form in ("single", "foreach", "fused")),
    case(weight_decay_schedule, "SGD", "fused"),
    *(case(tensor_lr_written_in_place, name, form) for name in ("SGD", "AdamW") for form in ("single", "fused")),
    case(tensor_lr_replaced),
    case(lr_that_falls_to_zero),
]

OTHERS: list[Case] = [case(scheduler_inside_reached_by_closure, True)]
