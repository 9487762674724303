"""Python numbers that stay inputs: learning rates, betas, step counts, and numbers that changed between two calls.

A `ScalarNode` remembers how a number was computed. What user code sees is a `GraphInt` or `GraphFloat` around it
(`capture.graph_numbers`); each operation computes its value as Python would and remembers how. Where a tensor operator
takes the number, the remembered operations become nodes of the graph:

    lr, beta                      placeholders
    p.add_(m, alpha=-lr / (1 - beta))   ->   neg(lr); sub(1, beta); truediv(..); add(p, m, alpha=..)

Why not torch's symbolic shapes: those normalise expressions (`a*b*c` may be reassociated), which changes the last bit
of a float, and cost 100 us an operation. Branching on a number adds a guard; a number without a known value
(`param.norm().item()` in an optimizer) cannot be branched on.

Numbers that Python around the graph computes: a learning rate after `scheduler.step()` inside of the step.

The graph does not know them. The step may return them; the runtime reads them after it repeated the scheduler's call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import fx
from torch.optim.lr_scheduler import LRScheduler

from wholestep.errors import ControlFlowError, Location, SideEffectError
from wholestep.ir.meta import user_location
from wholestep.ir.user_objects.slots import ABSENT, Slot

Number = int | float | bool


class ScalarHost(Protocol):
    """What a scalar needs from the capture it lives in."""

    def emit_scalar(self, target: Callable[..., Any], args: tuple[Any, ...], value: Number | None) -> fx.Node: ...

    def leaf_scalar(self, leaf: Any, value: Number | None) -> fx.Node: ...

    def add_guard(self, guard: ScalarGuard) -> None: ...

    def location_here(self) -> Any: ...

    def shape_scalar(self, symbol: Any) -> tuple[fx.Node, Number]: ...

    def note_scalar(self, node: ScalarNode) -> None: ...


@dataclass(frozen=True, eq=False)
class ScalarGuard:
    """The graph is right only while `expression` has the value `expected`."""

    expression: ScalarNode
    expected: Number
    why: str = ""
    """What fixed the value: a branch, a size."""
    location: Location | None = field(default=None, repr=False)

    @property
    def key(self) -> str:
        return f"{self.expression.key}=={self.expected!r}"

    @property
    def pins_leaf(self) -> bool:
        """Whether it allows one value only of a number that is an input."""
        return self.expression.leaf is not None and self.expression.kind is not bool

    def holds(self, leaf_value: Callable[[Any], Number], memo: dict[int, Number]) -> bool:
        """Whether it still does, with the current value of each leaf."""
        value = self.expression.evaluate(leaf_value, memo)
        if value == self.expected:
            return value != 0 or not isinstance(value, float) or _sign(value) == _sign(self.expected)
        return value != value and self.expected != self.expected

    def describe(self) -> str:
        if self.expression.kind is bool:
            what = self.expression.key if self.expected else f"not {self.expression.key}"
        else:
            what = f"{self.expression.key} == {self.expected!r}"
        if not self.why or self.location is None:
            return what
        return f"{what} ({self.why} at {self.location.file}:{self.location.line})"


def _sign(value: Number) -> float:
    return math.copysign(1.0, value)


def slice_length(start: int, end: int, size: int) -> int:
    """How many elements `x[start:end]` has in a dimension of that size."""
    return len(range(*slice(start, end).indices(size)))


def in_range(index: int, size: int) -> bool:
    """Whether an index, which may count from the end, exists in a dimension of that size."""
    return -size <= index < size


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "mod": operator.mod,
    "float_truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "int_floordiv": operator.floordiv,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "float_pow": operator.pow,
    "pow_by_natural": operator.pow,
    "pow": operator.pow,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "invert": operator.invert,
    "sym_min": min,
    "sym_max": max,
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": operator.abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
    "sym_float": float,
    "sym_int": int,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "cos": math.cos,
    "sin": math.sin,
    "tan": math.tan,
    "cosh": math.cosh,
    "sinh": math.sinh,
    "tanh": math.tanh,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "sym_and": operator.and_,
    "sym_or": operator.or_,
    "sym_not": operator.not_,
    "is_integer": float.is_integer,
    "slice_length": slice_length,
    "in_range": in_range,
}
_BOOLEAN = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "sym_and", "sym_or", "sym_not", "is_integer", "in_range"}
)
_DIVISIONS = frozenset({"mod", "float_truediv", "int_truediv", "int_floordiv", "floordiv", "truediv"})
_POWERS = frozenset({"float_pow", "pow_by_natural", "pow"})
_DOMAINS = {"sqrt": "ge", "log": "gt", "log2": "gt"}
_SYMBOL = {"add": "+", "sub": "-", "mul": "*", "float_truediv": "/", "truediv": "/", "int_truediv": "/"}
_SYMBOL |= {"float_pow": "**", "pow_by_natural": "**", "pow": "**", "mod": "%", "int_floordiv": "//", "floordiv": "//"}
_SYMBOL |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lshift": "<<", "rshift": ">>"}
_SYMBOL |= {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}


class ScalarNode:
    """One number: a leaf (an input or an `.item()`), a constant, or an operation on others.

    The method names are those that torch calls on the node of a SymInt, SymFloat or SymBool.
    """

    __slots__ = ("_fx", "_host", "args", "hint", "key", "kind", "leaf", "method")

    def __init__(
        self,
        host: ScalarHost,
        kind: type,
        hint: Number | None,
        key: str,
        *,
        method: str = "",
        args: tuple[ScalarNode, ...] = (),
        leaf: Any = None,
    ) -> None:
        self._host: Any = host
        self.kind = kind
        self.hint = hint
        self.key = key
        self.method = method
        self.args = args
        self.leaf = leaf
        self._fx: fx.Node | None = None
        if host is not None:
            host.note_scalar(self)

    def release(self) -> None:
        """Let go of the capture: torch's C++ may keep this node (in views), where the collector does not see it."""
        self._host = self._fx = None

    # What the graph and the guards ask for.

    @property
    def is_fixed(self) -> bool:
        """Whether it is a constant of the program."""
        return self.leaf is None and not self.method

    def fx_arg(self) -> fx.Node | Number:
        """What stands for this number in the arguments of a node."""
        if self.is_fixed:
            assert self.hint is not None
            return self.hint
        if self._fx is None:
            if self.leaf is not None:
                self._fx = self._host.leaf_scalar(self.leaf, self.hint)
            else:
                args = tuple(a.fx_arg() for a in self.args)
                self._fx = self._host.emit_scalar(_OPERATORS[self.method], args, self.hint)
        return self._fx

    def evaluate(self, leaf_value: Callable[[Any], Number], memo: dict[int, Number]) -> Number:
        """The value with other leaves, computed as Python would."""
        if id(self) in memo:
            return memo[id(self)]
        value: Number
        if self.leaf is not None:
            value = leaf_value(self.leaf)
        elif not self.method:
            assert self.hint is not None
            value = self.hint
        else:
            value = _OPERATORS[self.method](*(a.evaluate(leaf_value, memo) for a in self.args))
        memo[id(self)] = value
        return value

    def leaves(self) -> list[Any]:
        """The distinct leaves this number depends on."""
        found: dict[int, Any] = {}
        seen: set[int] = set()
        stack = [self]
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.leaf is not None:
                found[id(node.leaf)] = node.leaf
            stack.extend(node.args)
        return list(found.values())

    def as_python(self) -> Any:
        """The number that user code sees."""
        from wholestep.capture.scalars.python_scalars import wrap

        return wrap(self)

    def specialise(self, why: str) -> Number:
        """Fix the number to the value it has now, under a guard."""
        if self.hint is None:
            raise ControlFlowError(
                f"{why} needs the value of {self.key}, which is known only when the step runs.",
                fix="keep it a tensor: use torch.where, torch.minimum/maximum or clamp instead of Python branches.",
                location=None if self._host is None else self._host.location_here(),
            )
        if not self.is_fixed and self._host is not None:
            self._host.add_guard(ScalarGuard(self, self.hint, why, self._host.location_here()))
        return self.hint

    def apply(self, method: str, *others: Any) -> ScalarNode:
        """The result of an operation on this number."""
        args = (self, *(self._adopt(o) for o in others))
        self._guard_errors(method, args)
        hints = [a.hint for a in args]
        hint = None if any(h is None for h in hints) else _OPERATORS[method](*hints)
        if method in _BOOLEAN:
            kind: type = bool
        elif hint is not None:
            kind = type(hint)
        else:
            kind = float if any(a.kind is float for a in args) or "truediv" in method else int
            kind = {"sym_float": float, "sym_int": int, "floor": int, "ceil": int, "trunc": int}.get(method, kind)
        if all(a.is_fixed for a in args):
            assert hint is not None
            return ScalarNode(self._host, kind, hint, repr(hint))
        return ScalarNode(self._host, kind, hint, _render(method, args), method=method, args=args)

    def _guard_errors(self, method: str, args: tuple[ScalarNode, ...]) -> None:
        """Where Python raises for some values (division by zero), or gives a number of another kind, which of the two
        happens is a guard: user code may catch the error."""
        if method in _DIVISIONS:
            args[1]._guard_sign("ne", "a division")
        elif method in _POWERS and len(args) == 2:
            base, exponent = args
            if base.kind is not float and exponent.kind is not float:
                exponent._guard_sign("ge", "a power")
            elif exponent.kind is float and not (exponent.is_fixed and float(exponent.hint or 0.0).is_integer()):
                base._guard_sign("ge", "a power")
        elif method in _DOMAINS:
            args[0]._guard_sign(_DOMAINS[method], method)
        elif method in ("lshift", "rshift"):
            args[1]._guard_sign("ge", "a shift")

    def _guard_sign(self, comparison: str, why: str) -> None:
        # Numbers that are taken out of tensors are left alone: a guard on them would read state before each call.
        if self.is_fixed or self.hint is None or self._host is None or not _from_python(self):
            return
        compared = self.apply(comparison, 0)
        assert compared.hint is not None
        self._host.add_guard(ScalarGuard(compared, compared.hint, why, self._host.location_here()))

    def _adopt(self, other: Any) -> ScalarNode:
        if isinstance(other, ScalarNode):
            return other
        if isinstance(other, int | float):
            return ScalarNode(self._host, type(other), other, repr(other))
        node, value = self._host.shape_scalar(other)
        adopted = ScalarNode(self._host, type(value), value, str(other), leaf=other)
        adopted._fx = node
        return adopted

    # The protocol of torch's symbolic nodes.

    def is_int(self) -> bool:
        return self.kind is int

    def is_float(self) -> bool:
        return self.kind is float

    def is_bool(self) -> bool:
        return self.kind is bool

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return self.hint is not None

    def nested_int(self) -> None:
        return None

    def maybe_as_int(self) -> int | None:
        return None

    def maybe_as_float(self) -> float | None:
        return None

    def maybe_as_bool(self) -> bool | None:
        return None

    def constant_int(self) -> None:
        return None

    def constant_bool(self) -> None:
        return None

    def wrap_int(self, value: int) -> ScalarNode:
        return ScalarNode(self._host, int, value, repr(value))

    def wrap_float(self, value: float) -> ScalarNode:
        return ScalarNode(self._host, float, value, repr(value))

    def wrap_bool(self, value: bool) -> ScalarNode:
        return ScalarNode(self._host, bool, value, repr(value))

    def guard_int(self, file: str, line: int) -> int:
        return int(self.specialise("an integer argument"))

    def guard_float(self, file: str, line: int) -> float:
        return float(self.specialise("a float argument"))

    def guard_bool(self, file: str, line: int) -> bool:
        return bool(self.specialise("a branch"))

    def expect_true(self, file: str, line: int) -> bool:
        if self.hint is None:
            return True
        return self.guard_bool(file, line)

    def expect_size(self, file: str, line: int) -> bool:
        return self.guard_bool(file, line)

    def guard_size_oblivious(self, file: str, line: int) -> bool:
        return self.guard_bool(file, line)

    def statically_known_true(self, file: str, line: int) -> bool:
        return self.hint is not None and bool(self.hint) and self.is_fixed

    def guard_or_false(self, file: str, line: int) -> bool:
        return self.guard_bool(file, line)

    def guard_or_true(self, file: str, line: int) -> bool:
        return self.guard_bool(file, line)

    def bool_(self) -> bool:
        return self.guard_bool("", 0)

    def int_(self) -> int:
        return self.guard_int("", 0)

    def clone(self) -> ScalarNode:
        return self

    def _graph_repr(self) -> str:
        return self.key

    def __str__(self) -> str:
        return self.key

    def __repr__(self) -> str:
        return f"ScalarNode({self.key})"

    def __getattr__(self, name: str) -> Any:
        if name == "str":  # torch's name for the text of a node
            return self.__str__
        method = name if name in _OPERATORS else name.rstrip("_")
        if method in _OPERATORS:
            return lambda *others: self.apply(method, *others)
        raise AttributeError(name)


