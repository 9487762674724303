"""Dynamic dimensions: symbols for declared dims, and nodes for the size expressions that user code computes.

torch's ShapeEnv does the algebra and collects guards; an expression that an operator takes becomes nodes:

    x.view(b * t, d)      s0 = sym_size(x, 0); m = mul(s0, t); view(x, [m, d])

A declared dim is treated as at least 2 while tracing, so that size 1 takes the same graph (no broadcasting branch);
the range that the user declared is checked at each call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from wholestep.capture.graph.data_sizes import DataSizeEnv, assumption_text, unknown_size
from wholestep.errors import DynamicShapeError, Location
from wholestep.ir.captured_step import AutomaticDim, AutomaticSizes, Dim, out_of_range
from wholestep.ir.graph_functions import check_size, divide_sizes
from wholestep.ir.meta import user_location
from wholestep.options import Options
from wholestep.torch_private.fake_tensors import FakeTensorMode, new_fake
from wholestep.torch_private.symbolic_shapes import (
    data_symbols,
    fixed_symbols,
    new_data_size,
    new_size,
    new_symbol,
    size_assertions,
    symbol_in,
    sympy_function_names,
)


class WatchedShapeEnv(DataSizeEnv):
    """A ShapeEnv that records which line of the user's code fixed a symbol to one size."""

    def __init__(self) -> None:
        super().__init__(duck_shape=False, specialize_zero_one=False)
        self.fixed_at: dict[str, Location | None] = {}

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        known = len(self.replacements)
        answer = super().evaluate_expr(*args, **kwargs)
        if len(self.replacements) > known:
            for name, _ in fixed_symbols(self):
                self.fixed_at.setdefault(name, user_location())
        return answer


EmitScalar = Callable[[Callable[..., Any], tuple[Any, ...], Any], fx.Node]


