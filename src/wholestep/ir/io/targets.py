"""The names under which node targets are written to a file, and the allow-list through which they come back.

    torch.ops.aten.add.Tensor          "aten::add.Tensor"
    torch.ops.aten.mm.default          "aten::mm"
    operator.add, math.sqrt, max       "operator.add", "math.sqrt", "builtins.max"
    wholestep.ir.rng.get_rng_state     "wholestep.ir.rng.get_rng_state"

Any operator can be named. Only what is on the list can be read: a file cannot make us import or evaluate anything.
"""

from __future__ import annotations

import builtins
import math
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from wholestep.errors import GraphFormatError
from wholestep.ir import mutable, number_tensor, rng, rnn, shards
from wholestep.torch_private.operators import HigherOrderOperator, OpOverload, OpOverloadPacket, op_name, schema_of

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
    }
)
"""Operator namespaces that every file may use."""

_PRIM_OPS = frozenset({"prim::device", "prim::dtype", "prim::layout"})
"""The rest of `prim` is TorchScript's interpreter: Python calls, RPC, prints."""

_FILE_ARGUMENTS = frozenset({"filename"})
"""`aten::save` and `aten::from_file` reach the file system: no step needs them."""

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


def _python_functions() -> dict[str, Target]:
    found: dict[str, Target] = {}
    for module, names in ((operator, _OPERATOR), (math, _MATH), (builtins, _BUILTINS), (torch, _TORCH)):
        for name in names.split():
            if hasattr(module, name):
                found[f"{module.__name__}.{name}"] = getattr(module, name)
    found["float.is_integer"] = float.is_integer
    ours: tuple[Target, ...] = (
        rng.get_rng_state,
        rng.set_rng_state,
        rng.manual_seed,
        mutable.call_on_copies,
        rnn.packed_weights,
        shards.own_chunk,
        number_tensor.number_tensor,
    )
    for function in ours:
        found[f"{function.__module__}.{function.__name__}"] = function
    return found


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
