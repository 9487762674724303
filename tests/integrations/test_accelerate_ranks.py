"""Accelerate on two ranks, where `prepare` gives DistributedDataParallel: the step communicates as it does in eager."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it: here once, instead of on every rank
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from ranks import run_ranks

accelerate = pytest.importorskip("accelerate")


def on_this_rank(rank: int, **options: Any) -> Any:
    """An Accelerator as a script that `accelerate launch` started has it; the process group is there."""
    from accelerate.state import AcceleratorState, GradientState

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **options)


def train(rank: int, compiled: bool, **options: Any) -> tuple[list[Any], list[dict[str, int]]]:
    """Two epochs of three batches; what a rank sees, and the collectives of each graph."""
    accelerator = on_this_rank(rank, gradient_accumulation_steps=2, **options)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    inner = torch.optim.AdamW(plain.parameters(), lr=0.01)
    data = [(torch.randn(6), torch.randn(4)) for _ in range(12)]
    model, optimizer, scheduler, loader = accelerator.prepare(
        plain,
        inner,
        torch.optim.lr_scheduler.StepLR(inner, 2, 0.5),
        torch.utils.data.DataLoader(data, batch_size=2),
    )
    assert isinstance(model, nn.parallel.DistributedDataParallel)

    def step(x: Tensor, y: Tensor) -> Any:
        with accelerator.accumulate(model):
            norm = None
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss.detach(), norm

    run: Any = ws.compile(step) if compiled else step
    seen = []
    for _ in range(2):
        for batch in loader:
            loss, norm = run(*batch)
            state = [tensor.tolist() for tensor in (*plain.parameters(), *plain.buffers())]
            counts = (accelerator.step, accelerator.sync_gradients, scheduler.get_last_lr())
            seen.append((loss.tolist(), None if norm is None else norm.tolist(), counts, state))
    return seen, [collectives(graph) for graph in run.graphs] if compiled else []


def collectives(graph: ws.StepGraph) -> dict[str, int]:
    targets = [str(node.target) for node in graph.gm.graph.nodes]
    return dict(Counter(t.split(".")[1] for t in targets if "_c10d_functional" in t and "wait_tensor" not in t))


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"mixed_precision": "bf16"}, marks=pytest.mark.long)], ids=["float32", "bf16"]
)
def test_accelerate_on_two_ranks_trains_as_in_eager_and_communicates_in_the_graph(options: dict[str, Any]) -> None:
    def code(rank: int) -> list[dict[str, int]]:
        expected, _ = train(rank, False, **options)
        actual, graphs = train(rank, True, **options)
        for call, (want, got) in enumerate(zip(expected, actual, strict=True), 1):
            assert want == got, f"call {call}"
        return graphs

    (graphs, others) = run_ranks(code, 2, deadline=120)
    assert graphs == others
    assert {"all_reduce" in graph for graph in graphs} == {True, False}  # not in the first micro-batch of two


def test_two_forwards_whose_last_backward_is_triggered_to_synchronise_train_as_in_eager() -> None:
    def one(rank: int, compiled: bool) -> Any:
        accelerator = on_this_rank(rank)
        torch.manual_seed(0)
        plain = nn.Linear(6, 4)
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))

        def step(x: Tensor, y: Tensor) -> Any:
            with accelerator.no_sync(model):
                first, second = F.mse_loss(model(x), y), F.mse_loss(model(y @ y.T[:, :4] @ x), y)
            accelerator.backward(first)
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(second)
            optimizer.step()
            optimizer.zero_grad()
            return first.detach()

        run: Any = ws.compile(step) if compiled else step
        torch.manual_seed(rank)
        return [(run(torch.randn(4, 6), torch.randn(4, 4)).tolist(), plain.weight.tolist()) for _ in range(3)]

    for expected, actual in run_ranks(lambda rank: (one(rank, False), one(rank, True)), 2, deadline=90):
        assert expected == actual
