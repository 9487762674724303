"""Pieces of a graph: what makes two equal, what goes from one to the next, where write-backs and updates come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lower.graphs import run_graph
from wholestep.lower.pieces import PieceGraph, can_be_cut
from wholestep.lower.repeats import plan_repeats
from wholestep.lower.shared_bodies import BodyCache, SharedProgram, compile_shared

aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def squares(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape or (4, 4)) for shape in shapes]


def kinds(gm: fx.GraphModule, *names: list[str]) -> list[int]:
    """Numbers of the pieces with these nodes, equal ones alike."""
    graph = PieceGraph(gm)
    known: dict[Any, int] = {}
    by_name = {node.name: node for node in graph.order}
    return [known.setdefault(graph.key(graph.piece([by_name[n] for n in each])), len(known)) for each in names]


def shared(function: Callable[..., Any], *inputs: Tensor) -> SharedProgram:
    """A function whose repeated parts are run by one body; it has to give what the function gives."""
    gm = traced(function, *inputs)
    examples = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    program = compile_shared(gm, examples, run_graph, BodyCache())
    assert isinstance(program, SharedProgram)
    first, second = [t.clone() for t in inputs], [t.clone() for t in inputs]
    for got, want in zip(program(list(first)), function(*second), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(first, second, strict=True):
        assert torch.equal(got, want)
    return program


def layer(x: Tensor, w: Tensor, slope: float = 0.1) -> Tensor:
    h = torch.tanh((x @ w) * 2).sub(1)
    return x + torch.nn.functional.leaky_relu(h @ w.t(), slope)


def deep(layers: Callable[[int], float], count: int = 6) -> Callable[..., Any]:
    def run(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        for i in range(count):
            x = layer(x, weights[i], layers(i))
        return (x.sum(),)

    return run


def test_equal_layers_are_one_body() -> None:
    program = shared(deep(lambda i: 0.1), *squares(*[()] * 7))
    assert program.shared.bodies < program.shared.calls


def test_every_second_layer_is_found() -> None:
    program = shared(deep(lambda i: 0.1 + i % 2, 8), *squares(*[()] * 9))
    assert program.shared.bodies < program.shared.calls


def test_a_piece_with_another_constant_dtype_layout_or_wiring_is_another_piece() -> None:
    def work(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return a * 2, b * 2, a * 3, a * 2.0, c * 2, d * 2, a + b, b + a, a + a

    gm = traced(work, torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4).double(), torch.ones(4, 4).t())
    found = kinds(
        gm, *([f"mul{i}"] for i in ("", "_1", "_2", "_3", "_4", "_5")), *([f"add{i}"] for i in ("", "_1", "_2"))
    )
    assert found[:5] == [0, 0, 1, 2, 3]
    assert found[6:] == [found[6], found[6], found[6] + 1]


def test_the_same_nodes_with_other_results_are_another_piece() -> None:
    def work(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        first, second = (a * 2).tanh(), (b * 2).tanh()
        third = (a + b) * 2
        return first, second, third.tanh() + third

    gm = traced(work, *squares((), ()))
    assert kinds(gm, ["mul", "tanh"], ["mul_1", "tanh_1"], ["mul_2", "tanh_2"]) == [0, 0, 1]


def test_a_view_is_recomputed_and_only_whole_tensors_cross() -> None:
    def work(x: Tensor) -> tuple[Tensor, ...]:
        h = (x * 2).t()
        return (h.exp(), h)

    graph = PieceGraph(traced(work, *squares(())))
    first, second = (graph.piece([node]) for node in graph.order)
    assert [node.name for node in second.inputs] == ["mul"]
    assert [node.name for node in first.outputs] == ["mul", "t"]
    assert [node.name for node in second.steps] == ["t", "exp"]


def test_a_cast_to_the_same_dtype_is_recomputed_in_each_piece_because_it_is_its_input() -> None:
    def work(x: Tensor) -> tuple[Tensor, ...]:
        same = torch.ops.prims.convert_element_type(x, torch.float32)
        return (same.exp(),)

    assert [node.name for node in PieceGraph(traced(work, *squares(()))).order] == ["exp"]


def test_elements_of_a_tensor_do_not_make_pieces_differ() -> None:
    def work(x: Tensor, scalars: Tensor) -> tuple[Tensor, ...]:
        for i in range(12):
            x = torch.tanh(x @ x * scalars[i] + scalars[(5 * i) % 7]) * scalars[0]
        return (x,)

    assert shared(work, torch.randn(4, 4) / 4, torch.randn(12)).shared.repeated


def test_updates_come_as_soon_as_their_gradient_is_there() -> None:
    def work(x: Tensor, a: Tensor, b: Tensor, ma: Tensor, mb: Tensor) -> tuple[Tensor, ...]:
        da = x @ x
        db = x @ da
        decayed = [a * 0.9, b * 0.9]  # op by op, as foreach optimizers do
        moments = [ma * 0.5 + da, mb * 0.5 + db]
        for p, d, m in zip((a, b), decayed, moments, strict=True):
            p.copy_(d - m)
        for p, m in zip((ma, mb), moments, strict=True):
            p.copy_(m)
        return ()

    gm = traced(work, *squares(*[()] * 5))
    order = PieceGraph(gm).order
    place = {node.name: i for i, node in enumerate(order)}
    copies = [i for i, node in enumerate(order) if node.target is aten.copy_.default]
    assert copies[0] < place["mm_1"] < copies[-1]
    assert place["mul"] > place["mm"]  # of inputs only: not before it is read


def test_a_write_back_waits_for_the_readers_of_the_old_contents() -> None:
    def work(x: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        new = (x @ p).exp()
        late = (x @ new) @ p.t()
        p.copy_(new)
        return (late,)

    gm = traced(work, *squares((), ()))
    order = [node.name for node in PieceGraph(gm).order]
    assert order.index("copy_") > order.index("mm_2")


def test_graphs_with_symbols_and_with_writes_in_the_middle_stay_whole() -> None:
    symbolic = make_fx(lambda x: (x * 2,), tracing_mode="symbolic")(torch.ones(4, 3))
    assert not can_be_cut(symbolic)

    def writes(x: Tensor) -> tuple[Tensor, ...]:
        x.add_(1)
        return (x * 2,)

    assert not can_be_cut(traced(writes, torch.ones(4)))


def test_nothing_is_shared_in_a_graph_without_repeats() -> None:
    def work(x: Tensor) -> tuple[Tensor, ...]:
        h = (x @ x).exp()
        return ((h.t() @ x).tanh().sum(),)

    plan = plan_repeats(PieceGraph(traced(work, *squares(()))))
    assert len(plan.pieces) == 1
    assert not plan.saved
