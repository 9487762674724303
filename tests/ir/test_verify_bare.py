"""Graphs from elsewhere: what is right there although no StepGraph has it, and who is to blame for what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ir.collectives import comm
from wholestep.errors import PassError, VerifyError
from wholestep.passes import graph_optimization_pass
from wholestep.passes.engine.manager import apply_pass

aten = torch.ops.aten


@graph_optimization_pass(numerics="exact")
def harmless(gm: fx.GraphModule) -> None:
    output = gm.graph.output_node()
    first = output.all_input_nodes[0]
    with gm.graph.inserting_before(output):
        output.replace_input_with(first, gm.graph.call_function(aten.detach.default, (first,)))


def size_of_what_is_under_way(x: Tensor, y: Tensor) -> Any:
    gathered = comm.all_gather_into_tensor(x, 2, "0")
    return y.new_zeros(gathered.shape[0]), comm.wait_tensor(gathered)


def wait_twice(x: Tensor, y: Tensor) -> Any:
    return comm.wait_tensor(comm.wait_tensor(comm.all_reduce(x, "sum", "0"))) + 1


def started_by_another_graph(x: Tensor, y: Tensor) -> Any:
    return comm.wait_tensor(x) + comm.wait_tensor(y.view(-1)).sum()


def waited_for_by_another_graph(x: Tensor, y: Tensor) -> Any:
    return x + 1, comm.all_reduce(x, "sum", "0"), comm.all_reduce(y, "sum", "0").view(-1)


def piece_by_piece(x: Tensor, y: Tensor) -> Any:
    pieces = comm.all_reduce(x, "sum", "0").chunk(2)
    return sum(comm.wait_tensor(piece) for piece in pieces)


@pytest.mark.parametrize(
    "step",
    [
        size_of_what_is_under_way,
        wait_twice,
        started_by_another_graph,
        waited_for_by_another_graph,
        piece_by_piece,
    ],
)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("level", [1, 2])
def test_nothing_is_said_against_a_right_graph(step: Callable[..., Any], mode: Any, level: int) -> None:
    gm = make_fx(step, tracing_mode=mode)(torch.ones(4), torch.ones(6))
    apply_pass(harmless, gm, (), {}, level=level)


def test_modules_may_be_called() -> None:
    harmless(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))))


def unwaited() -> fx.GraphModule:
    graph = fx.Graph()
    started = graph.call_function(comm.all_reduce.default, (graph.placeholder("x"), "sum", "0"))
    graph.output((graph.call_function(aten.add.Tensor, (started, 1)),))
    return fx.GraphModule(nn.Module(), graph)


def test_a_pass_is_not_blamed_for_what_was_wrong_before_it() -> None:
    with pytest.raises(
        VerifyError, match="before harmless ran, the graph broke a rule already: add_tensor uses"
    ) as info:
        harmless(unwaited())
    assert not isinstance(info.value, PassError)


def test_a_pass_is_blamed_for_what_it_did() -> None:
    @graph_optimization_pass(numerics="changes")
    def forgets_the_wait(gm: fx.GraphModule) -> None:
        (wait,) = gm.graph.find_nodes(op="call_function", target=comm.wait_tensor.default)
        wait.replace_all_uses_with(wait.args[0])

    gm = make_fx(lambda x: comm.wait_tensor(comm.all_reduce(x, "sum", "0")) + 1, tracing_mode="fake")(torch.ones(2))
    with pytest.raises(PassError, match="forgets_the_wait left a graph that breaks a rule"):
        forgets_the_wait(gm)
