"""Graphs written by hand, graphs traced, and lowering without a compiler, for the tests of `wholestep.lower`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.lower import LowerOptions, partial_lower
from wholestep.lower.report import Lowering, lowering_of

aten = torch.ops.aten


def run_graph(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[[list[Any]], Any]:
    """In the place of Inductor: FX runs the region."""

    def call(tensors: list[Any]) -> tuple[Any, ...]:
        given = list(tensors)
        tensors.clear()
        return tuple(gm(*given))

    return call


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Regions are traced and called as always, and run by FX where Inductor's code would."""
    with (
        mock.patch("wholestep.lower.compiled_region.compile_inductor", run_graph),
        mock.patch("wholestep.lower.forward_backward.compile_inductor", run_graph),
    ):
        yield


def no_sin(node: fx.Node) -> bool:
    """A predicate: sines cut a graph into regions."""
    return node.target is not aten.sin.default


ANYTHING: dict[str, Any] = {"node_predicate": lambda node: True}
"""Keywords of `lowered`: one region for everything."""


def lowered(function: Callable[..., Any], *inputs: Any, tracing: str = "fake", **keywords: Any) -> fx.GraphModule:
    """A function traced and lowered, regions of any size."""
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    gm = make_fx(function, tracing_mode=tracing)(*copies)
    predicate = keywords.pop("node_predicate", no_sin)
    return partial_lower(gm, predicate, options=LowerOptions(**{"min_aten_ops": 1, "strict": True, **keywords}))


def report(gm: fx.GraphModule) -> Lowering:
    return lowering_of(gm)


def assert_runs_as(function: Callable[..., Any], gm: fx.GraphModule, *inputs: torch.Tensor) -> None:
    """Same results, same inputs afterwards, and the same results are the same tensors or views of the same memory."""
    ours, theirs = [value.clone() for value in inputs], [value.clone() for value in inputs]
    expected, actual = function(*theirs), gm(*ours)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(ours, theirs)
    want = [*pytree.tree_leaves(expected), *theirs]
    got = [*pytree.tree_leaves(actual), *ours]
    assert [value.stride() for value in got] == [value.stride() for value in want]
    assert _sharing(got) == _sharing(want)


def _sharing(values: list[torch.Tensor]) -> list[int]:
    """For each tensor the first one with the same memory."""
    storages = [value.untyped_storage().data_ptr() for value in values]
    return [storages.index(each) for each in storages]


def graph_of(nodes: Mapping[str, tuple[Any, ...]], **inputs: Any) -> fx.GraphModule:
    """A graph from a table: name -> (operator, arguments..., optional dict of keywords); strings are names.

    Inputs are tensors or Python numbers, which then may differ from call to call. All nodes are results, in order.
    """
    graph, values = fx.Graph(), dict[str, Any]()
    known: dict[str, fx.Node] = {}
    mode = FakeTensorMode()
    for name, value in inputs.items():
        known[name] = graph.placeholder(name)
        values[name] = value
        known[name].meta["val"] = _fake(value, mode)
    for name, (target, *given) in nodes.items():
        keywords = given.pop() if given and isinstance(given[-1], dict) else {}
        args, kwargs = _replaced((tuple(given), keywords), known)
        known[name] = graph.call_function(target, args, kwargs)
        args, kwargs = _replaced((tuple(given), keywords), values)
        values[name] = target(*args, **kwargs)
        known[name].meta["val"] = _fake(values[name], mode)
    graph.output(tuple(known[name] for name in nodes))
    return fx.GraphModule(torch.nn.Module(), graph)


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    return pytree.tree_map_only(torch.Tensor, mode.from_tensor, value)


def _replaced(value: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, known) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, known) for key, item in value.items()}
    return known.get(value, value) if isinstance(value, str) else value
