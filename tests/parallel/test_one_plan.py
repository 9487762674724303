"""`passes="auto"` hides communication by one plan: that of the first rank, whatever the others know of costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wholestep as ws
from cases.parts import adamw, train_step
from parallel.pairs import Case, all_of, beside_ddp, beside_fully_shard, numbers, world_mesh
from ranks import RanksFailed, run_ranks
from wholestep.ir.effects import is_collective
from wholestep.passes import overlap_communication
from wholestep.simulate import CPU, CollectiveModel, Link

SLOW = replace(CPU, flops=1e6, collectives=CollectiveModel(Link(1e-3, 0.0, 1e6), Link(1e-3, 0.0, 1e6)))
"""A machine on which it is worth to compute while tensors are sent; on the CPU all of it is latency."""


def net() -> nn.Module:
    """Seven rows: rank 1 pads where rank 0 does not."""
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))))


def issued(graph: ws.StepGraph) -> list[tuple[str, Any]]:
    """Operators and shapes of collectives in order."""
    found = [node for node in graph.gm.graph.nodes if node.op == "call_function" and is_collective(node.target)]
    return [(str(node.target), tuple(node.meta["val"].shape)) for node in found]


def machine_of_rank() -> Any:
    return SLOW if dist.get_rank() else CPU


def test_ranks_that_know_other_costs_follow_the_plan_of_the_first() -> None:
    def code(rank: int) -> tuple[list[Any], list[Any], list[Any]]:
        torch.manual_seed(0)
        model = net()
        optimizer = adamw(model)
        passes = [overlap_communication(machine=machine_of_rank())]
        step = ws.compile(train_step, parallel=ws.FullyShard(world_mesh()), lower="eager", passes=passes)
        step(model, optimizer, numbers(0, rank, 5, 6))
        first = issued(step.last)
        step(model, optimizer, numbers(1, rank, 5 + 3 * rank, 6))  # rank 1 captures again, rank 0 only its new state
        plain = ws.compile(train_step, parallel=step.options.parallel, passes=None)
        alone = plain.capture(model, optimizer, numbers(0, rank, 5, 6))
        overlap_communication(alone, machine=machine_of_rank())
        return first, issued(step.last), issued(alone)

    results = run_ranks(code, 2)
    assert results[0][:2] == results[1][:2]
    assert results[0][2] != results[1][2]  # each for itself would have packed other buckets


def test_two_ranks_with_other_costs_have_the_bits_of_torch() -> None:
    def check(case: Case) -> list[str]:
        planned = replace(case, compile={"passes": [overlap_communication(machine=machine_of_rank())]})
        return [*beside_ddp(planned), *beside_fully_shard(planned)]

    all_of(check, [Case("two ranks", net, steps=2)])


def test_the_text_of_a_step_says_what_is_exposed_and_why() -> None:
    def code(rank: int) -> tuple[str, str, str]:
        model = net()
        step = ws.compile(train_step, parallel=ws.FullyShard(world_mesh()), lower="eager", memory_budget="1GiB")
        nothing = step.explain()
        step(model, adamw(model), numbers(0, rank, 5, 6))
        timeline = ws.simulate.step(step.last, machine=ws.simulate.H100, peak_bytes=2**30)
        longest = max(timeline.exposed(), key=lambda each: each.exposed_us)
        return nothing, step.explain(ws.simulate.H100), longest.text(timeline.index)

    for nothing, text, reason in run_ranks(code, 2):
        assert nothing == "train_step: nothing was captured yet"
        assert "overlap_communication" in text
        assert "of it are exposed" in reason
        assert reason in text


def test_a_rank_without_the_plan_is_named() -> None:
    def code(rank: int) -> None:
        model = net()
        plan = ws.Replicate(world_mesh())
        step = ws.compile(train_step, parallel=plan, lower="inductor", passes=None if rank else "auto")
        step(model, adamw(model), numbers(0, rank, 5, 6))

    with pytest.raises(RanksFailed) as caught:
        run_ranks(code, 2)
    assert all("Ranks disagree on the graph" in text for text in caught.value.failures.values())
