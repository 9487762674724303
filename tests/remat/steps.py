"""Small training steps whose activations outweigh their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from cases.parts import train_step
from wholestep.ir.step_graph import MemoryReport


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks in a row; the last ones may be checkpointed."""

    def __init__(self, blocks: int = 5, width: int = 16, dropout: float = 0.1, checkpointed: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.first_checkpointed = blocks - checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i >= self.first_checkpointed else block(x)
        return x


class Images(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 8), (8, 8), (8, 4)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def rows(i: int) -> Tensor:
    return torch.randn(256, 16, generator=torch.Generator().manual_seed(i))


def pictures(i: int) -> Tensor:
    return torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(i))


class Trained:
    """A model after a few steps, with the losses, and the step that ran."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Net,
        batch: Callable[[int], Tensor] = rows,
        *,
        eager: bool = False,
        steps: int = 4,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = make()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.step: Any = train_step if eager else ws.compile(train_step, **options)
        self.losses = [self.step(self.model, optimizer, batch(i)) for i in range(steps)]

    @property
    def memory(self) -> MemoryReport:
        found = self.step.last.memory
        assert isinstance(found, MemoryReport)
        return found

    def equals(self, other: Trained) -> bool:
        mine, theirs = self.model.state_dict(), other.model.state_dict()
        return torch.equal(torch.stack(self.losses), torch.stack(other.losses)) and all(
            torch.equal(mine[name], theirs[name]) for name in theirs
        )
