"""Drawings hold every node once, without overlap and with edges that go down; large graphs collapse by module."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from wholestep.compilers import draw_graph, draw_graph_compile
from wholestep.errors import OptionError
from wholestep.inspect.drawing import MOST_BOXES, dot, drawing, kind_of_node, svg
from wholestep.inspect.layered_layout import WIDEST, place

SVG = "{http://www.w3.org/2000/svg}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))) * 0.5)


@pytest.fixture(scope="module")
def deep() -> fx.GraphModule:
    """A forward and backward of more than 500 nodes that know their modules."""
    model = nn.Sequential(*(Block() for _ in range(14)))

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    return ws.capture(step, model, torch.randn(4, 8)).gm


@pytest.fixture(scope="module")
def backward() -> fx.GraphModule:
    """A backward as torch.compile makes it."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(gm)
        return ws.compilers.nop(gm, inputs)

    torch._dynamo.reset()
    model = nn.Sequential(*(Block() for _ in range(4)))
    torch.compile(model, backend=ws.compilers.as_backend(keep))(torch.randn(4, 8)).sum().backward()
    return found[1]


def rectangles(text: str) -> list[tuple[float, float, float, float]]:
    found = []
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        if group.find(f"{SVG}title") is not None:
            box = group.find(f"{SVG}rect")
            assert box is not None
            found.append(tuple(float(box.attrib[key]) for key in ("x", "y", "width", "height")))
    return found  # type: ignore[return-value]


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]


def test_a_drawing_has_each_node_and_each_edge_once() -> None:
    gm = make_fx(lambda x, w: torch.tanh(x @ w).sum() + x.mean(), tracing_mode="fake")(
        torch.ones(2, 3), torch.ones(3, 3)
    )
    found = drawing(gm, False)
    assert [box.nodes for box in found.boxes] == [[node.name] for node in gm.graph.nodes]
    assert len(found.edges) == sum(len(node.users) for node in gm.graph.nodes)
    text = dot(found)
    assert text.count(" -> ") == len(found.edges)
    assert text.startswith("digraph")


def test_kinds_have_their_own_colours() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.rand_like(x) + (x @ x).t().sum() + torch.exp(x)

    gm = make_fx(function, tracing_mode="fake")(torch.ones(3, 3))
    kinds = {node.name: kind_of_node(node) for node in gm.graph.nodes}
    assert kinds["rand_like"] == "random"
    assert kinds["mm"] == "matmul"
    assert kinds["t"] == "view"
    assert kinds["sum_1"] == "reduction"
    assert kinds["exp"] == "pointwise"
    assert kinds["x_1"] == "input"
    fills = set(re.findall(r'rx="5" fill="(#\w+)"', svg(drawing(gm, False))))
    assert len(fills) == len(set(kinds.values()))


def test_five_hundred_nodes_are_readable_because_modules_are_boxes(deep: fx.GraphModule) -> None:
    assert len(deep.graph.nodes) > 500
    found = drawing(deep)
    assert len(found.boxes) <= MOST_BOXES
    drawn = {name for box in found.boxes for name in box.nodes}
    assert drawn >= {node.name for node in deep.graph.nodes if node.op == "call_function"}
    text = svg(found)
    assert float(ElementTree.fromstring(text).attrib["width"]) <= WIDEST + 100
    boxes = rectangles(text)
    assert len(boxes) == len(found.boxes)
    assert not any(overlap(a, b) for a, b in itertools.combinations(boxes, 2))
    titles = " ".join(box.title for box in drawing(deep, 2).boxes)
    assert "model.13 · forward" in titles
    assert "model.13 · backward" in titles


def test_backward_nodes_are_in_the_boxes_of_their_modules(backward: fx.GraphModule) -> None:
    titles = " ".join(box.title for box in drawing(backward, 1).boxes)
    assert all(f"{i} · backward" in titles for i in range(4))


def test_nodes_without_a_module_do_not_fragment_a_large_graph() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for block in range(60):
        for number in range(60):
            value = graph.call_function(torch.ops.aten.sin.default, (value,))
            if number % 10:  # gradients that are added up have no module
                value.meta["nn_module_stack"] = {"": (f"L['self'].h.{block}.mlp", nn.Module)}
    graph.output((value,))
    found = drawing(fx.GraphModule({}, graph))
    assert 60 <= len(found.boxes) <= 150
    assert sum(len(box.nodes) for box in found.boxes) >= 3600


def test_every_node_of_a_large_graph_can_be_drawn_too(deep: fx.GraphModule) -> None:
    boxes = rectangles(svg(drawing(deep, False)))
    assert len(boxes) == len(deep.graph.nodes)
    assert not any(overlap(a, b) for a, b in itertools.combinations(boxes, 2))


