"""The numbers that symbols of a graph's metadata stand for in one run: bound where first seen, checked ever after.

A symbol alone (`s0` as a size of an input, `u0` as the result of `.item()`) is bound to the number that stands there.
An expression over bound symbols has a value to compare with. No ShapeEnv is needed; where there is one, what it knows
of the range of a symbol is checked too.
"""

from __future__ import annotations

from typing import Any

import sympy

from wholestep.torch_private.symbolic_shapes import symbol_range


class SymbolValues:
    """Numbers by symbol, for one run of a graph."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self._known: dict[Any, Any] = {}

    def expected(self, wanted: Any, found: int | float | bool) -> Any:
        """The number that `wanted` (a number or symbolic number) is in this run; None where it cannot be known yet.

        `found` is what the run has there: a symbol that nothing has bound yet takes it.
        """
        node = getattr(wanted, "node", None)
        if node is None:
            return wanted
        expr = getattr(node, "expr", None)
        if expr is None:  # a number of our own capture: it stands for an input, not for an expression
            return None
        if expr.is_Symbol and expr not in self.values:
            self.values[expr] = found
            return found
        return self._evaluated(expr)

    def _evaluated(self, expr: Any) -> Any:
        known = self._known.get(expr)
        if known is None:
            if not expr.free_symbols <= self.values.keys():
                return None
            value = expr.xreplace({symbol: sympy.sympify(self.values[symbol]) for symbol in expr.free_symbols})
            known = self._known[expr] = _number(value)
        return known

    def out_of_range(self, wanted: Any, found: int | float | bool) -> str:
        """Why a number cannot be what a symbol stands for: its range in the ShapeEnv; "" if it can."""
        node = getattr(wanted, "node", None)
        expr, env = getattr(node, "expr", None), getattr(node, "shape_env", None)
        if env is None or not getattr(expr, "is_Symbol", False) or isinstance(found, bool | float):
            return ""
        lower, upper = symbol_range(env, expr)
        if (lower is not None and found < lower) or (upper is not None and found > upper):
            return f"{expr} in [{'-inf' if lower is None else lower}, {'inf' if upper is None else upper}]"
        return ""

    def shown(self) -> str:
        """The bindings for a message: `s0=4, u1=7`."""
        return ", ".join(f"{symbol}={value}" for symbol, value in self.values.items())


def _number(value: Any) -> Any:
    value = sympy.simplify(value) if not value.is_number and not value.is_Boolean else value
    if value in (sympy.true, sympy.false):
        return bool(value)
    if value.is_Integer or value.is_integer:
        return int(value)
    return float(value)
