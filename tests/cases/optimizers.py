"""Optimizers: every one in every form that the device offers, several groups, several optimizers, the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cases.parts import adamw, mlp, plain_run, train_step
from harness import Case, Run, batch_of, case

EVERYWHERE = ("cpu", "cuda")

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
        {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
    ],
    "Adam": [{"lr": 0.01}, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}, {"lr": 0.01, "maximize": True}],
    "AdamW": [{"lr": 0.01}, {"lr": 0.01, "amsgrad": True}],
    "RMSprop": [{"lr": 0.01}, {"lr": 0.01, "momentum": 0.5, "centered": True, "weight_decay": 0.1}],
    "Adagrad": [{"lr": 0.1}, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}],
    "NAdam": [{"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}],
    "Adafactor": [{"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.1, "maximize": True}],
    "Muon": [{"lr": 0.01}, {"lr": 0.01, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}],
}

CHANGED_BETWEEN_STEPS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-6},
    "RMSprop": {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1},
    "NAdam": {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "momentum_decay": 0.01},
    "Adafactor": {"lr": 0.01, "weight_decay": 0.1},
    "Muon": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
}

SINGLE = {"foreach": False}
FOREACH = {"foreach": True}
FUSED = {"fused": True}
CAPTURABLE = {"foreach": False, "capturable": True}
CAPTURABLE_FOREACH = {"foreach": True, "capturable": True}

# What torch takes at construction: Muon has no such arguments, RMSprop, NAdam and Adafactor have no fused form, and
# Adagrad's exists on CPU only.
FORMS: dict[str, dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    **{
        name: {"single": (SINGLE, EVERYWHERE), "foreach": (FOREACH, EVERYWHERE), "fused": (FUSED, EVERYWHERE)}
        for name in ("SGD", "Adam", "AdamW")
    },
    **{name: {"single": (SINGLE, EVERYWHERE), "foreach": (FOREACH, EVERYWHERE)} for name in ("RMSprop", "NAdam")},
    "Adagrad": {"single": (SINGLE, EVERYWHERE), "foreach": (FOREACH, EVERYWHERE), "fused": (FUSED, ("cpu",))},
    "Adafactor": {"single": (SINGLE, EVERYWHERE), "foreach": (FOREACH, EVERYWHERE)},
    "Muon": {"default": ({}, EVERYWHERE)},
}
for _name in ("Adam", "AdamW", "RMSprop", "NAdam"):
    FORMS[_name]["capturable"] = (CAPTURABLE, ("cuda",))
    FORMS[_name]["capturable_foreach"] = (CAPTURABLE_FOREACH, ("cuda",))


def model_for(name: str, where: torch.device) -> nn.Module:
    """Muon updates matrices only."""
    return mlp(where, bias=name != "Muon")


def build(name: str, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """A torch optimizer by name."""
    found: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    return found(parameters, **options)


def optimizer_case(name: str, form: str, variant: int) -> Case:
    options, devices = FORMS[name][form]
    settings = VARIANTS[name][variant]

    def make(where: torch.device) -> Run:
        model = model_for(name, where)
        return plain_run(where, model, build(name, model.parameters(), **settings, **options))

    said = "_".join(f"{key}={value}" for key, value in settings.items() if key != "lr")
    return Case("-".join(filter(None, [name, form, said])), make, devices=devices)


def hyper_parameter_case(name: str, form: str) -> Case:
    """Every hyper-parameter takes a new value after every step; that is never a reason for a new graph."""
    options, devices = FORMS[name][form]
    settings = CHANGED_BETWEEN_STEPS[name]

    def make(where: torch.device) -> Run:
        model = model_for(name, where)
        optimizer = build(name, model.parameters(), **settings, **options)

        def after(i: int, result: Any) -> None:
            for group in optimizer.param_groups:
                for key, value in settings.items():
                    factor = 1 - 0.03 * (i + 1)
                    group[key] = tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor

        return plain_run(where, model, optimizer, after=after)

    return Case(f"{name}-{form}-hyper_parameters_changed_every_step", make, devices=devices)


def several_groups(where: torch.device, name: str, form: str) -> Run:
    model = mlp(where)
    options = FORMS[name][form][0]
    groups = [
        {"params": [model[0].weight], "lr": 0.02, "weight_decay": 0.2},
        {"params": [model[0].bias, model[3].bias], "weight_decay": 0.0},
        {"params": [model[3].weight]},
    ]
    return plain_run(where, model, build(name, groups, lr=0.01, weight_decay=0.1, **options))


def two_optimizers_and_two_modules(where: torch.device, form: str) -> Run:
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6)).to(where)
    critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).to(where)
    options = FORMS["Adam"][form][0]
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9), **options)
    critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-2)

    def step(real: torch.Tensor) -> dict[str, torch.Tensor]:
        noise = torch.randn(real.shape[0], 3, device=real.device)
        critic_optimizer.zero_grad()
        fake = generator(noise)
        ones, zeros = torch.ones(real.shape[0], 1, device=where), torch.zeros(real.shape[0], 1, device=where)
        critic_loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        critic_loss = critic_loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        critic_loss.backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        generator_loss.backward()
        generator_optimizer.step()
        return {"critic": critic_loss.detach(), "generator": generator_loss.detach()}

    watch = {
        "generator": generator,
        "critic": critic,
        "generator_optimizer": generator_optimizer,
        "critic_optimizer": critic_optimizer,
    }
    return Run(step, lambda i: (batch_of(where, i, 5, 6),), watch)


def two_optimizers_over_one_module(where: torch.device) -> Run:
    model = mlp(where)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1, momentum=0.9)
    vectors = torch.optim.Adam([p for p in model.parameters() if p.ndim == 1], lr=0.01)

    def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    watch = {"model": model, "matrices": matrices, "vectors": vectors}
    return Run(step, lambda i: (model, [matrices, vectors], batch_of(where, i, 5, 6)), watch)


class Lion(torch.optim.Optimizer):
    """Written under no_grad, with tensor state only."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                b1, b2 = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(state["exp_avg"] * b1 + p.grad * (1 - b1)), alpha=-group["lr"])
                state["exp_avg"].mul_(b2).add_(p.grad, alpha=1 - b2)


