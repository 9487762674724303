"""Stages on ranks under every schedule of torch: outputs, losses, gradients and trained parameters are those of eager.

The stages are made by hand; each takes a value that it needs, integers, a value that is passed on to the last stage
(a skip connection) and a mask, and one of them returns a view.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _ScheduleForwardOnly, get_schedule_class

import wholestep as ws
from pipelining.manual_pipes import HandMade
from ranks import run_ranks
from wholestep.errors import OptionError, PipelineInputError, ScheduleError, StageError
from wholestep.pipelining import Stage, TensorChunkSpec, build_stage
from wholestep.pipelining.run import messages

SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
FOLDED = ("ZBVZeroBubble", "DualPipeV")


class Part(nn.Module):
    """A stage: (x, ids) -> (y, ids, skip, mask) -> ... -> (result, skip)."""

    def __init__(self, place: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.embedding = nn.Embedding(5, 6)
        self.alone = nn.Parameter(torch.randn(6))  # no input of the stage leads to it
        self.unused = nn.Parameter(torch.randn(2))
        self.first, self.last = place == 0, place == count - 1

    def forward(self, x: torch.Tensor, ids: torch.Tensor, *passed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(self.linear(x)) + self.embedding(ids)
        if self.first:
            return y, ids, y * self.alone, ids > 2
        if self.last:
            return (y + passed[0]) * passed[1].unsqueeze(-1), passed[0], self.alone.exp().sum()
        return y.t(), ids, *passed


class Turned(Part):
    """The stage that takes the view."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, *passed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(x.t(), ids, *passed)


def make(count: int) -> HandMade:
    torch.manual_seed(0)
    return HandMade([(Turned if place > 1 else Part)(place, count) for place in range(count)])


def loss_of(result: Any, target: torch.Tensor) -> torch.Tensor:
    return ((result[0] - target) ** 2).mean() + result[1].mean() + result[2].mean()


def batch(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 5, (rows,), generator=generator)
    return torch.randn(rows, 6, generator=generator), ids, torch.randn(rows, 6, generator=generator)


def places(name: str, rank: int, ranks: int, count: int) -> list[int]:
    if name in SINGLE:
        return [rank]
    return [rank, count - 1 - rank] if name in FOLDED else list(range(rank, count, ranks))


def same_gradients(stage: Any, reference: HandMade, note: str) -> None:
    theirs = dict(reference.stages[stage.stage_index].named_parameters())
    for name, parameter in stage.submod.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, msg=lambda text, name=name: f"{note}, {name}: {text}"
        )


def train(rank: int, ranks: int, count: int, names: tuple[str, ...]) -> None:
    """Steps over batches of changing size, gradients of two steps for one update, an evaluation between."""
    for name in names:
        pipe, reference = make(count), make(count)
        mine = places(name, rank, ranks, count)
        stages = [build_stage(pipe, place, "cpu") for place in mine]
        first, last = 0 in mine, count - 1 in mine
        schedule = get_schedule_class(name)(stages[0] if name in SINGLE else stages, 4, loss_fn=loss_of)
        optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], 0.1, momentum=0.9)
        eager = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(3)
        for step, rows in enumerate((8, 8, 7, 8, 13, 13, 5, 4, 8, 8)):
            x, ids, target = batch(rows, generator)
            losses: list[torch.Tensor] = []
            given = (x, ids) if first else ()
            result = schedule.step(*given, target=target if last else None, losses=losses)
            expected = reference(x, ids)
            loss_of(expected, target).backward()
            if last:
                torch.testing.assert_close(result[:2], expected[:2])
                assert not result[0].requires_grad
                parts = zip(x.tensor_split(4), ids.tensor_split(4), target.tensor_split(4), strict=True)
                torch.testing.assert_close(losses, [loss_of(reference(a, b), t) for a, b, t in parts])
            for stage in stages:
                same_gradients(stage, reference, f"{name}, step {step}, stage {stage.stage_index}")
            if step == 2:  # an evaluation changes no gradient, and may have another size
                x, ids, target = batch(9, generator)
                result = schedule.eval(*((x, ids) if first else ()), target=target if last else None)
                if last:
                    torch.testing.assert_close(result[0], reference(x, ids)[0])
                for stage in stages:
                    same_gradients(stage, reference, f"{name}, after evaluation, stage {stage.stage_index}")
            if step % 2:
                optimizer.step()
                eager.step()
                optimizer.zero_grad(set_to_none=step < 4)
                eager.zero_grad(set_to_none=step < 4)
        for stage in stages:
            torch.testing.assert_close(stage.submod.state_dict(), reference.stages[stage.stage_index].state_dict())


