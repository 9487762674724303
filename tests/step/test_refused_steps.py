"""`on_refusal="eager"`: a call that cannot be captured runs as the plain function, on all ranks or on none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP and fully_shard import it: here once, instead of on every rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from harness import Run, assert_frames_equal, batch_of, marked_line, play
from ranks import run_ranks
from wholestep.refused_steps import ATTEMPTS


def logs(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[float], every: int) -> Callable[..., Any]:
    """A step that reads the value of its loss in every `every`-th call and decides by it."""

    def step(x: Tensor, call: int) -> Tensor:
        loss = model(x).square().mean()
        if call % every == 0 and loss > 0:  # <- here
            seen.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def training(every: int) -> Run:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[float] = []
    step = logs(model, optimizer, seen, every)
    watch = {"model": model, "optimizer": optimizer, "seen": seen}
    return Run(step, lambda i: (batch_of(torch.device("cpu"), i, 4, 5), i), watch)


def eager_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if each.category is ws.EagerWarning]


@pytest.mark.parametrize("every", [1, 3])
def test_a_refused_step_runs_as_it_is_with_one_warning(every: int) -> None:
    run = training(every)
    expected = play(run, run.step, 9)
    run = training(every)
    step = ws.compile(run.step, lower="eager", on_refusal="eager", dynamic={})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = play(run, step, 9)
    assert_frames_equal(expected, actual)
    (said,) = eager_warnings(caught)
    assert "in call 1" in said
    assert "[WS-CONTROL-FLOW]" in said
    assert f"test_refused_steps.py:{marked_line(logs)}" in said
    assert "\n  fix   " in said
    assert step._refusals.count == (ATTEMPTS if every == 1 else 3)
    assert bool(step.graphs) == (every > 1)


def test_it_is_raised_by_default_and_by_capture() -> None:
    run = training(1)
    with pytest.raises(ws.errors.ControlFlowError):
        ws.compile(run.step, lower="eager")(*run.arguments(0))
    step = ws.compile(run.step, lower="eager", on_refusal="eager")
    with pytest.raises(ws.errors.ControlFlowError):
        step.capture(*run.arguments(0))
    with pytest.raises(ws.errors.ControlFlowError):
        ws.check(step, *run.arguments(0))


def test_no_capture_is_tried_after_some_refusals_until_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = torch.nn.Parameter(torch.ones(()))

    def step(x: Tensor) -> Tensor:
        return x * 2 if float((x * scale.detach()).sum()) > 0 else x

    compiled = ws.compile(step, lower="eager", on_refusal="eager")
    tried: list[Any] = []
    capture = compiled._capture
    monkeypatch.setattr(compiled, "_capture", lambda call: (tried.append(call), capture(call))[1])
    with pytest.warns(ws.EagerWarning):
        compiled(torch.ones(2))
    for _ in range(4):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert len(tried) == ATTEMPTS
    compiled.reset()
    with pytest.warns(ws.EagerWarning):
        compiled(torch.ones(2))


def test_an_error_of_the_step_itself_is_raised_without_a_warning() -> None:
    def step(x: Tensor, scale: int) -> Tensor:
        if scale < 0:
            raise KeyError("negative")
        return x * scale

    compiled = ws.compile(step, lower="eager", on_refusal="eager")
    for _ in range(ATTEMPTS + 1):
        with pytest.raises(KeyError, match="negative"):
            compiled(torch.ones(2), -1)
    assert torch.equal(compiled(torch.ones(2), 2), torch.full((2,), 2.0))
    assert len(compiled.graphs) == 1


def test_an_error_of_the_trace_alone_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no kernel for fakes")

    monkeypatch.setattr("wholestep.compiled_step.compile_step", fails)
    compiled = ws.compile(lambda x: x + 1, lower="eager", on_refusal="eager")
    with pytest.warns(ws.EagerWarning, match="the trace raised NotImplementedError: no kernel for fakes"):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_a_wrong_option_is_no_refusal() -> None:
    step = ws.compile(lambda x: x * 2, lower="eager", on_refusal="eager", dynamic={"nothing": {0: ws.Dim()}})
    with pytest.raises(ws.errors.DynamicShapeError):
        step(torch.ones(2))


def test_a_checked_step_that_is_refused_has_nothing_to_compare() -> None:
    run = training(1)
    expected = play(run, run.step, 3)
    run = training(1)
    with pytest.warns(ws.EagerWarning):
        actual = play(run, ws.compile(run.step, lower="eager", on_refusal="eager", check_first=2), 3)
    assert_frames_equal(expected, actual)


def rank_training(how: str, rank: int) -> tuple[nn.Module, Callable[..., Any], dict[str, Any]]:
    """Rank 0 alone looks at its loss, in calls 1 and 4."""
    torch.manual_seed(7)
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options: dict[str, Any] = {}
    if how in ("ddp", "Replicate beside ddp"):
        model = DistributedDataParallel(model)
    elif how in ("fully_shard", "FullyShard beside fully_shard"):
        fully_shard(model, mesh=mesh)
    elif how == "Replicate":
        options["parallel"] = ws.Replicate(mesh)
    else:
        options["parallel"] = ws.FullyShard(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, call: int) -> Tensor:
        model(x[:2]).square().sum().backward()
        loss = model(x[2:]).square().mean()
        if rank == 0 and call in (1, 4) and loss > 0:
            pass
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step, options


def whole(model: nn.Module) -> list[Any]:
    tensors = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [tensor.detach().clone() for tensor in tensors]


def test_ranks_fall_back_together_although_only_one_refuses() -> None:
    def code(rank: int) -> list[str]:
        found = []
        for how, beside in (
            ("ddp", "ddp"),
            ("fully_shard", "fully_shard"),
            ("Replicate", "ddp"),
            ("FullyShard", "fully_shard"),
        ):
            states = []
            for kind, compiled in ((beside, False), (how, True)):
                model, step, options = rank_training(kind, rank)
                if compiled:
                    step = ws.compile(step, lower="eager", on_refusal="eager", passes=None, name=how, **options)
                seen = []
                for call in range(1, 7):
                    generator = torch.Generator().manual_seed(10 * call + rank)
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always", ws.EagerWarning)
                        loss = step(torch.randn(4, 5, generator=generator), call)
                    seen.append([loss, *whole(model)])
                    found += [f"{how} {call}: {text}" for text in eager_warnings(caught)]
                states.append(seen)
            for call, (want, got) in enumerate(zip(*states, strict=True), 1):
                for a, b in zip(want, got, strict=True):
                    torch.testing.assert_close(a, b, msg=f"{how} after call {call}")
            found.append(f"{how}: {step._refusals.count} refusals, {bool(step.graphs)}")
        return found

    for rank, found in enumerate(run_ranks(code, 2, deadline=120)):
        for how in ("ddp", "fully_shard", "Replicate", "FullyShard"):
            assert f"{how}: 2 refusals, True" in found, found
            said = [text for text in found if text.startswith(f"{how} ")]
            assert len(said) == 1, said
            assert "[WS-CONTROL-FLOW]" in said[0]
            assert said[0].startswith(f"{how} 1: ")
            assert ("(rank 0)" in said[0]) == (rank == 1)


def test_a_rank_that_raises_stops_the_others_although_they_may_run_in_eager() -> None:
    def code(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Linear(3, 2)

        def step(x: Tensor) -> Tensor:
            loss = model(x).sum()
            if rank == 0 and loss > 1e9:
                return loss
            loss.backward()
            return loss.detach()

        how = "raise" if rank == 0 else "eager"
        compiled = ws.compile(step, lower="eager", on_refusal=how, parallel=ws.Replicate(mesh, deadline=5.0))
        with pytest.raises(ws.WholestepError) as caught:
            compiled(torch.ones(2, 3))
        return caught.value.code

    assert run_ranks(code, 2, deadline=60) == ["WS-CONTROL-FLOW", "WS-PEER-FAILED"]
