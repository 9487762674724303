from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import keyword
import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from ir.step_graphs import aten, chain, dynamic_step, find, sgd_step, with_everything
from wholestep.errors import GraphFormatError
from wholestep.ir import NodeMeta, Signature, StepGraph, node_meta, set_node_meta, verify
from wholestep.ir.graph_functions import call_on_copies
from wholestep.torch_private.fake_tensors import FakeTensor

STEPS = [sgd_step, with_everything, dynamic_step]


@pytest.mark.parametrize("make", STEPS)
def test_a_step_comes_back_and_writes_the_same_text_again(make: Callable[[], StepGraph]) -> None:
    step = make()
    text = step.to_json()
    again = StepGraph.from_json(text)
    assert again.to_json() == text
    assert again.signature == step.signature
    assert again.print_readable(print_output=False) == step.print_readable(print_output=False)
    assert [node_meta(n) for n in again.gm.graph.nodes] == [node_meta(n) for n in step.gm.graph.nodes]
    verify(again, level=2)


@pytest.mark.parametrize("make", STEPS)
def test_the_copy_computes_the_same_bits(make: Callable[[], StepGraph]) -> None:
    step = make()
    again = StepGraph.from_json(step.to_json())
    shapes = [node.meta["val"].shape for node in step.gm.graph.find_nodes(op="placeholder")]
    inputs = [torch.randn([int(d) for d in shape]) for shape in shapes]
    ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    torch.manual_seed(1)
    expected = step.gm(*ours)
    torch.manual_seed(1)
    found = again.gm(*theirs)
    for a, b in zip([*expected, *ours], [*found, *theirs], strict=True):
        assert torch.equal(
            torch.view_as_real(a) if a.is_complex() else a, torch.view_as_real(b) if b.is_complex() else b
        )


def test_values_come_back_as_fake_tensors_of_one_mode() -> None:
    again = StepGraph.from_json(with_everything().to_json())
    values = [n.meta["val"] for n in again.gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert all(isinstance(v, FakeTensor) for v in values)
    assert len({id(v.fake_mode) for v in values}) == 1


def test_a_call_on_copies_comes_back() -> None:
    graph = fx.Graph()
    p = graph.placeholder("p")
    new = graph.call_function(call_on_copies, (aten.add_.Scalar, (0,), p, 1.0))
    graph.output((graph.call_function(operator.getitem, (new, 0)),))
    set_node_meta(new, NodeMeta(in_place=aten.add_.Scalar))
    spec = chain(1).signature
    step = StepGraph(fx.GraphModule({}, graph), Signature((_named(spec.inputs[0], "p"),), spec.outputs))
    again = StepGraph.from_json(step.to_json())
    assert torch.equal(again.gm(torch.zeros(2))[0], torch.ones(2))
    assert node_meta(find(again, call_on_copies)).in_place is aten.add_.Scalar


def _named(spec: Any, name: str) -> Any:
    return dataclasses.replace(spec, name=name)


def test_a_node_that_has_no_form_is_named() -> None:
    step = chain(3)
    find(step, aten.mul.Tensor).target = torch.nn.functional.relu
    with pytest.raises(GraphFormatError, match=r"relu(.|\n)*node"):
        step.to_json()


def test_methods_and_modules_have_no_form() -> None:
    graph = fx.Graph()
    graph.output((graph.call_method("relu", (graph.placeholder("x"),)),))
    with pytest.raises(GraphFormatError, match="call_method"):
        StepGraph(fx.GraphModule({}, graph), Signature()).to_json()


def test_custom_operators_need_to_be_allowed() -> None:
    library = torch.library.Library("wholestep_test_json", "DEF")
    library.define("double(Tensor x) -> Tensor")
    step = chain(1)
    node = find(step, aten.add.Tensor)
    node.target, node.args = torch.ops.wholestep_test_json.double.default, (node.args[0],)
    text = step.to_json()
    with pytest.raises(GraphFormatError, match="wholestep_test_json::double"):
        StepGraph.from_json(text)
    again = StepGraph.from_json(text, allow_ops=["wholestep_test_json::*"])
    assert find(again, torch.ops.wholestep_test_json.double.default)
    del library


def test_ten_thousand_nodes_take_seconds_at_most() -> None:
    step = chain(10_000)
    start = time.process_time()
    text = step.to_json()
    written = time.process_time()
    StepGraph.from_json(text)
    assert written - start < 30
    assert time.process_time() - written < 30


# Hostile files

BASE = with_everything().to_json()
DYNAMIC = dynamic_step().to_json()


def damaged(change: Callable[[dict[str, Any]], Any]) -> str:
    document = json.loads(BASE)
    change(document)
    return json.dumps(document)


def node(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(n for n in document["nodes"] if n["name"] == name)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        "{",
        '{"format": "wholestep.step_graph"}',
        BASE[:-3],
        "[" * 100_000,
        '{"a":' * 100_000,
        "1" * 10_000,
        BASE.replace("9223372036854775807", "9" * 5000),
        BASE.replace("9223372036854775807", "NaN"),
        BASE.replace("9223372036854775807", "1.5"),
        BASE.replace('"version": 1', '"version": 2'),
        BASE.replace('"version": 1', '"version": true'),
        BASE.replace("wholestep.step_graph", "wholestep.other"),
        b"{}",
        None,
        3,
    ],
)
def test_text_that_is_not_a_step_is_refused(text: Any) -> None:
    with pytest.raises(GraphFormatError):
        StepGraph.from_json(text)