def test_schedules_of_one_stage_per_rank_train_like_eager():
    run_ranks(train, 3, 3, 3, SINGLE)


def test_schedules_of_several_stages_per_rank_train_like_eager():
    run_ranks(train, 2, 2, 4, (*LOOPED, *FOLDED))


def with_other_messages(rank: int) -> None:
    """Values that go by themselves, as large ones do, and unexpected messages in a group of their own, as with NCCL."""
    with mock.patch.object(messages, "_LARGE", 0), mock.patch.object(Stage, "_needs_side_group", return_value=True):
        train(rank, 2, 4, ("Interleaved1F1B", "ZBVZeroBubble"))


def test_large_values_and_a_group_for_unexpected_messages():
    run_ranks(with_other_messages, 2)


class Loses(nn.Module):
    """Returns a value that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(3, 3)
        self.lost = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kept(x), self.lost(x)


class Ranked(nn.Module):
    """Uses it for an order only."""

    def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return torch.gather(x, 1, order.argsort(1))


def without_gradients(rank: int) -> None:
    """A value without a gradient: parameters before it get none, as in eager. Then frozen stages."""
    for large in (messages._LARGE, 0):
        with mock.patch.object(messages, "_LARGE", large):
            pipe = HandMade([Loses(), Ranked()])
            stage = build_stage(pipe, rank, "cpu")
            schedule = ScheduleGPipe(stage, 2, lambda result, target: result.square().mean())
            x = torch.randn(4, 3)
            for _ in range(2):
                schedule.step(*((x,) if rank == 0 else ()), target=x if rank == 1 else None)
            gradients = {name: parameter.grad for name, parameter in stage.submod.named_parameters()}
            assert [name for name, gradient in gradients.items() if gradient is None] == (
                ["lost.weight", "lost.bias"] if rank == 0 else []
            )
            stage.submod.requires_grad_(False)
            schedule = ScheduleGPipe(stage, 2)
            for _ in range(2):
                schedule.step(*((x,) if rank == 0 else ()))


def test_values_without_gradient():
    torch.manual_seed(0)
    run_ranks(without_gradients, 2)


def in_forward_only(rank: int) -> None:
    pipe, reference = make(3), make(3)
    stage = build_stage(pipe, rank, "cpu")
    generator = torch.Generator().manual_seed(3)
    for schedule in (_ScheduleForwardOnly(stage, 2), ScheduleGPipe(stage, 3), ws.pipelining.schedule("1F1B", stage, 3)):
        for rows in (6, 7, 4):
            x, ids, _ = batch(rows, generator)
            with torch.no_grad():
                result = schedule.step(*((x, ids) if rank == 0 else ()))
            if rank == 2:
                torch.testing.assert_close(result[0], reference(x, ids)[0])
                assert result[2].shape == (schedule._n_microbatches,)
        assert all(parameter.grad is None for parameter in stage.submod.parameters())


def test_forward_only_with_and_without_gradient_mode():
    run_ranks(in_forward_only, 3)


class Ends(nn.Module):
    """Returns a dict, with something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        return y, y.argmax(-1), y.square().mean()


def structured(rank: int) -> None:
    def build() -> HandMade:
        torch.manual_seed(1)
        stages = [nn.Linear(6, 6), Ends()]
        return HandMade(stages, result=lambda v: {"logits": v[0], "more": [v[1], {"penalty": v[2]}], "none": None})

    def loss_fn(result: Any, target: Any) -> torch.Tensor:
        wanted, scale = target["label"], target["scale"]
        return nn.functional.cross_entropy(result["logits"] * scale, wanted) + result["more"][1]["penalty"]

    pipe, reference = build(), build()
    stage = build_stage(pipe, rank, "cpu")
    schedule = ws.pipelining.schedule(Schedule1F1B, stage, 4, loss_fn)
    assert isinstance(schedule, Schedule1F1B)
    x, target = torch.randn(10, 6), {"label": torch.randint(0, 3, (10,)), "scale": 2.0}
    result = schedule.step(*((x,) if rank == 0 else ()), target=target if rank == 1 else None)
    expected = reference(x)
    loss_fn(expected, target).backward()
    same_gradients(stage, reference, "dict")
    if rank == 1:
        torch.testing.assert_close(result["logits"], expected["logits"])
        torch.testing.assert_close(result["more"][0], expected["more"][0])
        assert result["more"][1]["penalty"].shape == (4,)
        assert result["none"] is None
    sums(rank)
    refusals(rank, pipe, stage)


