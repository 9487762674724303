from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from wholestep.errors import GraphFormatError
from wholestep.ir.io.node_values import SymbolReader, SymbolWriter


def sizes() -> tuple[Any, Any]:
    env = ShapeEnv()
    return tuple(  # type: ignore[return-value]
        env.create_symintnode(env.create_symbol(n, ConstantSource(name), DimDynamic.DYNAMIC), hint=n)
        for name, n in (("a", 6), ("b", 10))
    )


def read_back(value: Any) -> tuple[Any, SymbolReader]:
    writer = SymbolWriter()
    data = writer.write(value)
    text = json.dumps([data, list(writer.symbols.values())], allow_nan=False)
    data, declarations = json.loads(text)
    reader = SymbolReader(declarations)
    make = {torch.SymInt: reader.make_int, torch.SymFloat: reader.make_float}.get(type(value))
    return (make(data, None) if make else reader.make_bool(data)), reader


@pytest.mark.parametrize(
    "expression",
    [
        lambda a, b: a,
        lambda a, b: 2 * a + b - 1,
        lambda a, b: a * b // 3,
        lambda a, b: (a + 1) % 4,
        lambda a, b: a**2,
        lambda a, b: torch.sym_max(a, b),
        lambda a, b: torch.sym_min(a + 1, 3 * b),
        lambda a, b: torch.sym_float(a),
        lambda a, b: a / b,
        lambda a, b: torch.sym_sqrt(torch.sym_float(a)),
        lambda a, b: torch.sym_int(a / 2),
        lambda a, b: round(a / b, 2),
        lambda a, b: a << 2,
        lambda a, b: a == b,
        lambda a, b: (a < b) & (b <= 2 * a),
        lambda a, b: torch.sym_not(a >= b),
    ],
)
def test_an_expression_comes_back_with_its_symbols_and_hint(expression: Callable[[Any, Any], Any]) -> None:
    value = expression(*sizes())
    again, _ = read_back(value)
    assert type(again) is type(value)
    assert again.node.expr == value.node.expr
    assert str(again) == str(value)
    if not isinstance(value, torch.SymBool):
        assert again.node.hint == value.node.hint


def test_symbols_keep_name_range_and_hint() -> None:
    a, _ = sizes()
    again, reader = read_back(a)
    assert str(again) == str(a)
    symbol = again.node.expr
    assert int(reader.env.backed_var_to_val[symbol]) == 6
    assert reader.env.var_to_range[symbol].lower == 2


def test_expressions_read_from_a_file_can_be_computed_with() -> None:
    a, b = sizes()
    again, _ = read_back(a * b)
    assert (again + 1).node.hint == 61
    assert bool(again > 10)


def test_a_function_that_is_not_on_the_list_is_not_written() -> None:
    a, _ = sizes()
    odd = a.node.shape_env.create_symfloatnode(sympy.gamma(a.node.expr), hint=1.0)
    with pytest.raises(GraphFormatError, match="gamma"):
        SymbolWriter().write(odd)


S0 = {"name": "s0", "kind": "int", "positive": True, "hint": 4, "min": 2, "max": 8}


@pytest.mark.parametrize(
    "expr",
    [
        *["s1", "__import__('os')", None, 2**70, [], ["Add"], [["Add", 1], 2], ["eval", "s0"], ["Symbol", "s0"]],
        *[["Pow", "s0", 1000], ["Pow", 2, 10**9], ["Pow", "s0"], ["Rational", 1, 0], ["Rational", "s0", 2]],
        *[{"float": 3}, {"float": "x"}, {}, [1, 2]],
    ],
)
def test_a_damaged_expression_is_refused(expr: Any) -> None:
    with pytest.raises(GraphFormatError):
        SymbolReader([S0]).make_int(expr, None)


def test_endless_expressions_are_refused() -> None:
    expr: Any = "s0"
    for _ in range(100):
        expr = ["Add", expr, 1]
    with pytest.raises(GraphFormatError):
        SymbolReader([S0]).make_int(expr, None)


@pytest.mark.parametrize(
    "declarations",
    [
        {},
        [3],
        [{}],
        [S0, S0],
        [S0 | {"name": "__class__"}],
        [S0 | {"name": "s0; x"}],
        [S0 | {"name": ["s0"]}],
        [S0 | {"kind": "str"}],
        [S0 | {"kind": []}],
        [S0 | {"hint": "4"}],
        [S0 | {"hint": True}],
        [S0 | {"hint": 2**64}],
        [S0 | {"min": 1.5}],
        [S0 | {"positive": "yes"}],
    ],
)
def test_a_damaged_declaration_is_refused(declarations: Any) -> None:
    with pytest.raises(GraphFormatError):
        SymbolReader(declarations)