@pytest.mark.parametrize("key", sorted(json.loads(BASE).keys() - {"torch"}))
def test_each_section_must_be_there_and_of_its_kind(key: str) -> None:
    with pytest.raises(GraphFormatError):
        StepGraph.from_json(damaged(lambda d: d.pop(key)))
    for wrong in (None, 3, "x", [[]], [None], {"a": 1}):
        if not (key == "constants" and wrong is None):
            with pytest.raises(GraphFormatError):
                StepGraph.from_json(damaged(lambda d: d.update({key: wrong})))  # noqa: B023


HOSTILE_NAMES = [
    *["", " ", "a b", "1a", "a.b", "a-b", "é", "add\n", "x; import os", "x):\n    import os\n#", "a" * 2000],
    *["__import__", "eval", "exec", "self", "torch", "device", "inf", "print", "None", "True"],
    *keyword.kwlist[:5],
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_that_would_not_be_plain_python_is_refused(name: str) -> None:
    def rename_input(document: dict[str, Any]) -> None:
        document["signature"]["inputs"][0]["name"] = name
        document["signature"]["write_backs"] = []
        text = json.dumps(document).replace('{"node": "w"}', json.dumps({"node": name}))
        document.clear()
        document.update(json.loads(text))
        node(document, "w").update(name=name)

    with pytest.raises(GraphFormatError):
        StepGraph.from_json(damaged(rename_input))
    with pytest.raises(GraphFormatError):
        StepGraph.from_json(BASE.replace("_tensor_constant0", json.dumps(name)[1:-1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: node(d, "cat").update(name="split"), "name of another node"),
        (lambda d: node(d, "cat").update(op="call_method"), "op"),
        (lambda d: node(d, "cat").update(op="call_module", target="forward"), "op"),
        (lambda d: node(d, "cat").update(op=["call_function"]), "op"),
        (lambda d: node(d, "cat").update(target="os.system"), "os.system"),
        (lambda d: node(d, "cat").update(target="builtins.eval"), "eval"),
        (lambda d: node(d, "cat").update(target="mylib::op"), "mylib::op"),
        (lambda d: node(d, "cat").update(target=None), "target"),
        (lambda d: node(d, "cat").pop("target"), "target"),
        (lambda d: node(d, "cat").update(args=[{"node": "mul"}]), "not an earlier node"),
        (lambda d: node(d, "cat").update(args=[{"node": "cat"}]), "not an earlier node"),
        (lambda d: node(d, "cat").update(args=[{"node": "nowhere"}]), "not an earlier node"),
        (lambda d: node(d, "cat").update(args={"node": "x"}), "list of arguments"),
        (lambda d: node(d, "cat").update(args=3), "list of arguments"),
        (lambda d: node(d, "cat").update(kwargs={"a = 1, b": 1}), "identifier"),
        (lambda d: node(d, "cat").update(kwargs=[]), "keyword"),
        (lambda d: node(d, "cat").update(val=1000), "index"),
        (lambda d: node(d, "cat").update(val=-1), "index"),
        (lambda d: node(d, "cat").update(origin=1000), "index"),
        (lambda d: node(d, "cat").update(code="import os"), "unknown key"),
        (lambda d: node(d, "w").update(target="torch"), "no target"),
        (lambda d: node(d, "output").update(target="torch"), "flat tuple"),
        (lambda d: node(d, "w").update(args=[1]), "no such arguments"),
        (lambda d: node(d, "w").update(args=[{"node": "w"}]), "not an earlier node"),
        (lambda d: node(d, "_tensor_constant0").update(target="_tensor_constant9"), "not in the file"),
        (lambda d: node(d, "_tensor_constant0").update(target="forward"), "not in the file"),
        (lambda d: node(d, "output").update(args=[{"node": "cat"}]), "flat tuple"),
        (lambda d: node(d, "output").update(args=[{"tuple": [[{"node": "cat"}]]}]), "flat tuple"),
        (lambda d: node(d, "output").update(args=[]), "flat tuple"),
        (lambda d: node(d, "output").update(args=[{"tuple": []}]), "outputs"),
        (lambda d: node(d, "output").update(kwargs={"a": 1}), "no such arguments"),
        (lambda d: d["nodes"].pop(), "last node"),
        (lambda d: d["nodes"].clear(), "no nodes"),
        (lambda d: d["nodes"].append(d["nodes"][-1]), "last node"),
        (lambda d: d["nodes"].insert(5, d["nodes"].pop(0)), "not an earlier node|before all other"),
        (lambda d: d["nodes"].insert(3, {"op": "placeholder", "name": "q"}), "before all other"),
        (lambda d: d["signature"]["inputs"].pop(), "placeholders"),
        (lambda d: d["signature"]["inputs"].reverse(), "placeholders"),
        (lambda d: d["signature"]["outputs"].pop(), "outputs"),
        (lambda d: d["signature"]["write_backs"].append({"target": "w", "value": "nowhere"}), "does not exist"),
        (lambda d: d["signature"]["state_changes"][0].update(output=17), "does not exist"),
        (lambda d: d["signature"]["state_changes"][0].update(unless=-1), "does not exist"),
        (lambda d: d["signature"].update(result={"output": 9}), "result"),
        (lambda d: d["signature"].update(result={"eval": "1"}), "result"),
        (lambda d: d["signature"].update(result=3), "result"),
        (lambda d: d["constants"].pop("_tensor_constant0"), "not in the file"),
        (lambda d: d["constants"].update(forward=d["constants"]["_tensor_constant0"]), "torch uses that name"),
        (lambda d: d["constants"]["_tensor_constant0"].update(shape=[10**11]), "bytes"),
        (lambda d: d["origins"][0].update(phase=3), "origins"),
        (lambda d: d["origins"][0].update(in_place={"op": "mylib::evil_"}), "mylib::evil_"),
    ],
)
def test_damage_to_the_graph_is_refused_with_a_reason(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(GraphFormatError, match=message):
        StepGraph.from_json(damaged(change))


def test_the_message_says_which_node_is_wrong() -> None:
    with pytest.raises(GraphFormatError, match=r"nodes\[\d+\], 'cat'"):
        StepGraph.from_json(damaged(lambda d: node(d, "cat").update(target="os.system")))


@pytest.mark.parametrize(
    "text", ["'); __import__('os').system('touch /tmp/pwned') #", '"""\nimport os\n"""', "\\", "\x00"]
)
def test_strings_reach_the_generated_code_only_as_literals(text: str) -> None:
    again = StepGraph.from_json(damaged(lambda d: node(d, "sum_1").update(kwargs={"dtype": text})))
    assert f"dtype = {text!r}" in again.gm.code


def _paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _paths(item, (*here, key))
    return found


DOCUMENTS = [json.loads(BASE), json.loads(DYNAMIC)]
PATHS = [_paths(document)[1:] for document in DOCUMENTS]
odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**25), 10**25),
    st.text(max_size=8),
    st.sampled_from(["w", "x", "cat", "self", "s0", "float32", "cpu", "aten::add.Tensor", "operator.add", "inf"]),
    st.sampled_from([[], {}, {"node": "w"}, {"tuple": []}, {"float": "nan"}, {"op": "aten::mm"}, {"tensor": []}]),
    st.lists(st.integers(), max_size=3),
)


