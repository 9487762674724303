"""What `ws.compile` does by itself is there as passes too, for graphs from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from ir.collectives import Build, comm
from ir.step_graphs import aten
from passes.optimizers import OPTIMIZERS, name_of, optimizer_step
from passes.pretend import run
from passes.test_optimizer_blocks import the_block
from wholestep.errors import OptionError, WholestepError
from wholestep.ir.effects import in_place_variant
from wholestep.passes.engine.contract import applied_passes, graph_optimization_pass
from wholestep.passes.engine.replay import Replay
from wholestep.passes.redundant_collectives import (
    dedup_collectives,
    drop_dead_collectives,
    remove_dead_collectives,
    remove_duplicate_collectives,
)
from wholestep.passes.reinplace_tail import reinplace_tail


def test_collectives_that_are_repeated_or_dead_go() -> None:
    build = Build()
    x = build.input("x", 4)
    first, second = (build.call(aten.neg.default, build.wait(build.reduce(x))) for _ in range(2))
    build.wait(build.reduce(x, "max"))
    step = build.finish(build.call(aten.add.Tensor, first, second))
    before = run(step)
    remove_duplicate_collectives(step)
    remove_dead_collectives(step)
    assert len(step.gm.graph.find_nodes(op="call_function", target=comm.all_reduce.default)) == 1
    assert torch.equal(before[0][0], run(step)[0][0])
    assert applied_passes(step.gm) == ("remove_duplicate_collectives", "remove_dead_collectives")
    assert dedup_collectives is remove_duplicate_collectives
    assert drop_dead_collectives is remove_dead_collectives


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS[::3], ids=name_of)
def test_the_tail_becomes_in_place_in_a_graph_module(name: str, options: dict[str, Any]) -> None:
    step = optimizer_step(name, options)
    before = Replay(step.gm)
    reinplace_tail(step.gm)
    before.compare(step.gm, "exact")
    assert not step.gm.graph.find_nodes(op="call_function", target=aten.copy_.default)


def test_a_step_graph_stays_in_normal_form() -> None:
    step = optimizer_step("SGD", {"foreach": True})
    code = step.gm.code
    with pytest.raises(OptionError, match="reinplace_tail ends the normal form of a StepGraph") as info:
        reinplace_tail(step)
    assert "ws.compile updates in place by itself" in info.value.fix
    with pytest.raises(OptionError, match="reinplace_tail ends the normal form"):
        ws.compile(lambda x: x, passes=["reinplace_tail"])
    step.gm.recompile()
    assert step.gm.code == code


def sgd_with_momentum(p: Tensor, m: Tensor, g: Tensor) -> Tensor:
    new = m * 0.9 + g
    loss = (p * g).sum()
    updated = torch.add(p, new, alpha=-0.1)
    m.copy_(new)
    p.copy_(updated)
    return loss


def lists(p: Tensor, m: Tensor, g: Tensor) -> Tensor:
    new = torch._foreach_add([p, m], [g, g], alpha=0.5)
    result = g.exp()
    p.copy_(new[0])
    m.copy_(new[1])
    return result


def old_values_are_returned(p: Tensor, m: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    new = p + g
    p.copy_(new)
    return new, m


def cast_on_the_way(p: Tensor, m: Tensor, g: Tensor) -> Tensor:
    p.copy_((p.double() + g).float())
    return g.sum()


@pytest.mark.parametrize(
    ("step", "left"), [(sgd_with_momentum, 0), (lists, 0), (old_values_are_returned, 1), (cast_on_the_way, 1)]
)
def test_updates_of_graphs_from_elsewhere_become_in_place(step: Callable[..., Any], left: int) -> None:
    given = [torch.randn(3) for _ in range(3)]
    gm = make_fx(step, tracing_mode="fake")(*given)
    expected = [each.clone() for each in given]
    results = gm(*expected)
    reinplace_tail(gm, verify=3)
    assert len(gm.graph.find_nodes(op="call_function", target=aten.copy_.default)) == left
    torch.testing.assert_close(gm(*given), results, rtol=0, atol=0)
    assert all(map(torch.equal, given, expected))


def test_an_operator_has_a_twin_that_takes_the_same_arguments() -> None:
    assert in_place_variant(aten.add.Tensor) is aten.add_.Tensor
    assert in_place_variant(aten._foreach_mul.Scalar) is aten._foreach_mul_.Scalar
    assert in_place_variant(aten.mm.default) is None
    assert in_place_variant(aten.add_.Tensor) is None


def test_a_graph_that_writes_in_the_middle_is_left_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.neg.default, (x,))
    graph.call_function(aten.copy_.default, (y, x))
    graph.output((graph.call_function(aten.add.Tensor, (y, x)),))
    gm = fx.GraphModule({}, graph)
    reinplace_tail(gm)
    assert torch.equal(gm(torch.ones(2))[0], torch.full((2,), 2.0))


def test_an_optimizer_of_a_bad_pass_is_not_the_same() -> None:
    """The replay that these tests rely on sees two exchanged lanes."""

    @graph_optimization_pass(numerics="changes")
    def exchange(gm: fx.GraphModule) -> None:
        first, second = (gm.graph.find_nodes(op="call_function", target=aten.copy_.default)[i] for i in (0, 2))
        first.args, second.args = (first.args[0], second.args[1]), (second.args[0], first.args[1])

    step = optimizer_step("Adam", {"fused": True})
    assert the_block(step).params
    before = Replay(step.gm)
    exchange(step.gm)
    with pytest.raises(WholestepError, match="other values"):
        before.compare(step.gm, "exact")
