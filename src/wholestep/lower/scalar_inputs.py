"""Scalar inputs of a region, which change from call to call: elements of one small tensor instead of constants.

    graph     mul(p, 1 - lr * wd)         a scalar computed by Python at each call
    region    mul(p, scalars[0])          `scalars` is an input: one tensor with all scalars of the region

Kernels convert a Python scalar to the precision that they compute in, which is float32 for all floating types except
float64. So a scalar is passed twice: as float32 and, where it is used with a float64 tensor, as float64.

Symbolic sizes of regions: which inputs have them, and what compiled code assumes of them.

A region that reads `cat`, of size s0 + s1, needs s0 and s1: inputs of the graph with exactly these sizes become inputs
of the region. While a region is traced and compiled, sizes are compared (`s0 != 2`, `s0 * s1 is even`), with the
answers of the traced call. These guards become conditions of the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from wholestep.ir.effects import declares_writes, is_measure
from wholestep.torch_private.operators import (
    OpOverload,
    argument_names,
    named_arguments,
    op_name,
    plain_name,
    schema_of,
)
from wholestep.torch_private.symbolic_shapes import shape_env_of, shape_guards, symbol_in, symbols_in

aten = torch.ops.aten


class ScalarInput:
    """A scalar input inside of a region, as 0-dim tensors."""

    def __init__(self, single: Tensor | None, double: Tensor | None) -> None:
        self._single = single
        self._double = double

    def for_dtype(self, dtype: torch.dtype | None) -> Tensor:
        """The 0-dim tensor to use with tensors of a dtype."""
        found = self._double if dtype == torch.float64 else self._single
        assert found is not None, "the region asked for this precision"
        return found


_OPERANDS = frozenset(
    "add sub mul div true_divide eq ne lt le gt ge maximum minimum fmod remainder atan2 pow rsub clamp clamp_min "
    "clamp_max where fill masked_fill lerp addcmul addcdiv full full_like xlogy".split()
)
"""Operators (without `aten::`) whose scalar arguments can be tensors instead."""


_JUMPS = frozenset("eq ne lt le gt ge fmod remainder".split())
"""Discontinuous operators: eager rounds the scalar to the dtype of the tensors, which fused kernels do not."""


def accepts_scalar_inputs(node: fx.Node) -> bool:
    """True if an operator can take its scalars from a tensor."""
    if not isinstance(node.target, OpOverload):
        return False
    name = plain_name(node.target)
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_") in _OPERANDS and not declares_writes(node.target)
    if name in _JUMPS and any(_is_rounded(source.meta.get("val")) for source in node.all_input_nodes):
        return False
    return name in _OPERANDS


def _is_rounded(val: Any) -> bool:
    """True if eager rounds scalars beside this tensor to another type than the float32 or float64 of a region."""
    return isinstance(val, Tensor) and val.dtype not in (torch.float32, torch.float64)


def has_scalar_inputs(value: Any) -> bool:
    """True if a ScalarInput is among arguments."""
    if isinstance(value, list | tuple):
        return any(has_scalar_inputs(item) for item in value)
    if isinstance(value, dict):
        return any(has_scalar_inputs(item) for item in value.values())
    return isinstance(value, ScalarInput)


def call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator some of whose arguments may be ScalarInputs."""
    if not has_scalar_inputs(args) and not has_scalar_inputs(kwargs):
        return _plain(op, args, kwargs)
    given = named_arguments(op, args, kwargs)
    dtype = _promoted(given.values())
    given = {name: value.for_dtype(dtype) if isinstance(value, ScalarInput) else value for name, value in given.items()}
    name = plain_name(op)
    result = _SPECIAL[name](given) if name in _SPECIAL else _binary(name, given, dtype)
    # A Python scalar never decides the dtype of a result; as a tensor it would beside 0-dim tensors.
    if name not in _CREATES and dtype is not None and result.is_floating_point():
        result = result.to(dtype)
    return result


def _binary(name: str, given: dict[str, Any], dtype: torch.dtype | None) -> Tensor:
    """An operator of two operands, with the overload for two tensors."""
    alpha = given.pop("alpha", 1)
    mode = {key: given.pop(key) for key in ("rounding_mode",) if key in given}
    first, second = (_tensor(value, dtype) for value in given.values())
    if isinstance(alpha, Tensor) or alpha != 1:
        second = second * alpha
    overload = _OVERLOADS.get(name, "Tensor_mode" if mode else "Tensor")
    result: Tensor = getattr(getattr(aten, name), overload)(first, second, **mode)
    return result


