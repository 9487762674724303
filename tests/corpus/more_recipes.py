"""Recipes of supervised, sequential and reinforcement learning, and of numerics, as people write them."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corpus.recipe_parts import Convolutions, labels, mlp, noise, recipe
from harness import Run


@recipe
def contrastive_language_and_images() -> Run:
    pictures, words = mlp(12, 16, 8), mlp(6, 16, 8)
    scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    optimizer = torch.optim.AdamW([*pictures.parameters(), *words.parameters(), scale], lr=1e-3)

    def step(a: Tensor, b: Tensor) -> Tensor:
        logits = scale.exp() * F.normalize(pictures(a), dim=-1) @ F.normalize(words(b), dim=-1).T
        target = torch.arange(len(a))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            scale.clamp_(0, math.log(100))
        return loss

    watch = {"a": pictures, "b": words, "scale": scale, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 5, 12), noise(i + 9, 5, 6)), watch)


@recipe
def mixup_with_label_smoothing() -> Run:
    model = Convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        share = torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample()
        order = torch.randperm(len(x))
        out = model(share * x + (1 - share) * x[order])
        loss = share * loss_of(out, y) + (1 - share) * loss_of(out, y[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    watch = {"model": model, "optimizer": optimizer, "schedule": schedule}
    return Run(step, lambda i: (noise(i, 4, 3, 8, 8), labels(i, 4, 5)), watch)


@recipe
def gradient_accumulation() -> Run:
    model = Convolutions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for part, wanted in zip(x.chunk(3), y.chunk(3), strict=True):
            loss = F.cross_entropy(model(part), wanted) / 3
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    watch = {"model": model, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 6, 3, 8, 8), labels(i, 6, 5)), watch)


@recipe
def mixed_precision_with_scaler() -> Run:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    watch = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Run(step, lambda i: (noise(i, 5, 6), labels(i, 5, 3)), watch)


@recipe
def recurrent_language_model_with_carried_state() -> Run:
    table, network, head = nn.Embedding(20, 8), nn.LSTM(8, 12, 2, batch_first=True, dropout=0.1), nn.Linear(12, 20)
    model = nn.ModuleList([table, network, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = [torch.zeros(2, 3, 12), torch.zeros(2, 3, 12)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        out, (h, c) = network(table(x), (state[0], state[1]))
        loss = F.cross_entropy(head(out).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        state[0].copy_(h.detach())
        state[1].copy_(c.detach())
        return loss

    def batch(i: int) -> tuple[Tensor, Tensor]:
        ids = labels(i, 24, 20).view(3, 8)
        return ids[:, :-1], ids[:, 1:]

    return Run(step, batch, {"model": model, "optimizer": optimizer, "state": state})


@recipe
def packed_sequences() -> Run:
    network, head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=1e-2)

    def step(x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, last = network(packed)
        loss = F.cross_entropy(head(last[-1]), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watch = {"a": network, "b": head, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 3, 5, 6), torch.tensor([5, 3, 2]), labels(i, 3, 3)), watch)


@recipe
def loss_on_chosen_tokens() -> Run:
    table, head = nn.Embedding(20, 8), nn.Linear(8, 20)
    model = nn.ModuleList([table, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(ids: Tensor, wanted: Tensor) -> Tensor:
        chosen = wanted != -100
        loss = F.cross_entropy(head(table(ids))[chosen], wanted[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batch(i: int) -> tuple[Tensor, Tensor]:
        ids = labels(i, 24, 20).view(3, 8)
        return ids, ids.masked_fill(noise(i, 3, 8) > 0.5, -100)

    return Run(step, batch, {"model": model, "optimizer": optimizer})


@recipe
def mixture_of_experts_with_loops() -> Run:
    gate = nn.Linear(6, 3)
    experts = nn.ModuleList(mlp(6, 12, 6) for _ in range(3))
    optimizer = torch.optim.AdamW([*gate.parameters(), *experts.parameters()], lr=1e-3)

    def step(x: Tensor) -> Tensor:
        weights, chosen = gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, weights[row, place, None] * expert(x[row]))
        loss = (out - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (noise(i, 7, 6),), {"gate": gate, "experts": experts, "optimizer": optimizer})


@recipe
def deep_q_network() -> Run:
    online = mlp(4, 16, 3)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.RMSprop(online.parameters(), lr=1e-3)

    def step(seen: Tensor, action: Tensor, reward: Tensor, following: Tensor, done: Tensor) -> Tensor:
        with torch.no_grad():
            best = online(following).argmax(1, keepdim=True)
            wanted = reward + 0.99 * target(following).gather(1, best).squeeze(1) * (1 - done)
        loss = F.smooth_l1_loss(online(seen).gather(1, action[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(online.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(target.parameters(), online.parameters(), strict=True):
                p.mul_(0.995).add_(q, alpha=0.005)
        return loss

    def batch(i: int) -> tuple[Tensor, ...]:
        return noise(i, 6, 4), labels(i, 6, 3), noise(i, 6), noise(i + 9, 6, 4), labels(i + 5, 6, 2).float()

    return Run(step, batch, {"online": online, "target": target, "optimizer": optimizer})


@recipe
def proximal_policy_optimization() -> Run:
    policy, value = mlp(4, 16, 3), mlp(4, 16, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-4, eps=1e-5)

    def step(seen: Tensor, action: Tensor, old: Tensor, gain: Tensor, returns: Tensor) -> Tensor:
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        chosen = torch.distributions.Categorical(logits=policy(seen))
        ratio = (chosen.log_prob(action) - old).exp()
        clipped = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
        loss = clipped + 0.5 * F.mse_loss(value(seen).squeeze(1), returns) - 0.01 * chosen.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*policy.parameters(), *value.parameters()], 0.5)
        optimizer.step()
        return loss

    def batch(i: int) -> tuple[Tensor, ...]:
        return noise(i, 6, 4), labels(i, 6, 3), noise(i, 6) - 1, noise(i + 1, 6), noise(i + 2, 6)

    return Run(step, batch, {"policy": policy, "value": value, "optimizer": optimizer})


@recipe
def soft_actor_critic() -> Run:
    policy, critic = mlp(4, 16, 4), mlp(6, 16, 1)
    heat = nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.Adam(p, lr=1e-3) for p in (policy.parameters(), critic.parameters(), [heat])]

    def step(seen: Tensor, returns: Tensor) -> list[Tensor]:
        mean, log_std = policy(seen).chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        action = raw.tanh()
        log_prob = (normal.log_prob(raw) - torch.log(1 - action.square() + 1e-6)).sum(1)
        loss_critic = F.mse_loss(critic(torch.cat([seen, action.detach()], 1)).squeeze(1), returns)
        loss_policy = (heat.exp().detach() * log_prob - critic(torch.cat([seen, action], 1)).squeeze(1)).mean()
        loss_heat = -(heat * (log_prob.detach() - 2)).mean()
        for optimizer, loss in zip(optimizers, (loss_policy, loss_critic, loss_heat), strict=True):
            optimizer.zero_grad()
            loss.backward(retain_graph=True, inputs=[p for g in optimizer.param_groups for p in g["params"]])
        for optimizer in optimizers:
            optimizer.step()
        return [loss_policy.detach(), loss_critic.detach(), loss_heat.detach()]

    watch = {"policy": policy, "critic": critic, "heat": heat, "optimizers": optimizers}
    return Run(step, lambda i: (noise(i, 6, 4), noise(i + 3, 6)), watch)


@recipe
def sharpness_aware_by_hand() -> Run:
    model = Convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            moved = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters() if p.grad is not None]
            torch._foreach_add_(list(model.parameters()), moved)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moved)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watch = {"model": model, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 4, 3, 8, 8), labels(i, 4, 5)), watch)


@recipe
def low_rank_adaptation_by_hand() -> Run:
    base = nn.Linear(8, 8).requires_grad_(False)
    down, up = nn.Parameter(noise(1, 2, 8)), nn.Parameter(torch.zeros(8, 2))
    optimizer = torch.optim.AdamW([{"params": [down], "lr": 1e-3}, {"params": [up], "lr": 1e-2}])

    def step(x: Tensor) -> Tensor:
        loss = (base(x) + F.dropout(x, 0.1) @ down.T @ up.T * 2 - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watch = {"base": base, "down": down, "up": up, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 5, 8),), watch)


@recipe
def neural_differential_equation() -> Run:
    field = mlp(3, 12, 3)
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        h = 0.25
        for _ in range(4):  # Runge-Kutta of fourth order
            a = field(x)
            b = field(x + h / 2 * a)
            c = field(x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + field(x + h * c))
        loss = F.mse_loss(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (noise(i, 5, 3), noise(i + 9, 5, 3)), {"model": field, "optimizer": optimizer})


@recipe
def physics_informed_network() -> Run:
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 16), b=nn.Tanh(), c=nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(points: Tensor, edge: Tensor) -> Tensor:
        points = points.clone().requires_grad_()
        u = model(points)
        first = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0][:, 0]
        loss = (first[:, 1] - 0.1 * second).square().mean() + model(edge).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Run(step, lambda i: (noise(i, 8, 2), noise(i + 9, 4, 2)), {"model": model, "optimizer": optimizer})


@recipe
def graph_network_with_scatter() -> Run:
    inner, outer = nn.Linear(4, 8), nn.Linear(8, 3)
    optimizer = torch.optim.Adam([*inner.parameters(), *outer.parameters()], lr=1e-2)

    def spread(x: Tensor, edges: Tensor) -> Tensor:
        degree = torch.zeros(len(x)).scatter_add_(0, edges[1], torch.ones(edges.shape[1])).clamp(min=1)
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]) / degree[:, None]

    def step(x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(outer(F.relu(spread(inner(x), edges))), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batch(i: int) -> tuple[Tensor, Tensor, Tensor]:
        return noise(i, 7, 4), labels(i, 24, 7).view(2, 12), labels(i, 7, 3)

    return Run(step, batch, {"a": inner, "b": outer, "optimizer": optimizer})


@recipe
def siamese_with_triplets() -> Run:
    model = Convolutions()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_of = nn.TripletMarginLoss(margin=0.5)

    def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        out = model.features(torch.cat([a, b, c]))
        loss = loss_of(*out.chunk(3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Run(step, lambda i: tuple(noise(3 * i + k, 2, 3, 8, 8) for k in range(3)), {"m": model, "o": optimizer})


@recipe
def speech_with_ctc() -> Run:
    network, head = nn.GRU(6, 8, bidirectional=True, batch_first=True), nn.Linear(16, 10)
    optimizer = torch.optim.AdamW([*network.parameters(), *head.parameters()], lr=1e-3)

    def step(x: Tensor, wanted: Tensor) -> Tensor:
        scores = head(network(x)[0]).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, wanted, (12, 12), (4, 3), zero_infinity=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watch = {"a": network, "b": head, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 2, 12, 6), labels(i, 8, 9).view(2, 4) + 1), watch)


@recipe
def segmentation_with_dice() -> Run:
    down, up = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 2, 2, stride=2)
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], lr=1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = up(F.silu(F.group_norm(down(x), 2)))
        share = out.softmax(1)[:, 1]
        dice = 1 - (2 * (share * y).sum() + 1) / (share.sum() + y.sum() + 1)
        loss = F.cross_entropy(out, y) + dice
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    watch = {"a": down, "b": up, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 2, 3, 8, 8), labels(i, 128, 2).view(2, 8, 8)), watch)


@recipe
def weights_with_spectral_norm() -> Run:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    model = nn.Sequential(layer, nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(6, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (noise(i, 5, 6),), {"model": model, "optimizer": optimizer})


@recipe
def checkpointed_transformer() -> Run:
    layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True) for _ in range(2))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        out = x
        for layer in layers:
            out = torch.utils.checkpoint.checkpoint(layer, out, use_reentrant=False)
        loss = F.mse_loss(out, x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (noise(i, 2, 5, 16),), {"model": layers, "optimizer": optimizer})


@recipe
def early_exit_on_not_finite() -> Run:
    model = mlp(6, 12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("the batch has numbers that are not finite")
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (noise(i, 5, 6), labels(i, 5, 3)), {"model": model, "optimizer": optimizer})


@recipe
def logs_in_a_dict_and_a_list() -> Run:
    model = mlp(6, 12, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history: list[float] = []
    logs: dict[str, Any] = {}

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
        logs["accuracy"] = (out.argmax(1) == y).float().mean().item()
        return loss

    watch = {"model": model, "optimizer": optimizer, "history": history, "logs": logs}
    return Run(step, lambda i: (noise(i, 5, 6), labels(i, 5, 3)), watch)


@recipe
def smaller_last_batches() -> Run:
    model = Convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    rows = (6, 6, 4, 5)
    watch = {"model": model, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, rows[i % 4], 3, 8, 8), labels(i, rows[i % 4], 5)), watch)


@recipe
def sgd_with_a_closure() -> Run:
    model = mlp(6, 12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Run(step, lambda i: (noise(i, 5, 6), labels(i, 5, 3)), {"model": model, "optimizer": optimizer})
