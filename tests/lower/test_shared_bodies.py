"""Steps with repeated parts that are compiled once train as in eager; regions are run by FX, so that all is exact."""

from __future__ import annotations

import contextlib
import copy
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import wholestep as ws
from harness import Case, device
from lower.close import assert_close_parity
from lower.graphs import interpreted as interpreted
from lower.repeated_models import GPT, WORDS, EncoderDecoder, Llama, ResidualConvolutions
from lower.test_parity_lowered import ALL, OTHERS, every
from lower.test_parity_ranks import beside_ddp, beside_fully_shard
from parallel.pairs import Case as RankCase
from parallel.pairs import all_of, numbers
from selection import each_now
from wholestep.lower import repeats, shared_bodies
from wholestep.lower.options import LowerOptions
from wholestep.lower.pieces import PieceGraph
from wholestep.lower.report import lowering_of

pytestmark = pytest.mark.usefixtures("interpreted")

Build = Callable[[nn.Module], Optimizer]


def trained(
    model: nn.Module, make: Build, clip: float = 0.0, ema: bool = False, **options: Any
) -> tuple[Any, list[Any]]:
    """What the user can reach after some steps, and the step."""
    optimizer = make(model)
    average = copy.deepcopy(model) if ema else None

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
        return loss.detach()

    call = ws.compile(step, **options) if options else step
    losses = []
    for i in range(3):
        torch.manual_seed(i)
        losses.append(call(torch.randint(0, WORDS, (3, 6))))
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    means = [] if average is None else list(average.parameters())
    return call, [*losses, *model.state_dict().values(), *state, *means]


def single(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, foreach=False)


def foreach(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, foreach=True)


def fused(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, fused=True)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


def two_groups(model: nn.Module) -> Optimizer:
    large = [p for p in model.parameters() if p.dim() > 1]
    small = [p for p in model.parameters() if p.dim() < 2]
    return Adam([{"params": large}, {"params": small, "lr": 1e-3}], foreach=True)


def expected_and_shared(model: nn.Module, make: Build, **keywords: Any) -> Any:
    """Compare a shared step with eager; returns what is shared."""
    model = model.double()
    other = copy.deepcopy(model)
    _, want = trained(model, make, **keywords)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ws.LowerWarning)
        step, got = trained(
            other, make, **keywords, lower="inductor", lower_options={"repeat": "share", "strict": True}
        )
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)
    return [region.shared for region in lowering_of(step).regions]


@pytest.mark.parametrize(
    ("model", "make", "clip", "ema"),
    [
        pytest.param(lambda: GPT(4, dropout=0.3), momentum, 0.0, True, id="dropout"),
        pytest.param(lambda: Llama(4), two_groups, 0.1, False, id="llama", marks=pytest.mark.long),
        pytest.param(ResidualConvolutions, foreach, 0.0, False, id="batch-norm"),
        pytest.param(lambda: GPT(4, experts=2), foreach, 0.1, False, id="experts", marks=pytest.mark.long),
        pytest.param(lambda: EncoderDecoder(3), single, 0.0, False, id="encoder-decoder", marks=pytest.mark.long),
        pytest.param(GPT, foreach, 0.0, False, id="foreach", marks=pytest.mark.long),
        pytest.param(GPT, single, 0.1, False, id="clipped", marks=pytest.mark.long),
        pytest.param(GPT, fused, 0.1, True, id="fused-ema", marks=pytest.mark.long),
    ],
)
def test_shared_steps_train_as_in_eager(model: Callable[[], nn.Module], make: Build, clip: float, ema: bool) -> None:
    torch.manual_seed(0)
    shared = expected_and_shared(model(), make, clip=clip, ema=ema)
    assert any(each.bodies < each.calls for each in shared)


CUT = [each for each in every([*ALL, *OTHERS]) if not str(each.id).startswith("averaged_model")]
"""Without a model whose biases have gradients of rounding only, from batch norm, which Adam divides by themselves."""


@pytest.mark.parametrize("each", CUT)
def test_steps_cut_wherever_they_can_be_train_as_in_eager(each: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node is a piece of its own."""

    def everywhere(graph: PieceGraph, price: Sequence[int]) -> list[int]:
        allowed = (node.target is not operator.getitem for node in graph.order)
        return [i for i, may in enumerate(allowed) if may or not i]

    def apart(keys: Sequence[Any], *_: Any) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in range(len(keys))]

    monkeypatch.setattr(repeats, "_candidates", everywhere)
    monkeypatch.setattr(repeats, "_joined", apart)
    monkeypatch.setattr(shared_bodies, "_is_shared", lambda plan, bodies: True)
    with warnings.catch_warnings(), contextlib.suppress(ws.errors.CaptureError):
        warnings.simplefilter("error", ws.LowerWarning)
        assert_close_parity(each, device(), lower_options={"repeat": "share"})


class RepeatedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("check", each_now([beside_ddp, beside_fully_shard], "beside_fully_shard"))
def test_repeated_blocks_train_on_ranks_as_torchs_wrappers(check: Callable[[RankCase], list[str]]) -> None:
    case = RankCase(
        "repeated blocks",
        RepeatedBlocks,
        lambda model: AdamW(model.parameters(), lr=0.01, foreach=True),
        batch=lambda i, rank: (numbers(i, rank, 5, 6),),
        steps=3,
        compile={"passes": None, "lower": "inductor", "lower_options": {"min_aten_ops": 4, "repeat": "share"}},
    )

    all_of(check, [case], deadline=300)


def test_the_report_says_how_often_a_body_is_called() -> None:
    torch.manual_seed(0)
    model = ResidualConvolutions(4)
    step, _ = trained(model, momentum, lower="inductor", lower_options={"repeat": "share"})
    report = lowering_of(step)
    (region,) = report.regions
    assert region.shared.repeated[0][0] >= 2
    assert f"{region.name}: {region.shared.calls} calls of {region.shared.bodies} compiled bodies" in str(report)


def test_auto_leaves_shallow_models_whole() -> None:
    torch.manual_seed(0)
    step, _ = trained(ResidualConvolutions(4), momentum, lower="inductor", lower_options={"repeat": "auto"})
    assert not any(region.shared.calls for region in lowering_of(step).regions)


def test_other_words_are_refused() -> None:
    with pytest.raises(ws.errors.OptionError, match="repeat"):
        LowerOptions(repeat="always")
