"""What a node computes (`node.meta["val"]`) as JSON: sizes, strides and dtypes of tensors, kinds of scalars, no data.

    FakeTensor(8, 4)        {"tensor": [8, 4], "stride": [4, 1], "dtype": "float32", "device": "cpu"}
    SymInt 2*s0 in a shape  {"sym": "int", "expr": ["Mul", 2, "s0"], "hint": 16}
    a learning rate         {"number": "float", "hint": 0.1}          an unbacked scalar: "hint": null
    several results         {"tuple": [..]}, {"list": [..]}
    s0, declared once       {"name": "s0", "kind": "int", "positive": true, "hint": 8, "min": 2, "max": 64}

Equal values share one entry of a table, so that a file of 50,000 nodes stays small. Reading makes FakeTensors, all of
one FakeTensorMode. Symbolic expressions are rebuilt from an allow-list of functions and are not simplified again, so
that writing them once more gives the same text. Symbols keep their names, in a ShapeEnv of the graph's own.
"""

from __future__ import annotations

import json
import re
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from wholestep.errors import GraphFormatError
from wholestep.ir.io.arguments import read_device, read_dtype, read_float, shown
from wholestep.ir.signature import TensorSpec
from wholestep.torch_private.fake_tensors import FakeTensorMode, fake_tensor
from wholestep.torch_private.symbolic_shapes import largest_size, register_symbol, symbol_range, symbolic_functions

_LIMIT = 1 << 62
_MAX_DEPTH = 20
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = {"int": int, "float": float, "bool": bool}


def is_shape_symbol(value: object) -> bool:
    """True if a scalar is an expression over symbols of a ShapeEnv (not a symbolic scalar of our own capture)."""
    return isinstance(value, _SYMBOLIC) and hasattr(value.node, "expr")


def hint_of(value: Any) -> Any:
    """The hint of a symbolic scalar: its value at trace time, or None; a plain scalar itself."""
    return getattr(value.node, "hint", None) if isinstance(value, _SYMBOLIC) else value


def size_hint(size: Any, unknown: int = 1) -> int:
    """A size as an int: its hint where it is symbolic; the most that it can be, or `unknown`, if only a run decides."""
    known = hint_of(size)
    if known is None:
        known = largest_size(size)
    return unknown if known is None else int(known)


def tensor_bytes(tensor: Tensor) -> int:
    """The bytes that a new tensor of this layout takes."""
    if tensor.layout is not torch.strided:
        return size_hint(tensor.numel()) * tensor.element_size()
    last = 0
    for given, step in zip(tensor.shape, tensor.stride(), strict=True):
        n = given if type(given) is int else size_hint(given)
        if n == 0:
            return 0
        last += (n - 1) * (step if type(step) is int else size_hint(step))
    return (last + 1) * tensor.element_size()


def is_packed(tensor: Tensor) -> bool:
    """True if a tensor is contiguous. Decided by hints: no guard is added."""
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size_hint(size) != 1 and size_hint(step) != expected:
            return False
        expected *= size_hint(size)
    return True


def kind_of(value: object) -> str:
    """int, float or bool, for plain and symbolic scalars."""
    for kind, types in (
        ("bool", (bool, torch.SymBool)),
        ("int", (int, torch.SymInt)),
        ("float", (float, torch.SymFloat)),
    ):
        if isinstance(value, types):
            return kind
    return type(value).__name__


