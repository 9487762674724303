"""IterGraph and IterGraphModule: first, other and last iterations together compute what the graph computes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.errors import IterMoveError
from wholestep.ir.iter.graph import IterGraph
from wholestep.ir.iter.graph_module import IterGraphModule

aten = torch.ops.aten


def two_parameters() -> fx.GraphModule:
    """loss = sum(tanh(x * p) * q); p -= lr * grad of p; q -= lr * grad of q, by hand."""
    graph = fx.Graph()
    p, q, x, lr = (graph.placeholder(name) for name in ("p", "q", "x", "lr"))

    def call(name: str, op: Any, *args: Any) -> fx.Node:
        made = graph.call_function(op, args)
        made.name = name
        return made

    scaled = call("scaled", aten.mul.Tensor, x, p)
    hidden = call("hidden", aten.tanh.default, scaled)
    product = call("product", aten.mul.Tensor, hidden, q)
    loss = call("loss", aten.sum.default, product)
    grad_p = call("grad_p", aten.mul.Tensor, x, hidden)
    grad_q = call("grad_q", aten.mul.Tensor, hidden, 0.5)
    step_p = call("step_p", aten.mul.Tensor, grad_p, lr)
    new_p = call("new_p", aten.sub.Tensor, p, step_p)
    step_q = call("step_q", aten.mul.Tensor, grad_q, lr)
    new_q = call("new_q", aten.sub.Tensor, q, step_q)
    call("write_p", aten.copy_.default, p, new_p)
    call("write_q", aten.copy_.default, q, new_q)
    graph.output(loss)
    return fx.GraphModule(nn.Module(), graph)


def nodes(graph: fx.Graph, *names: str) -> list[fx.Node]:
    by_name = {node.name: node for node in graph.nodes}
    return [by_name[name] for name in names]


def moved_module(*parameters: str, max_iters: int = -1) -> IterGraphModule:
    module = IterGraphModule(two_parameters(), max_iters)
    for name in parameters:
        (target,) = nodes(module.graph, {"p": "scaled", "q": "product"}[name])
        moving = nodes(module.graph, f"step_{name}", f"new_{name}", f"write_{name}")
        module.graph.move_to_next_iter_before(moving, target)
    module.finalize_setup()
    return module


class Sides:
    """The module and the graph alone, on the same batches."""

    def __init__(self, module: IterGraphModule) -> None:
        self.module, self.plain = module, two_parameters()
        self.mine = [torch.ones(3), torch.full((3,), 2.0)]
        self.theirs = [value.clone() for value in self.mine]
        self.calls = 0

    def call(self, **last: bool) -> None:
        self.calls += 1
        x, lr = torch.randn(3), 0.1 * self.calls
        expected = self.plain(*self.theirs, x, lr)
        assert torch.equal(self.module(*self.mine, x, lr, **last), expected)

    def assert_same(self) -> None:
        assert all(map(torch.equal, self.mine, self.theirs))


@pytest.mark.parametrize("moved", [(), ("p",), ("q",), ("p", "q"), ("q", "p")])
@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("word", ["last_iter", "last_train_step"])
def test_training_ends_where_the_graph_alone_ends(moved: tuple[str, ...], calls: int, word: str) -> None:
    sides = Sides(moved_module(*moved))
    for i in range(calls):
        sides.call(**{word: i == calls - 1})
    sides.assert_same()
    for i in range(calls):  # and again
        sides.call(**{word: i == calls - 1})
    sides.assert_same()


@given(st.lists(st.sampled_from(["call", "last", "flush"]), max_size=12), st.sampled_from([("p",), ("q", "p")]))
def test_any_sequence_of_calls_flushes_and_last_calls_is_right(doing: list[str], moved: tuple[str, ...]) -> None:
    sides = Sides(moved_module(*moved))
    for each in doing:
        if each == "flush":
            sides.module.flush()
        else:
            sides.call(last_iter=each == "last")
        if each != "call":
            sides.assert_same()
            assert not sides.module.has_pending
    sides.module.flush()
    sides.assert_same()


def test_max_iters_makes_the_last_iteration_by_itself() -> None:
    sides = Sides(moved_module("p", max_iters=3))
    for _ in range(6):
        sides.call()
    sides.assert_same()


def test_moved_nodes_are_in_the_main_graph_before_their_target_and_not_in_the_setup() -> None:
    module = moved_module("p")
    order = [node.name for node in module.graph.nodes]
    assert order.index("write_p") == order.index("scaled") - 1
    assert "write_p" not in [node.name for node in module.setup_gm.graph.nodes]
    copies = [n for n in module.cleanup_gm.graph.nodes if n.target is aten.copy_.default and n.args[0].name == "p"]
    assert len(copies) == 2
    assert module.graph is module.main_gm.graph
    assert isinstance(module.graph, IterGraph)


def test_a_value_that_several_moves_need_crosses_once() -> None:
    module = moved_module("p", "q")
    names = {node.name for node in module.graph.cross_iter_values}
    assert len(module.graph.cross_iter_values) == module.graph.num_extra_output == 3
    assert {"grad_p", "grad_q"} < names  # and the learning rate


def test_a_pending_update_uses_the_scalars_of_its_own_step() -> None:
    sides = Sides(moved_module("p", "q"))
    lr = torch.tensor(0.5)
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(sides.module(*sides.mine, x, lr), sides.plain(*sides.theirs, x, lr))
        lr.mul_(-3)
    sides.module.flush()
    sides.assert_same()


def test_a_destination_after_the_first_use_raises_and_changes_nothing() -> None:
    module = IterGraphModule(two_parameters())
    before = str(module.graph)
    moving = nodes(module.graph, "step_p", "new_p", "write_p")
    with pytest.raises(IterMoveError, match="after scaled, the first use of p"):
        module.graph.move_to_next_iter_before(moving, nodes(module.graph, "hidden")[0])
    assert str(module.graph) == before


def test_nodes_with_users_in_the_same_iteration_cannot_move() -> None:
    graph = IterGraph(two_parameters().graph)
    with pytest.raises(ValueError, match="the user's output needs loss"):
        graph.move_to_next_iter_before(nodes(graph, "loss"), nodes(graph, "scaled")[0])
    with pytest.raises(RuntimeError, match="must satisfy one of the following conditions"):
        graph.move_to_next_iter_before(nodes(graph, "step_p"), nodes(graph, "scaled")[0])
    with pytest.raises(ValueError, match="nothing to move"):
        graph.move_to_next_iter_before([], nodes(graph, "scaled")[0])
    assert not graph.has_moves


def test_a_write_back_that_is_an_output_gives_the_state_itself() -> None:
    gm = two_parameters()
    (write,) = nodes(gm.graph, "write_p")
    output = gm.graph.output_node()
    output.args = ((output.args[0], write),)
    gm.recompile()
    module = IterGraphModule(gm)
    module.graph.move_to_next_iter_before(
        nodes(module.graph, "step_p", "new_p", "write_p"), nodes(module.graph, "scaled")[0]
    )
    p, q = torch.ones(3), torch.ones(3)
    _, returned = module(p, q, torch.ones(3), 0.1)
    assert returned is p
    module.flush()
    assert not torch.equal(p, torch.ones(3))


def test_no_move_after_the_setup_is_final() -> None:
    module = moved_module("p")
    with pytest.raises(RuntimeError, match="has been frozen"):
        module.graph.move_to_next_iter_before(
            nodes(module.graph, "step_q", "new_q", "write_q"), nodes(module.graph, "product")[0]
        )


def test_edits_reach_all_versions_before_and_after_a_move() -> None:
    module = IterGraphModule(two_parameters())
    graph = module.graph

    def double(name: str) -> None:
        (node,) = nodes(graph, name)
        with graph.inserting_after(node):
            made = graph.call_function(aten.mul.Tensor, (node, 2.0))
        graph.node_replace_all_uses_with(node, made, lambda user: user is not made)

    double("grad_p")
    graph.move_to_next_iter_before(nodes(graph, "step_p", "new_p", "write_p"), nodes(graph, "scaled")[0])
    double("step_p")
    double("hidden")
    graph.lint()
    module.finalize_setup()

    plain = two_parameters()
    for name in ("grad_p", "step_p", "hidden"):
        (node,) = nodes(plain.graph, name)
        with plain.graph.inserting_after(node):
            made = plain.graph.call_function(aten.mul.Tensor, (node, 2.0))
        node.replace_all_uses_with(made, lambda user, made=made: user is not made)
    plain.recompile()
    mine, theirs = [torch.ones(3), torch.ones(3)], [torch.ones(3), torch.ones(3)]
    for i in range(4):
        x = torch.randn(3)
        assert torch.equal(module(*mine, x, 0.1, last_iter=i == 3), plain(*theirs, x, 0.1))
    assert all(map(torch.equal, mine, theirs))


def test_the_output_can_be_replaced_after_a_move() -> None:
    module = IterGraphModule(two_parameters())
    graph = module.graph
    graph.move_to_next_iter_before(nodes(graph, "step_p", "new_p", "write_p"), nodes(graph, "scaled")[0])
    (loss,) = nodes(graph, "loss")
    graph.erase_node(graph.output_node())
    graph.output((loss, loss))
    module.recompile()
    one, two = module(torch.ones(3), torch.ones(3), torch.ones(3), 0.1)
    assert torch.equal(one, two)
    assert module.has_pending


def test_nodes_named_by_keep_unused_nodes_survive_dead_code_elimination() -> None:
    seen: list[Tensor] = []

    def note(value: Tensor) -> None:
        seen.append(value)

    module = IterGraphModule(two_parameters())
    graph = module.graph
    (grad,) = nodes(graph, "grad_p")
    with graph.inserting_after(grad):
        made = graph.call_function(note, (grad,))
    graph.keep_unused_nodes()
    graph.move_to_next_iter_before([made], nodes(graph, "scaled")[0])
    graph.eliminate_dead_code()
    module.finalize_setup()
    for i in range(3):
        module(torch.ones(3), torch.ones(3), torch.ones(3), 0.1, last_iter=i == 2)
        assert len(seen) == (i if i < 2 else 3)


def test_graphs_with_trees_of_arguments_and_results_keep_them() -> None:
    def step(batch: dict[str, Tensor], p: Tensor) -> dict[str, Tensor]:
        loss = (batch["x"] * p).sum()
        p.copy_(p - batch["x"] * 0.1)
        return {"loss": loss}

    gm = make_fx(step)({"x": torch.ones(3)}, torch.ones(3))
    module = IterGraphModule(gm)
    copies = [n for n in module.graph.nodes if n.target is aten.copy_.default]
    (sub,) = [n for n in module.graph.nodes if n.target is aten.sub.Tensor]
    first = next(n for n in module.graph.nodes if n.op == "call_function")
    module.graph.move_to_next_iter_before([*sub.all_input_nodes[1:], sub, *copies], first)
    p, q = torch.ones(3), torch.ones(3)
    for i in range(3):
        x = torch.randn(3)
        assert torch.equal(module({"x": x}, p, last_iter=i == 2)["loss"], step({"x": x}, q)["loss"])
    assert torch.equal(p, q)
