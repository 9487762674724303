"""Gradients of a pipeline on ranks: tied weights, clipping over all stages, data parallelism inside a stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import wholestep as ws
from pipelining.manual_pipes import HandMade
from ranks import run_ranks
from wholestep.errors import PlanError, StageError
from wholestep.pipelining import MultiUseParameterConfig, SharedParameter, build_stage, clip_grad_norm_, schedule

MICROBATCHES = 4
STEPS = 5


class Start(nn.Module):
    """An embedding and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.table(ids))


class Middle(nn.Module):
    """A layer, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Head(nn.Module):
    """Logits from the embedding's own weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def make(*, copied: bool) -> HandMade:
    """A model with tied weights; the two stages hold the same tensor, as a pipe does, or already copies of it."""
    torch.manual_seed(0)
    start = Start()
    weight = nn.Parameter(start.table.weight.detach().clone()) if copied else start.table.weight
    stages = [start, Middle(), Middle(), Head(weight)]
    tied = SharedParameter(("table.weight", "weight"), (0, 3), MultiUseParameterConfig.REPLICATE)
    return HandMade(stages, [tied])


def loss_of(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(result, target)


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank: int, cases: list[tuple[str, bool, str]]) -> None:
    for name, copied, plan in cases:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")) if plan else None
        plans = {"replicate": ws.Replicate, "shard": ws.FullyShard}
        train_case(name, copied, mesh, plans[plan](mesh["dp"]) if mesh is not None else None)


def train_case(name: str, copied: bool, mesh: Any, plan: Any) -> None:
    group = None if mesh is None else mesh["pp"].get_group()
    place, part, parts = dist.get_rank(group), 0, 1
    if mesh is not None:
        part, parts = mesh["dp"].get_local_rank(), 2
    pipe, reference = make(copied=copied), make(copied=False)
    mine = [place, 3 - place] if name in ("ZBVZeroBubble", "DualPipeV") else [place, place + 2]
    stages = [build_stage(pipe, index, "cpu", group, data_parallel=plan) for index in mine]
    steps = schedule(name, stages, MICROBATCHES, loss_of)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    assert len({id(parameter) for parameter in parameters}) == len(parameters)
    optimizer = torch.optim.AdamW(parameters, 0.1)
    once = list(dict.fromkeys(reference.parameters()))
    eager = torch.optim.AdamW(once, 0.1)
    generator = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        ids, target = torch.randint(0, 7, (2, 16), generator=generator)
        own, own_target = ids.chunk(parts)[part], target.chunk(parts)[part]
        steps.step(*((own,) if 0 in mine else ()), target=own_target if 3 in mine else None)
        for x, y in zip(ids.chunk(parts * MICROBATCHES), target.chunk(parts * MICROBATCHES), strict=True):
            (loss_of(reference(x), y) / (parts * MICROBATCHES)).backward()
        torch.testing.assert_close(clip_grad_norm_(stages, 0.5), torch.nn.utils.clip_grad_norm_(once, 0.5))
        for stage in stages:
            theirs = dict(reference.stages[stage.stage_index].named_parameters())
            for key, parameter in stage.submod.named_parameters():
                note = f"{name}, {plan}, step {step}, stage {stage.stage_index}, {key}"
                torch.testing.assert_close(whole(parameter.grad), theirs[key].grad, msg=lambda m, n=note: f"{n}: {m}")
        optimizer.step()
        eager.step()
        if step % 2:  # otherwise the clipped gradients stay, and the next step adds to them
            optimizer.zero_grad()
            eager.zero_grad()
    for stage in stages:
        theirs = dict(reference.stages[stage.stage_index].named_parameters())
        for key, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(whole(parameter.detach()), theirs[key].detach())
    tied_stay_equal(stages, group)


def tied_stay_equal(stages: list[Any], group: Any) -> None:
    tied = {}
    for stage in stages:
        for copy in stage.copies:
            tied[copy.stage] = whole(copy.parameter.detach())
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, tied, group=group)
    first, last = everywhere[0][0], (everywhere[0] | everywhere[1])[3]
    assert torch.equal(first, last)


def test_tied_gradients_are_summed_once_and_clipping_is_over_all_stages():
    run_ranks(train, 2, [("Interleaved1F1B", False, ""), ("InterleavedZeroBubble", True, ""), ("DualPipeV", False, "")])


def test_data_parallelism_inside_stages_is_reduced_once_a_step():
    cases = [("Interleaved1F1B", False, "replicate"), ("ZBVZeroBubble", False, "replicate")]
    run_ranks(train, 4, [*cases, ("ZBVZeroBubble", True, "shard"), ("LoopedBFS", False, "shard")])


def without_a_schedule(rank: int) -> None:
    """Norms of other orders, non-finite norms, and invalid options."""
    pipe = HandMade([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    stage = build_stage(pipe, rank, "cpu")
    for order in (1.0, 3.0, float("inf")):
        for number, parameter in enumerate(pipe.parameters()):
            parameter.grad = torch.arange(4.0).view(2, 2) - 3 * number
        expected = torch.nn.utils.get_total_norm([p.grad for p in pipe.parameters()], order)
        torch.testing.assert_close(clip_grad_norm_(stage, 1.0, order), expected)
        ours = pipe.parameters()[rank].grad
        torch.testing.assert_close(ours, (torch.arange(4.0).view(2, 2) - 3 * rank) / (expected + 1e-6))
    pipe.parameters()[0].grad = torch.full((2, 2), float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([stage], 1.0, error_if_nonfinite=True)
    with pytest.raises(StageError, match="takes stages"):
        clip_grad_norm_(pipe.parameters(), 1.0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(PlanError, match="a plan"):
        build_stage(pipe, rank, "cpu", data_parallel=mesh)
    with pytest.raises(PlanError, match="one unit"):
        build_stage(pipe, rank, "cpu", data_parallel=ws.FullyShard(mesh, modules=["linear"]))


def test_norms_of_other_orders_and_invalid_options():
    run_ranks(without_a_schedule, 2)
