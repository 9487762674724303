"""`_foreach_*` operators are decomposed and agree with eager, every functional overload of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lower.graphs import aten, graph_of, report
from selection import each_now
from wholestep.lower import LowerOptions, partial_lower
from wholestep.lower.decompositions import unscaled

FUNCTIONAL = sorted(
    {
        str(op): op
        for name in dir(torch._C._VariableFunctions)
        if name.startswith("_foreach_") and not name.endswith("_")
        for packet in [getattr(aten, name)]
        for op in (getattr(packet, overload) for overload in packet.overloads())
        if not op._schema.is_mutable
    }.items()
)
OPERATORS = [op for _, op in FUNCTIONAL]
UNIT = ("acos", "asin", "atanh", "erfinv")
POSITIVE = ("log", "sqrt", "lgamma", "pow")


def _list(op: Any, name: str) -> list[str]:
    base = op._schema.name.removeprefix("aten::_foreach_")
    if base.startswith(UNIT):
        return ["u", "v"]
    return ["p", "q"] if base.startswith(POSITIVE) or name in ("tensor2", "src") else ["x", "y"]


def arguments(op: Any) -> tuple[list[Any], dict[str, Any]]:
    """Something for each argument of an overload: strings are inputs of the graph."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            value: Any = _list(op, argument.name)
        elif kind.startswith("List["):
            value = [0.5, "n"]
        elif kind == "Tensor":
            value = "w" if argument.name == "scalars" else "t"
        elif argument.has_default_value():
            continue
        else:
            value = "n" if "Scalar" in op._schema.overload_name and "norm" not in op._schema.name else 2
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    x, y = torch.randn(3, 3, dtype=dtype), torch.randn(4, 4, dtype=dtype)
    p, q = x.abs() + 0.5, y.abs() + 0.5
    u, v = x.sigmoid() * 0.9, y.sigmoid() * 0.9
    return {"x": x, "y": y, "p": p, "q": q, "u": u, "v": v, "t": torch.tensor(0.7), "w": torch.tensor([0.3, 0.6])}


def filled(value: Any, known: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [filled(item, known) for item in value]
    return known.get(value, value) if isinstance(value, str) else value


def eager(op: Callable[..., Any], dtype: torch.dtype, n: float) -> Any:
    positional, named = arguments(op)
    known = {**inputs(dtype), "n": n}
    return op(*filled(positional, known), **{key: filled(value, known) for key, value in named.items()})


def test_there_are_operators_to_test() -> None:
    assert len(OPERATORS) > 70


@pytest.mark.parametrize("dtype", each_now([torch.float32, torch.float64], "torch.float32"))
def test_every_functional_overload_agrees_with_eager(dtype: torch.dtype) -> None:
    nodes: dict[str, tuple[Any, ...]] = {}
    known = {**inputs(dtype), "n": 0.25}
    for i, op in enumerate(OPERATORS):
        positional, named = arguments(op)
        nodes[f"list_{i}"] = (op, *positional, named)
    gm = graph_of(nodes, **known)
    # Lists as results would keep the operators outside: take their elements.
    graph = gm.graph
    output = graph.output_node()
    taken = []
    with graph.inserting_before(output):
        for node in list(graph.nodes):
            for i in range(2) if node.name.startswith("_foreach") else ():
                part = graph.call_function(operator.getitem, (node, i))
                part.meta["val"] = node.meta["val"][i]
                taken.append(part)
    output.args = (tuple(taken),)
    gm.recompile()
    partial_lower(gm, options=LowerOptions(min_aten_ops=1, strict=True))
    assert report(gm).outside == []
    assert len(report(gm).regions) == 1
    for n in (0.25, 1.75):
        got = gm(*inputs(dtype).values(), n)
        for i, op in enumerate(OPERATORS):
            want = eager(op, dtype, n)
            for j in range(2):
                torch.testing.assert_close(
                    got[2 * i + j], want[j], equal_nan=True, msg=lambda text, op=op: f"{op}: {text}"
                )


def test_unscaling_flags_non_finite_gradients_and_scales_the_rest() -> None:
    op = aten._amp_foreach_non_finite_check_and_unscale.default
    finite, broken = torch.tensor([1.0, 2.0]), torch.tensor([[float("inf")], [3.0]])
    for gradients in ([finite, finite * 3], [finite, broken]):
        want, found = op(gradients, torch.zeros(1), torch.tensor([0.5]))
        values, flag = unscaled(gradients, torch.zeros(1), torch.tensor([0.5]))
        assert torch.equal(flag, found)
        for got, expected in zip(values, want, strict=True):
            assert torch.equal(got, expected)
