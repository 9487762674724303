"""A check and a recording on ranks, over stages of a pipe."""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import wholestep as ws
from ranks import run_ranks
from wholestep.pipelining.planning.stage_costs import estimate_costs
from wholestep.simulate import pipeline

NAMES = ("1F1B", "ZBVZeroBubble")


def cut(stages: int) -> ws.pipelining.Pipe:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(stages))

        def forward(self, x):
            for index, layer in enumerate(self.layers):
                if index:
                    ws.pipelining.pipe_split()
                x = torch.tanh(layer(x))
            return x

    return ws.pipelining.pipeline(Model(), (torch.randn(2, 4),))


def on_a_rank(rank: int, pipes: dict[str, ws.pipelining.Pipe]) -> dict[str, tuple[str, str]]:
    found = {}
    for name, pipe in pipes.items():
        own = [rank] if pipe.num_stages == 2 else [rank, 3 - rank]
        stages = [pipe.build_stage(index, "cpu") for index in own]
        made = ws.pipelining.schedule(name, stages, 4, nn.functional.mse_loss)
        timeline = pipe.check(made, memory=2**30)
        given = (torch.randn(8, 4),) if rank == 0 else ()
        target = torch.randn(8, 4) if pipe.num_stages - 1 in own else None
        with pipeline.Recorder(*stages) as recorder:
            made.step(*given, target=target)
        found[name] = timeline.schedule.to_csv(), recorder.to_json()
    return found


def test_every_rank_checks_the_schedule_that_it_runs():
    pipes = {name: cut(2 if name == "1F1B" else 4) for name in NAMES}
    found = run_ranks(on_a_rank, 2, pipes)
    for name in NAMES:
        (first, _), (second, _) = (rank[name] for rank in found)
        assert first == second
        schedule = pipeline.Schedule.from_csv(first, name)
        records = [record for rank in found for record in pipeline.read_json(rank[name][1])]
        measured = pipeline.timeline_of(records, schedule)
        for ran, listed in zip(measured.of_rank, schedule.compute_only().ranks, strict=True):
            assert [span.action for span in ran] == list(listed)


class Kept:
    """The bytes that autograd saves, each storage once: current and peak."""

    def __init__(self, there: set[int]) -> None:
        self.there, self.alive = there, Counter()
        self.now = self.most = 0

    def keep(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        holder, memory = Holder([tensor]), tensor.untyped_storage()
        if memory.data_ptr() not in self.there:
            self.change(memory.data_ptr(), 1, memory.nbytes())
            weakref.finalize(holder, self.change, memory.data_ptr(), -1, memory.nbytes())
        return holder

    def change(self, key: int, by: int, size: int) -> None:
        before = bool(self.alive[key])
        self.alive[key] += by
        self.now += (bool(self.alive[key]) - before) * size
        self.most = max(self.most, self.now)


class Holder(list):
    """A list that can be watched."""


def most_kept(rank: int, pipe: ws.pipelining.Pipe, microbatches: int) -> tuple[int, int]:
    stage = pipe.build_stage(rank, "cpu")
    made = ws.pipelining.schedule("GPipe", stage, microbatches, nn.functional.mse_loss)
    rows = 2 * microbatches
    given, target = ((torch.randn(rows, 4),) if rank == 0 else ()), (torch.randn(rows, 4) if rank else None)
    kept = Kept({each.untyped_storage().data_ptr() for each in stage.submod.parameters()})
    with saved_tensors_hooks(kept.keep, lambda holder: holder[0]):
        made.step(*given, target=target)
    return kept.most, kept.now


def test_a_rank_saves_the_predicted_bytes_plus_those_of_the_loss():
    pipe, microbatches = cut(2), 3
    (first, first_left), (last, last_left) = run_ranks(most_kept, 2, pipe, microbatches)
    activations = [each.activation_bytes for each in estimate_costs(pipe)]
    size = pipeline.Bytes(activation=activations)
    predicted = pipeline.simulate("GPipe", bytes=size, ranks=2, microbatches=microbatches).peak_bytes
    target, heads = microbatches * 2 * 4 * 4, microbatches * 128  # received values are in buffers with a header
    assert first == predicted[0]
    assert predicted[1] <= last <= predicted[1] + target + heads
    assert first_left == last_left == 0
