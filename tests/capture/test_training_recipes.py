"""Recipes that people train by: sharpness-aware steps, momentum encoders, distributions in closures, late models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MultivariateNormal, Normal, kl_divergence
from torch.optim import Optimizer

import wholestep as ws
from docs.rows.page import refused, same, train


class SAM(Optimizer):
    """Sharpness-aware minimisation, as in the implementation that most people use."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in parameters]), p=2)
        for p in parameters:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_sharpness_aware_steps_with_a_closure(base: Callable[..., Optimizer]) -> None:
    def body(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        def closure() -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        return loss

    same(body, steps=6, optimizer=lambda model: SAM(model.parameters(), base, lr=0.1))


class MomentumContrast(nn.Module):
    """A queue of keys with a pointer, and an encoder that follows another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.query = nn.Linear(6, 4)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 20))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def keep(self, keys: Tensor) -> None:
        start = int(self.pointer)
        assert 20 % len(keys) == 0
        self.queue[:, start : start + len(keys)] = keys.T
        self.pointer[0] = (start + len(keys)) % 20

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            for followed, p in zip(self.query.parameters(), self.key.parameters(), strict=True):
                p.data = p.data * 0.9 + followed.data * 0.1
            key = self.key(x)
        result = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().detach()], 1)
        self.keep(key)
        return result


def test_the_pointer_of_a_queue_needs_no_graph_for_each_value() -> None:
    same(
        train,
        steps=10,
        model=MomentumContrast,
        optimizer=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
    )


def test_parameters_that_swap_their_data() -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Any:
        loss = train(model, optimizer, x)
        first, last = model[0].weight, model[2].weight
        first.data, last.data = last.data, first.data
        with torch.no_grad():
            first.mul_(1.5)
        return loss, first.sum() - last.sum(), first.sum(), last.sum()

    same(body, steps=6, model=build)


def test_a_result_that_would_share_the_memory_of_a_parameter_is_refused() -> None:
    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        new = model[0].weight * 0.5
        model[0].weight.data = new.detach()
        train(model, optimizer, x)
        return new.detach()

    refused("WS-PARAM-DATA", body)


def test_distributions_in_closures() -> None:
    prior = Normal(torch.zeros(4), torch.ones(4))
    full = MultivariateNormal(torch.zeros(4), torch.eye(4))

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        h = model(x)
        posterior = Normal(h, h.exp())
        z = posterior.rsample()
        loss = kl_divergence(posterior, prior).mean() - prior.log_prob(z).mean() - full.log_prob(z).mean()
        loss = loss + Categorical(logits=h).entropy().mean()
        loss.backward()
        optimizer.step()
        return loss

    same(body, steps=6)


def test_a_model_that_is_materialised_after_the_step_was_compiled() -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 4)
    step = ws.compile(lambda x: model(x).sum())
    with pytest.raises(ws.errors.UnsupportedError, match="meta device"):
        step(torch.ones(5, 6))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    assert step(torch.ones(5, 6)).item() == model(torch.ones(5, 6)).sum().item()


def test_hooks_that_extract_features() -> None:
    features: dict[str, Tensor] = {}
    norms: list[float] = []

    def build() -> nn.Module:
        features.clear()
        norms.clear()
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        model[0].register_forward_hook(lambda module, args, result: features.update(hidden=result))
        model[0].weight.register_hook(lambda grad: norms.append(grad.norm().item()))
        return model

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        loss = train(model, optimizer, x)
        return loss, features["hidden"].mean()

    same(body, steps=6, model=build, graphs=3, watch={"features": features, "norms": norms})
    assert len(norms) == 6


def test_a_hook_in_the_place_of_another_is_noticed() -> None:
    def between(i: int, model: Any, optimizer: Optimizer) -> None:
        if i == 3:
            model[0]._forward_hooks.clear()
            model[0].register_forward_hook(lambda module, args, result: result * 3)

    def build() -> nn.Module:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        model[0].register_forward_hook(lambda module, args, result: result * 2)
        return model

    same(train, steps=6, model=build, between=between, graphs=3)
