"""Recipes of generative and self-supervised training: several networks, second gradients, averages, queues."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from corpus.recipe_parts import labels, mlp, noise, recipe
from harness import Run


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
