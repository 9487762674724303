"""Python functions of torch that a pass inserts work in every StepGraph, also under a plan: they become operators."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholestep as ws
from wholestep.errors import PassError
from wholestep.passes import graph_optimization_pass

aten = torch.ops.aten


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).relu().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def inserts(make: Callable[[fx.Graph, fx.Node], fx.Node]) -> Any:
    """A pass that puts something behind the relu."""

    @graph_optimization_pass(numerics="changes")
    def doubles(gm: fx.GraphModule) -> None:
        (relu,) = (node for node in gm.graph.nodes if node.target is aten.relu.default)
        readers = list(relu.users)
        with gm.graph.inserting_after(relu):
            made = make(gm.graph, relu)
        for user in readers:
            user.replace_input_with(relu, made)

    return doubles


def run(passes: list[Any], **options: Any) -> tuple[Tensor, list[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    step = ws.compile(train_step, passes=passes, lower="eager", **options)
    loss = step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 3))
    assert step.last is not None
    assert "nodes" in step.explain()  # also where the graph asks for the device of a tensor (`prim::device`)
    return loss, [node.target for node in step.last.gm.graph.nodes if node.op == "call_function"]


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


FUNCTIONS: dict[str, Callable[[fx.Graph, fx.Node], fx.Node]] = {
    "torch.add": lambda graph, x: graph.call_function(torch.add, (x, x)),
    "packet": lambda graph, x: graph.call_function(aten.add, (x, x)),
    "method": lambda graph, x: graph.call_method("add", (x, x)),
    "keyword": lambda graph, x: graph.call_function(torch.add, (x,), {"other": x, "alpha": 1}),
    "several operators": lambda graph, x: graph.call_function(torch.nn.functional.normalize, (x,)),
}


@pytest.mark.fake_group
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_torch_is_replaced_by_its_operators_under_a_plan(name: str, two_ranks: Any) -> None:
    loss, targets = run([inserts(FUNCTIONS[name])], parallel=ws.Replicate(two_ranks))
    assert all(isinstance(target, torch._ops.OpOverload) or target.__module__ != "torch" for target in targets)
    without, _ = run([], parallel=ws.Replicate(two_ranks))
    if name == "several operators":
        assert aten.linalg_vector_norm.default in targets
    else:
        assert aten.add.Tensor in targets
        assert torch.allclose(loss, 4 * without)


def test_parts_of_a_tuple_are_those_of_the_operator() -> None:
    def sorted_rows(graph: fx.Graph, x: fx.Node) -> fx.Node:
        both = graph.call_function(torch.sort, (x,), {"dim": 1})
        with graph.inserting_after(both):
            return graph.call_function(operator.getitem, (both, 0))

    loss, targets = run([inserts(sorted_rows)])
    assert aten.sort.default in targets
    assert torch.allclose(loss, run([])[0])


def test_functions_of_functions_are_replaced_in_order() -> None:
    def twice(graph: fx.Graph, x: fx.Node) -> fx.Node:
        doubled = graph.call_function(torch.add, (x, x))
        with graph.inserting_after(doubled):
            return graph.call_method("relu", (doubled,))

    loss, targets = run([inserts(twice)])
    assert aten.add.Tensor in targets
    assert torch.allclose(loss, 4 * run([])[0])


def test_a_call_that_torch_refuses_names_the_node() -> None:
    with pytest.raises(PassError, match="add does not accept its arguments"):
        run([inserts(lambda graph, x: graph.call_function(torch.add, (x,)))])
