"""Small models that are hard to cut, each with inputs. Other test files import them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from wholestep.pipelining import SplitPoint, pipe_split


class SkipMLP(nn.Module):
    """The first hidden value is used again three stages later; the second input only in the last stage."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])

    def forward(self, x, shift):
        skip = torch.tanh(self.layers[0](x))
        pipe_split()
        h = torch.relu(self.layers[1](skip))
        pipe_split()
        h = torch.relu(self.layers[2](h))
        pipe_split()
        return self.layers[3](h) + skip * shift


class TwoTower(nn.Module):
    """Two towers over two inputs, used in the other order than the signature; the result is a dictionary."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.item = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, query, item, *, weight=None):
        i = self.item(item)
        pipe_split()
        q = self.query(query)
        pipe_split()
        scores = F.normalize(q, dim=-1) @ F.normalize(i, dim=-1).T * self.scale
        if weight is not None:
            scores = scores * weight[:, None]
        return {"scores": scores, "towers": (q, i), "kind": "cosine"}


class UNet(nn.Module):
    """Down and up, with a skip from each step down to the step up; batch norm."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.Dropout(0.2), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.leave = nn.Conv2d(2 * width, 3, 1)

    def forward(self, x):
        high = self.enter(x)
        low = self.down(high)
        h = self.middle(low) + low
        h = torch.cat([self.up(h), high], dim=1)
        return self.leave(h)


class InPlace(nn.Module):
    """In-place operators right after the cuts, on received values and views of them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, width)

    def forward(self, x, bias):
        h = self.a(x)
        part = h[:, :4]
        other = h.view(-1)
        pipe_split()
        h.add_(bias)
        k = self.b(h * 3) + part.sum()
        pipe_split()
        part.mul_(2)
        k.relu_()
        return self.c(k) + h + other.mean()


class Expert(nn.Module):
    """One expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoELayer(nn.Module):
    """Every expert on every token, mixed by a gate; the balance of the gate is a loss of its own."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList([Expert(width) for _ in range(experts)])

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        best = F.one_hot(weights.argmax(-1), weights.shape[-1]).to(x.dtype)
        mixed = sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return x + mixed, (weights.mean(0) * best.mean(0)).sum() * weights.shape[-1]


class MoE(nn.Module):
    """Layers whose auxiliary losses are added up over all stages and returned beside the result."""

    def __init__(self, width: int = 8, layers: int = 3, experts: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MoELayer(width, experts) for _ in range(layers)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        losses = []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        return self.head(x), sum(losses)


@dataclass(frozen=True)
class Case:
    """A model, its inputs and where to cut it."""

    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    kwargs: Callable[[], dict[str, Any]] = dict
    split: dict[str, Any] = field(default_factory=dict)
    stages: int = 2


def tokens(vocabulary: int = 32, batch: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**{**small, "bos_token_id": 0, "eos_token_id": 0, **settings}))


def llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "vocab_size": 32, "use_cache": False, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**{**small, **more, "max_position_embeddings": 16, **settings}))


def bert(**settings: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    small = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**{**small, "vocab_size": 32, "max_position_embeddings": 16, **settings}))


def t5(**settings: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    small = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    more = {"vocab_size": 32, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**{**small, **more, **settings}))


BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END

CASES = {
    "skip": Case(SkipMLP, lambda: (numbers(4, 8), numbers(4, 8)), stages=4),
    "two_tower": Case(TwoTower, lambda: (numbers(4, 8), numbers(4, 8) + 1), lambda: {"weight": numbers(4)}, stages=3),
    "unet": Case(UNet, lambda: (numbers(2, 3, 8, 8),), split={"down": BEGINNING, "middle": END}, stages=3),
    "in_place": Case(InPlace, lambda: (numbers(4, 8), numbers(8)), stages=3),
    "moe": Case(MoE, lambda: (numbers(4, 8),), split={"layers.1": BEGINNING, "layers.2": BEGINNING}, stages=3),
    "gpt2": Case(
        gpt2,
        lambda: (tokens(),),
        lambda: {"labels": tokens()},
        split={"transformer.h.1": BEGINNING, "transformer.h.2": BEGINNING},
        stages=3,
    ),
    "llama": Case(
        llama,
        lambda: (tokens(),),
        lambda: {"labels": tokens()},
        split={"model.layers.1": BEGINNING, "model.layers.2": BEGINNING},
        stages=3,
    ),
    "bert": Case(
        bert,
        lambda: (tokens(),),
        lambda: {"attention_mask": torch.ones(2, 6, dtype=torch.long), "labels": tokens()},
        split={"bert.encoder.layer.1": BEGINNING},
        stages=2,
    ),
    "t5": Case(
        t5,
        lambda: (tokens(),),
        lambda: {"labels": tokens(length=5)},
        split={"encoder.block.1": BEGINNING, "decoder": BEGINNING, "decoder.block.1": BEGINNING},
        stages=4,
    ),
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model of the table with its inputs; the same each time."""
    case = CASES[name]
    torch.manual_seed(seed)
    return case.make(), case.args(), case.kwargs()