_OVERLOADS = {"pow": "Tensor_Tensor", "maximum": "default", "minimum": "default", "atan2": "default"}
_CREATES = frozenset({"full", "full_like"})


def _promoted(values: Iterable[Any]) -> torch.dtype | None:
    """The dtype in which eager computes with these tensors and a float scalar; None without tensors."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.dtype != torch.bool]
    if not tensors:
        return None
    deciding = [tensor.dtype for tensor in tensors if tensor.dim()] or [tensor.dtype for tensor in tensors]
    found = reduce(torch.promote_types, deciding)
    return found if found.is_floating_point else torch.get_default_dtype()


def _plain(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call without ScalarInputs. Overloads that require tensors get them (foreach passes Python scalars)."""
    wants = [argument.name for argument in schema_of(op).arguments if str(argument.type) == "Tensor"]
    dtype = _dtype(args)
    given = tuple(
        _tensor(value, dtype) if name in wants and op_name(op) in _STRICT and not isinstance(value, Tensor) else value
        for name, value in zip(argument_names(op), args, strict=False)
    )
    return op(*given, **kwargs)


_STRICT = frozenset({"aten::maximum", "aten::minimum", "aten::atan2", "aten::pow.Tensor_Tensor"})
"""Overloads that refuse a Python scalar where the schema says Tensor; others accept one."""


def _dtype(args: Any) -> torch.dtype | None:
    for value in args:
        if isinstance(value, list | tuple):
            found = _dtype(value)
            if found is not None:
                return found
        if isinstance(value, Tensor):
            return value.dtype
    return None


def _tensor(value: Any, dtype: torch.dtype | None) -> Tensor:
    if isinstance(value, Tensor):
        return value
    kind = dtype if dtype is not None and dtype.is_floating_point else torch.float32
    return aten.full.default([], value, dtype=kind)  # type: ignore[no-any-return]


def _lerp(given: dict[str, Any]) -> Tensor:
    start, end, weight = given.values()
    return start + weight * (end - start)  # type: ignore[no-any-return]


def _addcmul(given: dict[str, Any]) -> Tensor:
    start, first, second, value = given.values()
    return start + value * (first * second)  # type: ignore[no-any-return]


def _addcdiv(given: dict[str, Any]) -> Tensor:
    start, first, second, value = given.values()
    return start + value * (first / second)  # type: ignore[no-any-return]


def _rsub(given: dict[str, Any]) -> Tensor:
    return given["other"] - given["self"] * given.get("alpha", 1)  # type: ignore[no-any-return]


def _clamp(given: dict[str, Any]) -> Tensor:
    result: Tensor = given["self"]
    dtype = _promoted([result])
    assert dtype is not None
    result = result.to(dtype)
    for bound, choose in (("min", torch.maximum), ("max", torch.minimum)):
        if given.get(bound) is not None:
            result = choose(result, _tensor(given[bound], dtype).to(dtype))
    return result


def _where(given: dict[str, Any]) -> Tensor:
    condition, first, second = given.values()
    dtype = _promoted([first, second])
    result: Tensor = aten.where.self(condition, _tensor(first, dtype), _tensor(second, dtype))
    return result


def _fill(given: dict[str, Any]) -> Tensor:
    return given["value"].to(given["self"].dtype).expand(given["self"].shape).clone()  # type: ignore[no-any-return]


def _masked_fill(given: dict[str, Any]) -> Tensor:
    return torch.where(given["mask"], given["value"].to(given["self"].dtype), given["self"])


def _full(given: dict[str, Any]) -> Tensor:
    dtype = given.get("dtype") or torch.get_default_dtype()
    value: Tensor = given["fill_value"]
    return value.to(dtype).expand(given["size"]).clone()


def _full_like(given: dict[str, Any]) -> Tensor:
    dtype = given.get("dtype") or given["self"].dtype
    value: Tensor = given["fill_value"]
    return aten.copy.default(torch.empty_like(given["self"], dtype=dtype), value.to(dtype))  # type: ignore[no-any-return]


_SPECIAL: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "rsub": _rsub,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "where": _where,
    "fill": _fill,
    "masked_fill": _masked_fill,
    "full": _full,
    "full_like": _full_like,
}


