from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from ir.step_graphs import aten, chain, dynamic_step, find, make_step, sgd_step, with_everything
from wholestep.errors import VerifyError
from wholestep.ir import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    Signature,
    StepGraph,
    WriteBack,
    tensor_spec,
    verify,
)
from wholestep.ir.graph_functions import call_on_copies, get_rng_state, manual_seed, set_rng_state

c10d = torch.ops._c10d_functional


@pytest.mark.parametrize("make", [sgd_step, with_everything, dynamic_step, lambda: chain(20)])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_correct_graph_passes(make: Callable[[], StepGraph], level: int) -> None:
    verify(make(), level)


def epilogue(step: StepGraph) -> list[fx.Node]:
    return step.gm.graph.find_nodes(op="call_function", target=aten.copy_.default)


def output(step: StepGraph) -> fx.Node:
    return step.gm.graph.output_node()


def add_before_output(step: StepGraph, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    with step.gm.graph.inserting_before(output(step)):
        node = step.gm.graph.call_function(target, args)
    node.meta["val"] = value
    return node


def _call_method(step: StepGraph) -> None:
    with step.gm.graph.inserting_before(find(step, aten.mm.default)):
        step.gm.graph.call_method("relu", (find(step, aten.t.default),))


def _out_of_order(step: StepGraph) -> None:
    find(step, aten.sub.Tensor).append(find(step, aten.t.default))


def _lost_input(step: StepGraph) -> None:
    step.signature = replace(step.signature, inputs=step.signature.inputs[:-1])


def _renamed_input(step: StepGraph) -> None:
    first, *rest = step.signature.inputs
    step.signature = replace(step.signature, inputs=(replace(first, name="other"), *rest))


def _retyped_input(step: StepGraph) -> None:
    first, *rest = step.signature.inputs
    assert first.tensor is not None
    spec = replace(first.tensor, dtype="float64")
    step.signature = replace(step.signature, inputs=(replace(first, tensor=spec), *rest))


def _reshaped_output(step: StepGraph) -> None:
    [spec] = step.signature.outputs
    assert spec.tensor is not None
    step.signature = replace(step.signature, outputs=(replace(spec, tensor=replace(spec.tensor, shape=(7,))),))


def _more_outputs(step: StepGraph) -> None:
    output(step).args = ((*output(step).args[0], find(step, aten.mm.default)),)  # type: ignore[misc]


def _nested_output(step: StepGraph) -> None:
    output(step).args = ((list(output(step).args[0]),),)  # type: ignore[arg-type]


def _lost_write(step: StepGraph) -> None:
    step.gm.graph.erase_node(epilogue(step)[0])


def _unlisted_write(step: StepGraph) -> None:
    step.signature = replace(step.signature, write_backs=step.signature.write_backs[:1])


def _other_value_written(step: StepGraph) -> None:
    node = epilogue(step)[0]
    node.args = (node.args[0], find(step, aten.mul.Tensor))


def _swapped_targets(step: StepGraph) -> None:
    first, second = epilogue(step)
    first.args, second.args = (second.args[0], first.args[1]), (first.args[0], second.args[1])


def _written_twice(step: StepGraph) -> None:
    first, second = epilogue(step)
    second.args = (first.args[0], second.args[1])


def _early_write(step: StepGraph) -> None:
    find(step, aten.add.Tensor).append(epilogue(step)[1])


def _half_a_write(step: StepGraph) -> None:
    epilogue(step)[0].args = epilogue(step)[0].args[:1]


def _work_after_epilogue(step: StepGraph) -> None:
    add_before_output(step, aten.relu.default, (find(step, aten.mm.default),), torch.empty(2, 3))


def _use_of_written(step: StepGraph) -> None:
    copy = epilogue(step)[0]
    copy.append(find(step, aten.mean.default))
    find(step, aten.mean.default).args = (copy,)


def _in_place_op(step: StepGraph) -> None:
    find(step, aten.mul.Tensor).target = aten.mul_.Tensor


def _write_into_intermediate(step: StepGraph) -> None:
    with step.gm.graph.inserting_after(find(step, aten.sub.Tensor)):
        step.gm.graph.call_function(aten.copy_.default, (find(step, aten.mm.default), find(step, aten.sub.Tensor)))


def _returns_view_of_old_parameter(step: StepGraph) -> None:
    output(step).args = ((find(step, aten.t.default),),)
    step.signature = replace(step.signature, outputs=(replace(step.signature.outputs[0], tensor=None),))


def _writes_what_was_overwritten(step: StepGraph) -> None:
    first, second = epilogue(step)
    second.args = (second.args[0], first.args[0])
    one, two = step.signature.write_backs
    step.signature = replace(step.signature, write_backs=(one, replace(two, value=one.target)))


def _unknown_value(step: StepGraph) -> None:
    del find(step, aten.mm.default).meta["val"]


def _unknown_input(step: StepGraph) -> None:
    del step.gm.graph.find_nodes(op="placeholder")[0].meta["val"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_call_method, "call_method"),
        (_out_of_order, "malformed"),
        (_lost_input, "4 placeholders, the signature 3"),
        (_renamed_input, "calls it other"),
        (_retyped_input, "signature says float64"),
        (_reshaped_output, "output 0"),
        (_more_outputs, "2 outputs, the signature 1"),
        (_nested_output, "flat"),
        (_lost_write, "lacks copy_"),
        (_unlisted_write, "no write-back"),
        (_other_value_written, "no write-back"),
        (_swapped_targets, "no write-back"),
        (_written_twice, "written twice"),
        (_half_a_write, "does not say what is written where"),
        (_early_write, "lacks copy_|outside of the epilogue"),
        (_work_after_epilogue, "lacks copy_"),
        (_use_of_written, "lacks copy_|uses the result"),
        (_in_place_op, "outside of the epilogue"),
        (_write_into_intermediate, "outside of the epilogue"),
        (_returns_view_of_old_parameter, "shares memory with w"),
        (_writes_what_was_overwritten, "shares memory with w"),
        (_unknown_value, "no `val`"),
        (_unknown_input, "no `val`"),
    ],
)
def test_a_broken_rule_is_named(damage: Callable[[StepGraph], None], message: str) -> None:
    step = sgd_step()
    damage(step)
    with pytest.raises(VerifyError, match=message):
        verify(step)
    verify(step, level=0)