class Shapes:
    """The symbols of one capture."""

    def __init__(self) -> None:
        self.env: WatchedShapeEnv | None = None
        self.symbols: dict[str, tuple[Dim, int]] = {}
        """Name of a symbol: its declared range and the size it had at capture."""
        self.sources: dict[str, list[tuple[int, int]]] = {}
        """Name of a symbol: the (batch leaf, dimension) places that have it."""
        self._nodes: dict[Any, fx.Node] = {}
        self._ints: dict[int, torch.SymInt] = {}
        self._first_tensor: dict[str, tuple[Tensor, int]] = {}
        self._asserted: set[Any] = set()
        self._sizes_of_numbers: dict[fx.Node, torch.SymInt] = {}
        self._places: dict[str, list[str]] = {}
        """Name of a symbol: the same places as text."""

    def declare(self) -> WatchedShapeEnv:
        """The ShapeEnv, created when the first dynamic dim is declared."""
        if self.env is None:
            self.env = WatchedShapeEnv()
        return self.env

    def begin_data_sizes(self, mode: FakeTensorMode) -> bool:
        """From now on operators may create data-dependent sizes. False if they already could."""
        if mode.shape_env is not None:
            return False
        mode.shape_env = self.declare()
        mode.static_shapes = False
        return True

    def name_data_sizes(self, node: fx.Node, tensor: Tensor, emit: EmitScalar) -> None:
        """The graph reads a data-dependent size from the first tensor that has it."""
        assert self.env is not None
        for dim, size in enumerate(tensor.shape):
            symbol = symbol_in(size)
            if symbol is not None and symbol not in self._nodes and data_symbols(self.env, symbol):
                self._nodes[symbol] = emit(torch.ops.aten.sym_size.int, (node, dim), size)

    def size_of(self, node: Any, emit: EmitScalar) -> torch.SymInt:
        """The size that a node computes as a number."""
        found = self._sizes_of_numbers.get(node)
        if found is None:
            found = self._sizes_of_numbers[node] = new_data_size(self.declare())
            self._nodes[symbol_in(found)] = node
            emit(check_size, (emit(operator.ge, (node, 0), None), f"{node} >= 0, a size"), None)
        return found

    def add_conditions(self, emit: EmitScalar, node_of: Callable[[Tensor], fx.Node]) -> None:
        """Let the graph check what was assumed of data-dependent sizes since the last call."""
        if self.env is None:
            return
        asserted = [each for each in size_assertions(self.env) if each[0] not in self._asserted]
        found, self.env.conditions = [*self.env.conditions, *asserted], []
        for holds, why in found:
            self._asserted.add(holds)
            condition = self._emit(holds, None, emit, node_of)
            emit(check_size, (condition, assumption_text(holds, why, user_location())), None)

    def condition(self, expression: Any, emit: EmitScalar, node_of: Callable[[Tensor], fx.Node]) -> Any:
        """The node of a condition on sizes."""
        return self._emit(expression, None, emit, node_of)

    def close(self) -> None:
        """The step ran: from now on sizes are read for metadata only."""
        if self.env is not None:
            self.env.below_recorder = True
            self.env.decide = self.env.assume = None

    def fake_of(self, mode: FakeTensorMode, real: Tensor, leaf: int, dims: dict[int, Dim], path: str) -> Tensor:
        """A fake whose declared dims are symbols. One `Dim` object is one symbol wherever it is used."""
        if not real.is_contiguous():
            raise DynamicShapeError(
                f"{path} is not contiguous, so its strides do not follow from a dynamic size.",
                fix="call .contiguous() on it before the step.",
            )
        sizes: list[Any] = list(real.shape)
        for dim, declared in dims.items():
            size = sizes[dim]
            if not declared.min <= size <= (declared.max if declared.max is not None else size):
                raise out_of_range(path, dim, size, declared)
            symbol = self._symbol(declared, size, path, dim)
            sizes[dim] = symbol
            name = str(symbol.node.expr)
            self.sources[name].append((leaf, dim))
            self._places[name].append(f"dimension {dim} of {path}")
        fake = new_fake(mode, real, sizes)
        for dim in dims:
            self._first_tensor.setdefault(str(sizes[dim].node.expr), (fake, dim))
        return fake

    def _symbol(self, declared: Dim, size: int, path: str, dim: int) -> torch.SymInt:
        known = self._ints.get(id(declared))
        if known is not None:
            have = self.symbols[str(known.node.expr)][1]
            if have != size:
                raise DynamicShapeError(
                    f"{path} has size {size} in dimension {dim}, and another leaf with the same Dim has {have}.",
                    fix="give dimensions that may differ from each other a Dim of their own.",
                )
            return known
        made = new_symbol(self.declare(), max(size, 2), declared.min, declared.max)
        self._ints[id(declared)] = made
        name = str(made.node.expr)
        self.symbols[name] = (declared, size)
        self.sources[name] = []
        self._places[name] = []
        return made

    def release(self) -> None:
        """Drop nodes and fakes: only the trace needs them."""
        self._nodes, self._ints, self._first_tensor, self._sizes_of_numbers = {}, {}, {}, {}

    def refuse_fixed(self) -> None:
        """Refuse a declared dim that the step fixed to one size."""
        if self.env is None:
            return
        for name, value in fixed_symbols(self.env):
            if name in self.symbols:
                places = " and ".join(self._places[name])
                were = "was" if len(self._places[name]) == 1 else "were"
                error = DynamicShapeError(
                    f"{places} {were} declared dynamic, and the step works only for size {value}.",
                    fix="derive sizes from tensor.shape instead of writing them down, or leave this dimension out of "
                    "dynamic= (True declares the first one of every batch tensor; a mapping names some).",
                    location=self.env.fixed_at.get(name),
                )
                error.fixed = tuple(self.sources[name])
                raise error

    def node(self, value: Any, emit: EmitScalar, node_of: Callable[[Tensor], fx.Node]) -> Any:
        """The node or constant for a symbolic size among the arguments of a node."""
        expression = sympy.sympify(value.node.expr)
        return self._emit(expression, value.node.hint, emit, node_of)

    def _emit(self, expression: Any, hint: Any, emit: EmitScalar, node_of: Callable[[Tensor], fx.Node]) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression.is_Float:
            return float(expression)
        if expression.is_Rational:
            return int(expression.p) / int(expression.q)
        known = self._nodes.get(expression)
        if known is not None:
            return known
        hint = self._data_size(expression) if hint is None else hint
        if expression.is_Symbol:
            if str(expression) not in self._first_tensor:
                raise unknown_size(expression)
            tensor, dim = self._first_tensor[str(expression)]
            node = emit(torch.ops.aten.sym_size.int, (node_of(tensor), dim), hint)
        else:
            node = self._emit_operation(expression, hint, emit, node_of)
        self._nodes[expression] = node
        return node

    def _emit_operation(self, expression: Any, hint: Any, emit: EmitScalar, node_of: Any) -> fx.Node:
        name = sympy_function_names(expression)
        if name not in _OPERATIONS:
            raise DynamicShapeError(
                f"the size expression {expression} uses {name}, which is not captured.",
                fix="declare fewer dynamic dims, or compute the size from static values.",
            )
        operands = [self._emit(arg, None, emit, node_of) for arg in expression.args]
        function, arity = _OPERATIONS[name]
        if arity is None:
            result = operands[0]
            for operand in operands[1:-1]:
                result = emit(function, (result, operand), None)
            return emit(function, (result, operands[-1]), hint)
        return emit(function, tuple(operands), hint)

    def _data_size(self, expression: Any) -> Any:
        """The symbol of a data-dependent size; None for other expressions."""
        assert self.env is not None
        return new_size(self.env, expression) if data_symbols(self.env, expression) else None


