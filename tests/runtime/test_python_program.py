"""The function a graph is turned into does what the graph module does."""

from __future__ import annotations

import gc
import linecache
import math
import operator
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import fx

from wholestep.runtime.python_program import program

aten = torch.ops.aten


def graph_of(build: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(build(graph))
    return fx.GraphModule(torch.nn.Module(), graph)


def all_kinds(graph: fx.Graph) -> Any:
    x, _, y = (graph.placeholder(n) for n in ("x", "unused", "y"))
    split = graph.call_function(aten.split.Tensor, (x, 1))
    first = graph.call_function(operator.getitem, (split, 0))
    filled = graph.call_function(aten.full.default, ([2, 2], math.inf), {"dtype": torch.float64})
    stacked = graph.call_function(aten.cat.default, ([first, y],))
    rows = graph.call_function(operator.getitem, (stacked, slice(0, 2, None)))
    graph.call_function(aten.add_.Tensor, (rows, 1.5), {"alpha": 2})
    nan = graph.call_function(aten.full_like.default, (y, math.nan))
    return (stacked, {"filled": filled}, [nan, None, "text", 3], (rows,))


def test_a_program_returns_what_the_graph_module_returns() -> None:
    gm = graph_of(all_kinds)
    inputs = torch.randn(2, 3), 7, torch.randn(2, 3)
    want, got = gm(*inputs), program(gm)(*inputs)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0)
    torch.testing.assert_close(got[1]["filled"], want[1]["filled"], rtol=0, atol=0)
    assert got[2][0].isnan().all()
    assert got[2][1:] == want[2][1:]
    torch.testing.assert_close(got[3][0], want[3][0], rtol=0, atol=0)


def test_a_value_is_dropped_after_its_last_use() -> None:
    seen: list[bool] = []
    alive: list[Any] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        made = x + 1
        alive.append(weakref.ref(made))
        return made

    def look(x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        seen.append(alive[0]() is None)
        return x

    def build(graph: fx.Graph) -> Any:
        x = graph.placeholder("x")
        made = graph.call_function(make, (x,))
        doubled = graph.call_function(aten.mul.Tensor, (made, 2))
        return graph.call_function(look, (doubled,))

    program(graph_of(build))(torch.ones(2))
    assert seen == [True]


def test_an_error_shows_the_line_of_the_program() -> None:
    def build(graph: fx.Graph) -> Any:
        x = graph.placeholder("x")
        return graph.call_function(aten.mm.default, (x, x))

    run = program(graph_of(build))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        run(torch.ones(2, 3))
    text = "".join(traceback.format_exception(caught.value))
    assert "aten__mm" in text
    assert "<wholestep program" in text


def test_the_source_goes_away_with_the_program() -> None:
    def programs() -> int:
        return sum(name.startswith("<wholestep program") for name in linecache.cache)

    gc.collect()
    before = programs()
    run = program(graph_of(lambda graph: graph.call_function(aten.neg.default, (graph.placeholder("x"),))))
    assert programs() == before + 1
    del run
    gc.collect()
    assert programs() == before
