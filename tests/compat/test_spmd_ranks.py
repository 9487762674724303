"""`compat.spmd` on two real ranks, beside DistributedDataParallel and fully_shard of torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it: here once, instead of on every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from wholestep.compat.spmd.api import compile
from wholestep.compat.spmd.gm_transformation import GraphModuleTransformation
from wholestep.compat.spmd.parallel_mode import DataParallel

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
}


class SmallMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.sigmoid(self.net2(self.relu(self.net1(x))))
        return out + 0.1 * out.clone().view(-1).squeeze().unsqueeze(0).view(out.shape[0], -1)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    inputs, labels = batch
    loss = (model(inputs) - labels).square().sum()
    loss.backward()
    optimizer.step()
    return loss


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(6, 5, generator=generator), torch.randn(6, 8, generator=generator)) for _ in range(4)]


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def beside_ddp(rank: int, optimizer: str, options: dict[str, Any], factor: float) -> bool:
    torch.manual_seed(1)
    model = SmallMLP()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    ours, theirs = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](ddp.parameters())
    step = compile(**options)(train_step)
    for batch in batches(rank):
        inputs, labels = batch
        theirs.zero_grad()
        (ddp(inputs) - labels).square().sum().backward()
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            parameter.grad *= factor
        theirs.step()
        step(model, ours, batch)
    step._compiled_obj.step.flush()
    pairs = list(zip(model.parameters(), ddp.parameters(), strict=True))
    return all(torch.allclose(whole(a).detach(), b.detach(), atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_data_parallel_trains_as_ddp_does(style: str, optimizer: str) -> None:
    assert run_ranks(beside_ddp, 2, optimizer, {"parallel_mode": DataParallel(style)}, 1.0) == [True, True]


def test_by_default_gradients_are_summed() -> None:
    assert run_ranks(beside_ddp, 2, "adam", {}, float(2)) == [True, True]


def test_a_transformed_graph_trains_as_ddp_does() -> None:
    transformation = GraphModuleTransformation(4, enable_graph_optimization=True)
    options = {"gm_transformation": transformation, "parallel_mode": DataParallel()}
    assert run_ranks(beside_ddp, 2, "momentum", options, 1.0) == [True, True]
    assert not dist.is_initialized()