class OldAdam(torch.optim.Optimizer):
    """Written the way it was in 2018: `p.data`, and a step count that is a Python int."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.data, self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                state["step"] += 1
                state["exp_avg"].mul_(0.9).add_(grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
                denominator = state["exp_avg_sq"].sqrt().add_(1e-8)
                size = group["lr"] * math.sqrt(1 - 0.999 ** state["step"]) / (1 - 0.9 ** state["step"])
                p.data.addcdiv_(state["exp_avg"], denominator, value=-size)


class TensorStepAdam(torch.optim.Optimizer):
    """State that is re-assigned rather than written in place, the step count a tensor, a norm over all parameters."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 1 / torch.stack([g.norm() for g in grads]).norm().clamp(min=1.0)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "step" not in state:
                    state["step"] = torch.zeros((), device=p.device)
                    state["average"] = torch.zeros_like(p)
                state["step"] = state["step"] + 1
                state["average"] = torch.lerp(state["average"], p.grad * scale, 0.1)
                corrected = state["average"] / (1 - 0.9 ** state["step"])
                p -= group["lr"] * corrected


def users_own_optimizer(where: torch.device, kind: Callable[..., torch.optim.Optimizer]) -> Run:
    model = mlp(where)
    optimizer = kind(model.parameters(), lr=0.01)

    def after(i: int, result: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9**i

    return plain_run(where, model, optimizer, after=after)


def update_without_an_optimizer_object(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * g
        return loss

    return Run(step, lambda i: (model, batch_of(where, i, 5, 6)), {"model": model})


def adafactor_whose_relative_step_overtakes_lr(where: torch.device) -> Run:
    model = mlp(where)
    return plain_run(where, model, torch.optim.Adafactor(model.parameters(), lr=0.45))


def optimizer_in_its_default_form(where: torch.device, name: str) -> Run:
    model = mlp(where)
    return plain_run(where, model, build(name, model.parameters(), lr=0.01))


def named_parameters_in_the_optimizer(where: torch.device) -> Run:
    model = mlp(where)
    return plain_run(where, model, torch.optim.AdamW(model.named_parameters(), lr=0.01))


def optimizer_called_twice_in_a_step(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[torch.Tensor]:
        return [train_step(model, optimizer, half) for half in x.split(4)]

    return plain_run(where, model, adamw(model), step, sizes=(8, 6))


def step_that_asks_the_optimizer_for_its_lr(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> dict[str, Any]:
        loss = model(x).square().mean() * optimizer.param_groups[0]["lr"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "lr": optimizer.param_groups[0]["lr"]}

    optimizer = adamw(model)

    def after(i: int, result: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9

    return plain_run(where, model, optimizer, step, after=after)


CASES: list[Case] = [
    *(
        optimizer_case(name, form, variant)
        for name, forms in FORMS.items()
        for form in forms
        for variant in range(len(VARIANTS[name]))
    ),
    *(hyper_parameter_case(name, form) for name, forms in FORMS.items() for form in forms),
    *(case(several_groups, name, form) for name in ("SGD", "AdamW") for form in ("single", "foreach", "fused")),
    case(several_groups, "Adafactor", "single"),
    *(case(two_optimizers_and_two_modules, form) for form in ("single", "foreach", "fused")),
    case(two_optimizers_over_one_module),
    *(
        case(users_own_optimizer, kind, name=f"users_own_optimizer-{kind.__name__}")
        for kind in (Lion, OldAdam, TensorStepAdam)
    ),
    case(update_without_an_optimizer_object),
    case(adafactor_whose_relative_step_overtakes_lr, graphs=3),
    *(case(optimizer_in_its_default_form, name) for name in ("SGD", "AdamW", "Adafactor")),
    case(named_parameters_in_the_optimizer),
    case(optimizer_called_twice_in_a_step),
    case(step_that_asks_the_optimizer_for_its_lr),
]

# Not on the list of what must be captured: equal to eager or refused with a code, never silently wrong.
OTHERS: list[Case] = [
    case(optimizer_in_its_default_form, name, graphs=None, options={"max_recompiles": 20})
    for name in ("RAdam", "Adadelta", "Adamax", "ASGD", "Rprop")
]
