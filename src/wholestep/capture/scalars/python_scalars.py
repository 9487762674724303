"""The int and float that user code sees for a symbolic scalar.

`GraphInt` and `GraphFloat` behave as `int` and `float` in every Python operation. Arithmetic is recorded (`k * 2 + 1`
becomes nodes of the graph); a comparison returns a plain bool under a guard; everything that needs the value itself
(an index, `range`, a dictionary key, text, bits of it) specialises the scalar to its current value, under a guard:

    k + 1, k // 2, -k, k ** 2, k & 1       a symbolic scalar
    k > 3, k in (2, 3)                     bool, guard on the comparison
    [..][k], {..}[k], range(k), f"{k}"     the plain value, guard on k

They are subclasses of torch's SymInt and SymFloat, which torch's argument parser accepts, and answer
`isinstance(k, int)` as a plain number does. `type(k) is int` is the one test that tells them apart: the trace that
uses them is compared with one of plain numbers (`scalar_policy`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wholestep.capture.scalars.symbolic_scalars import ScalarNode
from wholestep.ir.deferred import Number

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def wrap(node: ScalarNode) -> Any:
    """The Python object for a node; a constant of the program is a plain number."""
    if node.is_fixed:
        return node.hint
    kind: Any = {int: GraphInt, bool: GraphBool}.get(node.kind, GraphFloat)
    made = kind(node)
    if node.is_deferred:
        node.note_given(made)
    return made


def _binary(method: str, python: Callable[[Any, Any], Any], *, reflected: bool) -> Callable[[Any, Any], Any]:
    def operation(self: Any, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        node: ScalarNode = self.node
        if type(other) not in (int, float, bool) and not isinstance(other, _SYMBOLIC):
            # Other types (Fraction, numpy's, sequences) define the operation on the plain number.
            plain = node.specialise("an operation with another type")
            return python(other, plain) if reflected else python(plain, other)
        operand = other.node if isinstance(other, _SYMBOLIC) else other
        if not reflected:
            return wrap(node.apply(method, operand))
        first = operand if isinstance(operand, ScalarNode) else node._adopt(operand)
        return wrap(first.apply(method, node))

    return operation


def _compared(method: str, python: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def comparison(self: Any, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        node: ScalarNode = self.node
        if type(other) not in (int, float, bool) and not isinstance(other, _SYMBOLIC):
            if other is None or isinstance(other, str | bytes | list | tuple | dict | set):
                return NotImplemented
            return python(node.specialise("a comparison with another type"), other)
        compared = node.apply(method, other.node if isinstance(other, _SYMBOLIC) else other)
        return wrap(compared) if compared.hint is None else bool(compared.specialise("a comparison"))

    return comparison


def _unary(method: str) -> Callable[[Any], Any]:
    def operation(self: Any) -> Any:
        return wrap(self.node.apply(method))

    return operation


def _valued(why: str, read: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that needs the plain value."""

    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        return read(self.node.specialise(why), *args, **kwargs)

    return operation


def _as_text(function: Callable[..., str]) -> Callable[..., str]:
    """Text of a number: of one that is not known yet, text that is filled in after the run."""

    def operation(self: Any, *args: Any) -> str:
        node: ScalarNode = self.node
        return node.text(function, *args)

    return operation


def _converted(kind: type) -> Callable[[Any], Any]:
    """`float(x)`, `int(x)`: a plain number, which C code asks for."""

    def operation(self: Any) -> Any:
        node: ScalarNode = self.node
        node.before_conversion(kind.__name__)
        return kind((node.truncated() if kind is int else node).specialise(f"{kind.__name__}()"))

    return operation


def _round(self: Any, digits: Any = None) -> Any:
    return wrap(self.node.apply("round") if digits is None else self.node.apply("round", operator.index(digits)))


def _pow(self: Any, other: Any, modulus: Any = None) -> Any:
    if modulus is not None:
        return pow(self.node.specialise("a power with a modulus"), other, modulus)
    return _plain_pow(self, other)


def _divmod(self: Any, other: Any) -> Any:
    return self // other, self % other


def _rdivmod(self: Any, other: Any) -> Any:
    return other // self, other % self


def _index(self: Any) -> int:
    self.node.before_index()
    return int(self.node.specialise("an index"))


def _truth(self: Any) -> bool:
    node: ScalarNode = self.node
    return bool(node.apply("ne", 0).specialise("a branch"))


def _array(self: Any, dtype: Any = None, copy: Any = None) -> Any:
    import numpy

    self.node.before_index()
    return numpy.asarray(self.node.specialise("an array"), dtype=dtype)


def _plain_value(self: Any) -> Number:
    number: Number = self.node.specialise("a plain value")
    return number


def _attribute_of_value(name: str) -> property:
    return property(lambda self: getattr(self.node.specialise(f"the attribute {name}"), name))


_plain_pow = _binary("pow", operator.pow, reflected=False)

