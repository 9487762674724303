"""`ws.debug.compare` names the first node that differs beyond its contract, in ulps, and changes nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, fx, nn

import wholestep as ws
from debug.graphs import chain
from debug.seeded import call_of, changes_a_constant, looks_around, seeded, swaps, train_step
from wholestep.debug import compare
from wholestep.debug.value_distance import gap_between, max_ulps

aten = torch.ops.aten


def compiled(*passes, **options):
    return ws.compile(train_step, passes=list(passes), verify=0, **{"lower": "eager", **options})


def test_eager_and_compiled_are_equal_and_no_state_changes(capsys):
    call = call_of()
    step = compiled(looks_around)
    step(*call)
    before = copy.deepcopy([call[0].state_dict(), call[1].state_dict()])
    state = torch.random.get_rng_state()
    found = compare(train_step, step, call)
    assert not found
    assert found.first is None
    assert found.compared > 50
    assert found.numerics == "exact"
    assert "no difference" in capsys.readouterr().out
    torch.testing.assert_close([call[0].state_dict(), call[1].state_dict()], before, rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_first_node_that_differs_is_named_with_its_line_and_error(capsys):
    found = compare(train_step, compiled(seeded(swaps, "sub_tensor")), call_of())
    assert found.first is not None
    assert found.first.node == "sub_tensor"
    assert found.first.max_ulps > 1000
    assert found.first.location is not None
    assert found.first.location.file.endswith("seeded.py")
    assert "first difference: sub_tensor" in capsys.readouterr().out


def test_two_step_graphs_and_two_graph_modules_are_compared_on_given_values():
    call = call_of()
    graph = ws.capture(train_step, *call)
    other = ws.StepGraph.from_json(graph.to_json())
    changes_a_constant(other.gm, "mul_tensor")
    model, _, x, y = call
    known = {f"model.{name}": value for name, value in model.named_parameters()} | {"x": x, "y": y}
    inputs = [known.get(spec.path, 0.1) for spec in graph.signature.inputs]
    found = compare(graph, other, inputs, quiet=True)
    assert found.first is not None
    assert found.first.node == "mul_tensor"
    assert compare(graph.gm, other.gm, inputs, quiet=True).first == found.first


def test_a_node_replaced_by_the_same_operator_is_compared_with_it():
    a, b = chain(5, 2), chain(5, 2)
    old = next(node for node in b.graph.nodes if node.target is aten.mul.Tensor)
    with b.graph.inserting_before(old):
        new = b.graph.call_function(aten.mul.Tensor, (old.args[0], 3.0))
    new.name = "quite_another_name"
    old.replace_all_uses_with(new)
    b.graph.erase_node(old)
    b.recompile()
    found = compare(a, b, [torch.randn(3), torch.randn(3)], quiet=True)
    assert found.first is not None
    assert (found.first.node, found.first.counterpart) == ("quite_another_name", old.name)


def test_reassociated_sums_are_allowed_where_the_contract_says_so():
    def graph(*order: int) -> fx.GraphModule:
        made = fx.Graph()
        parts = [made.placeholder(f"x{i}") for i in range(3)]
        first, second, third = (parts[i] for i in order)
        half = made.create_node("call_function", aten.add.Tensor if order[0] else torch.add, (first, second))
        half.name = f"half_{order[0]}"  # another name and kind: it has no counterpart
        made.output((made.create_node("call_function", aten.add.Tensor, (half, third), name="whole"),))
        return fx.GraphModule({}, made)

    inputs = [torch.randn(1000) for _ in range(3)]
    found = compare(graph(0, 1, 2), graph(1, 2, 0), inputs, numerics="exact", quiet=True)
    assert found.first is not None
    assert found.first.node == "whole"
    assert found.first.new == ("half_1",)
    assert not compare(graph(0, 1, 2), graph(1, 2, 0), inputs, numerics="reassociates", quiet=True)


def test_a_node_that_raises_in_one_version_is_the_difference():
    a, b = chain(4, 2), chain(4, 2)
    next(n for n in b.graph.nodes if n.target is aten.mul.Tensor).target = aten.mm.default
    found = compare(a, b, [torch.randn(3), torch.randn(3)], quiet=True)
    assert found.first is not None
    assert found.first.gap.kind == "raised"
    assert found.first.node == "mul_tensor"


def test_a_wrong_write_into_an_input_is_seen():
    call = call_of()
    step = compiled(seeded(_writes_another_value, ""))
    found = compare(train_step, step, call, quiet=True)
    assert found.first is not None
    assert found.first.node.startswith("copy_")


def _writes_another_value(gm: fx.GraphModule, name: str) -> None:
    first, second = [n for n in gm.graph.nodes if n.target is aten.copy_.default and n.meta["val"].dim() == 2][:2]
    first.args = (first.args[0], second.args[1])


def test_uninitialised_memory_and_in_place_updates_are_not_differences():
    def clipped(model, optimizer, x, y):
        torch.nn.functional.dropout((model(x) - y).pow(2), 0.1).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    call = call_of()
    found = compare(clipped, ws.compile(clipped, lower="eager"), call, quiet=True)
    assert any("empty_like" in node.name for node in ws.capture(clipped, *call).gm.graph.nodes)
    assert not found
    step = ws.compile(clipped, lower="eager")
    step(*call)
    updating = step.executable
    assert any("_foreach_mul_" in str(node.target) for node in updating.graph.nodes)
    assert not compare(clipped, updating, call_of(), quiet=True, numerics="exact")


def test_a_version_without_a_graph_or_with_other_inputs_is_refused():
    with pytest.raises(ws.errors.BisectError, match="placeholders"):
        compare(chain(2), chain(2), [torch.randn(2)])
    with pytest.raises(ws.errors.BisectError, match="not a version"):
        compare(3, 4, [])
    with pytest.raises(ws.errors.BisectError, match="not of the same step"):
        compare(train_step, fx.symbolic_trace(lambda something: something + 1), call_of())
    with pytest.raises(ws.errors.OptionError):
        compare(chain(2), chain(2), [torch.randn(2)] * 2, numerics="roughly")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_ulps_count_the_floats_in_between(dtype):
    one = torch.tensor([1.0, -2.0, 0.0], dtype=dtype)
    up = one
    for _ in range(3):
        up = torch.nextafter(up, torch.full_like(up, math.inf))
    assert max_ulps(one, up) == 3
    assert max_ulps(one, one) == 0
    tiny = torch.nextafter(torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype))
    assert max_ulps(tiny, -tiny) == 2
    assert max_ulps(one, torch.full_like(one, math.nan)) is None


def test_gaps_tell_shapes_types_and_nan_apart():
    assert gap_between(torch.ones(2), torch.ones(3), None, "exact").kind == "shape"
    assert gap_between(torch.ones(2), torch.ones(2).double(), None, "exact").kind == "dtype"
    assert gap_between(3, 4, None, "reassociates").kind == "type"
    nan = torch.tensor([math.nan])
    assert gap_between(nan, nan, None, "exact") is None
    assert gap_between(nan, torch.ones(1), None, "reassociates") is not None
    assert gap_between((torch.ones(2), None), (torch.ones(2), None), None, "exact") is None


def test_a_skipped_rounding_to_half_precision_is_allowed_under_reassociates():
    a = fx.symbolic_trace(lambda x: x.bfloat16().float().sum())
    b = copy.deepcopy(a)
    rounded, wide = (
        b.graph.find_nodes(op="call_method", target="bfloat16")[0],
        b.graph.find_nodes(target="float", op="call_method")[0],
    )
    wide.args = rounded.args
    b.graph.erase_node(rounded)
    x = [torch.randn(64)]
    assert compare(a, b, x, numerics="exact", quiet=True).first.node == "float_1"
    assert not compare(a, b, x, numerics="reassociates", quiet=True)
    c = copy.deepcopy(b)
    c.graph.find_nodes(op="call_method", target="sum")[0].target = "mean"
    assert compare(a, c, x, numerics="reassociates", quiet=True).first.node == "sum_1"


def one_step(model: nn.Module, x: Tensor) -> Tensor:
    loss = (model(x) * 2).tanh().pow(2).mean()
    loss.backward()
    return loss


def same_with_one_more(model: nn.Module, x: Tensor) -> Tensor:
    loss = (model(x) * 1.0 * 2).tanh().pow(2).mean()
    loss.backward()
    return loss


def wrong_with_one_more(model: nn.Module, x: Tensor) -> Tensor:
    loss = (model(x) * 1.0 * 2).tanh().pow(3).mean()
    loss.backward()
    return loss


def wrong_by_one_more(model: nn.Module, x: Tensor) -> Tensor:
    loss = (model(x) * 1.5 * 2).tanh().pow(2).mean()
    loss.backward()
    return loss


def test_functions_with_different_operator_counts_are_aligned() -> None:
    call = (nn.Linear(4, 4), torch.randn(3, 4))
    same = compare(one_step, same_with_one_more, call, quiet=True)
    assert not same
    assert (same.only_in_a, len(same.only_in_b)) == ((), 2)  # with its backward
    assert same.labels == ("one_step", "same_with_one_more")
    wrong = compare(one_step, wrong_with_one_more, call, quiet=True).first
    assert wrong is not None
    assert wrong.node == "pow_tensor_scalar"
    new = compare(one_step, wrong_by_one_more, call, quiet=True).first
    assert new is not None
    assert new.new == ("mul_tensor",)
