"""A small denoising diffusion model (DDPM) by diffusers: a UNet learns the noise that a scheduler added, with a moving
average of its weights, and then draws pictures from noise.

    python examples/gallery/diffusion.py --steps 200

Noise and noise levels are drawn in the step, so each run of its graph sees others, in the order in which eager would
have drawn them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from torch import Tensor, nn

import wholestep as ws

SIZE, LEVELS = 16, 50


def discs(count: int) -> Tensor:
    """Pictures of one bright disc on a dark ground, between -1 and 1."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    centre = torch.randint(5, SIZE - 5, (2, count, 1, 1))
    far = ((y - centre[0]).square() + (x - centre[1]).square()).float().sqrt()
    return (2 * torch.sigmoid(2 * (4 - far)) - 1).unsqueeze(1)


class Average:
    """An exponential moving average of parameters, updated in the step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.values = decay, [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, new in zip(self.values, model.parameters(), strict=True):
            mean.lerp_(new, 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        for mean, parameter in zip(self.values, model.parameters(), strict=True):
            parameter.copy_(mean)


@torch.no_grad()
def drawn(model: nn.Module, noise: DDPMScheduler, count: int) -> Tensor:
    """Pictures from noise, one level after the other."""
    noise.set_timesteps(LEVELS)
    images = torch.randn(count, 1, SIZE, SIZE)
    for level in noise.timesteps:
        images = noise.step(model(images, level).sample, level, images).prev_sample
    return images


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lower", default="eager", help="inductor compiles first, which pays in longer runs")
    parser.add_argument("--report", type=Path, help="write the page of the step here")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    noise = DDPMScheduler(num_train_timesteps=LEVELS, beta_schedule="squaredcos_cap_v2")
    optimizer, average = torch.optim.AdamW(model.parameters(), lr=2e-3), Average(model, 0.98)

    @ws.compile(lower=args.lower)
    def train_step(images: Tensor) -> Tensor:
        added = torch.randn_like(images)
        levels = torch.randint(0, LEVELS, (len(images),))
        loss = F.mse_loss(model(noise.add_noise(images, added, levels), levels).sample, added)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        return loss.detach()

    losses = []
    for step in range(args.steps):
        losses.append(train_step(discs(args.batch)))
        if (step + 1) % max(args.steps // 4, 1) == 0:
            recent = torch.stack(losses[-20:]).mean().item()
            print(f"step {step + 1:4}: loss {recent:.3f}")
    average.copy_to(model)
    model.eval()
    for row in drawn(model, noise, 1)[0, 0]:
        print("".join(" .:*#"[int(value)] for value in ((row + 1) * 2.5).clamp(0, 4)))
    print(f"{len(train_step.graphs)} graphs, the last of {train_step.last.num_nodes} nodes")
    if args.report:
        print(train_step.report(args.report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
