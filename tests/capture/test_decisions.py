"""Branches that only check: guards where the batch decides them, assumptions with assume=True, refused otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from harness import Bits, Run, assert_frames_equal, device, freeze, play, random_state

Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], Tensor]


def batch(i: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(i)
    return torch.randn(6, 4, generator=made), torch.randint(0, 3, (6,), generator=made)


def run_of(step: Step) -> Run:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return Run(step, lambda i: (model, optimizer, *batch(i)), {"model": model, "optimizer": optimizer})


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state_of(run: Run) -> dict[str, Any]:
    seen = random_state()
    for name, value in run.watch.items():
        seen |= freeze(value, name)
    return {path: value.bits if isinstance(value, Bits) else value for path, value in seen.items()}


def same_as_eager(step: Step, graphs: int = 2, **options: Any) -> tuple[Run, Any]:
    run = run_of(step)
    expected = play(run, step, 3)
    run = run_of(step)
    compiled = ws.compile(step, lower="eager", **options)
    assert_frames_equal(expected, play(run, compiled, 3))
    assert len(compiled.graphs) == graphs
    return run, compiled


def test_a_check_of_the_batch_is_a_guard() -> None:
    def checks(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= 3:
            raise ValueError("no such class")
        assert torch.isfinite(x).all()
        assert labels.min().item() >= 0
        return trained(m, o, F.cross_entropy(m(x), labels))

    run, compiled = same_as_eager(checks)
    assert any("no longer holds" in str(each) for each in compiled.recompiles) is False
    model, optimizer, x, labels = run.arguments(3)
    before = state_of(run)
    with pytest.raises(ValueError, match="no such class"):
        compiled(model, optimizer, x, labels + 3)
    with pytest.raises(AssertionError):
        compiled(model, optimizer, x.fill_(math.nan), labels)
    assert state_of(run) == before


def test_the_other_way_of_a_branch_on_the_batch_is_a_graph_of_its_own() -> None:
    def chooses(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
        weight = 2.0 if (labels == 0).sum() > 2 else 1.0
        return trained(m, o, F.cross_entropy(m(x), labels) * weight)

    run = run_of(chooses)
    expected = play(run, chooses, 8)
    run = run_of(chooses)
    compiled = ws.compile(chooses, lower="eager")
    assert_frames_equal(expected, play(run, compiled, 8))
    assert len(compiled.graphs) == 3


def raises_on_nan(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(m(x), labels)
    if not torch.isfinite(loss):  # <- here
        raise ValueError("diverged")
    return trained(m, o, loss)


def raises_on_a_nan_number(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(m(x), labels)
    if math.isnan(loss.item()):  # <- here
        raise ValueError("diverged")
    return trained(m, o, loss)


def looks_at_new_parameters(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    loss = trained(m, o, F.cross_entropy(m(x), labels))
    for p in m.parameters():
        assert not torch.isnan(p).any()  # <- here
    return loss


def clips_by_a_finite_norm(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(m(x), labels)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    if norm.isfinite():  # <- here
        o.step()
    o.zero_grad()
    return loss


ASSUMING = (raises_on_nan, raises_on_a_nan_number, looks_at_new_parameters, clips_by_a_finite_norm)


@pytest.mark.parametrize("step", ASSUMING, ids=lambda each: each.__name__)
def test_a_branch_on_what_the_step_computes_is_refused_and_says_what_to_do(step: Step) -> None:
    run = run_of(step)
    with pytest.raises(ws.errors.ControlFlowError, match="assume=True") as caught:
        ws.compile(step, lower="eager")(*run.arguments(0))
    assert caught.value.location is not None
    assert "<- here" in caught.value.location.text


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("step", ASSUMING, ids=lambda each: each.__name__)
def test_a_step_whose_assumption_failed_raises_with_state_as_before(step: Step, lower: str) -> None:
    if lower == "eager":
        run, compiled = same_as_eager(step, assume=True)
    else:
        run, compiled = run_of(step), ws.compile(step, assume=True)
        play(run, compiled, 2)
    model, optimizer, x, labels = run.arguments(3)
    before = state_of(run)
    for _ in range(2):
        with pytest.raises(ws.errors.AssumedError, match="<- here"):
            compiled(model, optimizer, x * math.nan, labels)
        assert state_of(run) == before
    compiled(model, optimizer, x, labels)
    assert state_of(run) != before


def test_gradients_that_are_freed_early_come_back() -> None:
    def keeps_gradients(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
        o.zero_grad()
        loss = F.cross_entropy(m(x), labels)
        if not torch.isfinite(loss):
            raise ValueError("diverged")
        loss.backward()
        o.step()
        return loss

    run, compiled = same_as_eager(keeps_gradients, assume=True)
    model, optimizer, x, labels = run.arguments(3)
    before = state_of(run)
    with pytest.raises(ws.errors.AssumedError):
        compiled(model, optimizer, x * math.nan, labels)
    assert state_of(run) == before


def test_the_error_shows_the_values() -> None:
    def bounded(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(m(x), labels)
        if loss > 100:
            raise ValueError("diverged")
        return trained(m, o, loss)

    run, compiled = same_as_eager(bounded, assume=True)
    model, optimizer, x, labels = run.arguments(3)
    with torch.no_grad():
        model[3].bias.copy_(torch.tensor([0.0, 1e6, 2e6]))  # type: ignore[index]
    with pytest.raises(ws.errors.AssumedError, match=r"False, and in this call it is True for \d"):
        compiled(model, optimizer, x, labels)


def test_an_empty_selection_may_be_assumed() -> None:
    def selects(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
        rows = m(x).max(-1).values.sigmoid() > 0
        if m(x)[rows].shape[0] == 0:
            raise ValueError("nothing selected")
        return trained(m, o, m(x)[rows].square().mean())

    run, compiled = same_as_eager(selects, assume=True)
    model, optimizer, x, labels = run.arguments(3)
    before = state_of(run)
    with pytest.raises(ws.errors.AssumedError, match="condition of a branch"):
        compiled(model, optimizer, x * math.nan, labels)
    assert state_of(run) == before


def routed(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    """As the experts of Mixtral in transformers: only those that some token was sent to."""
    out = m(x)
    chosen = F.one_hot((x[:, 0] > x[:, 0].mean()).long() + 2 * (out[:, 0] > 1e6).long(), 4).t()
    total = torch.zeros_like(out)
    for expert in (chosen.sum(-1) > 0).nonzero():
        expert = expert[0]
        if expert == 3:
            continue
        (rows,) = torch.where(chosen[expert])
        total.index_add_(0, rows, out[rows] * (expert + 1))
    return trained(m, o, total.square().mean())


def test_a_loop_over_a_size_that_data_decides_may_be_assumed() -> None:
    run, compiled = same_as_eager(routed, assume=True)
    model, optimizer, x, labels = run.arguments(3)
    before = state_of(run)
    with pytest.raises(ws.errors.AssumedError, match=r"for 1 \(a number is 2: .*for expert in"):
        compiled(model, optimizer, x * 0, labels)
    assert state_of(run) == before


def test_a_loop_over_a_size_that_data_decides_is_refused_by_default() -> None:
    run = run_of(routed)
    with pytest.raises(ws.errors.DataShapeError, match="assume=True") as caught:
        ws.compile(routed, lower="eager")(*run.arguments(0))
    assert caught.value.location is not None
    assert "for expert in" in str(caught.value.location.text)


def test_whether_tensors_are_close_may_be_assumed() -> None:
    def compares(m: nn.Module, o: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
        if torch.allclose(m(x), torch.zeros(()), atol=1e-3) or m(x).allclose(x.mean(), rtol=1e-6):
            raise ValueError("collapsed")
        return trained(m, o, F.cross_entropy(m(x), labels))

    same_as_eager(compares, assume=True)
    run = run_of(compares)
    with pytest.raises(ws.errors.ControlFlowError, match="assume=True"):
        ws.compile(compares, lower="eager")(*run.arguments(0))


def test_ranks_cannot_assume() -> None:
    with pytest.raises(ws.errors.OptionError, match="assume=True cannot be used with parallel="):
        ws.compile(raises_on_nan, assume=True, parallel=object.__new__(ws.Replicate))