def test_the_error_shows_the_node_its_line_and_its_neighbours() -> None:
    step = sgd_step()
    _in_place_op(step)
    with pytest.raises(VerifyError) as caught:
        verify(step)
    error = caught.value
    assert error.node.startswith("mul = aten.mul_.Tensor(t_1, ")
    assert error.location is not None
    assert error.location.line == 20
    assert [line[:2] for line in error.around] == ["  ", "  ", "> ", "  ", "  "]
    assert "train.py:20" in str(error)


def test_a_value_may_go_to_two_places_and_be_returned() -> None:
    step = sgd_step()
    output(step).args = ((epilogue(step)[0].args[1],),)
    step.signature = replace(step.signature, outputs=(replace(step.signature.outputs[0], tensor=None),))
    verify(step)


def test_the_new_contents_of_a_parameter_may_be_returned_through_its_copy() -> None:
    step = sgd_step()
    output(step).args = ((epilogue(step)[0],),)
    step.signature = replace(step.signature, outputs=(replace(step.signature.outputs[0], tensor=None),))
    verify(step, level=2)


def test_the_users_own_tensor_may_be_returned_updated() -> None:
    step = sgd_step()
    output(step).args = ((step.gm.graph.find_nodes(op="placeholder")[0],),)
    step.signature = replace(step.signature, outputs=(replace(step.signature.outputs[0], tensor=None),))
    verify(step, level=2)


def test_a_view_of_an_input_that_is_never_written_may_be_returned() -> None:
    step = make_step(lambda x: (x.t(),), [("x", InputKind.BATCH, "batch", torch.randn(2, 3))])
    verify(step, level=2)


def test_two_parameters_cannot_be_exchanged_in_place() -> None:
    inputs = [(name, InputKind.PARAMETER, name, torch.randn(2)) for name in ("a", "b")]
    step = make_step(lambda a, b: (b * 1, a * 1), inputs, writes={"a": 0, "b": 1})
    verify(step)
    nodes = step.gm.graph.find_nodes(op="placeholder")
    for copy, value in zip(epilogue(step), reversed(nodes), strict=True):
        copy.args = (copy.args[0], value)
    step.signature = replace(step.signature, write_backs=(WriteBack("a", "b"), WriteBack("b", "a")))
    with pytest.raises(VerifyError, match="shares memory with a"):
        verify(step)


def test_random_state_and_calls_on_copies_are_part_of_the_normal_form() -> None:
    graph = fx.Graph()
    p = graph.placeholder("p")
    p.meta["val"] = value = torch.empty(2)
    graph.call_function(manual_seed, (3,))
    state = graph.call_function(get_rng_state, ("cpu",))
    state.meta["val"] = torch.get_rng_state()
    graph.call_function(set_rng_state, (state, "cpu"))
    new = graph.call_function(call_on_copies, (aten.add_.Scalar, (0,), p, 1.0))
    new.meta["val"] = (value,)
    first = graph.call_function(operator.getitem, (new, 0))
    first.meta["val"] = value
    graph.call_function(aten.copy_.default, (p, first)).meta["val"] = value
    graph.output(())
    inputs = (InputSpec("p", InputKind.PARAMETER, "p", tensor_spec(value)),)
    step = StepGraph(fx.GraphModule({}, graph), Signature(inputs, (), (WriteBack("p", first.name),)))
    before = torch.get_rng_state()
    verify(step, level=2)
    assert torch.equal(torch.get_rng_state(), before)
    del state.meta["val"]
    with pytest.raises(VerifyError, match="no `val`"):
        verify(step)


