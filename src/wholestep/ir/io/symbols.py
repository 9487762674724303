"""Symbolic numbers as JSON: expressions become nested lists, symbols are declared once per file.

    2*s0 + 1            ["Add", 1, ["Mul", 2, "s0"]]
    s0                  {"name": "s0", "kind": "int", "positive": true, "hint": 8, "min": 2, "max": 64}

Expressions are rebuilt from a list of known functions and are not simplified again, so that writing them once more
gives the same text. Symbols keep their names in a ShapeEnv of the graph's own.
"""

from __future__ import annotations

import re
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from wholestep.errors import GraphFormatError
from wholestep.ir.io.arguments import read_float, shown
from wholestep.torch_private.symbolic_shapes import register_symbol, symbol_range, symbolic_functions

Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool

_SYMPY = (
    sympy.Add,
    sympy.Mul,
    sympy.Pow,
    sympy.Eq,
    sympy.Ne,
    sympy.StrictLessThan,
    sympy.LessThan,
    sympy.StrictGreaterThan,
    sympy.GreaterThan,
    sympy.And,
    sympy.Or,
    sympy.Not,
)
FUNCTIONS: dict[str, Any] = {cls.__name__: cls for cls in _SYMPY} | symbolic_functions()
"""Every function that may stand in an expression, by name."""

_NAME = re.compile(r"[a-z]{1,4}\d{1,20}", re.ASCII)
_MAX_DEPTH = 60
_MAX_EXPONENT = 64
_LIMIT = 1 << 63


class SymbolWriter:
    """Writes expressions and collects the symbols they use."""

    def __init__(self) -> None:
        self.symbols: dict[str, dict[str, Any]] = {}
        self._known: dict[Any, Any] = {}

    def write(self, value: Symbolic) -> Any:
        """The expression of a SymInt, SymFloat or SymBool."""
        node = value.node
        expr = node.expr
        found = self._known.get(expr)
        if found is None:
            for symbol in sorted(expr.free_symbols, key=str):
                self._declare(symbol, node.shape_env)
            found = self._known[expr] = _write(expr)
        return found

    def _declare(self, symbol: Any, env: ShapeEnv) -> None:
        if symbol.name in self.symbols:
            return
        hint = env.backed_var_to_val.get(symbol)
        lower, upper = symbol_range(env, symbol)
        kind = "int" if symbol.is_integer else "float"
        if hint is not None:
            hint = int(hint) if kind == "int" else {"float": float(hint).hex()}
        self.symbols[symbol.name] = {
            "name": symbol.name,
            "kind": kind,
            "positive": symbol.is_positive,
            "hint": hint,
            "min": lower,
            "max": upper,
        }


class SymbolReader:
    """Rebuilds expressions over the symbols that a file declares."""

    def __init__(self, declarations: Any) -> None:
        if not isinstance(declarations, list):
            raise GraphFormatError(f"the symbols must be a list, not {shown(declarations)}.")
        self.env = ShapeEnv()
        self._symbols: dict[str, Any] = {}
        for entry in declarations:
            self._declare(entry)

    def _declare(self, entry: Any) -> None:
        if not isinstance(entry, dict) or not _NAME.fullmatch(str(entry.get("name"))):
            raise GraphFormatError(f"{shown(entry)} does not declare a symbol.")
        name, kind, positive = entry["name"], entry.get("kind"), entry.get("positive")
        if name in self._symbols or kind not in ("int", "float") or positive not in (True, False, None):
            raise GraphFormatError(f"the declaration of symbol {name} is damaged, or there are two.")
        hint = entry.get("hint")
        if isinstance(hint, dict):
            hint = read_float(hint.get("float"))
        wanted = int if kind == "int" else float
        bounds = (entry.get("min"), entry.get("max"))
        if not (hint is None or type(hint) is wanted) or not all(b is None or type(b) is int for b in bounds):
            raise GraphFormatError(f"symbol {name} has a hint or range of another kind.")
        if any(type(x) is int and abs(x) >= _LIMIT for x in (*bounds, hint)):
            raise GraphFormatError(f"symbol {name} has a hint or range beyond 64 bits.")
        assumptions = {"integer": True} if kind == "int" else {"real": True}
        if positive is not None:
            assumptions["positive"] = positive
        symbol = sympy.Symbol(name, **assumptions)
        register_symbol(self.env, symbol, hint, *bounds)
        self._symbols[name] = symbol

    def make_int(self, data: Any, hint: int | None) -> Any:
        """A SymInt (or an int, where the expression is one)."""
        return self.env.create_symintnode(self._read(data, 0), hint=hint)

    def make_float(self, data: Any, hint: float | None) -> Any:
        """A SymFloat (or a float)."""
        return self.env.create_symfloatnode(self._read(data, 0), hint=hint)

    def make_bool(self, data: Any) -> Any:
        """A SymBool."""
        return self.env.create_symboolnode(self._read(data, 0))

    def _read(self, data: Any, depth: int) -> Any:
        if type(data) is int and abs(data) < _LIMIT:
            return sympy.Integer(data)
        if type(data) is bool:
            return sympy.true if data else sympy.false
        if isinstance(data, str) and data in self._symbols:
            return self._symbols[data]
        if isinstance(data, dict) and set(data) == {"float"}:
            return sympy.Float(read_float(data["float"]))
        if isinstance(data, list) and data and depth < _MAX_DEPTH:
            return self._apply(data[0], [self._read(item, depth + 1) for item in data[1:]])
        raise GraphFormatError(f"{shown(data)} is not part of a symbolic expression.")

    def _apply(self, name: Any, args: list[Any]) -> Any:
        if name == "Rational" and len(args) == 2 and all(a.is_Integer for a in args) and args[1] > 0:
            return sympy.Rational(*args)
        if not (isinstance(name, str) and name in FUNCTIONS and args):
            raise GraphFormatError(f"{shown(name)} is not a function of symbolic expressions.")
        if name == "Pow" and (len(args) != 2 or (args[1].is_number and not abs(args[1]) <= _MAX_EXPONENT)):
            raise GraphFormatError("a symbolic expression has a power that is too large.")
        return FUNCTIONS[name](*args, evaluate=False)


def _write(expr: Any) -> Any:
    if expr.is_Symbol:
        return expr.name
    if expr.is_Integer:
        return int(expr)
    if expr.is_Rational:
        return ["Rational", int(expr.p), int(expr.q)]
    if expr.is_Float:
        return {"float": float(expr).hex()}
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    name = type(expr).__name__
    if FUNCTIONS.get(name) is not type(expr):
        raise GraphFormatError(f"the symbolic expression {expr} uses {name}, which has no form in the file.")
    return [name, *(_write(arg) for arg in expr.args)]