@given(st.data())
@settings(max_examples=200)
def test_any_mutation_of_a_document_is_read_or_refused_and_never_crashes(data: st.DataObject) -> None:
    which = data.draw(st.integers(0, 1))
    document = copy.deepcopy(DOCUMENTS[which])
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(PATHS[which]))
        holder: Any = document
        try:
            for key in parents:
                holder = holder[key]
            action = data.draw(st.sampled_from(["replace", "delete", "duplicate", "swap"]))
            if action == "delete":
                del holder[last]
            elif action == "duplicate" and isinstance(holder, list):
                holder.insert(last, copy.deepcopy(holder[last]))
            elif action == "swap" and isinstance(holder, list):
                holder[0], holder[last] = holder[last], holder[0]
            else:
                holder[last] = data.draw(odd_values)
        except (KeyError, IndexError, TypeError):
            continue
    try:
        step = StepGraph.from_json(json.dumps(document))
    except GraphFormatError:
        return
    again = StepGraph.from_json(step.to_json())
    assert again.fingerprint() == step.fingerprint()
    step.print_readable(print_output=False)


@given(
    st.text(max_size=200)
    | st.recursive(odd_values, lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(json.dumps)
)
def test_arbitrary_text_is_refused(text: str) -> None:
    with pytest.raises(GraphFormatError):
        StepGraph.from_json(text)


@given(st.integers(0, len(BASE) - 1), st.integers(1, 40), st.text(max_size=4))
def test_json_of_a_graph_with_a_part_missing_is_read_or_refused(start: int, length: int, filling: str) -> None:
    text = BASE[:start] + filling + BASE[start + length :]
    with contextlib.suppress(GraphFormatError):
        StepGraph.from_json(text)
