from __future__ import annotations

import time

import torch
from torch import fx

from ir.step_graphs import chain, dynamic_step, sgd_step, with_everything
from wholestep.errors import Location
from wholestep.ir import NodeMeta, Signature, StepGraph, format_node, set_node_meta
from wholestep.ir.readable import describe_value, readable


def text_of(step: StepGraph) -> str:
    return step.print_readable(print_output=False)


def test_the_header_counts_nodes_by_phase_and_inputs_by_kind() -> None:
    assert text_of(sgd_step()).splitlines()[0] == (
        "# StepGraph: 19 nodes (forward 12, epilogue 2); inputs: 1 parameter, 1 optimizer_state, 2 batch"
    )


def test_inputs_say_what_they_are_and_where_the_user_finds_them() -> None:
    lines = text_of(sgd_step()).splitlines()
    assert "    w,  # parameter        model.fc.weight                                   f32[3, 4]" in lines
    assert any(line.split("#")[1].split() == ["batch", "batch['x']", "f32[2,", "4]"] for line in lines if "x," in line)


def test_nodes_carry_shape_and_line_under_the_module_they_come_from() -> None:
    lines = text_of(sgd_step()).splitlines()
    here = lines.index("    mm = aten.mm.default(x, t)  # f32[2, 3]  train.py:15")
    assert lines[here - 2] == "    # forward model.fc  (train.py:14)"
    assert lines[here + 1] == "    # forward model.act  (train.py:16)"


def test_the_epilogue_the_return_and_the_state_changes_close_it() -> None:
    lines = text_of(with_everything()).splitlines()
    end = lines.index("    # epilogue")
    assert lines[end + 1] == "    copy__default = aten.copy_.default(w, clamp)  # model.w"
    assert lines[end + 2].startswith("    return (mul, add, mul_1)  # out0: ")
    assert lines[end + 3 :] == [
        "# returns {'loss': out0, 'n': 3, 'nan': inf}",
        "# afterwards",
        "#   optimizer.state[model.w].step = out1  (created optimizer_state)  unless out0",
        "#   optimizer.param_groups[0].lr = 0.1  (constant hyper_parameter)",
        "#   model.w.grad  (removed gradient)",
        "# also calls scheduler.step()",
    ]


def test_the_body_is_python() -> None:
    for step in (sgd_step(), with_everything(), dynamic_step()):
        compile(text_of(step), "<text>", "exec")


def test_symbolic_dimensions_are_shown_as_expressions() -> None:
    step = dynamic_step()
    rows = step.gm.graph.find_nodes(op="placeholder")[1].meta["val"].shape[0]
    assert f"f32[2*{rows}, " in text_of(step)


def test_text_of_the_users_cannot_break_out_of_its_comment() -> None:
    step = sgd_step()
    for node in step.gm.graph.nodes:
        set_node_meta(node, NodeMeta("evil\nimport os\x1b[2J", Location("a\nb.py", 1)))
    text = text_of(step)
    assert "\nimport os" not in text
    assert "\x1b" not in text
    compile(text, "<text>", "exec")


def test_values_have_short_names() -> None:
    assert describe_value(torch.empty(2, 3, dtype=torch.bfloat16)) == "bf16[2, 3]"
    assert describe_value((torch.empty(()), [torch.empty(1, dtype=torch.bool)])) == "(f32[], [b8[1]])"
    assert describe_value([torch.empty(1)] * 6) == "[f32[1], f32[1], f32[1], f32[1], .. 6 in all]"
    assert describe_value(0.5) == "float"
    assert describe_value(None) == ""


def test_any_node_can_be_shown_in_a_message() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    method = graph.call_method("relu", (x,))
    output = graph.output((method, {"a": x}, slice(x, None, 2), (x,), torch.device("cpu")))
    assert format_node(x) == "x = <input>"
    assert format_node(method) == "relu = <call_method relu>(x)"
    assert format_node(output) == "return (relu, {'a': x}, slice(x, None, 2), (x,), cpu)"


def test_a_graph_without_signature_can_still_be_read() -> None:
    assert "x," in readable(chain(2).gm, Signature())


def test_ten_thousand_nodes_take_seconds_at_most() -> None:
    step = chain(10_000)
    start = time.process_time()
    text_of(step)
    assert time.process_time() - start < 30
