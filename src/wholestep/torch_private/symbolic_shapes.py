"""Symbolic sizes: the ShapeEnv, its symbols, ranges and guards. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx
from torch._subclasses import fake_tensor as _fake_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.fx.experimental.symbolic_shapes import ValueRangesSLoc
from torch.utils._sympy import functions as _sympy_functions
from torch.utils._sympy.numbers import int_oo as _int_oo
from torch.utils._sympy.value_ranges import ValueRanges as _ValueRanges


def symbolic_functions() -> dict[str, type]:
    """The sympy functions in expressions of symbolic sizes (`torch.utils._sympy.functions`). 2.11, 2.13."""
    names = (
        "FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt LShift RShift Max Min "
        "PowByNatural FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt "
        "RoundToInt RoundDecimal ToFloat Identity BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor"
    ).split()
    unary = "sqrt cos cosh sin sinh tan tanh asin acos atan exp log asinh log2".split()
    names += [f"OpaqueUnaryFn_{name}" for name in unary]
    return {name: getattr(_sympy_functions, name) for name in names if hasattr(_sympy_functions, name)}


def symbol_range(env: ShapeEnv, symbol: Any) -> tuple[int | None, int | None]:
    """The range of an integer symbol in a ShapeEnv; None for a side that is unbounded. 2.11, 2.13."""
    found = env.var_to_range.get(symbol)
    if found is None or not found.is_int:
        return None, None
    lower = None if found.lower == -_int_oo else int(found.lower)
    upper = None if found.upper == _int_oo else int(found.upper)
    return lower, upper


def register_symbol(env: ShapeEnv, symbol: Any, hint: int | float | None, lower: int | None, upper: int | None) -> None:
    """Register a symbol that was read from a file in a ShapeEnv, under its own name. 2.11, 2.13."""
    if hint is not None:
        env.backed_var_to_val[symbol] = sympy.Integer(hint) if symbol.is_integer else sympy.Float(hint)
    env.var_to_sources[symbol] = []
    here = env._get_sloc()
    env.var_to_range_sloc[symbol] = ValueRangesSLoc(here, here)  # read where a comparison narrows the range
    if symbol.is_integer:
        env.var_to_range[symbol] = _ValueRanges(
            -_int_oo if lower is None else lower, _int_oo if upper is None else upper
        )
    else:
        env.var_to_range[symbol] = _ValueRanges(-sympy.oo, sympy.oo)


def new_symbol(env: ShapeEnv, hint: int, low: int, high: int | None) -> torch.SymInt:
    """A symbolic size with a hint, assumed to be at least 2 (see `capture/graph/dynamic_shapes.py`). 2.11, 2.13."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.utils._sympy.value_ranges import ValueRanges

    source = ConstantSource(f"wholestep_dim{len(env.var_to_range)}")
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    made: Any = env.create_symintnode(symbol, hint=hint, source=source)
    top = high if high is not None else 2**31
    env.var_to_range[made.node.expr] = ValueRanges(max(low, 2), max(top, 2))
    return made  # type: ignore[no-any-return]


def fixed_symbols(env: ShapeEnv) -> list[tuple[str, int]]:
    """Symbols that the trace specialised to one value. 2.11, 2.13."""
    return [(str(symbol), int(value)) for symbol, value in env.replacements.items() if value.is_Integer]


def shape_guards(env: ShapeEnv) -> list[Any]:
    """The sympy conditions that a trace assumed. 2.11, 2.13."""
    return [guard.expr for guard in env.guards]


def sympy_function_names(expression: Any) -> str:
    """The name of the outermost operation of a size expression."""
    return type(expression).__name__


@contextmanager
def _some_shape_env(mode: Any) -> Iterator[None]:
    """Give a mode a ShapeEnv: Inductor's cache records conditions on sizes there, and does not cache without one."""
    if mode is None or mode.shape_env is not None:
        yield
        return
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode.shape_env = ShapeEnv()
    try:
        yield
    finally:
        mode.shape_env = None


def symbol_in(size: Any) -> Any:
    """The symbol of a size that is a single symbol; None for other sizes (`SymInt.node`). 2.11, 2.13."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return expression if getattr(expression, "is_Symbol", False) else None


SIZE_FILES = frozenset(
    str(sys.modules[name].__file__)
    for name in (
        "torch.fx.experimental.symbolic_shapes",
        "torch.fx.experimental.sym_node",
        "torch.fx.experimental.recording",
    )
)
"""Files of torch's own code between the code that reads the value of a size and the ShapeEnv. 2.11, 2.13."""


_NO_SIZE = 2**40
"""No tensor has so many elements: the bound is one that torch gives to every size."""


def data_symbols(env: ShapeEnv, expression: Any) -> list[Any]:
    """The symbols of an expression that stand for sizes which the data of a run decides: they have no hint
    (`ShapeEnv.is_unbacked_symint`). 2.11, 2.13."""
    return [symbol for symbol in env.replace(expression).free_symbols if env.is_unbacked_symint(symbol)]


def is_condition(expression: Any) -> bool:
    """True for an expression that is true or false; sympy counts every symbol among them."""
    return isinstance(expression, Boolean) and not isinstance(expression, sympy.Symbol)


