"""The models of several benchmarks: a GPT in some sizes, and its training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT and of its batch."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    words: int


SHAPES = {
    ("cpu", "tiny"): Shape(3, 32, 2, 32, 32, 64),
    ("cpu", "small"): Shape(6, 128, 4, 4, 64, 512),
    ("cpu", "large"): Shape(6, 512, 8, 8, 256, 512),
    ("cuda", "tiny"): Shape(2, 64, 2, 8, 64, 256),
    ("cuda", "small"): Shape(6, 256, 8, 8, 256, 1024),
    ("cuda", "large"): Shape(12, 768, 12, 16, 1024, 50304),
}


class Block(nn.Module):
    """Attention and two matrices, with norms before. `written_out`: attention is many operators, and looks at all."""

    def __init__(self, width: int, heads: int, *, written_out: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.written_out = written_out
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        if self.written_out:
            mixed = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Words and places in, the loss out (so that torch.compile has it too); the two tables of words are one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        logits = self.head(self.norm(self.blocks(self.words(ids) + self.places(places))))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def train_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> Tensor:
    """One step of language modelling; bf16 autocast on CUDA."""
    with torch.autocast("cuda", torch.bfloat16, enabled=ids.is_cuda):
        loss = model(ids, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
