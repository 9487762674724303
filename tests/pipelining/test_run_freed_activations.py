"""The activations of a microbatch are freed when its backward is done, not only when the step ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipelining.manual_pipes import HandMade
from ranks import run_ranks
from wholestep.pipelining import build_stage, schedule


class Holder:
    """What autograd saves in place of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # not the tensor itself, which would keep its graph alive


def mean_loss(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(result, target)


def viewed_loss(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (result - target).square().mean(0).sum(0, keepdim=True)[0]


def kept_by_the_last_stage(kind: str, loss_of: Callable[..., torch.Tensor]) -> tuple[list[int], list[Any], bool]:
    """The number of saved tensors of the last stage after each of its microbatches."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    pipe = HandMade(parts)
    stages = [build_stage(pipe, place, "cpu") for place in range(2)]
    last = stages[1]
    alive: weakref.WeakSet[Holder] = weakref.WeakSet()
    counts = []

    def pack(tensor: torch.Tensor) -> Holder:
        holder = Holder(tensor)
        alive.add(holder)
        return holder

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
            return type(last).forward_one_chunk(last, *args, **kwargs)

    def weights(*args: Any, **kwargs: Any) -> None:
        type(last).backward_weight_one_chunk(last, *args, **kwargs)
        counts.append(len(alive))

    last.forward_one_chunk = forward
    last.backward_weight_one_chunk = weights
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    losses: list[torch.Tensor] = []
    schedule(kind, stages, 4, loss_of).step(x, target=y, losses=losses)
    found = [parameter.grad for stage in stages for parameter in stage.submod.parameters()]
    model = nn.Sequential(*parts)
    model.zero_grad()
    for rows, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
        (loss_of(model(rows), wanted) / 4).backward()
    for ours, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)
    return counts, [loss.item() for loss in losses], any(loss.requires_grad for loss in losses)


def in_one_rank(rank: int) -> None:
    for kind in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        counts, losses, with_graph = kept_by_the_last_stage(kind, mean_loss)
        assert len(counts) == len(losses) == 4, (kind, counts)
        assert counts[-1] == 0, (kind, counts)
        assert not with_graph
        counts, losses, _ = kept_by_the_last_stage(kind, viewed_loss)
        assert len(losses) == 4  # a view cannot let its graph go; it trains all the same


def test_a_split_backward_frees_the_activations_of_the_last_stage():
    run_ranks(in_one_rank, 1)