def pack_scalars(scalars: list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All scalars of a region as one tensor."""
    packed = torch.tensor(scalars, dtype=dtype)
    return packed if device.type == "cpu" else packed.pin_memory().to(device, non_blocking=True)


SymbolSource = tuple[fx.Node, int | None]
"""An input of a graph, and the dimension whose size is a symbol; None: the input itself is the symbol."""


def set_symbolic_sizes(graph: fx.Graph) -> None:
    """Make the metadata of nodes that compute sizes symbolic: a trace may have noted the integers of its own call."""
    for node in graph.nodes:
        if node.op != "call_function" or type(node.meta.get("val")) is not int:
            continue
        vals = [source.meta.get("val") for source in node.all_input_nodes]
        if is_measure(node.target) or (_is_arithmetic(node.target) and any(isinstance(v, SymInt) for v in vals)):
            args = fx.map_arg(node.args, lambda source: source.meta.get("val"))
            node.meta = {**node.meta, "val": node.target(*args, **node.kwargs)}


def _is_arithmetic(target: Any) -> bool:
    return getattr(target, "__module__", "") in ("_operator", "math") or target in (torch.sym_max, torch.sym_min)


def symbol_sources(graph: fx.Graph) -> dict[Any, SymbolSource]:
    """Where the symbols of a graph can be read."""
    found: dict[Any, SymbolSource] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            for symbol, dim in _symbols_read_from(node.meta.get("val")):
                found.setdefault(symbol, (node, dim))
    return found


def _symbols_read_from(val: Any) -> list[tuple[Any, int | None]]:
    sizes: list[tuple[Any, int | None]] = (
        [(size, dim) for dim, size in enumerate(val.shape)] if isinstance(val, Tensor) else [(val, None)]
    )
    return [(symbol, dim) for size, dim in sizes if (symbol := symbol_in(size)) is not None]


def symbols_of(nodes: Iterable[fx.Node]) -> set[Any]:
    """All symbols in the sizes and strides of values."""
    found: set[Any] = set()
    for node in nodes:
        val = node.meta.get("val")
        for item in val if isinstance(val, list | tuple) else [val]:
            found |= symbols_in(item)
    return found


def missing_sources(
    inputs: Sequence[fx.Node], nodes: Iterable[fx.Node], sources: Mapping[Any, SymbolSource]
) -> list[fx.Node]:
    """Inputs of the graph that a region must have in addition, so that it knows the sizes of its values."""
    known = {symbol for node in inputs for symbol, _ in _symbols_read_from(node.meta.get("val"))}
    wanted = symbols_of([*inputs, *nodes]) - known
    found: dict[fx.Node, None] = {}
    for symbol in sorted(wanted, key=str):
        if symbol in sources:
            found.setdefault(sources[symbol][0])
    return [node for node in found if node not in inputs]


class SizeConditions:
    """What compiled code assumes of sizes."""

    def __init__(self, conditions: Sequence[Any], sources: Mapping[Any, SymbolSource]) -> None:
        self._conditions = list(conditions)
        self._symbols = sorted({symbol for each in conditions for symbol in each.free_symbols}, key=str)
        self._places = [sources.get(symbol) for symbol in self._symbols]
        self._known: dict[tuple[int, ...], bool] = {}

    @property
    def can_be_checked(self) -> bool:
        return None not in self._places

    @property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the graph that have the sizes."""
        return list(dict.fromkeys(place[0] for place in self._places if place is not None))

    def hold(self, values: Sequence[Any]) -> bool:
        """True if the conditions hold for these values of `inputs`."""
        given = dict(zip(self.inputs, values, strict=True))
        sizes = tuple(
            int(given[node] if dim is None else given[node].shape[dim]) for node, dim in filter(None, self._places)
        )
        if sizes not in self._known:
            known = dict(zip(self._symbols, sizes, strict=True))
            self._known[sizes] = all(bool(each.subs(known)) for each in self._conditions)
        return self._known[sizes]

    def __str__(self) -> str:
        return ", ".join(map(str, self._conditions))

    def __bool__(self) -> bool:
        return bool(self._conditions)


class WatchedSizes:
    """Collects the guards on sizes that are added while regions are compiled."""

    def __init__(self, graph: fx.Graph, before: dict[Any, int]) -> None:
        """`before`: by shape environment, how many guards there were before its first region was compiled."""
        self.sources = symbol_sources(graph)
        nodes = graph.find_nodes(op="placeholder")
        self._env = next((env for n in nodes if (env := shape_env_of(n.meta.get("val"))) is not None), None)
        self._before = 0 if self._env is None else before.setdefault(self._env, len(shape_guards(self._env)))

    def conditions(self) -> SizeConditions:
        """The guards that were added until now."""
        added = [] if self._env is None else shape_guards(self._env)[self._before :]
        return SizeConditions([each for each in added if each.free_symbols], self.sources)