_ARITHMETIC: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("add", operator.add),
    "sub": ("sub", operator.sub),
    "mul": ("mul", operator.mul),
    "truediv": ("truediv", operator.truediv),
    "floordiv": ("floordiv", operator.floordiv),
    "mod": ("mod", operator.mod),
    "pow": ("pow", operator.pow),
}
_BITS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "and": ("bitwise_and", operator.and_),
    "or": ("bitwise_or", operator.or_),
    "xor": ("bitwise_xor", operator.xor),
    "lshift": ("lshift", operator.lshift),
    "rshift": ("rshift", operator.rshift),
}


def _methods(kind: type) -> dict[str, Any]:
    """The methods of a symbolic scalar of a type."""
    found: dict[str, Any] = {}
    for name, (method, python) in (_ARITHMETIC | (_BITS if kind is int else {})).items():
        found[f"__{name}__"] = _binary(method, python, reflected=False)
        found[f"__r{name}__"] = _binary(method, python, reflected=True)
    found |= {"__pow__": _pow, "__divmod__": _divmod, "__rdivmod__": _rdivmod, "__round__": _round}
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        found[f"__{name}__"] = _compared(name, getattr(operator, name))
    for name in ("neg", "pos", "abs", "floor", "ceil", "trunc"):
        found[f"__{name}__"] = _unary(name)
    if kind is int:
        found["__invert__"] = _unary("invert")
        found["__index__"] = _index
    found |= {
        "__bool__": _truth,
        "__int__": _converted(int),
        "__float__": _converted(float),
        "__complex__": _valued("complex()", complex),
        "__hash__": _valued("a key", hash),
        "__str__": _as_text(str),
        "__repr__": _as_text(repr),
        "__format__": _as_text(format),
        "__array__": _array,
        "__copy__": lambda self: self,
        "__deepcopy__": lambda self, memo: self,
        "__reduce_ex__": lambda self, protocol: (kind, (_plain_value(self),)),
        "__sym_float__": _unary("sym_float"),
        "__sym_int__": _unary("sym_int"),
        "__class__": property(lambda self: kind),
    }
    for name in dir(kind):
        if not name.startswith("_"):
            value = getattr(kind, name)
            found[name] = _valued(f"{name}()", value) if callable(value) else _attribute_of_value(name)
    return found


def _bool_methods() -> dict[str, Any]:
    """The methods of a symbolic bool."""
    found: dict[str, Any] = {}
    for name, method in (("and", "and"), ("or", "or"), ("xor", "bitwise_xor")):
        python = getattr(operator, f"{name}_" if name != "xor" else name)
        found[f"__{name}__"] = _binary(method, python, reflected=False)
        found[f"__r{name}__"] = _binary(method, python, reflected=True)
    for name, (method, python) in _ARITHMETIC.items():
        found[f"__{name}__"] = _binary(method, python, reflected=False)
        found[f"__r{name}__"] = _binary(method, python, reflected=True)
    return found | {
        "__eq__": _compared("eq", operator.eq),
        "__ne__": _compared("ne", operator.ne),
        "__bool__": _valued("a branch", bool),
        "__int__": _converted(int),
        "__float__": _converted(float),
        "__index__": _valued("an index", int),
        "__hash__": _valued("a key", hash),
        "__str__": _as_text(str),
        "__repr__": _as_text(repr),
        "__format__": _as_text(format),
        "__copy__": lambda self: self,
        "__deepcopy__": lambda self, memo: self,
        "__reduce_ex__": lambda self, protocol: (bool, (_plain_value(self),)),
        "__class__": property(lambda self: bool),
    }


# `type()` and not a class statement: `__class__` in a class body would be the name of the enclosing class's cell.
GraphInt: Any = type("GraphInt", (torch.SymInt,), {"__doc__": "A symbolic int.", **_methods(int)})
GraphFloat: Any = type("GraphFloat", (torch.SymFloat,), {"__doc__": "A symbolic float.", **_methods(float)})
GraphBool: Any = type("GraphBool", (torch.SymBool,), {"__doc__": "A symbolic bool.", **_bool_methods()})


def symbolic_scalar(value: Any) -> Any:
    """The scalar that user code sees, for one that came back through torch, which wraps nodes in types of its own."""
    node = value.node if isinstance(value, _SYMBOLIC) else None
    return wrap(node) if isinstance(node, ScalarNode) else value


def plain_keys(tree: Any) -> Any:
    """A result whose dictionaries have plain keys: hashing specialised them already."""
    if type(tree) is dict:
        made = {_plain_value(k) if isinstance(k, _SYMBOLIC) else k: plain_keys(v) for k, v in tree.items()}
        same = all(a is b for a, b in zip((*made, *made.values()), (*tree, *tree.values()), strict=True))
        return tree if same else made
    if type(tree) in (list, tuple):
        items = [plain_keys(item) for item in tree]
        same = all(a is b for a, b in zip(items, tree, strict=True))
        return tree if same else type(tree)(items)
    return tree
