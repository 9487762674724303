"""Recipes of training as people write them: several networks, second gradients, averages, queues, losses of papers."""

from __future__ import annotations

import copy
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from harness import Run

RECIPES: dict[str, Callable[[], Run]] = {}


def recipe(make: Callable[[], Run]) -> Callable[[], Run]:
    """Add a recipe under the name of its function."""
    RECIPES[make.__name__] = make
    return make


def noise(i: int, *shape: int) -> Tensor:
    """Normal numbers of call i."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(i))


def labels(i: int, rows: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(1000 + i))


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with GELU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Convolutions(nn.Module):
    """A small residual network with batch norm."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, classes)

    def features(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        return F.adaptive_avg_pool2d(x + self.block(x), 1).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


@recipe
def gan() -> Run:
    maker, judge = mlp(4, 16, 8), mlp(8, 16, 1)
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def step(real: Tensor) -> tuple[Tensor, Tensor]:
        made = maker(torch.randn(len(real), 4))
        of_judge.zero_grad()
        yes, no = judge(real), judge(made.detach())
        loss_judge = F.softplus(-yes).mean() + F.softplus(no).mean()
        loss_judge.backward()
        of_judge.step()
        of_maker.zero_grad()
        loss_maker = F.softplus(-judge(made)).mean()
        loss_maker.backward()
        of_maker.step()
        return loss_judge.detach(), loss_maker.detach()

    watch = {"maker": maker, "judge": judge, "a": of_maker, "b": of_judge}
    return Run(step, lambda i: (noise(i, 6, 8),), watch)


@recipe
def wasserstein_gan_with_gradient_penalty() -> Run:
    critic = mlp(8, 16, 1)
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)

    def step(real: Tensor, made: Tensor) -> Tensor:
        mix = torch.rand(len(real), 1)
        between = (mix * real + (1 - mix) * made).requires_grad_()
        slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
        loss = critic(made).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Run(step, lambda i: (noise(i, 6, 8), noise(50 + i, 6, 8)), {"model": critic, "optimizer": optimizer})


@recipe
def maml() -> Run:
    model = mlp(3, 12, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def adapted(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        weights = dict(model.named_parameters())
        loss = F.mse_loss(functional_call(model, weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        return {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for task in range(len(x)):
            inner = adapted(x[task, :4], y[task, :4])
            total = total + F.mse_loss(functional_call(model, inner, (x[task, 4:],)), y[task, 4:])
        total.backward()
        optimizer.step()
        return total.detach()

    return Run(step, lambda i: (noise(i, 3, 8, 3), noise(9 + i, 3, 8, 1)), {"model": model, "optimizer": optimizer})


@recipe
def per_sample_gradients_with_noise() -> Run:
    model = mlp(4, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    def step(x: Tensor, y: Tensor) -> None:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.named_parameters():
            clipped = torch.einsum("n,n...->...", factor, each[name])
            p.grad = (clipped + 0.1 * torch.randn_like(p)) / len(x)
        optimizer.step()

    return Run(step, lambda i: (noise(i, 5, 4), labels(i, 5, 3)), {"model": model, "optimizer": optimizer})


@recipe
def moco() -> Run:
    query = mlp(6, 16, 8)
    key = copy.deepcopy(query)
    for p in key.parameters():
        p.requires_grad_(False)
    queue = F.normalize(noise(7, 8, 12), dim=0)
    pointer = torch.zeros(1, dtype=torch.long)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.05, momentum=0.9)

    def step(a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(key.parameters(), query.parameters(), strict=True):
                p.data = p.data * 0.99 + q.data * 0.01
            k = F.normalize(key(b), dim=1)
        q = F.normalize(query(a), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.clone()], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            where = int(pointer)
            queue[:, where : where + len(k)] = k.T
            pointer[0] = (where + len(k)) % queue.shape[1]
        return loss.detach()

    watch = {"query": query, "key": key, "queue": queue, "pointer": pointer, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 4, 6), noise(i + 40, 4, 6)), watch)


@recipe
def byol_with_average_weights() -> Run:
    online, predictor = mlp(6, 16, 8), mlp(8, 8, 8)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.AdamW([*online.parameters(), *predictor.parameters()], lr=1e-3)

    def step(a: Tensor, b: Tensor) -> Tensor:
        loss = 2 - 2 * F.cosine_similarity(predictor(online(a)), target(b).detach()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 0.01)
        return loss.detach()

    watch = {"online": online, "predictor": predictor, "target": target, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 4, 6), noise(i + 40, 4, 6)), watch)


@recipe
def averaged_model_of_torch() -> Run:
    model = mlp(6, 12, 3)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss.detach()

    watch = {"model": model, "average": average, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 5, 6), labels(i, 5, 3)), watch)


@recipe
def distillation() -> Run:
    teacher, student = mlp(6, 24, 4).eval(), mlp(6, 8, 4)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, nesterov=True, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2, dim=-1)
        out = student(x)
        apart = F.kl_div(F.log_softmax(out / 2, dim=-1), soft, reduction="batchmean") * 4
        loss = 0.5 * apart + 0.5 * F.cross_entropy(out, y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    watch = {"student": student, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 5, 6), labels(i, 5, 4)), watch)


@recipe
def variational_autoencoder() -> Run:
    encoder, decoder = mlp(8, 16, 6), mlp(3, 16, 8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

    def step(x: Tensor) -> Tensor:
        mean, log_variance = encoder(x).chunk(2, dim=1)
        made = decoder(mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        loss = F.binary_cross_entropy_with_logits(made, x.sigmoid(), reduction="none").sum(1).mean() + divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Run(step, lambda i: (noise(i, 5, 8),), {"a": encoder, "b": decoder, "optimizer": optimizer})


@recipe
def vector_quantized_autoencoder() -> Run:
    encoder, decoder, codes = mlp(8, 16, 4), mlp(4, 16, 8), nn.Embedding(10, 4)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters(), *codes.parameters()], lr=1e-3)

    def step(x: Tensor) -> Tensor:
        z = encoder(x)
        nearest = torch.cdist(z, codes.weight).argmin(1)
        q = codes(nearest)
        through = z + (q - z).detach()
        loss = F.mse_loss(decoder(through), x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Run(step, lambda i: (noise(i, 5, 8),), {"a": encoder, "b": decoder, "c": codes, "optimizer": optimizer})


@recipe
def denoising_diffusion() -> Run:
    model = mlp(9, 32, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)

    def step(x: Tensor) -> Tensor:
        t = torch.randint(0, 50, (len(x),))
        a = kept[t][:, None]
        added = torch.randn_like(x)
        out = model(torch.cat([a.sqrt() * x + (1 - a).sqrt() * added, t[:, None] / 50], 1))
        loss = F.mse_loss(out, added)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (noise(i, 6, 8),), {"model": model, "optimizer": optimizer})


@recipe
def flow_matching() -> Run:
    model = mlp(9, 32, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def step(x: Tensor) -> Tensor:
        t, start = torch.rand(len(x), 1), torch.randn_like(x)
        loss = (model(torch.cat([torch.lerp(start, x, t), t], 1)) - (x - start)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (noise(i, 6, 8),), {"model": model, "optimizer": optimizer})


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
