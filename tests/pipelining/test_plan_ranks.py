"""A check and a recording where schedules really run: on ranks, over stages of a pipe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep as ws
from ranks import run_ranks
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


@pytest.mark.parametrize("names", [NAMES])
def test_every_rank_checks_the_schedule_that_it_then_runs(names):
    pipes = {name: cut(2 if name == "1F1B" else 4) for name in names}
    found = run_ranks(on_a_rank, 2, pipes)
    for name in names:
        (first, _), (second, _) = (rank[name] for rank in found)
        assert first == second
        schedule = pipeline.Schedule.from_csv(first, name)
        records = [record for rank in found for record in pipeline.read_json(rank[name][1])]
        measured = pipeline.timeline_of(records, schedule)
        for ran, listed in zip(measured.of_rank, schedule.compute_only().ranks, strict=True):
            assert [span.action for span in ran] == list(listed)