_OPERATIONS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "Add": (operator.add, None),
    "Mul": (operator.mul, None),
    "Pow": (operator.pow, 2),
    "PowByNatural": (operator.pow, 2),
    "FloorDiv": (operator.floordiv, 2),
    "CleanDiv": (operator.floordiv, 2),
    "Mod": (operator.mod, 2),
    "PythonMod": (operator.mod, 2),
    "Max": (max, None),
    "Min": (min, None),
    "IntTrueDiv": (divide_sizes, 2),
    "FloatTrueDiv": (divide_sizes, 2),
    "FloatPow": (operator.pow, 2),
    "ToFloat": (float, 1),
    "TruncToInt": (int, 1),
    "Equality": (operator.eq, 2),
    "Unequality": (operator.ne, 2),
    "StrictLessThan": (operator.lt, 2),
    "LessThan": (operator.le, 2),
    "StrictGreaterThan": (operator.gt, 2),
    "GreaterThan": (operator.ge, 2),
    "And": (operator.and_, None),
    "Or": (operator.or_, None),
    "Not": (operator.not_, 1),
}


def dynamic_dims(options: Options, paths: list[str], leaves: list[Any]) -> dict[int, dict[int, Dim]]:
    """For each batch leaf, the dimensions that were declared dynamic by a path that leads to it."""
    if options.dynamic is True:
        return _first_dims(leaves)
    if isinstance(options.dynamic, AutomaticSizes):
        return {leaf: dict(dims) for leaf, dims in options.dynamic.dims.items()}
    found: dict[int, dict[int, Dim]] = {}
    for declared, dims in (options.dynamic or {}).items():
        matched = False
        missing = dict.fromkeys(dims, 0)
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            inside = path == declared or (path.startswith(declared) and path[len(declared)] in ".[")
            if not inside or not isinstance(leaf, Tensor):
                continue
            matched = True
            for dim, spec in dims.items():
                if -leaf.dim() <= dim < leaf.dim():
                    missing.pop(dim, None)
                    found.setdefault(i, {})[dim % leaf.dim()] = spec
        if not matched:
            tensors = [p for p, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)]
            raise DynamicShapeError(
                f"dynamic names {declared!r}, and no tensor argument has that path.",
                fix=f"the tensor arguments are {', '.join(tensors) or 'none'}.",
            )
        if missing:
            raise DynamicShapeError(
                f"dynamic names dimension {next(iter(missing))} of {declared!r}, and no tensor there has so many.",
                fix="count dimensions from 0, or from the end: -1 is the last.",
            )
    return found