def _from_python(node: ScalarNode) -> bool:
    """Whether a number is made of numbers that lie in Python objects only."""
    return all(hasattr(leaf, "get") or hasattr(leaf, "index") for leaf in node.leaves())


def scalar_of(value: object) -> ScalarNode | None:
    """The ScalarNode inside a SymFloat, SymInt or SymBool, if it is one of ours."""
    if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
        node = value.node
        return node if isinstance(node, ScalarNode) else None
    return None


def _render(method: str, args: tuple[ScalarNode, ...]) -> str:
    if method in _SYMBOL and len(args) == 2:
        return f"({args[0].key} {_SYMBOL[method]} {args[1].key})"
    if method == "neg":
        return f"-{args[0].key}"
    return f"{method}({', '.join(a.key for a in args)})"


@dataclass(frozen=True, eq=False)
class LastRateSlot(Slot):
    """`scheduler.get_last_lr()[index]`."""

    scheduler: LRScheduler
    index: int

    def get(self) -> Any:
        rates = getattr(self.scheduler, "_last_lr", ())
        return rates[self.index] if self.index < len(rates) else ABSENT


class HostNumber:
    """A number that exists only after the step ran. It can be returned, and nothing else."""

    def __init__(self, path: str, read: Callable[[], Any]) -> None:
        self.path = path
        self.read = read

    def _refuse(self, *_: Any) -> NoReturn:
        raise SideEffectError(
            f"the step computes with {self.path} after a scheduler changed it in the same step.",
            fix="call scheduler.step() at the end of the step, or outside of it.",
            location=user_location(),
        )

    __float__ = __int__ = __index__ = __bool__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __format__ = _refuse

    def __repr__(self) -> str:
        return f"<{self.path} after the step>"
