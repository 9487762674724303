"""Tables of nodes, memory over time, and what objects look like as text and in notebooks."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import wholestep as ws
from steps_to_show import gpt_step
from wholestep.compiled_step import CompiledStep
from wholestep.inspect.notebooks import SHOWN, html_of
from wholestep.simulate.pipeline import simulate


@pytest.fixture(scope="module")
def step() -> CompiledStep[..., torch.Tensor]:
    return gpt_step()


def test_nodes_of_a_module_phase_and_operator_are_shown(step: CompiledStep[..., torch.Tensor]) -> None:
    found = ws.inspect.show(step, module="*.attention", phase="backward", op="mm")
    assert len(found) == 8  # two products for each of two linear layers, in two blocks
    assert {row.operator for row in found.rows} == {"aten.mm.default"}
    assert all(".attention." in row.module_path and row.phase == "backward" for row in found.rows)
    assert all("tiny_gpt.py" in row.line and row.bytes and row.us for row in found.rows)
    for text in ("8 of", "module *.attention, phase backward, op mm", "mm_default_7", "f32[32, 16]"):
        assert text in str(found)
    json.dumps(found.as_data())


def test_an_operator_may_be_written_in_any_of_its_forms(step: CompiledStep[..., torch.Tensor]) -> None:
    assert step.last is not None
    counts = {op: len(ws.inspect.show(step.last, op=op)) for op in ("mm", "aten.mm", "aten::mm", "aten.mm.default")}
    assert set(counts.values()) == {sum(n.target is torch.ops.aten.mm.default for n in step.last.gm.graph.nodes)}
    assert {row.operator for row in ws.inspect.show(step, op="*softmax*").rows} >= {"aten._log_softmax.default"}
    whole = ws.inspect.show(step)
    assert len(whole) + len(step.last.signature.inputs) + 1 == step.last.num_nodes
    assert "others" in str(whole)


def test_a_filter_that_finds_nothing_says_what_there_is(step: CompiledStep[..., torch.Tensor]) -> None:
    found = ws.inspect.show(step, module="encoder")
    assert not found
    assert "model.blocks.0.attention" in str(found)
    assert "modules:" in found._repr_html_()
    with pytest.raises(ws.WholestepError, match="not a phase"):
        ws.inspect.show(step, phase="sideways")
    with pytest.raises(ws.WholestepError, match="no graph to show"):
        ws.inspect.show(nn.Linear(1, 1))


def test_memory_by_kind_adds_up_to_what_is_alive(step: CompiledStep[..., torch.Tensor]) -> None:
    timeline = step.memory_timeline()
    assert numpy.array_equal(sum(timeline.by_kind.values()), timeline.live)
    assert timeline.peak_bytes == timeline.live.max() == sum(each.bytes for each in timeline.alive())
    assert sum(timeline.by_module().values()) == timeline.peak_bytes
    assert {"parameter", "optimizer_state", "saved", "gradient"} <= set(timeline.by_kind)
    assert timeline.by_module(depth=2)["model.blocks"] > timeline.peak_bytes / 2
    at = timeline.alive(timeline.peak_at)
    assert at == timeline.alive()
    text = str(timeline)
    for word in ("peak", "^forward", "^backward", "^optimizer", "saved", "largest at the peak", "tiny_gpt.py"):
        assert word in text
    with pytest.raises(ws.WholestepError, match="does not run in this step"):
        timeline.alive("nothing")
    json.dumps(timeline.as_data())


def test_a_step_and_its_graph_are_a_few_lines_of_text(step: CompiledStep[..., torch.Tensor]) -> None:
    text = str(step)
    assert len(text.splitlines()) <= 20
    for word in (
        "train_step: 2 graphs",
        "call 2:",
        "forward",
        "28 parameter",
        "aten.view.default",
        "writes:",
        "returns",
    ):
        assert word in text
    assert str(step.last) in text
    assert repr(step.last).startswith("StepGraph(")
    fresh = ws.compile(lambda x: x, lower="eager", name="fresh")
    assert str(fresh) == "fresh: nothing was captured yet"


class _Balanced(HTMLParser):
    """Counts open elements."""

    VOID = frozenset({"br", "polygon"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def html(value: Any) -> str:
    text = value._repr_html_()
    parser = _Balanced()
    parser.feed(text)
    assert not parser.open
    assert "http" not in text.replace("http://www.w3.org", "")
    return text


def test_every_object_has_html_for_notebooks(step: CompiledStep[..., torch.Tensor]) -> None:
    assert step.last is not None
    region = ws.lower.report.RegionReport(0, "subgraph_0", "", 9, 1, 1, 0, ("forward",))
    lowering = ws.lower.report.Lowering([region], [("sort", "aten.sort", "no lowering")])
    budget = ws.ir.step_graph.MemoryReport("cpu", 10, 9, 8, 11, (), (), 1)
    measured = ws.simulate.MeasuredStep(
        (), "cpu", measured=(ws.simulate.MeasuredRow("mm", "aten.mm.default", (2.0, 4.0)),)
    )
    check = ws.check(lambda x: x + 1, torch.ones(2), lower="eager", steps=1)
    expected = {
        step: "captured again because",
        step.last: "optimizer.param_groups[0].lr",
        step.memory_timeline(): "<svg",
        ws.inspect.show(step, op="mm"): "mm_default",
        ws.inspect.diff(step.graphs[0], step.last): "only b reads",
        ws.simulate.step(step.last): "the longest nodes",
    }
    for value, word in expected.items():
        assert word in html(value), type(value)
    for value, word in ((lowering, "no lowering"), (budget, "planned"), (measured, "3.0"), (check, "equal to the bit")):
        assert word in html(value), type(value)
    assert "<svg" in html(simulate("1F1B", ranks=2, microbatches=4))


def test_what_a_user_wrote_is_escaped() -> None:
    row = ws.simulate.MeasuredRow("<script>", "a & b", (1.0,))
    text = html(ws.simulate.MeasuredStep((), "cpu", name="<b>", measured=(row,)))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_every_class_that_is_listed_exists_and_shows_itself() -> None:
    import importlib

    for name in SHOWN:
        module, _, cls = name.rpartition(".")
        assert hasattr(getattr(importlib.import_module(module), cls), "_repr_html_"), name
    assert html_of(object()).startswith("<div><pre>&lt;object")


def test_what_a_step_says_of_itself_is_some_twenty_lines_however_often_it_was_captured() -> None:
    step = ws.compile(lambda x: (x * 2).sum(), lower="eager", dynamic=False, max_recompiles=20)
    for n in range(1, 9):
        step(torch.ones(n))
    text = step.explain()
    assert "8 graphs for 8 calls, captured in" in text
    assert "2 earlier recompiles" in text
    assert "call 8: " in text
    assert "call 2: " not in text
    for word in ("no communication", "nodes after", "memory: peak", "step 0."):
        assert word in text
    assert len(text.splitlines()) < 22
    assert f"memory: peak {ws.ir.step_graph.shown(step.memory_timeline().peak_bytes)} at" in text
