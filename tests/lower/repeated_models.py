"""Small models with repeated parts, in float64, for the tests of bodies that are compiled once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 32


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        k, v = self.kv(x if memory is None else memory).chunk(2, -1)
        scores = self.q(x) @ k.transpose(-1, -2) / x.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return self.out(self.dropout(scores.softmax(-1)) @ v)


class Block(nn.Module):
    """As in GPT, with dropout; every second one may have experts."""

    def __init__(self, width: int, dropout: float = 0.0, experts: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, dropout)
        self.dropout = nn.Dropout(dropout)
        self.router = nn.Linear(width, experts) if experts else None
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(max(experts, 1)))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(max(experts, 1)))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.attention(self.norm1(x), mask=mask)
        h = self.norm2(x)
        made = [down(F.gelu(up(h))) for up, down in zip(self.up, self.down, strict=True)]
        if self.router is None:
            return x + self.dropout(made[0])
        weights = self.router(h).softmax(-1)
        best = torch.zeros_like(weights).scatter(-1, weights.topk(1, -1).indices, 1.0) * weights
        return x + sum(best[..., i : i + 1] * each for i, each in enumerate(made))


class GPT(nn.Module):
    """Tied words; `experts` in every second layer."""

    def __init__(self, layers: int = 5, width: int = 8, dropout: float = 0.0, experts: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width, dropout, experts * (i % 2)) for i in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.words(ids))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class LlamaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
        x = x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0])
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Rotary positions, computed once; the first layers are frozen if asked for."""

    def __init__(self, layers: int = 5, width: int = 8) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.arange(ids.shape[1], dtype=torch.float64)[:, None] * 0.5 ** torch.arange(4)
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class CrossBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width), Attention(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        x = x + self.own(self.norms[0](x)) + bias
        x = x + self.cross(self.norms[1](x), memory)
        return x + self.down(F.relu(self.up(self.norms[2](x))))


class EncoderDecoder(nn.Module):
    """As T5: what the encoder made is read by each layer of the decoder, one table of positions by all."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.randn(6, width))
        self.encoder = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.decoder = nn.ModuleList(CrossBlock(width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.encoder(self.words(ids))
        x = self.words(ids.flip(-1))
        for block in self.decoder:
            x = block(x, memory, self.positions)
        return F.cross_entropy((x @ self.words.weight.t()).flatten(0, 1), ids.flatten())


class ResidualConvolutions(nn.Module):
    """Batch norm updates buffers; `momentum=None` counts."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2))
            for _ in range(layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()
