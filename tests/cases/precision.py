"""Autocast, GradScaler with steps that it skips, parameters in low precision, float64 and complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cases.optimizers import FORMS, OldAdam, build
from cases.parts import adamw, mlp, plain_run
from harness import Case, Run, batch_of, case


def autocast(where: torch.device, dtype: torch.dtype, form: str) -> Run:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).to(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(where.type, dtype=dtype):
            out = model(x)
            loss = nn.functional.cross_entropy(out, out.detach().argmax(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, build("AdamW", model.parameters(), lr=0.01, **FORMS["AdamW"][form][0]), step)


def autocast_with_a_region_switched_off(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(where.type, dtype=torch.bfloat16):
            hidden = model[0](x)
            with torch.autocast(where.type, enabled=False):
                out = model[3](model[1](hidden.float()))
            twice = model[0](x) + hidden
        loss = out.square().mean() + twice.float().abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, twice

    return plain_run(where, model, adamw(model), step)


def autocast_as_a_decorator(where: torch.device) -> Run:
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)

        @torch.autocast(where.type, dtype=torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    model = Decorated().to(where)
    return plain_run(where, model, adamw(model))


def autocast_around_the_whole_call(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)

    @torch.autocast(where.type, dtype=torch.bfloat16)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "optimizer": optimizer})


def batch_with_infinities(where: torch.device, i: int, at: tuple[int, ...]) -> torch.Tensor:
    x = batch_of(where, i, 5, 6)
    return x.index_fill(0, torch.tensor([2], device=where), float("inf")) if i in at else x


SCALED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD-single": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD-plain-fused": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    "Adam-single": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "OldAdam": lambda p: OldAdam(p, lr=0.01),
}


# Eager's fused SGD leaves the momentum of a skipped first step uninitialised: nothing to compare with.
SKIPPABLE_FIRST = ("SGD-single", "SGD-plain-fused", "Adam-single", "AdamW-foreach", "AdamW-fused")


def scaler_for(where: torch.device, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(where.type, init_scale=2.0**10, growth_interval=3, **options)


def grad_scaler(where: torch.device, optimizer_name: str, skipped: tuple[int, ...], clip: bool) -> Run:
    model = mlp(where)
    optimizer = SCALED[optimizer_name](model.parameters())
    scaler = scaler_for(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(where.type, dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss

    watch = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Run(step, lambda i: (model, optimizer, scaler, batch_with_infinities(where, i, skipped)), watch)


def grad_scaler_in_closure_with_two_optimizers(where: torch.device) -> Run:
    body, head = nn.Linear(6, 8).to(where), nn.Linear(8, 2).to(where)
    body_optimizer = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
    head_optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    scaler = scaler_for(where)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = head(torch.tanh(body(x))).square().mean()
        scaler.scale(loss).backward()
        for optimizer in (body_optimizer, head_optimizer):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        return loss

    watch = {
        "body": body,
        "head": head,
        "body_optimizer": body_optimizer,
        "head_optimizer": head_optimizer,
        "scaler": scaler,
    }
    return Run(step, lambda i: (batch_with_infinities(where, i, (4,)),), watch)


def grad_scaler_switched_off(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(where.type, enabled=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    watch = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Run(step, lambda i: (batch_of(where, i, 5, 6),), watch)


def grad_scaler_set_between_steps(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)
    scaler = scaler_for(where)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    def after(i: int, result: Any) -> None:
        if i == 3:
            scaler.update(new_scale=64.0)
        if i == 5:
            scaler.set_growth_factor(1.5)
        if i == 7:
            scaler.load_state_dict(scaler.state_dict())

    watch = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Run(step, lambda i: (batch_of(where, i, 5, 6),), watch, after=after)


def parameters_of_type(where: torch.device, dtype: torch.dtype, name: str, form: str) -> Run:
    model = mlp(where, dtype=dtype)
    optimizer = build(name, model.parameters(), lr=0.01, weight_decay=0.1, **FORMS[name][form][0])
    return plain_run(where, model, optimizer, dtype=dtype)


def parameters_of_several_types(where: torch.device) -> Run:
    first, last = nn.Linear(6, 8, dtype=torch.bfloat16), nn.Linear(8, 2)
    model = nn.ModuleList([first, last]).to(where)

    def step(model: nn.ModuleList, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model[1](torch.tanh(model[0](x.bfloat16())).float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step)


def master_weights_by_hand(where: torch.device) -> Run:
    model = mlp(where, dtype=torch.bfloat16)
    master = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(master, lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        for whole, p in zip(master, model.parameters(), strict=True):
            whole.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for whole, p in zip(master, model.parameters(), strict=True):
                p.copy_(whole)
        model.zero_grad()
        return loss

    watch = {"model": model, "optimizer": optimizer, "master": master}
    return Run(step, lambda i: (batch_of(where, i, 5, 6, dtype=torch.bfloat16),), watch)


class ComplexLayer(nn.Module):
    """A complex matrix, as in spectral layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.fft.fft(x, dim=-1) @ self.weight).abs() + self.bias


def complex_parameters(where: torch.device, name: str, form: str) -> Run:
    model = ComplexLayer().to(where)
    return plain_run(where, model, build(name, model.parameters(), lr=0.01, **FORMS[name][form][0]))


CASES: list[Case] = [
    *(case(autocast, torch.bfloat16, form) for form in ("single", "foreach", "fused")),
    case(autocast, torch.float16, "foreach", devices=("cuda",)),
    case(autocast_with_a_region_switched_off),
    case(autocast_as_a_decorator),
    case(autocast_around_the_whole_call),
    *(case(grad_scaler, name, (), False) for name in SCALED if name != "OldAdam"),
    *(case(grad_scaler, name, (0, 4, 5), False, graphs=4) for name in SKIPPABLE_FIRST),
    case(grad_scaler, "SGD-fused", (4, 5), False),
    case(grad_scaler, "AdamW-foreach", (4,), True),
    case(grad_scaler, "SGD-single", (0, 1, 6), True, graphs=4),
    case(grad_scaler, "SGD-fused", (1, 6), True),
    case(grad_scaler, "AdamW-fused", (0, 5), True, graphs=4),
    case(grad_scaler_in_closure_with_two_optimizers),
    case(grad_scaler_switched_off),
    case(grad_scaler_set_between_steps, graphs=4),
    *(
        case(parameters_of_type, dtype, "AdamW", form)
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
        for form in ("single", "foreach", "fused")
    ),
    *(case(parameters_of_type, torch.bfloat16, name, "foreach") for name in ("SGD", "Adafactor")),
    case(parameters_of_several_types),
    case(master_weights_by_hand),
    *(case(complex_parameters, name, form) for name in ("SGD", "Adam", "AdamW") for form in ("single", "foreach")),
]

OTHERS: list[Case] = [
    case(grad_scaler, "OldAdam", (4,), False, graphs=None, options={"max_recompiles": 20}),
]
