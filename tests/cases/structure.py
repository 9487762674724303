"""How a step is written: where it finds its objects, averages, constants, own ops, and all batches and results."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from cases import batches_and_results
from cases.parts import adamw, mlp, plain_run, train_step
from harness import Case, Run, batch_of, case


def reached_by_closure(where: torch.device) -> Run:
    model = mlp(where, dropout=0.2)
    optimizer = adamw(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        return train_step(model, optimizer, x)

    return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "optimizer": optimizer})


MODEL: nn.Module
OPTIMIZER: torch.optim.Optimizer


def step_on_globals(x: torch.Tensor) -> torch.Tensor:
    loss = MODEL(x).square().mean()
    loss.backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()
    return loss


def reached_by_globals(where: torch.device) -> Run:
    global MODEL, OPTIMIZER
    MODEL = mlp(where)
    OPTIMIZER = adamw(MODEL)
    return Run(step_on_globals, lambda i: (batch_of(where, i, 5, 6),), {"model": MODEL, "optimizer": OPTIMIZER})


class Trainer:
    """The object most training loops grow into."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.model = mlp(where)
        self.optimizer = adamw(self.model)
        self.limits = {"norm": 0.5}
        self.weight = torch.ones(4, device=where)

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        return (self.model(x) * self.weight).square().mean()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss_of(x)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.limits["norm"])
        self.optimizer.step()
        return loss

    def run(self) -> Run:
        """This trainer's bound method as the step."""
        watch = {"model": self.model, "optimizer": self.optimizer, "weight": self.weight}
        return Run(self.step, lambda i: (batch_of(self.where, i, 5, 6),), watch)


def reached_by_self(where: torch.device) -> Run:
    return Trainer(where).run()


class CallableStep(Trainer):
    """An object that is itself the step."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)


def callable_object(where: torch.device) -> Run:
    trainer = CallableStep(where)
    return Run(trainer, trainer.run().arguments, trainer.run().watch)


def partial_function(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)
    step = functools.partial(train_step, model, optimizer)
    return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "optimizer": optimizer})


@dataclass
class TrainState:
    """Objects in an argument that is no pytree."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: nn.Module


def objects_inside_an_argument(where: torch.device) -> Run:
    model = mlp(where)
    state = TrainState(model, adamw(model), copy.deepcopy(model))

    def step(state: TrainState, x: torch.Tensor) -> torch.Tensor:
        loss = train_step(state.model, state.optimizer, x)
        with torch.no_grad():
            for average, p in zip(state.ema.parameters(), state.model.parameters(), strict=True):
                average.lerp_(p, 0.1)
        return loss

    watch = {"model": model, "optimizer": state.optimizer, "ema": state.ema}
    return Run(step, lambda i: (state, batch_of(where, i, 5, 6)), watch)


def keyword_and_default_arguments(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)

    def step(*inputs: torch.Tensor, weight: float = 0.5, **objects: Any) -> torch.Tensor:
        loss = sum(objects["model"](x).square().mean() * weight for x in inputs)
        loss.backward()
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()
        return loss

    return Run(
        step,
        lambda i: (batch_of(where, i, 5, 6), batch_of(where, 50 + i, 3, 6)),
        {"model": model, "optimizer": optimizer},
        keywords=lambda i: {"model": model, "optimizer": optimizer},
    )


def bare_parameters(where: torch.device) -> Run:
    weight = nn.Parameter(torch.randn(6, 3, device=where))
    scale = torch.ones(3, device=where, requires_grad=True)
    optimizer = torch.optim.Adam([weight, scale], lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = ((x @ weight) * scale).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"weight": weight, "scale": scale, "optimizer": optimizer})


def tensor_in_closure(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)
    weights = {"class": torch.ones(4, device=where)}

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * weights["class"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def after(i: int, result: Any) -> None:
        if i == 3:
            weights["class"].mul_(0.5)
        if i == 6:
            weights["class"] = torch.arange(4.0, device=where)

    return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "optimizer": optimizer}, after=after)


def average_by_lerp(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)
    ema = copy.deepcopy(model).requires_grad_(False)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = train_step(model, optimizer, x)
        with torch.no_grad():
            for average, p in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.1)
        return loss

    watch = {"model": model, "optimizer": optimizer, "ema": ema}
    return Run(step, lambda i: (batch_of(where, i, 5, 6),), watch)


def average_by_foreach(where: torch.device) -> Run:
    model = mlp(where)
    optimizer = adamw(model)
    shadow = [p.detach().clone() for p in model.parameters()]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = train_step(model, optimizer, x)
        torch._foreach_mul_(shadow, 0.9)
        torch._foreach_add_(shadow, [p.detach() for p in model.parameters()], alpha=0.1)
        return loss

    watch = {"model": model, "optimizer": optimizer, "shadow": shadow}
    return Run(step, lambda i: (batch_of(where, i, 5, 6),), watch)


