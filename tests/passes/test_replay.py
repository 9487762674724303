"""Level 3: what it sees, on which inputs, and what it does with graphs that run on none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from ir.collectives import comm
from wholestep.errors import OptionError, PassError, VerifyError
from wholestep.passes import GraphPass, approximates, graph_optimization_pass, merge_common_subexpressions
from wholestep.passes.engine.contract import Numerics, weakest
from wholestep.passes.engine.manager import apply_pass
from wholestep.passes.engine.pretend_ranks import collective
from wholestep.passes.engine.replay import InFloat64, Replay

aten = torch.ops.aten


def traced(code: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    gm: fx.GraphModule = make_fx(code, tracing_mode="fake")(*given)
    return gm


def times_fifty(numerics: Numerics) -> GraphPass:
    @graph_optimization_pass(numerics=numerics)
    def edits(gm: fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            if node.args[1] == 2:
                node.args = (node.args[0], 50)

    return edits


def with_argument(op: Any, position: int, value: Any) -> GraphPass:
    @graph_optimization_pass(numerics="exact")
    def edits(gm: fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=op):
            node.update_arg(position, value)

    return edits


def refuses(pass_: GraphPass, gm: fx.GraphModule, match: str = "other values") -> None:
    with pytest.raises(PassError, match=match):
        apply_pass(pass_, gm, (), {}, level=3)


def test_a_mask_does_not_make_everything_equal() -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return (x * 2).masked_fill(~mask, float("-inf")).softmax(-1)

    refuses(times_fifty("exact"), traced(masked, torch.randn(3, 3), torch.ones(3, 3, dtype=torch.bool)))


@pytest.mark.parametrize("shift", [-5.0, 0.0, 3.0])
def test_inputs_are_drawn_until_results_are_numbers(shift: float) -> None:
    refuses(times_fifty("exact"), traced(lambda x: (x + shift).log() * 2, torch.ones(3)))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_pass_may_change_small_results_by_small_differences_only(size: float) -> None:
    refuses(times_fifty("reassociates"), traced(lambda x: x * 2 * size, torch.ones(3)))


def test_a_wrong_small_update_of_a_weight_is_seen() -> None:
    refuses(times_fifty("reassociates"), traced(lambda p, g: p - g * 2 * 1e-6, torch.ones(3), torch.ones(3)))


@pytest.mark.parametrize("numerics", ["exact", "reassociates"])
def test_imaginary_parts_count(numerics: Numerics) -> None:
    refuses(times_fifty(numerics), traced(lambda x: torch.complex(x, x * 2), torch.ones(3)))


@pytest.mark.parametrize("numerics", ["exact", "reassociates"])
def test_numbers_of_python_count(numerics: Numerics) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    total = graph.call_function(aten.sum.default, (graph.call_function(aten.mul.Tensor, (x, 2)),))
    graph.output((graph.call_function(aten._local_scalar_dense.default, (total,)),))
    refuses(times_fifty(numerics), fx.GraphModule(nn.Module(), graph))


def test_whole_numbers_of_other_ranks_are_others() -> None:
    whole = torch.ones(3, dtype=torch.long)
    gm = traced(lambda i: comm.wait_tensor(comm.all_gather_into_tensor(i * 2, 2, "0")) + 0, whole)
    refuses(with_argument(aten.add.Tensor, 1, 1), gm)
    reduced = comm.all_reduce.default, ("all_reduce", torch.tensor([-3, 0, 5]))
    found = {op: collective("all_reduce", (reduced[1][1], op), 4).tolist() for op in ("sum", "max", "min", "product")}
    assert found == {"sum": [-30, 0, 50], "max": [-3, 0, 20], "min": [-12, 0, 5], "product": [81 * 24, 0, 625 * 24]}


def test_another_root_is_seen() -> None:
    gm = traced(lambda x: comm.wait_tensor(comm.broadcast(x * 2, 0, "0")) + 0, torch.ones(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wholestep.passes.engine.pretend_ranks.group_size", lambda node: 2)
        before = Replay(gm)
        gm.graph.find_nodes(op="call_function", target=comm.broadcast.default)[0].update_arg(1, 1)
        with pytest.raises(VerifyError, match="output 0 has other values"):
            before.compare(gm, "exact")


def test_a_result_that_has_become_an_input_is_seen() -> None:
    @graph_optimization_pass(numerics="exact")
    def drops_copies(gm: fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=aten.clone.default):
            node.replace_all_uses_with(node.args[0])

    refuses(drops_copies, traced(lambda x: x.clone(), torch.ones(3)), "output 0 now shares its memory with input x_1")


def test_a_result_that_is_gone_is_called_that() -> None:
    @graph_optimization_pass(numerics="exact")
    def drops_a_result(gm: fx.GraphModule) -> None:
        output = gm.graph.output_node()
        output.args = (output.args[0][:1],)

    refuses(drops_a_result, traced(lambda x: (x + 1, x + 2), torch.ones(3)), "has 1 outputs, before the pass it had 2")


@given(order=st.permutations(range(12)), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_sums_in_any_order_are_within_the_contract(order: list[int], dtype: torch.dtype) -> None:
    @graph_optimization_pass(numerics="reassociates")
    def other_order(gm: fx.GraphModule) -> None:
        inputs = gm.graph.find_nodes(op="placeholder")
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            total = inputs[order[0]]
            for i in order[1:]:
                total = gm.graph.call_function(aten.add.Tensor, (total, inputs[i]))
            result = gm.graph.call_function(aten.sub.Tensor, (total, 6.0))  # next to nothing is left: large errors
        output.args = (result,)

    def added(*xs: Tensor) -> Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return total - 6.0

    gm = traced(added, *[torch.ones(5, dtype=dtype) for _ in range(12)])
    apply_pass(other_order, gm, (), {}, level=3)


def trained(model: nn.Module, loss_of: Callable[..., Tensor], *batch: Tensor) -> None:
    """One step at level 3 with a pass that changes nothing wrong."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ws.compile(step, passes=[merge_common_subexpressions], verify=3)(model, optimizer, *batch)