def known_answer(env: ShapeEnv, expression: Any) -> Any:
    """The value of an expression that follows from the ranges of its symbols; None if none does
    (`ShapeEnv._maybe_evaluate_static`). 2.11, 2.13."""
    return env._maybe_evaluate_static(expression)


def highest_value(env: ShapeEnv, symbol: Any) -> int | None:
    """The largest value that a symbol may have. 2.11, 2.13."""
    hint = env.backed_var_to_val.get(symbol)
    return int(hint) if hint is not None else symbol_range(env, symbol)[1]


def largest_size(size: Any) -> int | None:
    """The bound of a size which only a run decides; None if there is none (`ShapeEnv.bound_sympy`). 2.11, 2.13."""
    env, expression = getattr(size.node, "shape_env", None), getattr(size.node, "expr", None)
    if env is None or expression is None:
        return None
    upper = env.bound_sympy(expression).upper
    return int(upper) if upper.is_Integer and upper < _NO_SIZE else None


def size_assertions(env: ShapeEnv) -> list[tuple[Any, str]]:
    """What a trace assumes of data-dependent sizes, each with its message
    (`ShapeEnv.deferred_runtime_asserts`). 2.11, 2.13."""
    return [(each.expr, str(each.msg)) for found in env.deferred_runtime_asserts.values() for each in found]


def new_data_size(env: ShapeEnv) -> torch.SymInt:
    """A new size that only a run decides (`create_unbacked_symint`, `_constrain_range_for_size`). 2.11, 2.13."""
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    made: torch.SymInt = env.create_unbacked_symint()
    _constrain_range_for_size(made)
    return made


def fix_symbol(env: ShapeEnv, symbol: Any, value: int) -> None:
    """From now on a symbol stands for one value (`ShapeEnv._set_replacement`). 2.11, 2.13."""
    env._set_replacement(symbol, sympy.Integer(value), "the graph is for this value")


def new_size(env: ShapeEnv, expression: Any) -> Any:
    """A symbolic size, or condition on sizes, of an expression without a hint (`ShapeEnv.create_symintnode`,
    `create_symfloatnode`). 2.11, 2.13."""
    if is_condition(expression):
        return env.create_symboolnode(expression)
    return (
        env.create_symintnode(expression, hint=None)
        if expression.is_integer
        else env.create_symfloatnode(expression, hint=None)
    )


def expression_of(size: Any) -> Any:
    """The sympy expression of a symbolic size; None for an int (`SymInt.node`). 2.11, 2.13."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def symbols_in(val: Any) -> set[Any]:
    """The symbols in a size, or in the sizes and strides of a tensor. 2.11, 2.13."""
    if isinstance(val, torch.Tensor):
        items: list[Any] = [*val.shape, *(val.stride() if val.layout is torch.strided else ())]
    else:
        items = [val]
    sizes = [item for item in items if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool)]
    return set().union(*(getattr(size.node.expr, "free_symbols", ()) for size in sizes))


def shape_env_of(val: Any) -> ShapeEnv | None:
    """The ShapeEnv of the symbols of a fake value. 2.11, 2.13."""
    if isinstance(val, torch.SymInt):
        found: ShapeEnv | None = val.node.shape_env
        return found
    return val.fake_mode.shape_env if isinstance(val, _fake_tensor.FakeTensor) else None


def dynamo_source(node: fx.Node) -> str:
    """Dynamo's source of an input of its graph, `L['self']._modules['fc']._parameters['weight']`; else the node's name
    (`_dynamo_source`, `grapharg`). 2.11, 2.13."""
    source = getattr(node, "_dynamo_source", None) or getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    return str(name() if callable(name) else name) if name is not None else node.name


def input_source(node: fx.Node) -> int | str | None:
    """Which input of its caller a placeholder of AOTAutograd is: an index, a parameter's name, or -1 for others (a
    tangent). None if the graph has no such record (`desc`, since 2.9). 2.11, 2.13."""
    described = node.meta.get("desc")
    if described is None:
        return None
    found = getattr(described, "idx", getattr(described, "target", -1))
    plain = type(described).__name__ in ("PlainAOTInput", "ParamAOTInput", "BufferAOTInput")
    return found if plain and isinstance(found, int | str) else -1


def shapes_by_python() -> Any:
    """Context in which operators infer shapes by torch's Python meta kernels if there are any: those in C++ read sizes
    as ints, which specialises a dynamic size (`torch._C._EnablePythonDispatcher`). 2.11, 2.13."""
    return torch._C._EnablePythonDispatcher()


def shape_env_of_trace() -> Any:
    """The ShapeEnv of the current trace; None without symbolic sizes (`detect_fake_mode`). 2.11, 2.13."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode()
    return None if mode is None else mode.shape_env


def symbols_by_value(env: Any) -> dict[int, Any]:
    """The symbol of each size; equal sizes share one (`ShapeEnv.val_to_var`). 2.11, 2.13."""
    return {int(value): symbol for value, symbol in env.val_to_var.items()}


def size_at_capture(size: Any) -> int | None:
    """The value that a size had when its symbol was made; None if data decides it (`SymInt.node.hint`). 2.11, 2.13."""
    found = size.node.hint if isinstance(size, torch.SymInt) else size
    return None if found is None else int(found)
