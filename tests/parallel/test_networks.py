"""Networks on two ranks: recomputation, dropout, BatchNorm, an LSTM, attention, Hugging Face models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from cases.huggingface import VOCABULARY, language_model
from parallel.pairs import Case, Compiled, Side, all_of, beside, beside_ddp, beside_fully_shard, numbers, world_mesh
from selection import some_now


class Recomputed(nn.Module):
    """Two blocks with dropout, computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.4), nn.Linear(7, 4))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 4))


def convolved() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 5, 3), nn.GroupNorm(5, 5), nn.Flatten(), nn.LazyLinear(4) if False else nn.Linear(20, 4)
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 9, dropout=0.1, batch_first=True)


def shaped(*sizes: int) -> Callable[[int, int], tuple[Any, ...]]:
    return lambda i, rank: (numbers(i, rank, *sizes),)


CASES = [
    Case("dropout", dropped),
    Case("convolution", convolved, batch=shaped(2, 3, 6)),
    Case("lstm", Recurrent, batch=shaped(2, 4, 6)),
    Case("attention", Attending, batch=shaped(2, 4, 6)),
    Case("encoder layer", encoder, batch=shaped(2, 4, 6)),
]
CASES = [replace(case, steps=4) for case in CASES]
LOCAL_BUFFERS = Case("batch norm", normed, steps=4)
RECOMPUTED = Case("recomputed", Recomputed, steps=4)


@pytest.mark.parametrize("cases", some_now([*CASES, RECOMPUTED], "dropout", "attention", "recomputed"))
def test_networks_have_the_bits_of_ddp(cases: list[Case]) -> None:
    all_of(beside_ddp, cases)


@pytest.mark.parametrize(
    "cases",
    some_now([*CASES, LOCAL_BUFFERS, RECOMPUTED], "convolution", "lstm", "batch norm", "recomputed"),
)
def test_networks_have_the_bits_of_fully_shard(cases: list[Case]) -> None:
    all_of(beside_fully_shard, cases)


@pytest.mark.long  # tests/parallel/test_parameters.py has plainer models that keep whole parameters
def test_networks_with_whole_parameters_until_the_backward_have_the_bits_of_fully_shard() -> None:
    cases = [each for each in CASES if each.name in ("lstm", "encoder layer")]
    all_of(partial(beside_fully_shard, reshard_after_forward=False), [*cases, RECOMPUTED])


def test_local_buffers_have_the_bits_of_ddp_without_broadcasts() -> None:
    def check(case: Case) -> list[str]:
        torchs = Side(case, lambda model: DistributedDataParallel(model, forward_sync_buffers=False))
        return beside(torchs, Compiled(case, ws.Replicate(world_mesh(), buffers="local")))

    all_of(check, [LOCAL_BUFFERS])


def language_case(name: str) -> Case:
    def step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batch(i: int, rank: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(1000 + 100 * i + rank)
        return (torch.randint(3, VOCABULARY, (2, 9), generator=generator),)

    return Case(name, lambda: language_model(name), step=step, batch=batch, steps=4)


@pytest.mark.parametrize(
    ("check", "names"),
    [
        (beside_fully_shard, ["Llama"]),
        pytest.param(beside_ddp, ["GPT2", "Llama", "Bert"], marks=pytest.mark.long),
        pytest.param(beside_fully_shard, ["GPT2", "Bert"], marks=pytest.mark.long),
    ],
)
def test_language_models_have_the_bits_of_torchs_wrappers(check: Callable[[Case], list[str]], names: list[str]) -> None:
    for name in names:
        language_model(name)  # what it imports is there before the ranks start
    all_of(check, [language_case(name) for name in names])
