"""Buffers written in forward, every way to draw random numbers, and activation checkpoints that draw them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from cases.parts import adamw, plain_run
from harness import Case, Run, batch_of, case


def batch_norm(where: torch.device, dims: int, training: bool, momentum: float | None) -> Run:
    if dims == 1:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(), nn.Linear(8, 2))
        sizes: tuple[int, ...] = (5, 6)
    else:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Conv2d(4, 2, 3))
        sizes = (2, 3, 6, 6)
    model = model.to(where).train(training)
    return plain_run(where, model, adamw(model), sizes=sizes)


def batch_norm_without_statistics(where: torch.device) -> Run:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 2)).to(where)
    return plain_run(where, model, adamw(model))


def frozen_batch_norm(where: torch.device) -> Run:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).eval().requires_grad_(False), nn.Linear(8, 2)).to(where)
    return plain_run(where, model, adamw(model))


def batch_norm_called_twice_in_a_step(where: torch.device) -> Run:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() + model(x * 2).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step)


class Counting(nn.Module):
    """Buffers written in place: a counter, a running mean, a ring of the last rows, a buffer outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("ring", torch.zeros(3, 6))
        self.register_buffer("hidden", torch.ones(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls += 1
            self.mean.lerp_(x.mean(0), 0.1)
            self.ring[1:] = self.ring[:-1].clone()
            self.ring[0] = x[0]
            self.hidden.mul_(0.9).add_(x.var(0), alpha=0.1)
        return self.inner((x - self.mean) / self.hidden)


class Rebinding(nn.Module):
    """Buffers that forward binds to new tensors, one of which starts as None."""

    mean: torch.Tensor
    last: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x - self.mean)
        if self.last is not None:
            out = out + self.last.sum()
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.last = out.detach()
        return out


def module_with_buffers(where: torch.device, kind: Callable[[], nn.Module]) -> Run:
    model = kind().to(where)
    return plain_run(where, model, adamw(model))


def spectral_norm(where: torch.device) -> Run:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 2)).to(where)
    return plain_run(where, model, adamw(model))


def weight_norm(where: torch.device) -> Run:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 2)).to(where)
    return plain_run(where, model, adamw(model))


def random_in_the_step(where: torch.device, draw: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    model = nn.Linear(6, 6).to(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = draw(model(x))
        loss = drawn.float().square().mean() + model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, drawn

    return plain_run(where, model, adamw(model), step)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_of_a_half": lambda x: F.dropout(x),
    "dropout_of_a_transposed_tensor": lambda x: F.dropout(x.t(), 0.3),
    "dropout_inplace": lambda x: F.dropout(x + 0, 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(0), 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "rand": lambda x: x * torch.rand(x.shape, device=x.device),
    "randn": lambda x: x + torch.randn(5, 6, device=x.device),
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randint": lambda x: x * torch.randint(0, 3, (5, 6), device=x.device),
    "randint_like": lambda x: x * torch.randint_like(x, 3),
    "randperm": lambda x: x[torch.randperm(5, device=x.device)],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.7),
    "bernoulli_of_a_half": lambda x: x * torch.empty_like(x).bernoulli_(),
    "bernoulli_by_a_tensor": lambda x: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "bernoulli_through_a_transposed_view": lambda x: x * torch.zeros(6, 5, device=x.device).t().bernoulli_(0.3),
    "uniform_through_a_strided_view": lambda x: x + torch.zeros(5, 12, device=x.device)[:, ::2].uniform_(),
    "randn_like_a_transposed_tensor": lambda x: x + torch.randn_like(x.t()).t(),
    "normal": lambda x: torch.normal(x.detach(), 0.1) * x,
    "normal_": lambda x: x + torch.empty_like(x).normal_(0.0, 0.5),
    "uniform_": lambda x: x + torch.empty(6, device=x.device).uniform_(-1, 1),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(6, device=x.device), 4)],
    "distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    "cpu_then_device": lambda x: x * torch.rand(5, 6).to(x.device),
}


def dropout_module(where: torch.device) -> Run:
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Linear(32, 2)).to(where)
    return plain_run(where, model, adamw(model))