def _first_dims(leaves: list[Any]) -> dict[int, dict[int, Dim]]:
    """The first dimension of every tensor, as `dynamic=True` means it: equal sizes are one dimension that varies.

    Sizes 0 and 1 stay static, since they broadcast, and so do tensors whose strides do not follow from their sizes.
    """
    by_size: dict[int, Dim] = {}
    found: dict[int, dict[int, Dim]] = {}
    for i, leaf in enumerate(leaves):
        if type(leaf) is Tensor and leaf.dim() > 0 and leaf.shape[0] > 1 and leaf.is_contiguous():
            found[i] = {0: by_size.setdefault(leaf.shape[0], Dim())}
    return found


_MOST_STRUCTURES = 32


class SeenSizes:
    """The sizes of the batches for which a step was captured: which dimensions vary.

        x [8, 5], y [8]      first capture
        x [3, 5], y [3]      dimension 0 of both varies, and has been the same in both: one symbol

    A dimension whose size is 0 or 1 in a call stays static in it: such sizes broadcast.
    """

    def __init__(self) -> None:
        self._known: list[_SeenStructure] = []

    def note(self, leaves: list[Any], structure: Any) -> None:
        """A graph was captured for these arguments."""
        seen, shapes = self._of(structure), _shapes_of(leaves)
        if shapes not in seen.shapes:
            seen.shapes.append(shapes)

    def fix(self, structure: Any, places: Iterable[tuple[int, int]]) -> None:
        """The step works only for one size of these dimensions: they stay static."""
        self._of(structure).fixed.update(places)

    def give_up(self, structure: Any) -> None:
        """Calls of this structure have one graph for each size."""
        self._of(structure).has_given_up = True

    def varying(self, leaves: list[Any], structure: Any) -> AutomaticSizes | None:
        """The dimensions whose size is another than in a capture before; None if there are none."""
        seen = self._of(structure)
        if not seen.shapes or seen.has_given_up:
            return None
        by_sizes: dict[tuple[int, ...], AutomaticDim] = {}
        found: dict[int, dict[int, Dim]] = {}
        for i, shape in enumerate(_shapes_of(leaves)):
            before = [shapes[i] for shapes in seen.shapes]
            if shape is None or any(other is None or len(other) != len(shape) for other in before):
                continue
            for dim, size in enumerate(shape):
                sizes = tuple(other[dim] for other in before if other is not None)
                if size > 1 and (i, dim) not in seen.fixed and any(other not in (size, 0, 1) for other in sizes):
                    found.setdefault(i, {})[dim] = by_sizes.setdefault((*sizes, size), AutomaticDim())
        return AutomaticSizes(found) if found else None

    def _of(self, structure: Any) -> _SeenStructure:
        found = next((seen for seen in self._known if seen.structure == structure), None)
        if found is None:
            found = _SeenStructure(structure)
            self._known = [*self._known[-_MOST_STRUCTURES:], found]
        return found


@dataclass
class _SeenStructure:
    """What is known of the calls whose arguments have one tree structure."""

    structure: Any
    shapes: list[list[tuple[int, ...] | None]] = field(default_factory=list)
    """The shapes of the leaves in each capture; None: not a plain contiguous tensor."""
    fixed: set[tuple[int, int]] = field(default_factory=set)
    """(leaf, dimension) places that the step fixed to one size."""
    has_given_up: bool = False


def _shapes_of(leaves: list[Any]) -> list[tuple[int, ...] | None]:
    """The shapes of plain contiguous tensors: the strides of others do not follow from their sizes."""
    return [tuple(leaf.shape) if type(leaf) is Tensor and leaf.is_contiguous() else None for leaf in leaves]