STEPS: dict[str, Callable[[], None]] = {
    "an LSTM": lambda: trained(nn.LSTM(4, 4), lambda m, x: m(x)[0].sum(), torch.randn(5, 2, 4)),
    "one class": lambda: trained(
        nn.Linear(4, 1),
        lambda m, x, y: F.cross_entropy(m(x), y),
        torch.randn(5, 4),
        torch.zeros(5, dtype=torch.long),
    ),
    "an embedding with one row": lambda: trained(
        nn.Embedding(1, 4), lambda m, i: m(i).sum(), torch.zeros(3, dtype=torch.long)
    ),
    "gather": lambda: trained(
        nn.Linear(4, 4), lambda m, x, i: m(x).gather(0, i).sum(), torch.randn(1, 4), torch.zeros(1, 4, dtype=torch.long)
    ),
    "cholesky": lambda: trained(
        nn.Linear(3, 3), lambda m, x: (torch.linalg.cholesky(x) @ m.weight).sum(), torch.eye(3)
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_do_not_take_any_input_are_replayed_too(name: str, caplog: Any) -> None:
    STEPS[name]()
    assert "is not replayed" not in caplog.text


@graph_optimization_pass(numerics="exact")
def adds_a_copy(gm: fx.GraphModule) -> None:
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_function(aten.clone.default, (output.args[0],)),)


@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_bits_are_reduced(op: str) -> None:
    gm = traced(lambda i: comm.wait_tensor(comm.all_reduce(i * 2, op, "0")) + 0, torch.ones(3, dtype=torch.long))
    apply_pass(adds_a_copy, gm, (), {}, level=3)
    parts = {"band": 6 & 12 & 18, "bor": 6 | 12 | 18, "bxor": 6 ^ 12 ^ 18}
    assert collective("all_reduce", (torch.tensor([6]), op), 3).item() == parts[op]


def test_uneven_pieces_are_exchanged() -> None:
    def code(x: Tensor) -> Tensor:
        done: Tensor = comm.wait_tensor(comm.all_to_all_single(x, [1, 5], [2, 2], "0"))
        return done + torch.ones(6)

    apply_pass(adds_a_copy, traced(code, torch.ones(4)), (), {}, level=3)
    assert collective("all_to_all_single", (torch.arange(4.0), [1, 2], [2, 2]), 2).tolist() == [0.0, 0.0, 1.125]


def test_a_collective_that_works_in_place_writes_its_operand() -> None:
    def code(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        done = comm.wait_tensor(comm.all_reduce_(h, "sum", "0"))
        return done, h + 1

    @graph_optimization_pass(numerics="exact")
    def reads_the_result(gm: fx.GraphModule) -> None:
        add = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
        add.args = (gm.graph.find_nodes(op="call_function", target=comm.wait_tensor.default)[0], add.args[1])

    apply_pass(reads_the_result, traced(code, torch.ones(4)), (), {}, level=3)


def test_replaying_leaves_the_modules_of_a_graph_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    gm = fx.symbolic_trace(model)
    gm.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.ones(4, 3)
    apply_pass(adds_a_copy, gm, (), {}, level=3)
    assert model[0].num_batches_tracked == 0
    assert torch.equal(model[0].running_mean, torch.zeros(3))  # type: ignore[arg-type]


def mean_of_squares(x: Tensor) -> Tensor:
    return x.square().sum() / x.numel()


def of_squares(numerics: Numerics, build: Callable[[fx.Graph, fx.Node], fx.Node]) -> GraphPass:
    """A pass that computes the result of `mean_of_squares` from its input in another way."""

    @graph_optimization_pass(numerics=numerics)
    def edits(gm: fx.GraphModule) -> None:
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            output.args = (build(gm.graph, gm.graph.find_nodes(op="placeholder")[0]),)

    return edits


def in_bf16(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """A worse way: squares are rounded to bf16."""
    rounded = graph.call_function(aten._to_copy.default, (graph.call_function(aten.square.default, (x,)),))
    rounded.kwargs = {"dtype": torch.bfloat16}
    total = graph.call_function(aten.sum.default, (rounded,), {"dtype": torch.float32})
    return graph.call_function(aten.div.Tensor, (total, 1000))


def in_double(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """A better way."""
    wide = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64})
    total = graph.call_function(aten.sum.default, (graph.call_function(aten.square.default, (wide,)),))
    narrow = graph.call_function(aten.div.Tensor, (total, 1000))
    return graph.call_function(aten._to_copy.default, (narrow,), {"dtype": x.meta["val"].dtype})


def test_a_result_nearer_to_float64_is_within_approximates_and_one_further_away_is_not() -> None:
    apply_pass(of_squares(approximates(1), in_double), traced(mean_of_squares, torch.ones(1000)), (), {}, level=3)
    refuses(of_squares(approximates(2), in_bf16), traced(mean_of_squares, torch.ones(1000)), r"approximates\(2\)")


def test_a_graph_in_half_precision_may_be_replaced_by_a_better_one() -> None:
    """As sums in another order they would be too far apart: rounding each product to bf16 loses three digits."""

    def rounded_often(x: Tensor) -> Tensor:
        total = x[0]
        for i in range(1, 40):
            total = total + x[i] * x[i]
        return total

    @graph_optimization_pass(numerics=approximates(1))
    def in_float(gm: fx.GraphModule) -> None:
        x, output = gm.graph.find_nodes(op="placeholder")[0], gm.graph.output_node()
        with gm.graph.inserting_before(output):
            wide = gm.graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float32})
            first = gm.graph.call_function(aten.select.int, (wide, 0, 0))
            rest = gm.graph.call_function(aten.slice.Tensor, (wide, 0, 1, 40))
            squares = gm.graph.call_function(aten.square.default, (rest,))
            total = gm.graph.call_function(
                aten.add.Tensor, (gm.graph.call_function(aten.sum.default, (squares,)), first)
            )
            output.args = (gm.graph.call_function(aten._to_copy.default, (total,), {"dtype": torch.bfloat16}),)

    apply_pass(in_float, traced(rounded_often, torch.ones(40, dtype=torch.bfloat16)), (), {}, level=3)


def test_the_float64_run_draws_the_same_random_numbers() -> None:
    gm = traced(lambda x: F.dropout(x * 2, 0.5) * 3, torch.ones(64))
    apply_pass(of_squares(approximates(1), lambda graph, x: graph.output_node().args[0]), gm, (), {}, level=3)  # type: ignore[arg-type,return-value]
    torch.manual_seed(7)
    wide = InFloat64(gm).run(torch.ones(64, dtype=torch.float64))
    torch.manual_seed(7)
    assert torch.equal(wide, gm(torch.ones(64)).double())


def test_what_several_passes_promise_together() -> None:
    assert weakest(["exact", approximates(2), "reassociates", approximates(1.5)]) == approximates(3)
    assert weakest([approximates(2), "changes"]) == "changes"
    assert weakest([]) == "exact"
    with pytest.raises(OptionError, match="a factor, 1 or more"):
        approximates(0.5)
    with pytest.raises(OptionError, match=r"approximates\(bound\)"):
        graph_optimization_pass(numerics="roughly")  # type: ignore[call-overload]
