"""The origin of a node is the same question for graphs of our capture, of AOTAutograd and of export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

import wholestep as ws
from wholestep.errors import Location
from wholestep.ir.meta import (
    NodeMeta,
    location_of_node,
    module_call,
    module_path,
    nearest_location,
    phase,
    set_node_meta,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def nodes_of(graph: fx.Graph, word: str) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and word in str(node.target)]


def test_a_captured_node_has_the_line_and_module_that_capture_recorded() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    graph = ws.capture(step, Net(), torch.ones(2, 4)).gm.graph
    first, second = nodes_of(graph, "aten.addmm")
    assert [module_path(first), module_path(second)] == ["model.layers.0", "model.layers.1"]
    where = location_of_node(first)
    assert where is not None
    assert where.file == __file__
    assert {phase(node) for node in nodes_of(graph, "tanh_backward")} == {"backward"}


def test_an_aot_graph_has_the_line_and_module_that_dynamo_recorded() -> None:
    found: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(gm.graph)
        return ws.compilers.nop(gm, inputs)

    torch._dynamo.reset()
    torch.compile(Net(), backend=ws.compilers.as_backend(keep))(torch.ones(2, 4)).sum().backward()
    forward, backward = found
    assert [module_path(node) for node in nodes_of(forward, "aten.addmm")] == ["layers.0", "layers.1"]
    where = location_of_node(nodes_of(forward, "aten.tanh")[0])
    assert where is not None
    assert (where.file, where.text) == (__file__, "x = torch.tanh(layer(x))")
    assert phase(nodes_of(backward, "aten.mm")[0]) == "backward"


def test_an_exported_graph_tells_two_calls_of_one_module_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.fc(self.fc(x)))

    graph = torch.export.export(Twice(), (torch.ones(2, 4),)).graph
    first, second = nodes_of(graph, "linear")
    assert module_path(first) == module_path(second) == "fc"
    assert module_call(first) != module_call(second)


def test_frames_of_torch_are_the_answer_only_where_there_is_no_other() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = f'  File "{torch.__file__}", line 3, in inner\n    return x\n'
    assert location_of_node(node, user_only=True) is None
    assert location_of_node(node) == Location(torch.__file__, 3, "inner", "return x")
    node.meta["stack_trace"] = '  File "user.py", line 7, in step\n    y = f(x)\n' + node.meta["stack_trace"]
    assert location_of_node(node) == Location("user.py", 7, "step", "y = f(x)")


def test_a_node_without_a_line_has_that_of_its_nearest_producer() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.neg, (x,))
    z = graph.call_function(torch.neg, (y,))
    assert nearest_location(z) is None
    set_node_meta(x, NodeMeta(location=Location("far.py", 1, text="x")))
    set_node_meta(y, NodeMeta(location=Location("near.py", 2, text="y")))
    assert nearest_location(z) == Location("near.py", 2, text="y")