def averaged_model(where: torch.device, how: str) -> Run:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(where)
    optimizer = adamw(model)
    options: dict[str, dict[str, Any]] = {
        "equal": {},
        "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        "ema_single": {"avg_fn": get_ema_avg_fn(0.9)},
        "ema_with_buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    }
    averaged = AveragedModel(model, **options[how])

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = train_step(model, optimizer, x)
        averaged.update_parameters(model)
        return loss

    watch = {"model": model, "optimizer": optimizer, "averaged": averaged}
    return Run(step, lambda i: (batch_of(where, i, 5, 6),), watch)


def teacher_and_student(where: torch.device) -> Run:
    teacher, student = mlp(where, dropout=0.3).eval(), mlp(where, dropout=0.3)
    optimizer = adamw(student)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = F.kl_div(student(x).log_softmax(-1), target, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watch = {"teacher": teacher, "student": student, "optimizer": optimizer}
    return Run(step, lambda i: (batch_of(where, i, 5, 6),), watch)


def constants_made_in_the_step(where: torch.device) -> Run:
    model = mlp(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([0.1, 0.2, 0.3, 0.4], device=x.device)
        weights[1] += 1
        mask = torch.ones(4, 4, device=x.device).tril().bool()
        index = torch.as_tensor([0, 2], device=x.device)
        out = model(x)
        loss = (out * weights).square().mean() + (out @ mask.float())[:, index].sum() * 0.1
        loss = loss + torch.arange(4, device=x.device).float().mul(out).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step)


def results_written_to_an_out_argument(where: torch.device) -> Run:
    model = mlp(where)
    total = torch.zeros(4, device=where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = train_step(model, optimizer, x)
        with torch.no_grad():
            torch.add(total, model(x).mean(0), alpha=0.5, out=total)
            torch.maximum(total, torch.zeros_like(total), out=total)
            torch.mul(total[:2], 0.5, out=total[:2])
        return loss

    return plain_run(where, model, adamw(model), step, watch={"total": total})


class ScaledTanh(torch.autograd.Function):
    """Saves tensors and a number on ctx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, power: float) -> torch.Tensor:
        y = torch.tanh(x * scale)
        ctx.save_for_backward(x, scale, y)
        ctx.power = power
        return y * power

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, scale, y = ctx.saved_tensors
        inner = grad * ctx.power * (1 - y * y)
        return inner * scale, (inner * x).sum(0), None


class StraightThrough(torch.autograd.Function):
    """The newer form, and a gradient that is not the derivative."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def custom_autograd_functions(where: torch.device) -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return StraightThrough.apply(ScaledTanh.apply(self.inner(x), self.scale, 1.5) * 4)

    model = Model().to(where)
    return plain_run(where, model, adamw(model))


@torch.library.custom_op("wholestep_tests::soft_clamp", mutates_args=())
def soft_clamp(x: torch.Tensor, limit: float) -> torch.Tensor:
    return limit * torch.tanh(x / limit)


@soft_clamp.register_fake
def _(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save_for_soft_clamp(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.limit = inputs[1]


def _soft_clamp_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (output,) = ctx.saved_tensors
    return grad * (1 - (output / ctx.limit).square()), None


soft_clamp.register_autograd(_soft_clamp_backward, setup_context=_save_for_soft_clamp)


@torch.library.custom_op("wholestep_tests::accumulate_", mutates_args=("total",))
def accumulate_(total: torch.Tensor, value: torch.Tensor) -> None:
    total.add_(value.sum(0))


@accumulate_.register_fake
def _(total: torch.Tensor, value: torch.Tensor) -> None:
    return None


class WithCustomOps(nn.Module):
    """One op that returns a new tensor and one that writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = soft_clamp(self.inner(x), 0.7)
        accumulate_(self.total, out.detach())
        return out + self.total.mean()


def custom_library_ops(where: torch.device) -> Run:
    model = WithCustomOps().to(where)
    return plain_run(where, model, adamw(model))


CASES: list[Case] = [
    case(reached_by_closure),
    case(reached_by_globals),
    case(reached_by_self),
    case(callable_object),
    case(partial_function),
    case(objects_inside_an_argument),
    case(keyword_and_default_arguments),
    case(bare_parameters),
    case(tensor_in_closure, graphs=3),
    case(average_by_lerp),
    case(average_by_foreach),
    *(case(averaged_model, how, graphs=3) for how in ("equal", "ema", "ema_single", "ema_with_buffers")),
    case(teacher_and_student),
    *batches_and_results.CASES,
    case(constants_made_in_the_step),
    case(results_written_to_an_out_argument),
    case(custom_autograd_functions),
    case(custom_library_ops),
]
