"""Lowered steps on a GPU, replayed as one CUDA graph, train as eager does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.lower.cuda_graph import CudaGraphStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "error::wholestep.CudaGraphWarning", "error::wholestep.LowerWarning"
    ),
]

FUSED = {"fused": True}


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 4)]
    return nn.Sequential(*layers).cuda()


def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(i: int, size: int = 8) -> Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(i))


class Pair:
    """The same model trained in eager and through wholestep."""

    def __init__(self, step: Callable[..., Any] = train_step, settings: dict[str, Any] = FUSED, **options: Any) -> None:
        self.model = make_model()
        self.eager = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **settings)
        self.eager_optimizer = torch.optim.AdamW(self.eager.parameters(), lr=1e-2, **settings)
        self.step = ws.compile(step, lower="inductor", **options)
        self.function = step

    def run(self, x: Tensor) -> None:
        ours = self.step(self.model, self.optimizer, x)
        theirs = self.function(self.eager, self.eager_optimizer, x)
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-3, atol=1e-4)

    def check(self) -> None:
        for ours, theirs in zip(self.model.parameters(), self.eager.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-3, atol=1e-3)

    @property
    def replays(self) -> bool:
        forward = self.step._last.executor._forward
        return isinstance(forward, CudaGraphStep) and bool(forward._recordings)


def test_new_batches_and_a_schedule_need_one_recording() -> None:
    pair = Pair()
    for i in range(8):
        for optimizer in (pair.optimizer, pair.eager_optimizer):
            optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
        pair.run(batch(i).cuda())
    pair.check()
    assert pair.replays
    assert len(pair.step._last.executor._forward._recordings) == 1


def test_step_counts_on_the_host_are_numbers_of_the_recording() -> None:
    pair = Pair(settings={"foreach": True})
    for i in range(6):
        pair.run(batch(i).cuda())
    pair.check()
    assert pair.replays


def test_a_batch_may_be_sent_to_the_gpu_inside_of_the_step() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        return train_step(model, optimizer, x.to("cuda", non_blocking=True))

    pair = Pair(step)
    for i in range(6):
        pair.run(batch(i))
    pair.check()
    assert pair.replays


def test_two_shapes_share_the_memory_of_their_recordings() -> None:
    pair = Pair()
    for i in range(10):
        pair.run(batch(i, 8 if i % 2 else 12).cuda())
    pair.check()
    assert pair.replays


def test_dynamic_sizes_have_a_recording_each() -> None:
    pair = Pair(dynamic={"x": {0: ws.Dim(min=2, max=64)}})
    for i in range(9):
        pair.run(batch(i, (8, 12, 20)[i % 3]).cuda())
    pair.check()
    assert len(pair.step.graphs) <= 2
    assert len(pair.step._last.executor._forward._recordings) == 3


def test_results_stay_what_they_were_and_moved_state_is_recorded_again() -> None:
    pair = Pair()
    losses = []
    for i in range(5):
        losses.append((loss := pair.step(pair.model, pair.optimizer, batch(i).cuda()), float(loss.detach())))
    assert all(float(loss.detach()) == value for loss, value in losses)
    for parameter in pair.model.parameters():
        parameter.data = parameter.data.clone()
    for i in range(5):
        train_step(pair.eager, pair.eager_optimizer, batch(i).cuda())
    for i in range(5, 8):
        pair.run(batch(i).cuda())
    pair.check()
    assert pair.replays


def test_dropout_differs_from_step_to_step_and_follows_the_seed() -> None:
    def losses(seed: int) -> list[float]:
        model = make_model(dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
        step = ws.compile(train_step, lower="inductor")
        step(model, optimizer, batch(0).cuda())
        step(model, optimizer, batch(0).cuda())
        torch.manual_seed(seed)
        return [float(step(model, optimizer, batch(0).cuda()).detach()) for _ in range(5)]

    first, again, other = losses(7), losses(7), losses(8)
    assert len(set(first)) == 5
    assert first == pytest.approx(again, rel=1e-5)  # two compilations may add in another order
    assert first != pytest.approx(other, rel=1e-3)


def test_a_number_that_changes_at_every_step_ends_the_recording_with_a_reason() -> None:
    pair = Pair()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for i in range(14):
            for optimizer in (pair.optimizer, pair.eager_optimizer):
                optimizer.param_groups[0]["weight_decay"] = 0.01 * i
            pair.run(batch(i).cuda())
    pair.check()
    reasons = [str(w.message) for w in found if w.category is ws.CudaGraphWarning]
    assert len(reasons) == 1
    assert "changes again and again" in reasons[0]


def test_gradients_that_are_kept_are_the_users_own() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    pair = Pair(step)
    for i in range(4):
        pair.run(batch(i).cuda())
    kept = [p.grad for p in pair.model.parameters()]
    values = [grad.clone() for grad in kept]
    pair.run(batch(9).cuda())
    assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))
    for ours, theirs in zip(pair.model.parameters(), pair.eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_a_grad_scaler_skips_a_step_inside_of_the_recording() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, scaler: Any) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    sides = []
    for function in (ws.compile(step, lower="inductor"), step):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for i in range(7):
            function(model, optimizer, batch(i).cuda() * (float("inf") if i == 4 else 1.0), scaler)
        sides.append((model, scaler.get_scale()))
    (ours, scale), (theirs, expected) = sides
    assert scale == expected == 2.0**9
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-2, atol=2e-3)


def test_what_must_be_recorded_and_cannot_be_says_why() -> None:
    def step(model: nn.Module, x: Tensor, offsets: Tensor) -> Tensor:
        return (model(x) + offsets.cpu().sum().cuda()).sum()

    with pytest.raises(ws.errors.CudaGraphError, match="WS-CUDAGRAPH"):
        ws.compile(step, lower="inductor", cuda_graph=True)(make_model(), batch(0).cuda(), torch.ones(3).cuda())
