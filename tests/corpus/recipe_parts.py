"""What recipes share: their table, small networks, noise and labels of a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
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