def generator_of_the_users_own(where: torch.device, form: str) -> Run:
    model = nn.Linear(6, 6).to(where)
    generator = torch.Generator(device=where).manual_seed(7)

    def mask_like(x: torch.Tensor) -> torch.Tensor:
        if form == "rand":
            return torch.rand(x.shape, device=x.device, generator=generator)
        if form == "bernoulli_":
            return torch.empty_like(x).bernoulli_(0.5, generator=generator)
        return torch.normal(0.0, 1.0, (5, 6), device=x.device, generator=generator)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        loss = (model(x + noise) * mask_like(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step, watch={"generator": generator})


def generator_as_an_argument(where: torch.device) -> Run:
    model = nn.Linear(6, 6).to(where)
    generator = torch.Generator(device=where).manual_seed(7)
    optimizer = adamw(model)

    def step(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        loss = (model(x) * torch.rand(x.shape, device=x.device, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watch = {"model": model, "optimizer": optimizer, "generator": generator}
    return Run(step, lambda i: (batch_of(where, i, 5, 6), generator), watch)


def reseeded_between_steps(where: torch.device) -> Run:
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.4), nn.Linear(32, 2)).to(where)
    return plain_run(where, model, adamw(model), after=lambda i, result: torch.manual_seed(i // 3))


def random_numbers_drawn_between_steps(where: torch.device) -> Run:
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.4), nn.Linear(32, 2)).to(where)
    return plain_run(where, model, adamw(model), after=lambda i, result: torch.rand(i + 1, device=where))


class Checkpointed(nn.Module):
    """Two blocks with dropout, recomputed in the backward."""

    def __init__(self, use_reentrant: bool, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 16)) for _ in range(2)
        )
        self.last = nn.Linear(16, 2)
        self.options = {"use_reentrant": use_reentrant, **options}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + F.dropout(checkpoint(block, x, **self.options), 0.1)
        return self.last(x)


def checkpointed(where: torch.device, use_reentrant: bool) -> Run:
    model = Checkpointed(use_reentrant).to(where)
    return plain_run(where, model, adamw(model))


def checkpointed_under_autocast(where: torch.device, use_reentrant: bool) -> Run:
    model = Checkpointed(use_reentrant).to(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(where.type, dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step)


def checkpointed_with_one_block_inside_another(where: torch.device) -> Run:
    inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3))
    outer = nn.Linear(6, 6)
    model = nn.ModuleList([inner, outer]).to(where)

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return outer(torch.tanh(checkpoint(inner, x, use_reentrant=False)))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = checkpoint(recomputed, x, use_reentrant=False).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step)


def checkpointed_sequence(where: torch.device) -> Run:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4))).to(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = checkpoint_sequential(model, 2, x, use_reentrant=False).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, blocks, adamw(blocks), step)


def checkpointed_batch_norm(where: torch.device) -> Run:
    block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = nn.Sequential(block, nn.Linear(6, 2)).to(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model[1](checkpoint(model[0], x, use_reentrant=False)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step)


def seeded_in_the_step(where: torch.device) -> Run:
    model = nn.Linear(6, 6).to(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        loss = F.dropout(model(x), 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step)


def forked_randomness(where: torch.device) -> Run:
    model = nn.Linear(6, 6).to(where)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[] if where.type == "cpu" else [0]):
            torch.manual_seed(3)
            noise = torch.randn_like(x)
        loss = F.dropout(model(x + noise), 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_run(where, model, adamw(model), step)


CASES: list[Case] = [
    *(case(batch_norm, dims, training, 0.1) for dims in (1, 2) for training in (True, False)),
    case(batch_norm, 1, True, None),
    case(batch_norm, 2, True, None),
    case(batch_norm_without_statistics),
    case(frozen_batch_norm),
    case(batch_norm_called_twice_in_a_step),
    *(case(module_with_buffers, kind, name=f"buffers-{kind.__name__}") for kind in (Counting, Rebinding)),
    case(spectral_norm),
    case(weight_norm),
    *(case(random_in_the_step, draw, name=f"random-{name}", steps=4) for name, draw in DRAWS.items()),
    case(dropout_module),
    *(case(generator_of_the_users_own, form) for form in ("rand", "bernoulli_", "normal")),
    case(generator_as_an_argument),
    case(reseeded_between_steps),
    case(random_numbers_drawn_between_steps),
    case(checkpointed, False),
    case(checkpointed, True),
    case(checkpointed_under_autocast, False),
    case(checkpointed_under_autocast, True),
    case(checkpointed_with_one_block_inside_another),
    case(checkpointed_sequence),
    case(checkpointed_batch_norm),
]

OTHERS: list[Case] = [case(seeded_in_the_step, graphs=None), case(forked_randomness, graphs=None)]