def communicating(*, coalesced: bool = False, view: bool = False) -> StepGraph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value = torch.empty(4, device="meta")
    if coalesced:
        reduced = graph.call_function(c10d.all_reduce_coalesced.default, ([x, x], "sum", "0"))
        reduced.meta["val"] = [value, value]
        parts = [graph.call_function(operator.getitem, (reduced, i)) for i in range(2)]
    else:
        parts = [graph.call_function(c10d.all_reduce.default, (x, "sum", "0"))]
    if view:
        parts = [graph.call_function(aten.view.default, (part, [2, 2])) for part in parts]
    waits = [graph.call_function(c10d.wait_tensor.default, (part,)) for part in parts]
    results = [graph.call_function(aten.relu.default, (wait,)) for wait in waits]
    graph.output(tuple(results))
    shaped = torch.empty(2, 2, device="meta") if view else value
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            node.meta["val"] = value if node.target in (c10d.all_reduce.default, operator.getitem) else shaped
    return StepGraph(
        fx.GraphModule({}, graph),
        Signature(
            (InputSpec("x", InputKind.GRADIENT, "g", tensor_spec(value)),),
            tuple(OutputSpec(OutputKind.RESULT, "r") for _ in results),
        ),
    )


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_collectives_that_are_waited_on_pass(coalesced: bool, view: bool) -> None:
    verify(communicating(coalesced=coalesced, view=view), level=2)


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("which", [0, -1])
def test_a_dropped_wait_is_found(coalesced: bool, view: bool, which: int) -> None:
    step = communicating(coalesced=coalesced, view=view)
    wait = step.gm.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)[which]
    wait.replace_all_uses_with(wait.args[0])
    with pytest.raises(VerifyError, match="not waited on"):
        verify(step)
    step.gm.graph.erase_node(wait)
    with pytest.raises(VerifyError, match="not waited on"):
        verify(step)


@pytest.mark.parametrize("coalesced", [False, True])
def test_a_collective_without_a_wait_is_found(coalesced: bool) -> None:
    step = communicating(coalesced=coalesced)
    graph = step.gm.graph
    wait = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)[-1]
    wait.replace_all_uses_with(graph.find_nodes(op="placeholder")[0])
    graph.erase_node(wait)
    with pytest.raises(VerifyError, match="never waited on"):
        verify(step)


def test_the_result_of_a_collective_cannot_be_returned_unwaited() -> None:
    step = communicating()
    output(step).args = ((find(step, c10d.all_reduce.default),),)
    with pytest.raises(VerifyError, match="not waited on"):
        verify(step)


def test_a_collective_of_an_unwaited_result_is_found() -> None:
    step = communicating()
    reduced = find(step, c10d.all_reduce.default)
    with step.gm.graph.inserting_after(reduced):
        again = step.gm.graph.call_function(c10d.all_reduce.default, (reduced, "sum", "0"))
    again.meta["val"] = reduced.meta["val"]
    with pytest.raises(VerifyError, match="not waited on"):
        verify(step)


def test_in_place_collectives_are_not_functional() -> None:
    step = communicating()
    find(step, c10d.all_reduce.default).target = c10d.all_reduce_.default
    with pytest.raises(VerifyError, match="outside of the epilogue"):
        verify(step)


def test_a_shape_that_depends_on_data_is_taken_as_recorded() -> None:
    def step(x: Tensor) -> tuple[Tensor]:
        return (x.nonzero() * 2,)

    verify(make_step(step, [("x", InputKind.BATCH, "x", torch.ones(4))], tracing_mode="symbolic"), level=2)


def test_time_grows_with_the_length_of_the_graph_only() -> None:
    step = chain(20_000)
    start = time.process_time()
    verify(step)
    assert time.process_time() - start < 15  # what grows with the square of the length takes longer on any machine


@pytest.mark.parametrize("view", [False, True])
def test_a_wait_for_something_that_no_collective_made_is_found(view: bool) -> None:
    step = communicating(view=view)
    wait = find(step, c10d.wait_tensor.default)
    x = step.gm.graph.find_nodes(op="placeholder")[0]
    with step.gm.graph.inserting_before(wait):
        for waited in (x, wait):
            again = step.gm.graph.call_function(c10d.wait_tensor.default, (waited,))
            again.meta["val"] = waited.meta["val"]
            if waited is wait:
                wait.append(again)
            with pytest.raises(VerifyError, match=f"{again.name} waits on {waited.name}, which no collective made"):
                verify(step)
            step.gm.graph.erase_node(again)
    verify(step)


def test_a_second_wait_for_the_same_result_is_allowed() -> None:
    step = communicating()
    wait = find(step, c10d.wait_tensor.default)
    with step.gm.graph.inserting_after(wait):
        step.gm.graph.call_function(c10d.wait_tensor.default, wait.args).meta["val"] = wait.meta["val"]
    verify(step)
