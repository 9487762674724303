"""A vision transformer that learns to tell shapes apart: random crops and flips, mixup, label smoothing, a moving
average of the weights.

    python examples/gallery/vit.py --steps 120

Augmentation draws random numbers in the step and the moving average is updated in it: all of that is in the graph, with
the generator's state as an input, and a run draws the random numbers that eager would have drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wholestep as ws

SIZE, PATCH, WIDTH, CLASSES = 24, 4, 64, 4


def pictures(count: int) -> tuple[Tensor, Tensor]:
    """Discs, rings, squares and crosses of random size and place, in noise."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    label = torch.randint(CLASSES, (count,))
    centre, radius = torch.randint(8, 16, (2, count, 1, 1)), torch.randint(4, 8, (count, 1, 1))
    dy, dx = (y - centre[0]).abs(), (x - centre[1]).abs()
    far = (dx.square() + dy.square()).float().sqrt()
    disc, ring = far <= radius, (far - radius).abs() < 1.2
    square, cross = torch.maximum(dx, dy) < radius, (torch.minimum(dx, dy) < 2) & (far < radius)
    shapes = torch.stack([disc, ring, square, cross])
    drawn = shapes[label, torch.arange(count)].float()
    return (drawn + 0.3 * torch.randn(count, SIZE, SIZE)).unsqueeze(1), label


class ViT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.summary = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2 + 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.summary.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def augmented(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Flips, a shift by up to two pixels, and mixup with the batch in reverse."""
    flip = torch.rand(len(images), 1, 1, 1) < 0.5
    images = torch.where(flip, images.flip(-1), images)
    shifts = torch.randint(0, 5, (2, len(images), 1))
    rows, columns = (shift + torch.arange(SIZE) for shift in shifts)
    padded = F.pad(images[:, 0], (2, 2, 2, 2))
    images = padded[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]].unsqueeze(1)
    share = 0.8 + 0.2 * torch.rand(len(images), 1)
    targets = F.one_hot(labels, CLASSES).float()
    mixed = share[..., None, None] * images + (1 - share[..., None, None]) * images.flip(0)
    return mixed, share * targets + (1 - share) * targets.flip(0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lower", default="eager", help="inductor compiles first, which pays in longer runs")
    parser.add_argument("--report", type=Path, help="write the page of the step here")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = ViT()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps)

    @ws.compile(lower=args.lower)
    def train_step(images: Tensor, labels: Tensor) -> Tensor:
        images, targets = augmented(images, labels)
        loss = F.cross_entropy(model(images), targets, label_smoothing=0.05)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss.detach()

    @torch.no_grad()
    def accuracy(network: nn.Module) -> float:
        network.eval()
        generator_state = torch.get_rng_state()
        torch.manual_seed(1)
        images, labels = pictures(200)
        torch.set_rng_state(generator_state)
        right = (network(images).argmax(-1) == labels).float().mean().item()
        network.train()
        return right

    for step in range(args.steps):
        loss = train_step(*pictures(args.batch))
        scheduler.step()
        if (step + 1) % max(args.steps // 4, 1) == 0:
            right = f"accuracy {accuracy(model):.0%}, of the average {accuracy(average):.0%}"
            print(f"step {step + 1:4}: loss {loss.item():.3f}, {right}")
    print(f"{len(train_step.graphs)} graphs; why each beyond the first was captured:")
    for recompile in train_step.recompiles:
        print(" ", recompile)
    if args.report:
        print(train_step.report(args.report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
