"""What backward leaves: zero_grad in all places, accumulation, clipping, tied, frozen and unused parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cases.optimizers import FORMS
from cases.parts import TiedLanguageModel, WithUnusedParts, adamw, mlp, plain_run
from harness import Case, Run, batch_of, case, tokens_of


def zero_grad_placed(where: torch.device, place: str, set_to_none: bool) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        if place == "start":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss = model(x).square().mean()
        if place == "before_backward":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        optimizer.step()
        if place == "end":
            optimizer.zero_grad(set_to_none=set_to_none)
        return loss

    return plain_run(where, model, adamw(model), step)


def gradients_removed_by_hand(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        model[0].bias.grad = None
        optimizer.step()
        for p in model[3].parameters():
            p.grad = None
        return loss

    return plain_run(where, model, adamw(model), step)


def zero_grad_between_steps(where: torch.device, set_to_none: bool) -> Run:
    model = mlp(where)
    optimizer = adamw(model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return plain_run(
        where, model, optimizer, step, after=lambda i, result: optimizer.zero_grad(set_to_none=set_to_none)
    )


def gradients_assigned_by_hand(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        parameters = list(model.parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g / (1 + g.norm())
        optimizer.step()
        return loss

    return plain_run(where, model, adamw(model), step)


def gradients_changed_in_place(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[torch.Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        norms = []
        for p in model.parameters():
            p.grad.mul_(0.5)
            p.grad.data.add_(p.data, alpha=0.01)
            p.grad.nan_to_num_()
            norms.append(p.grad.norm())
        optimizer.step()
        optimizer.zero_grad()
        return norms

    return plain_run(where, model, adamw(model), step)


def several_backwards_in_one_step(where: torch.device, set_to_none: bool) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=x.device)
        for part in x.chunk(4):
            loss = model(part).square().mean() / 4
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        return total

    return plain_run(where, model, adamw(model), step, sizes=(8, 6))


def accumulation_over_steps(where: torch.device, every: int) -> Run:
    model = mlp(where)
    optimizer = adamw(model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, *, update: bool) -> torch.Tensor:
        loss = model(x).square().mean() / every
        loss.backward()
        if update:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return plain_run(where, model, optimizer, step, keywords=lambda i: {"update": i % every == every - 1})


def two_losses_over_one_graph(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = model(x)
        first, second = out.square().mean(), out.abs().sum()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        return first, second

    return plain_run(where, model, adamw(model), step)


def gradient_penalty(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out.square() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step)


def gradient_of_the_batch_returned(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor | None:
        x = x.clone().requires_grad_()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return x.grad

    return plain_run(where, model, adamw(model), step)


def backward_with_a_given_gradient(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        out.backward(gradient=torch.ones_like(out) * 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return out

    return plain_run(where, model, adamw(model), step)


def backward_into_some_parameters(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward(inputs=list(model[3].parameters()))
        optimizer.step()
        return loss

    return plain_run(where, model, adamw(model), step)


def clipped(where: torch.device, clip: Callable[[Any], Any]) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> dict[str, Any]:
        loss = model(x).square().sum()
        loss.backward()
        norm = clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "norm": norm}

    return plain_run(where, model, adamw(model), step)


CLIPS: dict[str, Callable[[Any], Any]] = {
    "by_norm": lambda p: nn.utils.clip_grad_norm_(p, 0.5),
    "by_norm_foreach": lambda p: nn.utils.clip_grad_norm_(p, 0.5, foreach=True),
    "by_norm_single": lambda p: nn.utils.clip_grad_norm_(p, 0.5, foreach=False),
    "by_largest": lambda p: nn.utils.clip_grad_norm_(p, 0.5, norm_type=float("inf")),
    "by_value": lambda p: nn.utils.clip_grad_value_(p, 0.05),
    "by_value_single": lambda p: nn.utils.clip_grad_value_(p, 0.05, foreach=False),
}


def tied_weights(where: torch.device) -> Run:
    model = TiedLanguageModel().to(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    optimizer = adamw(model)
    return Run(
        step,
        lambda i: (model, optimizer, tokens_of(where, i, 3, 7, vocabulary=11)),
        {"model": model, "optimizer": optimizer},
    )


def one_module_used_twice(where: torch.device) -> Run:
    inner = nn.Linear(6, 6)
    model = nn.Sequential(inner, nn.Tanh(), inner, nn.Linear(6, 2)).to(where)
    return plain_run(where, model, adamw(model))


def frozen_and_unused_parameters(where: torch.device, all_in_the_optimizer: bool) -> Run:
    model = WithUnusedParts().to(where)
    parameters = [p for p in model.parameters() if all_in_the_optimizer or p.requires_grad]
    return plain_run(where, model, torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1))


def parameters_outside_the_optimizer(where: torch.device) -> Run:
    model = mlp(where)
    return plain_run(where, model, torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9))


def parts_used_on_some_steps(where: torch.device, form: str) -> Run:
    model = nn.ModuleDict({"body": nn.Linear(6, 6), "a": nn.Linear(6, 2), "b": nn.Linear(6, 2)}).to(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **FORMS["Adam"][form][0])

    def step(x: torch.Tensor, head: str) -> torch.Tensor:
        loss = model[head](torch.tanh(model["body"](x))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watch = {"model": model, "optimizer": optimizer}
    return Run(step, lambda i: (batch_of(where, i, 5, 6), "ab"[i % 3 == 2]), watch)


def detached_and_stopped_parts(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        hidden = model[1](model[0](x))
        with torch.no_grad():
            target = model[3](hidden).softmax(-1)
        loss = F.cross_entropy(model[3](hidden.detach()), target) + hidden.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step)


def only_backward(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return Run(step, lambda i: (model, batch_of(where, i, 5, 6)), {"model": model})


def evaluation(where: torch.device, how: str) -> Run:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).to(where).eval()

    def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).softmax(-1)

    def without_gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x).softmax(-1)

    @torch.inference_mode()
    def inference(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).softmax(-1)

    step = {"plain": plain, "no_grad": without_gradient, "decorated": torch.no_grad()(plain), "inference": inference}
    return Run(step[how], lambda i: (model, batch_of(where, i, 5, 6)), {"model": model})


CASES: list[Case] = [
    *(
        case(zero_grad_placed, place, set_to_none)
        for place in ("start", "before_backward", "end")
        for set_to_none in (True, False)
    ),
    case(zero_grad_placed, "absent", True),
    case(gradients_removed_by_hand),
    case(zero_grad_between_steps, True),
    case(zero_grad_between_steps, False),
    case(gradients_assigned_by_hand),
    case(gradients_changed_in_place),
    case(several_backwards_in_one_step, True),
    case(several_backwards_in_one_step, False),
    case(accumulation_over_steps, 2, graphs=4),
    case(accumulation_over_steps, 3, graphs=6),
    case(two_losses_over_one_graph),
    case(gradient_penalty),
    case(gradient_of_the_batch_returned),
    case(backward_with_a_given_gradient),
    case(backward_into_some_parameters),
    *(case(clipped, clip, name=f"clipped-{name}") for name, clip in CLIPS.items()),
    case(tied_weights),
    case(one_module_used_twice),
    case(frozen_and_unused_parameters, True),
    case(frozen_and_unused_parameters, False),
    case(parameters_outside_the_optimizer),
    *(case(parts_used_on_some_steps, form, graphs=5) for form in ("single", "foreach", "fused")),
    case(detached_and_stopped_parts),
    case(only_backward),
    *(case(evaluation, how, graphs=1) for how in ("plain", "no_grad", "decorated")),
]

OTHERS: list[Case] = [case(evaluation, "inference", graphs=None)]
