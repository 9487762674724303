"""Tensor-parallel plans, alone and with data parallelism around them, against a single process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import wholestep as ws
from ranks import run_ranks
from wholestep.ir.effects import is_collective

STEPS = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def megatron() -> dict[str, Any]:
    return {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(x).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def plan_of(kind: str, mesh: DeviceMesh, styles: dict[str, Any]) -> Any:
    make: Any = {"replicate": ws.Replicate, "fully shard": ws.FullyShard}[kind]
    return make(mesh["dp"], tensor_parallel=(mesh["tp"], styles))


def errors(rank: int, kind: str, data: int) -> dict[str, Any]:
    """How far a rank is from a single process, after some steps."""
    mesh = init_device_mesh("cpu", (data, dist.get_world_size() // data), mesh_dim_names=("dp", "tp"))
    model, reference = net(), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.05)
    compiled = ws.compile(step, parallel=plan_of(kind, mesh, megatron()))
    worst = 0.0
    for i in range(STEPS):
        torch.manual_seed(i)
        whole = torch.randn(4 * data, 8, dtype=torch.float64)
        loss, norm = compiled(model, optimizer, whole.chunk(data)[mesh["dp"].get_local_rank()])
        want_loss, want_norm = step(reference, plain, whole)
        loss = loss.clone()
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        worst = max(worst, abs(loss / data - want_loss).item(), abs(norm - want_norm).item())
    wants = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(whole, wants[name], rtol=1e-9, atol=1e-12)
    state = {name: type(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}
    assert compiled.last is not None
    count = sum(is_collective(node.target) for node in compiled.last.gm.graph.nodes)
    return {"worst": worst, "graphs": len(compiled.graphs), "state": state, "collectives": count}


@pytest.mark.parametrize(
    ("kind", "world", "data"),
    [
        ("replicate", 2, 1),
        ("fully shard", 4, 2),
        pytest.param("fully shard", 2, 1, marks=pytest.mark.long),
        pytest.param("replicate", 4, 2, marks=pytest.mark.long),
    ],
)
def test_tensor_parallel_steps_are_those_of_a_single_process(kind: str, world: int, data: int) -> None:
    results = run_ranks(errors, world, kind, data, deadline=90)
    for result in results:
        assert result["worst"] < 1e-12
        assert result["graphs"] == 2
        assert result["state"]["layers.0.up.weight"] is DTensor
        assert result["collectives"] > 0


def wrong_name(rank: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    plan = plan_of("replicate", mesh, {"layers.*.upp": ColwiseParallel()})
    with pytest.raises(ws.errors.PlanError) as caught:
        ws.compile(step, parallel=plan)(model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 8).double())
    return str(caught.value)


def test_a_plan_that_names_no_module_is_refused_on_every_rank() -> None:
    for message in run_ranks(wrong_name, 2):
        assert "'layers.*.upp'" in message
        assert "layers.0.up" in message


def no_style(rank: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ws.errors.PlanError) as caught:
        plan_of("replicate", mesh, {"layers.*.up": "colwise"})
    with pytest.raises(ws.errors.MeshError):
        ws.Replicate(mesh["dp"], tensor_parallel=(mesh, megatron()))
    with pytest.raises(ws.errors.MeshError, match="the same axis"):
        ws.Replicate(mesh["tp"], tensor_parallel=(mesh["tp"], megatron()))
    return str(caught.value)


def test_a_plan_takes_styles_of_torch_and_one_axis() -> None:
    assert all("ColwiseParallel()" in message for message in run_ranks(no_style, 2))


def whole_matrices(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    optimizer = torch.optim.Adafactor(model.parameters())
    step_of_plan = ws.compile(step, parallel=plan_of("fully shard", mesh, megatron()))
    with pytest.raises((ws.errors.ShardedOptimizerError, ws.errors.PeerFailedError)) as caught:
        step_of_plan(model, optimizer, torch.ones(2, 8).double())
    return str(caught.value)


def test_an_optimizer_of_whole_matrices_refuses_parameters_sharded_along_two_axes() -> None:
    assert all("along two axes" in message for message in run_ranks(whole_matrices, 4, deadline=60))