def sums(rank: int) -> None:
    """Losses that are sums: nothing is scaled, and microbatches of different sizes count as they are."""
    torch.manual_seed(1)
    pipe = HandMade([nn.Linear(6, 6), nn.Linear(6, 3)])
    stage = build_stage(pipe, rank, "cpu", weights="equal")
    schedule = ScheduleGPipe(stage, 3, lambda result, target: (result - target).square().sum(), scale_grads=False)
    x, target = torch.randn(7, 6), torch.randn(7, 3)
    schedule.step(*((x,) if rank == 0 else ()), target=target if rank == 1 else None)
    (pipe(x) - target).square().sum().backward()
    torch.manual_seed(1)
    reference = HandMade([nn.Linear(6, 6), nn.Linear(6, 3)])
    (reference(x) - target).square().sum().backward()
    ours = [p.grad / (2 if i // 2 == rank else 1) for i, p in enumerate(pipe.parameters())]
    torch.testing.assert_close(ours, [p.grad for p in reference.parameters()])


def refusals(rank: int, pipe: HandMade, stage: Any) -> None:
    for wrong in ({"stage_index": 2}, {"weights": "some"}):
        with pytest.raises((StageError, OptionError)):
            build_stage(pipe, **{"stage_index": rank, "device": "cpu", **wrong})
    with pytest.raises(OptionError, match="no schedule"):
        ws.pipelining.schedule("2F2B", stage, 4)
    with pytest.raises(OptionError, match="one stage on each rank"):
        ws.pipelining.schedule("GPipe", [stage, stage], 4)
    with pytest.raises(StageError, match="stages of"):
        ws.pipelining.schedule("GPipe", nn.Linear(2, 2), 4)
    elsewhere = ws.pipelining.schedule("GPipe", build_stage(pipe, 1 - rank, "cpu"), 4)
    with pytest.raises(StageError, match=rf"GPipe runs stage {1 - rank} on rank {1 - rank}.*\n.*here \[{rank}\]"):
        elsewhere.step(torch.randn(4, 6))
    looped = ws.pipelining.schedule("Interleaved1F1B", [stage], 2, lambda result, target: result["logits"].mean())
    orders = looped.pipeline_order_with_comms
    for actions in orders.values():
        actions[:] = [action for action in actions if action.computation_type.name != "REDUCE_GRAD"]
    with pytest.raises(ScheduleError, match="never reduces"):
        looped.step(torch.randn(4, 6))


class Scaled(nn.Module):
    """Takes a value that is the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.linear(x * scale) + shift


def with_whole_arguments(rank: int) -> None:
    torch.manual_seed(1)
    pipe = HandMade([Scaled(), nn.Linear(6, 3)])
    stage = build_stage(pipe, rank, "cpu")
    x, scale, shift = torch.randn(8, 6), torch.randn(1, 6), torch.randn(6)
    specs = {"args_chunk_spec": (TensorChunkSpec(0), None), "kwargs_chunk_spec": {"shift": None}}
    for name in ("1F1B", "Interleaved1F1B"):
        schedule = ws.pipelining.schedule(name, [stage], 4, lambda result, _: result.mean(), **specs)
        result = schedule.step(*((x, scale) if rank == 0 else ()), **({"shift": shift} if rank == 0 else {}))
        if rank == 1:
            torch.testing.assert_close(result, pipe(x, scale, shift))
    if rank == 0:
        with pytest.raises(
            PipelineInputError, match=r"argument 1 has 1 rows.*\n.*None for an argument that is passed whole"
        ):
            ws.pipelining.schedule("GPipe", stage, 4).step(x, scale, shift=shift)


def test_arguments_that_are_passed_whole_to_every_microbatch():
    run_ranks(with_whole_arguments, 2)


def test_dict_results_and_targets_and_losses_that_are_sums():
    torch.manual_seed(0)
    run_ranks(structured, 2)