def tensor_spec(tensor: Tensor) -> TensorSpec:
    """The spec of a tensor for a signature; symbolic dimensions as text."""
    return TensorSpec(
        shape=tuple(d if type(d) is int else str(d) for d in tensor.shape),
        stride=tuple(d if type(d) is int else str(d) for d in tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        requires_grad=tensor.requires_grad,
    )


class ValueWriter:
    """Collects the values of a graph into a table."""

    def __init__(self) -> None:
        self.table: list[Any] = []
        self.symbols = SymbolWriter()
        self._by_key: dict[Any, int] = {}

    def write(self, value: object) -> int:
        """The index of a value in the table."""
        key: Any = tensor_key(value) if isinstance(value, Tensor) else None
        data = None
        if key is None:
            data = self.describe(value)
            key = json.dumps(data)
        found = self._by_key.get(key)
        if found is None:
            found = self._by_key[key] = len(self.table)
            self.table.append(self.describe(value) if data is None else data)
        return found

    def describe(self, value: object) -> Any:
        """One value as JSON."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, tuple | list):
            return {"tuple" if isinstance(value, tuple) else "list": [self.describe(item) for item in value]}
        if value is None:
            return None
        if is_shape_symbol(value):
            return self._symbol(value)
        kind = kind_of(value)
        if kind not in _NUMBERS:
            raise GraphFormatError(f"a node has a value of type {kind}, which has no form in the file.")
        hint = hint_of(value)
        return {"number": kind, "hint": {"float": hint.hex()} if isinstance(hint, float) else hint}

    def _tensor(self, value: Tensor) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            raise GraphFormatError(f"a node has a tensor of layout {value.layout}, which has no form in the file.")
        data: dict[str, Any] = {
            "tensor": [self._dim(d) for d in value.shape],
            "stride": [self._dim(d) for d in value.stride()],
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": str(value.device),
        }
        offset = value.storage_offset()
        if type(offset) is not int or offset != 0:
            data["offset"] = self._dim(offset)
        if value.requires_grad:
            data["requires_grad"] = True
        return data

    def _dim(self, dim: Any) -> Any:
        return dim if type(dim) is int else self._symbol(dim)

    def _symbol(self, value: Any) -> Any:
        symbolic: Symbolic = value
        kind = kind_of(symbolic)
        hint = symbolic.node.hint if symbolic.node.has_hint() else None
        if kind == "bool":
            return {"sym": kind, "expr": self.symbols.write(symbolic)}
        if hint is not None:
            hint = int(hint) if kind == "int" else {"float": float(hint).hex()}
        return {"sym": kind, "expr": self.symbols.write(symbolic), "hint": hint}


class ValueReader:
    """Makes the values of a file's table, a new one for each use."""

    def __init__(self, table: Any, symbols: Any) -> None:
        if not isinstance(table, list):
            raise GraphFormatError(f"the values must be a list, not {shown(table)}.")
        self._table = table
        self._symbols = SymbolReader(symbols)
        self.mode = FakeTensorMode(shape_env=self._symbols.env, allow_non_fake_inputs=True)
        self._geometry: dict[int, tuple[Any, ...]] = {}

    def read(self, index: Any) -> Any:
        """The value at an index of the table."""
        if type(index) is not int or not 0 <= index < len(self._table):
            raise GraphFormatError(f"{shown(index)} is not an index into the table of values.")
        data = self._table[index]
        if isinstance(data, dict) and "tensor" in data:
            geometry = self._geometry.get(index)
            if geometry is None:
                geometry = self._geometry[index] = self._read_geometry(data)
            return self._make(geometry)
        return self._read(data, 0)

    def _read(self, data: Any, depth: int) -> Any:
        if data is None:
            return None
        if not isinstance(data, dict) or depth > _MAX_DEPTH:
            raise GraphFormatError(f"{shown(data)} does not describe a value.")
        if "tensor" in data:
            return self._make(self._read_geometry(data))
        if "sym" in data:
            return self._read_symbol(data)
        if "number" in data:
            return self._read_number(data)
        for tag, kind in (("tuple", tuple), ("list", list)):
            if isinstance(data.get(tag), list):
                return kind(self._read(item, depth + 1) for item in data[tag])
        raise GraphFormatError(f"{shown(data)} does not describe a value.")

    def _read_geometry(self, data: dict[str, Any]) -> tuple[Any, ...]:
        shape, stride = data["tensor"], data.get("stride")
        if not (isinstance(shape, list) and isinstance(stride, list) and len(shape) == len(stride) <= 64):
            raise GraphFormatError("a tensor's shape and stride must be lists of the same length.")
        dtype, device = read_dtype(data.get("dtype")), read_device(data.get("device"))
        requires_grad = data.get("requires_grad", False)
        if requires_grad is not False and not (requires_grad is True and (dtype.is_floating_point or dtype.is_complex)):
            raise GraphFormatError(f"a tensor of {dtype} cannot require a gradient.")
        sizes = tuple(self._dim(d) for d in shape)
        steps = tuple(self._dim(d) for d in stride)
        return sizes, steps, dtype, device, self._dim(data.get("offset", 0)), requires_grad

    def _make(self, geometry: tuple[Any, ...]) -> Tensor:
        sizes, steps, dtype, device, offset, requires_grad = geometry
        try:
            return fake_tensor(self.mode, sizes, steps, dtype, device, offset=offset, requires_grad=requires_grad)
        except Exception as error:
            raise GraphFormatError(
                f"torch cannot make a tensor of shape {sizes} and stride {steps}: {error}."
            ) from error

    def _dim(self, data: Any) -> Any:
        if type(data) is int and 0 <= data < _LIMIT:
            return data
        if isinstance(data, dict) and data.get("sym") == "int":
            return self._read_symbol(data)
        raise GraphFormatError(f"{shown(data)} is not a dimension.")

    def _read_symbol(self, data: dict[str, Any]) -> Any:
        kind, expr = data["sym"], data.get("expr")
        hint = _read_hint(data, kind)
        try:
            if kind == "int":
                return self._symbols.make_int(expr, hint)
            return self._symbols.make_float(expr, hint) if kind == "float" else self._symbols.make_bool(expr)
        except GraphFormatError:
            raise
        except Exception as error:
            raise GraphFormatError(f"a symbolic expression cannot be rebuilt: {error}.") from error

    def _read_number(self, data: dict[str, Any]) -> Any:
        kind = data["number"]
        hint = _read_hint(data, kind)
        if hint is not None:
            return hint
        env = self._symbols.env
        if kind == "int":
            return env.create_unbacked_symint()
        return env.create_unbacked_symfloat() if kind == "float" else env.create_unbacked_symbool()


def _read_hint(data: dict[str, Any], kind: object) -> Any:
    hint = data.get("hint")
    if isinstance(hint, dict):
        hint = read_float(hint.get("float"))
    wanted = _NUMBERS.get(kind) if isinstance(kind, str) else None
    if wanted is None or not (hint is None or type(hint) is wanted):
        raise GraphFormatError(f"{shown(data)} does not describe a number.")
    return hint


def tensor_key(tensor: Tensor) -> tuple[Any, ...] | None:
    """A hashable description of a tensor's layout; None where a dimension is symbolic."""
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    for dim in (*shape, *stride, offset):
        if type(dim) is not int:
            return None
    return (shape, stride, offset, tensor.dtype, tensor.device, tensor.requires_grad)


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
"""Every function that an expression may use, by name."""

_NAME = re.compile(r"[a-z]{1,4}\d{1,20}", re.ASCII)
_MAX_EXPRESSION_DEPTH = 60
_MAX_EXPONENT = 64
_MAX_NUMBER = 1 << 63


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
        if any(type(x) is int and abs(x) >= _MAX_NUMBER for x in (*bounds, hint)):
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
        if type(data) is int and abs(data) < _MAX_NUMBER:
            return sympy.Integer(data)
        if type(data) is bool:
            return sympy.true if data else sympy.false
        if isinstance(data, str) and data in self._symbols:
            return self._symbols[data]
        if isinstance(data, dict) and set(data) == {"float"}:
            return sympy.Float(read_float(data["float"]))
        if isinstance(data, list) and data and depth < _MAX_EXPRESSION_DEPTH:
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
