"""Symbolic scalars: learning rates, betas, step counts, and numbers that changed between two calls.

A `ScalarNode` records how a scalar was computed. User code sees a `GraphInt` or `GraphFloat` around it
(`python_scalars`); each operation computes its value as Python would and is recorded. Where a tensor operator takes the
scalar, the recorded operations become nodes of the graph:

    lr, beta                      placeholders
    p.add_(m, alpha=-lr / (1 - beta))   ->   neg(lr); sub(1, beta); truediv(..); add(p, m, alpha=..)

torch's symbolic shapes do not serve here: they normalise expressions (`a*b*c` may be reassociated), which changes the
last bit of a float, and cost 100 us an operation. A branch on a symbolic scalar adds a guard.

A scalar whose value is known only when the graph runs (`loss.item()`) or after it (a learning rate that
`scheduler.step()` computes) is an expression like the others, and a branch on it is refused. Where it is returned,
stored or printed, the runtime evaluates the expression after the run (`ir.deferred`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch.optim.lr_scheduler import LRScheduler

from wholestep.errors import ControlFlowError, ItemError, Location, SideEffectError, WholestepError
from wholestep.ir.deferred import DeferredNumber, HostLeaf, ItemLeaf, Number, SizeLeaf
from wholestep.ir.graph_walks import reachable
from wholestep.ir.user_objects.plain_contents import own_dict
from wholestep.ir.user_objects.slots import ABSENT, Slot


class ScalarHost(Protocol):
    """What a scalar needs from its capture."""

    def emit_scalar(self, target: Callable[..., Any], args: tuple[Any, ...], value: Number) -> fx.Node: ...

    def leaf_scalar(self, leaf: Any, value: Number) -> fx.Node: ...

    def add_guard(self, guard: ScalarGuard) -> None: ...

    def location_here(self) -> Any: ...

    def shape_scalar(self, symbol: Any) -> tuple[fx.Node, Number]: ...

    def note_scalar(self, node: ScalarNode) -> None: ...

    def before_conversion(self, name: str, node: ScalarNode | None = None) -> None: ...

    def before_index(self, node: ScalarNode) -> None: ...

    def decide(self, scalar: ScalarNode) -> Number | None: ...

    def note_given(self, value: Any) -> None: ...

    def text(self, node: ScalarNode, function: Callable[..., str], *args: Any) -> str: ...


@dataclass(frozen=True, eq=False)
class ScalarGuard:
    """The graph is correct only while `expression` has the value `expected`."""

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
        """Whether it allows a single value of a scalar input."""
        return self.expression.leaf is not None and self.expression.kind is not bool

    def holds(self, leaf_value: Callable[[Any], Number], memo: dict[int, Number]) -> bool:
        """Whether it holds for the current values of the leaves."""
        try:
            value = self.expression.evaluate(leaf_value, memo)
        except (ArithmeticError, ValueError):  # as Python raises in another call: `math.floor(nan)`
            return False
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
        where = self.location.users_first
        inside = "" if where.inside is None else f", in {where.inside}"
        return f"{what} ({self.why} at {where.file}:{where.line}{inside})"


def is_scalar_method(name: object, operands: int) -> bool:
    """Whether there is an operation on so many scalars; for records that are read from a file."""
    if name in ("round", "slice_length"):
        return operands in ((1, 2) if name == "round" else (3,))
    return name in OPERATIONS and operands == (1 if name in _UNARY else 2)


def _sign(value: Number) -> float:
    return math.copysign(1.0, value)


def slice_length(start: int, end: int, size: int) -> int:
    """The number of elements of `x[start:end]` in a dimension of that size."""
    return len(range(*slice(start, end).indices(size)))


def in_range(index: int, size: int) -> bool:
    """Whether an index, which may count from the end, exists in a dimension of that size."""
    return -size <= index < size


OPERATIONS: dict[str, Callable[..., Any]] = {
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
_UNARY = frozenset(
    "invert neg pos abs floor ceil trunc sym_float sym_int sqrt exp log log2 cos sin tan cosh sinh tanh sym_not "
    "is_integer".split()
)
_LONGEST = 160
_INTEGER = "an integer argument"
_BRANCHES = ("a branch", "a comparison")
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
    """One scalar: a leaf (an input or an `.item()`), a constant, or an operation on others.

    The method names are those that torch calls on the node of a SymInt, SymFloat or SymBool.
    """

    __slots__ = ("_fx", "_host", "args", "hint", "key", "kind", "leaf", "method", "trial")

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
        self.trial: Number = getattr(leaf, "trial", 0) if hint is None else hint
        """The value; for a scalar that is not known yet, the value that it has in a trace with plain numbers."""
        self._fx: fx.Node | None = None
        if host is not None:
            host.note_scalar(self)

    def release(self) -> None:
        """Drop the capture: torch's C++ may keep this node alive (in views), where the collector does not see it."""
        self._host = self._fx = None

    @property
    def is_fixed(self) -> bool:
        """Whether it is a constant of the program."""
        return self.leaf is None and not self.method

    def fx_arg(self) -> fx.Node | Number:
        """The node or constant for this scalar among the arguments of a node."""
        if self.is_fixed:
            assert self.hint is not None
            return self.hint
        if self._fx is None:
            if self.leaf is not None:
                self._fx = self._host.leaf_scalar(self.leaf, self.trial)
            else:
                args = tuple(a.fx_arg() for a in self.args)
                self._fx = self._host.emit_scalar(OPERATIONS[self.method], args, self.trial)
        return self._fx

    def evaluate(self, leaf_value: Callable[[Any], Number], memo: dict[int, Number]) -> Number:
        """The value for other leaves, computed as Python would."""
        stack = [self]  # no recursion: a sum of a thousand items is a thousand deep
        while stack:
            node = stack[-1]
            if id(node) not in memo:
                missing = [a for a in node.args if id(a) not in memo]
                if missing:
                    stack += reversed(missing)
                    continue
                if node.leaf is not None:
                    memo[id(node)] = leaf_value(node.leaf)
                elif not node.method:
                    assert node.hint is not None
                    memo[id(node)] = node.hint
                else:
                    memo[id(node)] = OPERATIONS[node.method](*(memo[id(a)] for a in node.args))
            stack.pop()
        return memo[id(self)]

    def leaves(self) -> list[Any]:
        """The distinct leaves that this scalar depends on."""
        nodes: Iterable[ScalarNode] = reachable([self], lambda node: node.args)
        return list({id(node.leaf): node.leaf for node in nodes if node.leaf is not None}.values())

    def as_python(self) -> Any:
        """The scalar that user code sees."""
        from wholestep.capture.scalars.python_scalars import wrap

        return wrap(self)

    def specialise(self, why: str) -> Number:
        """Fix the scalar to its current value, under a guard."""
        if self.hint is None:
            asks = (why in _BRANCHES and self.kind is bool) or (why == _INTEGER and self.kind is int)
            answer = self._host.decide(self) if asks and self._host else None
            if answer is None:
                raise self._unknown(why)
            return answer  # type: ignore[no-any-return]
        if not self.is_fixed and self._host is not None:
            self._host.add_guard(ScalarGuard(self, self.hint, why, self._host.location_here()))
        return self.hint

    def truncated(self) -> ScalarNode:
        """The whole part of a number that `int(x)` converts: all values with the same one make the same graph."""
        if self.kind is not float or self.hint is None or not math.isfinite(self.hint):
            return self
        self.apply("abs").apply("lt", math.inf).specialise("int()")
        return self.apply("trunc")

    def text(self, function: Callable[..., str], *args: Any) -> str:
        """`function` (str, repr, format) of the number: filled in after the run where it is not known yet."""
        if self.hint is None and self._host is not None:
            made: str = self._host.text(self, function, *args)
            return made
        return function(self.specialise("text"), *args)

    def _unknown(self, why: str) -> WholestepError:
        """The error for code that needs the value before there is one."""
        where = None if self._host is None else self._host.location_here()
        late = next((leaf for leaf in self.leaves() if isinstance(leaf, HostLeaf)), None)
        if late is not None:
            return computed_with(late, where)
        what = f"{why} needs the value of {self.key}, which is known only when the step runs."
        if why in _BRANCHES:
            advice = (
                "keep it a tensor: use torch.where, torch.minimum/maximum or clamp instead of Python branches; or, "
                "where the branch only checks (raise, assert), compile with assume=True."
            )
            return ControlFlowError(what, fix=advice, location=where)
        return ItemError(
            what,
            fix="return the tensor from the step and read its value outside. (A value may be returned, printed, stored "
            "and computed with; it is filled in after the run.)"
            + (" Where it is nearly always the same, compile with assume=True." if why == _INTEGER else ""),
            location=where,
        )

    def before_conversion(self, name: str) -> None:
        """User code calls `float(x)` or `int(x)`, which must return a plain number."""
        if self._host is not None and (self.hint is None or name == "float"):
            self._host.before_conversion(name, self)

    def before_index(self) -> None:
        """User code takes an element, or counts to the number."""
        if self.hint is not None and self.kind is int and self._host is not None:
            self._host.before_index(self)

    def note_given(self, value: Any) -> None:
        """User code gets a scalar that is not known yet."""
        if self._host is not None:
            self._host.note_given(value)

    @property
    def is_deferred(self) -> bool:
        """Whether it depends on a scalar that is known only when the graph runs, or after it."""
        return self.hint is None

    def deferred(self) -> DeferredNumber:
        """The scalar as an expression that the runtime evaluates."""
        return DeferredNumber(self.key, tuple(self.leaves()), self.evaluate, self.trial)

    def apply(self, method: str, *others: Any) -> ScalarNode:
        """The result of an operation on this scalar."""
        args = (self, *(self._adopt(o) for o in others))
        self._guard_errors(method, args)
        if any(a.hint is None for a in args):
            return self._apply_deferred(method, args)
        hint = OPERATIONS[method](*(a.hint for a in args))
        hint = bool(hint) if method in _BOOLEAN else hint  # numpy has a bool of its own
        kind = bool if method in _BOOLEAN else float if isinstance(hint, float) else type(hint)  # numpy.float64, too
        if all(a.is_fixed for a in args):
            return ScalarNode(self._host, kind, hint, repr(hint))
        return ScalarNode(self._host, kind, hint, _render(method, args), method=method, args=args)

    def _apply_deferred(self, method: str, args: tuple[ScalarNode, ...]) -> ScalarNode:
        """The same for a scalar that is not known yet: of the type that it has for the trial values."""
        trial = OPERATIONS[method](*(a.trial for a in args))
        kind = bool if method in _BOOLEAN else type(trial)
        text = _render(method, args)
        text = text if len(text) <= _LONGEST else f"an expression of {args[0].key[: _LONGEST // 2]}"
        made = ScalarNode(self._host, kind, None, text, method=method, args=args)
        made.trial = trial
        return made

    def _guard_errors(self, method: str, args: tuple[ScalarNode, ...]) -> None:
        """Where Python raises for some values (division by zero), or returns a number of another type, a guard fixes
        which of the two happens: user code may catch the error."""
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
        # Scalars read from tensors get no guard: it would read state before each call.
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
        kind = float if other.is_float() else bool if other.is_bool() else int
        adopted = ScalarNode(self._host, kind, value, str(other), leaf=SizeLeaf(node))
        adopted._fx = node
        return adopted

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
        return int(self.specialise(_INTEGER))

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
        method = name if name in OPERATIONS else name.rstrip("_")
        if method in OPERATIONS:
            return lambda *others: self.apply(method, *others)
        raise AttributeError(name)


def _from_python(node: ScalarNode) -> bool:
    """Whether a scalar depends only on numbers that lie in Python objects."""
    return not any(isinstance(leaf, ItemLeaf | SizeLeaf | HostLeaf) for leaf in node.leaves())


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
        rates = own_dict(self.scheduler).get("_last_lr", ())
        return rates[self.index] if self.index < len(rates) else ABSENT


def computed_with(leaf: HostLeaf, location: Location | None) -> SideEffectError:
    """The error where a scalar that exists only after the graph ran reaches the graph, or decides something."""
    return SideEffectError(
        f"the step computes with {leaf.path} after a scheduler changed it in the same step.",
        fix="call scheduler.step() at the end of the step, or outside of it.",
        location=location,
    )
