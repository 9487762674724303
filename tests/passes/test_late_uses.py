"""Results that are used at once: elementwise uses move down so that their collectives share a bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ir.collectives import Build, comm
from passes.pretend import Pretend, run
from wholestep.ir.effects import is_collective
from wholestep.ir.graph_walks import copy_graph
from wholestep.passes import bucket_reduce_scatter, comm_fusion_with_concat, schedule_comm_wait
from wholestep.passes.engine.dump import displaced
from wholestep.passes.engine.manager import apply_pass

aten = torch.ops.aten


def reduce(x: Tensor) -> Tensor:
    done: Tensor = comm.wait_tensor(comm.all_reduce(x, "sum", "0"))
    return done


def collectives(gm: fx.GraphModule) -> int:
    return sum(is_collective(node.target) for node in gm.graph.nodes)


def same_with(gm: fx.GraphModule, pass_: Any, *given: Tensor) -> None:
    """A pass, and the results of before."""
    gm.graph.eliminate_dead_code()
    expected = _Sum(gm).run(*[x.clone() for x in given])
    apply_pass(pass_, gm, (), {}, level=3)
    found = _Sum(gm).run(*[x.clone() for x in given])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class _Sum(Pretend):
    """Reductions do the same to each element, wherever it stands."""

    def _start(self, operand: Tensor, call: str, target: Any) -> Tensor:
        rows = operand.shape[0] // 2 if "scatter" in str(target) else operand.shape[0]
        result = torch.full_like(operand[:rows], torch.nan)
        self._arriving[result.untyped_storage().data_ptr()] = (result, operand[:rows] * 3)
        return result


def test_reduced_and_divided_at_once_is_one_bucket() -> None:
    inputs = [torch.randn(10) for _ in range(20)]
    gm = make_fx(lambda *xs: tuple(reduce(x * 2) / 2 for x in xs), tracing_mode="fake")(*inputs)
    same_with(gm, comm_fusion_with_concat, *inputs)
    assert collectives(gm) == 1


def test_scattered_and_cast_at_once_is_one_bucket() -> None:
    inputs = [torch.randn(4, 2) for _ in range(6)]

    def step(*xs: Tensor) -> tuple[Tensor, ...]:
        done = [comm.wait_tensor(comm.reduce_scatter_tensor(x * 2, "sum", 2, "0")).to(torch.float64) for x in xs]
        return tuple(done)

    gm = make_fx(step, tracing_mode="fake")(*inputs)
    apply_pass(bucket_reduce_scatter, gm, (), {}, level=3)
    assert collectives(gm) == 1


def test_uses_that_are_needed_for_the_next_operand_keep_collectives_apart() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = reduce(x * 2) / 2
        return first, reduce(y * first.sum())

    gm = make_fx(step, tracing_mode="fake")(torch.randn(4), torch.randn(4))
    same_with(gm, comm_fusion_with_concat, torch.randn(4), torch.randn(4))
    assert collectives(gm) == 2


def test_a_use_does_not_move_past_a_write_into_what_it_reads() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.sum() * torch.ones(4)
        first = reduce(x * 2) * scale
        scale.zero_()
        return first, reduce(y * 2 + scale)

    inputs = torch.randn(4), torch.randn(4)
    gm = make_fx(step, tracing_mode="fake")(*inputs)
    same_with(gm, comm_fusion_with_concat, *inputs)


def test_random_numbers_are_drawn_where_they_were() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.bernoulli(torch.sigmoid(reduce(x * 2)))
        return first, reduce(y * 2) * torch.rand(4)

    gm = make_fx(step, tracing_mode="fake")(torch.randn(4), torch.randn(4))
    order = [n.name for n in gm.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    comm_fusion_with_concat(gm)
    found = [n.name for n in gm.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    assert found == order
    assert collectives(gm) == 2


def test_only_what_stands_in_the_way_moves() -> None:
    build = Build()
    inputs = [build.input(f"w{i}", 4) for i in range(3)]
    other = build.input("x", 4, 4)
    results = []
    for w in inputs:
        results.append(build.call(aten.div.Tensor, build.wait(build.reduce(w)), 2.0))
        other = build.call(aten.mm.default, other, other)
    updates = [build.call(aten.mul.Tensor, each, 0.1) for each in results]
    step = build.finish(*updates, other)
    before = copy_graph(step.gm.graph)
    comm_fusion_with_concat(step)
    assert collectives(step.gm) == 1
    assert displaced(before, step.gm.graph) == 0  # nothing but inputs is needed: the bucket begins before all uses


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_steps_with_chains_of_uses_compute_the_same(data: st.DataObject) -> None:
    build = Build()
    values = [build.input(f"w{i}", 4, 3) for i in range(3)]
    limit = data.draw(st.sampled_from([0.06, 0.2, 25.0]))
    for _ in range(data.draw(st.integers(4, 24))):
        kind = data.draw(st.sampled_from(["reduce", "reduce", "div", "add", "view", "mm", "cast"]))
        one, other = data.draw(st.sampled_from(values)), data.draw(st.sampled_from(values))
        if kind == "reduce":
            made = build.wait(build.reduce(build.call(aten.mul.Tensor, one, 1.5) if data.draw(st.booleans()) else one))
        elif kind == "div":
            made = build.call(aten.div.Tensor, one, 2.0)
        elif kind == "add":
            made = build.call(aten.add.Tensor, one, other)
        elif kind == "view":
            made = build.call(aten.view.default, build.call(aten.view.default, one, [-1]), [4, 3])
        elif kind == "cast":
            made = build.call(aten._to_copy.default, one, dtype=torch.float32)
        else:
            made = build.call(aten.mm.default, build.call(aten.mm.default, one, build.call(aten.t.default, one)), other)
        values.append(made)
    step = build.finish(*values[-4:])
    expected = run(step)
    before = collectives(step.gm)
    apply_pass(comm_fusion_with_concat, step, (limit / 1024,), {}, level=3)
    assert collectives(step.gm) <= before
    apply_pass(schedule_comm_wait, step, (), {}, level=3)
    for one_, other_ in zip(expected[0], run(step)[0], strict=True):
        torch.testing.assert_close(one_, other_)


@pytest.mark.parametrize("count", [100, 1000])
def test_long_chains_are_walked_once(count: int) -> None:
    build = Build()
    inputs = [build.input(f"w{i}", 2) for i in range(count)]
    previous = inputs[0]
    results = []
    for w in inputs:
        done = build.call(aten.div.Tensor, build.wait(build.reduce(build.call(aten.neg.default, w))), 2.0)
        previous = build.call(aten.add.Tensor, done, previous)
        results.append(done)
    step = build.finish(previous, *results)
    comm_fusion_with_concat(step)
    assert collectives(step.gm) == 1
