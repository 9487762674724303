"""Arguments and targets of nodes as JSON: what JSON has stays as it is, all else is an object with one tagged key.

3, True, None, "sum", [1, 2]        the same
0.5                                 {"float": "0x1.0000000000000p-1"}     exact, with inf, nan and -0.0
(1, 2)                              {"tuple": [1, 2]}
a node                              {"node": "add_1"}
torch.bfloat16, cuda:0              {"dtype": "bfloat16"}, {"device": "cuda:0"}
an operator as an argument          {"op": "aten::_fused_adam_"}

torch.ops.aten.add.Tensor as a target       "aten::add.Tensor"      (the overload `default` is left out: "aten::mm")
operator.add, math.sqrt, max                "operator.add", "math.sqrt", "builtins.max"
get_rng_state of ir/graph_functions.py      "wholestep.ir.rng.get_rng_state"      (names stay, wherever the code is)

Any operator can be written. Only what is on the allow-list can be read: a file cannot cause an import or an eval.
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from wholestep.errors import GraphFormatError
from wholestep.ir.graph_functions import (
    call_on_copies,
    check_assumed,
    check_size,
    divide_sizes,
    get_rng_state,
    manual_seed,
    number_tensor,
    own_chunk,
    packed_weights,
    set_rng_state,
)
from wholestep.torch_private.operators import HigherOrderOperator, OpOverload, OpOverloadPacket, op_name, schema_of
from wholestep.torch_private.packed_sequences import NAMESPACE as PACKED_NAMESPACE
from wholestep.torch_private.packed_sequences import packed_operators

DTYPES: dict[str, torch.dtype] = {
    str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)
}
LAYOUTS: dict[str, torch.layout] = {
    str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.layout)
}
MEMORY_FORMATS: dict[str, torch.memory_format] = {
    str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.memory_format)
}

_DEVICE = re.compile(r"[a-z]{2,12}(?::\d{1,5})?", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MAX_DEPTH = 50
_PLAIN = frozenset({int, bool, str, type(None)})


class ArgumentWriter:
    """Turns arguments into JSON. The form of nodes and devices can be chosen (the fingerprint does)."""

    def __init__(
        self,
        node: Callable[[fx.Node], Any] | None = None,
        device: Callable[[torch.device], str] = str,
    ) -> None:
        self._node = node or (lambda n: n.name)
        self._device = device

    def write(self, value: Any) -> Any:
        """The JSON form of one argument."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, fx.Node):
            return {"node": self._node(value)}
        if kind is float:
            return {"float": value.hex()}
        if isinstance(value, list):
            return [self.write(item) for item in value]
        if isinstance(value, tuple):
            return {"tuple": [self.write(item) for item in value]}
        return self._write_rare(value)

    def _write_rare(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {"dict": [[self.write(k), self.write(v)] for k, v in value.items()]}
        if isinstance(value, slice):
            return {"slice": [self.write(value.start), self.write(value.stop), self.write(value.step)]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": self._device(value)}
        if isinstance(value, torch.layout):
            return {"layout": str(value).removeprefix("torch.")}
        if isinstance(value, torch.memory_format):
            return {"memory_format": str(value).removeprefix("torch.")}
        if isinstance(value, complex):
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if value is Ellipsis:
            return {"ellipsis": True}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, OpOverload):
            return {"op": target_name(value)}
        raise GraphFormatError(
            f"an argument of type {describe_target(type(value))} has no form in the file: {value!r}."
        )


class ArgumentReader:
    """Turns JSON back into arguments; anything unexpected raises GraphFormatError."""

    def __init__(self, nodes: Mapping[str, fx.Node], targets: TargetReader) -> None:
        self._nodes = nodes
        self._targets = targets
        self._tags: dict[str, Callable[[Any, int], Any]] = {
            "node": self._node,
            "float": lambda x, _: read_float(x),
            "tuple": lambda x, depth: tuple(self._items(x, depth)),
            "dict": self._dict,
            "slice": self._slice,
            "dtype": lambda x, _: _from_table(DTYPES, x, "dtype"),
            "device": lambda x, _: read_device(x),
            "layout": lambda x, _: _from_table(LAYOUTS, x, "layout"),
            "memory_format": lambda x, _: _from_table(MEMORY_FORMATS, x, "memory_format"),
            "complex": self._complex,
            "ellipsis": lambda x, _: Ellipsis,
            "range": self._range,
            "op": self._op,
        }

    def read(self, data: Any, depth: int = 0) -> Any:
        """The argument that `data` describes."""
        if type(data) in _PLAIN:
            return data
        if depth > _MAX_DEPTH:
            raise GraphFormatError("an argument is nested too deeply.")
        if isinstance(data, list):
            return [self.read(item, depth + 1) for item in data]
        if isinstance(data, dict) and len(data) == 1:
            [(tag, content)] = data.items()
            if tag in self._tags:
                return self._tags[tag](content, depth + 1)
        raise GraphFormatError(f"{shown(data)} is not an argument.")

    def _items(self, content: Any, depth: int) -> list[Any]:
        if not isinstance(content, list):
            raise GraphFormatError(f"expected a list, found {shown(content)}.")
        return [self.read(item, depth) for item in content]

    def _node(self, content: Any, _: int) -> fx.Node:
        if isinstance(content, str) and content in self._nodes:
            return self._nodes[content]
        raise GraphFormatError(f"an argument refers to {shown(content)}, which is not an earlier node.")

    def _dict(self, content: Any, depth: int) -> dict[Any, Any]:
        if not (isinstance(content, list) and all(isinstance(p, list) and len(p) == 2 for p in content)):
            raise GraphFormatError(f"expected a list of pairs, found {shown(content)}.")
        if not all(isinstance(key, str) for key, _ in content):
            raise GraphFormatError("the keys of a dict argument must be strings.")
        return {key: self.read(value, depth) for key, value in content}

    def _slice(self, content: Any, depth: int) -> slice:
        parts = self._items(content, depth)
        if len(parts) != 3 or not all(part is None or type(part) is int or isinstance(part, fx.Node) for part in parts):
            raise GraphFormatError(f"{shown(content)} is not a slice.")
        return slice(*parts)

    def _complex(self, content: Any, _: int) -> complex:
        if not (isinstance(content, list) and len(content) == 2):
            raise GraphFormatError(f"{shown(content)} is not a complex number.")
        return complex(read_float(content[0]), read_float(content[1]))

    def _range(self, content: Any, _: int) -> range:
        if not (
            isinstance(content, list) and len(content) == 3 and all(type(x) is int for x in content) and content[2]
        ):
            raise GraphFormatError(f"{shown(content)} is not a range.")
        return range(*content)

    def _op(self, content: Any, _: int) -> OpOverload:
        if not isinstance(content, str):
            raise GraphFormatError(f"{shown(content)} is not the name of an operator.")
        return self._targets.read_op(content)

    def read_kwargs(self, data: Any) -> dict[str, Any]:
        """Keyword arguments; their names end up in generated Python, so they must be plain identifiers."""
        if not isinstance(data, dict):
            raise GraphFormatError(f"expected keyword arguments, found {shown(data)}.")
        for name in data:
            check_identifier(name, "the name of a keyword argument")
        return {name: self.read(value) for name, value in data.items()}


def read_float(data: Any) -> float:
    """A float from its hexadecimal form."""
    if isinstance(data, str) and len(data) <= 40:
        try:
            return float.fromhex(data)
        except (ValueError, OverflowError):
            pass
    raise GraphFormatError(f"{shown(data)} is not a float in hexadecimal form.")


def read_device(data: Any) -> torch.device:
    """A device from its name."""
    if isinstance(data, str) and _DEVICE.fullmatch(data):
        try:
            return torch.device(data)
        except RuntimeError:
            pass
    raise GraphFormatError(f"{shown(data)} is not a device of this torch.")


def read_dtype(data: Any) -> torch.dtype:
    """A dtype from its name without `torch.`."""
    found: torch.dtype = _from_table(DTYPES, data, "dtype")
    return found


def check_identifier(name: object, what: str) -> str:
    """The name itself if it is a plain Python identifier; otherwise GraphFormatError."""

    if not (isinstance(name, str) and _IDENTIFIER.fullmatch(name)) or keyword.iskeyword(name) or len(name) > 1000:
        raise GraphFormatError(f"{shown(name)} cannot be {what}: it is not a plain Python identifier.")
    return name


def shown(data: object) -> str:
    """A piece of a file for an error message, shortened."""
    text = repr(data) if isinstance(data, str | int | float | bool | type(None)) else type(data).__name__
    if isinstance(data, dict):
        text = "an object with keys " + ", ".join(repr(k)[:30] for k in list(data)[:5]) if data else "an empty object"
    return text if len(text) <= 120 else text[:120] + "..."


def _from_table(table: Mapping[str, Any], data: Any, what: str) -> Any:
    if isinstance(data, str) and data in table:
        return table[data]
    raise GraphFormatError(f"{shown(data)} is not a {what} of this torch.")


Target = Callable[..., Any]

NAMESPACES = frozenset(
    {
        "aten",
        "prims",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "c10d_functional",
        "_dtensor",
        "inductor_prims",
        "rngprims",
        "wholestep",
        PACKED_NAMESPACE,
    }
)
"""Operator namespaces that every file may use."""

_PRIM_OPS = frozenset({"prim::device", "prim::dtype", "prim::layout"})
"""The rest of `prim` is TorchScript's interpreter: Python calls, RPC, prints."""

_FILE_ARGUMENTS = frozenset({"filename"})
"""`aten::save` and `aten::from_file` access the file system: no step needs them."""

_OPERATOR = (
    "add sub mul truediv floordiv mod pow neg pos abs getitem eq ne lt le gt ge and_ or_ xor not_ lshift rshift invert "
    "is_ is_not truth index matmul"
)
_MATH = (
    "sqrt floor ceil trunc log log2 log10 log1p exp exp2 expm1 pow cos sin tan cosh sinh tanh acos asin atan atan2 "
    "asinh acosh atanh fabs fmod hypot copysign isfinite isinf isnan gcd prod"
)
_BUILTINS = "max min round int float bool abs sum pow divmod len"
_TORCH = "sym_float sym_int sym_max sym_min sym_not sym_ite sym_sqrt sym_sum sym_fresh_size"


_OURS: dict[str, Target] = {
    "wholestep.ir.rng.get_rng_state": get_rng_state,
    "wholestep.ir.rng.set_rng_state": set_rng_state,
    "wholestep.ir.rng.manual_seed": manual_seed,
    "wholestep.ir.mutable.call_on_copies": call_on_copies,
    "wholestep.ir.graph_functions.packed_weights": packed_weights,
    "wholestep.ir.graph_functions.own_chunk": own_chunk,
    "wholestep.ir.graph_functions.number_tensor": number_tensor,
    "wholestep.ir.graph_functions.check_assumed": check_assumed,
    "wholestep.ir.graph_functions.check_size": check_size,
    "wholestep.ir.graph_functions.divide_sizes": divide_sizes,
    # Read only: names of the same functions in older files.
    "wholestep.ir.rnn.packed_weights": packed_weights,
    "wholestep.ir.shards.own_chunk": own_chunk,
    "wholestep.ir.number_tensor.number_tensor": number_tensor,
}
"""Functions of this package by the name that they have in files, which does not change when the code moves."""


def _python_functions() -> dict[str, Target]:
    found: dict[str, Target] = {}
    for module, names in ((operator, _OPERATOR), (math, _MATH), (builtins, _BUILTINS), (torch, _TORCH)):
        for name in names.split():
            if hasattr(module, name):
                found[f"{module.__name__}.{name}"] = getattr(module, name)
    found["float.is_integer"] = float.is_integer
    return found | _OURS


PYTHON_FUNCTIONS = _python_functions()
"""Every Python function that a graph may call, by the name it has in a file."""

_PYTHON_NAMES = {function: name for name, function in reversed(PYTHON_FUNCTIONS.items())}

_OP_NAME = re.compile(r"([A-Za-z_]\w*)::([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?", re.ASCII)
_ALLOW = re.compile(r"([A-Za-z_]\w*)::(\*|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)", re.ASCII)


def target_name(target: object) -> str:
    """The name of a node's target in a file."""
    if isinstance(target, OpOverload):
        return op_name(target)
    try:
        name = _PYTHON_NAMES.get(target)  # type: ignore[call-overload]
    except TypeError:
        name = None
    if name is not None:
        return str(name)
    what = "higher-order operator" if isinstance(target, HigherOrderOperator) else "function"
    raise GraphFormatError(
        f"the {what} {describe_target(target)} has no name in the file format.",
        fix="replace the node by torch operators, or register the function as a torch.library operator.",
    )


def describe_target(target: object) -> str:
    """A target for people, whether or not it is on the list."""
    if isinstance(target, OpOverload | OpOverloadPacket | str):
        return str(target)
    module = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return f"{module}.{name}" if module and name else str(name or type(target).__name__)


class TargetReader:
    """Finds targets by name, once per name, for one file."""

    def __init__(self, allow_ops: Iterable[str] = ()) -> None:
        self._namespaces: set[str] = set(NAMESPACES)
        self._ops: set[str] = set(_PRIM_OPS)
        for entry in (allow_ops,) if isinstance(allow_ops, str) else allow_ops:
            match = _ALLOW.fullmatch(entry)
            if match is None:
                raise GraphFormatError(
                    f"allow_ops does not take {entry!r}.", fix='write "mylib::myop" for one operator or "mylib::*".'
                )
            if match[2] == "*":
                self._namespaces.add(match[1])
            else:
                self._ops.add(entry)
        self._found: dict[str, Target] = {}

    def read(self, name: str) -> Target:
        """The callable with this name; raises GraphFormatError if the name is not on the list."""
        found = self._found.get(name)
        if found is None:
            found = PYTHON_FUNCTIONS.get(name) or self.read_op(name)
            self._found[name] = found
        return found

    def read_op(self, name: str) -> OpOverload:
        """The torch operator with this name."""
        match = _OP_NAME.fullmatch(name)
        if match is None:
            raise GraphFormatError(f"the graph calls {_shown(name)}, which is not on the list of allowed functions.")
        namespace, base, overload = match.groups()
        if not (namespace in self._namespaces or {name, f"{namespace}::{base}"} & self._ops):
            raise GraphFormatError(
                f"the graph calls the operator {_shown(name)}, which is not on the list of allowed operators.",
                fix=f'if you trust it, pass allow_ops=["{namespace}::{base}"] (or "{namespace}::*").',
            )
        if namespace == PACKED_NAMESPACE:
            packed_operators()
        packet = getattr(getattr(torch.ops, namespace), base, None)
        op = getattr(packet, overload or "default", None) if isinstance(packet, OpOverloadPacket) else None
        if not isinstance(op, OpOverload) or op_name(op) != name:
            raise GraphFormatError(
                f"this torch ({torch.__version__}) has no operator {_shown(name)}.",
                fix="import the library that registers it, or use the torch version that wrote the file.",
            )
        if namespace == "aten" and any(a.name in _FILE_ARGUMENTS for a in schema_of(op).arguments):
            raise GraphFormatError(f"the graph calls {name}, which reads or writes files; no step graph may.")
        return op


def _shown(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:100] + "...")
