"""Buckets in graphs that write in place, return results or gather what was gathered: memory is as it was before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from ir.collectives import Build
from passes.pretend import run, shared_pairs
from wholestep.ir import StepGraph
from wholestep.ir.effects import is_collective
from wholestep.passes import (
    bucket_all_gather,
    bucket_reduce_scatter,
    comm_fusion_with_concat,
    merge_common_subexpressions,
)

aten = torch.ops.aten

PASSES: dict[str, Any] = {
    "gather": bucket_all_gather,
    "scatter": bucket_reduce_scatter,
    "reduce": comm_fusion_with_concat,
}


def collectives(gm: fx.GraphModule) -> int:
    return sum(is_collective(node.target) for node in gm.graph.nodes)


def same_after(make: Callable[[], StepGraph], bucket: Any) -> int:
    """Results, inputs and shared memory are as before; returns how many collectives are left."""
    results, inputs, _ = run(make())
    step = make()
    bucket(step.gm)
    results_now, inputs_now, _ = run(step)
    assert all(map(torch.equal, results, results_now))
    assert all(map(torch.equal, inputs, inputs_now))
    starts = [[t.data_ptr() for t in each] for each in (results, results_now)]
    assert len(set(starts[0])) == len(set(starts[1]))
    return collectives(step.gm)


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("copies", [True, False], ids=["copied before", "a view"])
def test_an_operand_is_made_before_its_source_is_written(kind: str, copies: bool) -> None:
    def make() -> StepGraph:
        build = Build()
        inputs = [build.input("x", 4, 3), build.input("y", 2, 3)]
        steps = [
            build.call(aten.clone.default, x) if copies else build.call(aten.view.default, x, [-1]) for x in inputs
        ]
        build.call(aten.mul_.Tensor, inputs[0], 2.0)
        waits = [build.wait(getattr(build, kind)(each)) for each in steps]
        return build.finish(*[build.call(aten.sum.default, wait) for wait in waits])

    assert same_after(make, PASSES[kind]) == 1


@pytest.mark.parametrize("through_a_view", [True, False])
def test_a_result_that_is_written_is_not_shared(through_a_view: bool) -> None:
    def make() -> StepGraph:
        build = Build()
        x, y = build.input("x", 4, 3), build.input("y", 2, 3)
        waits = [build.wait(build.gather(each)) for each in (x, y, x)]
        written = build.call(aten.view.default, waits[0], [-1]) if through_a_view else waits[0]
        build.call(aten.mul_.Tensor, written, 3.0)
        return build.finish(*[build.call(aten.sum.default, wait) for wait in waits])

    assert same_after(make, bucket_all_gather) == 1


def test_two_results_that_leave_are_two_tensors() -> None:
    def make() -> StepGraph:
        build = Build()
        x, y = build.input("x", 4, 3), build.input("y", 2, 3)
        return build.finish(*[build.wait(build.gather(each)) for each in (x, y, x)])

    assert same_after(make, bucket_all_gather) == 1
    step = make()
    bucket_all_gather(step.gm)
    assert not shared_pairs(run(step)[0])


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("inner_first", [True, False])
def test_what_is_gathered_over_two_axes_has_a_bucket_on_each(casts: bool, inner_first: bool) -> None:
    def make() -> StepGraph:
        build = Build()
        dtype = torch.bfloat16 if casts else torch.float32
        first, x, y = build.input("first", 2, dtype=dtype), build.input("x", 4, 3), build.input("y", 2, 3)
        waits = [build.wait(build.gather(first, "inner"))] if inner_first else []
        outer = [build.wait(build.gather(each, "outer")) for each in (x, y)]
        for each in outer:
            operand = build.call(aten._to_copy.default, each, dtype=dtype) if casts else each
            waits.append(build.wait(build.gather(operand, "inner")))
        return build.finish(*[build.call(aten.sum.default, wait) for wait in waits])

    assert same_after(make, bucket_all_gather) == 2 + inner_first


def gathered_twice(pads: bool, casts: bool) -> StepGraph:
    """What one of two ranks has: the one with the shorter shards pads them."""
    build = Build()
    inputs = [build.input(f"x{i}", 3 if pads else 4, 3) for i in range(3)]
    sums = []
    for x in inputs * 2:
        operand = build.call(aten._to_copy.default, x, dtype=torch.bfloat16) if casts else x
        operand = build.call(aten.constant_pad_nd.default, operand, [0, 0, 0, 1]) if pads else operand
        sums.append(build.call(aten.sum.default, build.wait(build.gather(operand))))
    return build.finish(*sums)


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("size", [25, 2.5e-4])
def test_ranks_that_pad_come_to_the_same_buckets_also_where_they_pad_once(casts: bool, size: float) -> None:
    def bucket(gm: fx.GraphModule) -> None:
        merge_common_subexpressions(gm)
        bucket_all_gather(gm, size)

    found = []
    for pads in (True, False):
        same_after(lambda pads=pads: gathered_twice(pads, casts), bucket)  # type: ignore[misc]
        step = gathered_twice(pads, casts)
        bucket(step.gm)
        sent: Any = [n.args[0] for n in step.gm.graph.nodes if is_collective(n.target)]
        found.append([operand.meta["val"].numel() for operand in sent])
    assert found[0] == found[1]
    assert len(found[0]) < 6


def test_a_padding_that_somebody_writes_is_read_at_its_time() -> None:
    def make() -> StepGraph:
        build = Build()
        x, y = build.input("x", 3, 3), build.input("y", 4, 3)
        padded = build.call(aten.constant_pad_nd.default, x, [0, 0, 0, 1])
        waits = [build.wait(build.gather(each)) for each in (y, padded)]
        build.call(aten.mul_.Tensor, padded, 2.0)
        waits += [build.wait(build.gather(each)) for each in (padded, y)]
        return build.finish(*[build.call(aten.sum.default, wait) for wait in waits])

    assert same_after(make, bucket_all_gather) == 2
