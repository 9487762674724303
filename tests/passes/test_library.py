"""What `ws.compile` does by itself is there as passes too, for graphs from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from ir.collectives import Build, comm
from ir.step_graphs import aten
from passes.optimizers import OPTIMIZERS, name_of, optimizer_step
from passes.pretend import run
from passes.test_optimizer_blocks import the_block
from wholestep.errors import WholestepError
from wholestep.passes.contract import applied_passes, graph_optimization_pass
from wholestep.passes.library import reinplace_tail, remove_dead_collectives, remove_duplicate_collectives
from wholestep.passes.replay import Replay


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
    with pytest.raises(WholestepError, match="reinplace_tail"):
        reinplace_tail(step)
    step.gm.recompile()
    assert step.gm.code == code


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

    @graph_optimization_pass()
    def exchange(gm: fx.GraphModule) -> None:
        first, second = (gm.graph.find_nodes(op="call_function", target=aten.copy_.default)[i] for i in (0, 2))
        first.args, second.args = (first.args[0], second.args[1]), (second.args[0], first.args[1])

    step = optimizer_step("Adam", {"fused": True})
    assert the_block(step).params
    before = Replay(step.gm)
    exchange(step.gm)
    with pytest.raises(WholestepError, match="other values"):
        before.compare(step.gm, "exact")