def test_text_stays_inside_of_its_box_and_boxes_inside_of_the_drawing(deep: fx.GraphModule) -> None:
    root = ElementTree.fromstring(svg(drawing(deep)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for group in root.iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        if group.find(f"{SVG}title") is None or box is None:
            continue
        left, right = float(box.attrib["x"]), float(box.attrib["x"]) + float(box.attrib["width"])
        assert left >= 0
        assert right <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
        for text in group.iter(f"{SVG}text"):
            if text.attrib.get("font-size") is None:
                # A monospaced letter of size 11 is 7 pixels wide in Chromium.
                assert float(text.attrib["x"]) + 7.0 * len(text.text or "") <= right + 1


def test_many_inputs_are_lines_in_the_boxes_of_their_first_readers(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(12)))
    wrapped = nn.ModuleDict({"a_module_with_quite_a_long_name_of_its_own": model})

    def step(model: nn.ModuleDict, x: Tensor) -> Tensor:
        loss = model["a_module_with_quite_a_long_name_of_its_own"](x).sum()
        loss.backward()
        return loss

    captured = ws.capture(step, wrapped, torch.ones(1, 4))
    found = drawing(captured.gm, 3, {spec.name: spec.path for spec in captured.signature.inputs})
    assert not any(box.kind == "input" for box in found.boxes)
    lines = [line for box in found.boxes for line in box.lines]
    assert any("11.1.weight: f32[4] → 1 more" in line for line in lines)  # the backward reads it too
    text = ws.inspect.draw(captured, tmp_path / "step.svg", collapse=4).read_text(encoding="utf-8")
    assert ".11.1 · forward" in text
    rows = rectangles(text)
    assert max(left for left, *_ in rows) < 1200  # it does not wander off to one side


def test_names_that_are_not_xml_or_dot_are_escaped() -> None:
    gm = fx.symbolic_trace(lambda x: x + 1)
    hostile = '<script>"&\\\x00\n</script>'
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    node.meta["nn_module_stack"] = {"a": (hostile, nn.Linear)}
    found = drawing(gm, False)
    found.boxes[0].title = hostile
    ElementTree.fromstring(svg(found))
    assert "<script>" not in svg(found)
    assert '\\"' in dot(found)


@given(st.data())
def test_boxes_do_not_overlap_and_are_below_their_inputs(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    edges = []
    for target in range(1, count):
        sources = data.draw(st.sets(st.integers(0, target - 1), max_size=4))
        edges += [(source, target) for source in sorted(sources)]
    size = {i: (data.draw(st.floats(10, 400)), data.draw(st.floats(10, 90))) for i in range(count)}
    placed = place(range(count), edges, size)
    boxes = [(placed.x[i] - size[i][0] / 2, placed.y[i] - size[i][1] / 2, *size[i]) for i in range(count)]
    shrunk = [(x + 0.01, y + 0.01, w - 0.02, h - 0.02) for x, y, w, h in boxes]
    assert not any(overlap(a, b) for a, b in itertools.combinations(shrunk, 2))
    for source, target in edges:
        assert placed.y[source] < placed.y[target]
    assert set(placed.paths) | set(placed.far) == set(edges)


def test_the_compiler_writes_svg_and_dot_without_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiler = draw_graph_compile(str(tmp_path / "made" / "net"))
    gm = make_fx(lambda x: x.sin(), tracing_mode="fake")(torch.ones(2))
    compiled = compiler(gm, [torch.ones(2)])
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())
    compiler(gm, [torch.ones(2)])
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert names == {"net.svg", "net.dot", "net_1.svg", "net_1.dot"}
    draw_graph_compile(str(tmp_path / "only.svg"))(gm, [])
    assert (tmp_path / "only.svg").exists()
    assert not (tmp_path / "only.dot").exists()


def test_a_png_without_graphviz_and_an_unknown_ending_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    gm = fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(OptionError, match="graphviz"):
        draw_graph(gm, tmp_path / "a.png")
    with pytest.raises(OptionError, match=r"\.svg"):
        draw_graph(gm, tmp_path / "a.jpeg")


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_a_png_is_drawn_by_graphviz(tmp_path: Path) -> None:
    path = draw_graph(fx.symbolic_trace(lambda x: x + 1), tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_step_is_drawn_with_the_names_of_its_inputs(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    text = draw_graph(ws.capture(step, model, torch.ones(1, 2)), tmp_path / "step.svg").read_text(encoding="utf-8")
    assert "model.weight" in text
    assert 'stroke-dasharray="4 2"' in text  # the backward


def test_the_optimizer_is_one_box_and_backwards_belong_to_their_modules() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    captured = ws.capture(step, torch.ones(2, 3, 8, 8))
    found = drawing(captured.gm)
    titles = [box.title for box in found.boxes]
    assert sum(title.startswith("optimizer ·") for title in titles) <= 2
    assert any(title.startswith("epilogue ·") for title in titles)
    backward = next(box for box in found.boxes if any("convolution_backward" in name for name in box.nodes))
    assert backward.title.startswith("model.0 · backward")


def test_a_graph_without_module_paths_is_collapsed_too() -> None:
    def many(x: Tensor) -> Tensor:
        for _ in range(400):
            x = x.sin() + x
        return x

    found = drawing(make_fx(many)(torch.ones(2)))
    assert 50 <= len(found.boxes) <= MOST_BOXES
    assert found.boxes[2].title.startswith("forward · ")
    assert sum(len(box.nodes) for box in found.boxes) >= 800
