"""Checkpoints: saved from a pipeline, loaded into the plain model and into a pipeline with another number of stages."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from ranks import run_ranks
from wholestep.pipelining import Pipe, SplitPoint, pipeline, schedule


class Tied(nn.Module):
    """An embedding whose weight is also the head, statistics, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3)])
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.table(ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * self.scale
        return self.head(h)


def cut(*places: str) -> Pipe:
    torch.manual_seed(0)
    return pipeline(Tied(), (torch.zeros(4, dtype=torch.long),), split_spec=dict.fromkeys(places, SplitPoint.BEGINNING))


def states(stages: list) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        found.update(stage.submod.state_dict())
    return found


def round_trip(rank: int, folder: Path, four: Pipe, two: Pipe) -> None:
    stages = [four.build_stage(index, "cpu") for index in (rank, rank + 2)]
    steps = schedule("Interleaved1F1B", stages, 4, nn.functional.cross_entropy)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], 0.5)
    torch.manual_seed(1)
    ids, target = torch.randint(0, 9, (2, 16))
    torch.manual_seed(0)
    model = Tied()
    for part, wanted in zip(ids.chunk(4), target.chunk(4), strict=True):
        (nn.functional.cross_entropy(model(part), wanted) / 4).backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    steps.step(*((ids,) if rank == 0 else ()), target=target if rank == 1 else None)
    optimizer.step()
    dcp.save(states(stages), checkpoint_id=folder)

    names: list[set[str]] = [set(), set()]
    dist.all_gather_object(names, set(states(stages)))
    assert names[0] | names[1] == set(model.state_dict())

    torch.manual_seed(5)
    plain = Tied()
    loaded = plain.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    plain.load_state_dict(loaded)
    torch.testing.assert_close(plain.state_dict(), model.state_dict())

    stage = two.build_stage(rank, "cpu")
    loaded = stage.submod.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    stage.submod.load_state_dict(loaded)
    expected = model.state_dict()
    torch.testing.assert_close(loaded, {name: expected[name] for name in loaded})

    stage.submod.eval()
    result = schedule("GPipe", stage, 4).step(*((ids,) if rank == 0 else ()))
    if rank == 1:
        torch.testing.assert_close(result, model.eval()(ids))


def test_a_checkpoint_loads_into_the_model_and_another_number_of_stages(tmp_path):
    run_ranks(round_trip, 2, tmp_path, cut("layers.0", "layers.2", "head"), cut("layers.1"))
