"""Compare one real value with the metadata of its node: dtype, device, size, stride, offset, contiguity, scalars.

    MetadataDifference("stride", "(4, 1)", "(1, 4)")

Strides count where a dimension has more than one element. Sizes and scalars may be symbolic (`SymbolValues`): a symbol
alone (`s0` as a size of an input, `u0` as the result of `.item()`) is bound to the value of this run where it is first
seen, and checked from then on; an expression over bound symbols has a value to compare with. No ShapeEnv is needed;
where there is one, the range of a symbol is checked too. Known faults of torch's own fake kernels are not reported
(`is_known`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from wholestep.torch_private.pytrees import pytree
from wholestep.torch_private.symbolic_shapes import symbol_range

_NUMBERS = (int, float, bool)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class MetadataDifference:
    """What metadata says and what a run found. `which`: the place of the value where a node has several.

    `expected` is empty where the value itself is wrong, whatever its metadata.
    """

    what: str
    expected: str
    found: str
    which: str = ""

    def __str__(self) -> str:
        place = f"output {self.which}: " if self.which else ""
        return f"{place}{self.what} is {self.found}{f', metadata says {self.expected}' if self.expected else ''}"


def differences(
    wanted: Any,
    found: Any,
    symbols: SymbolValues,
    *,
    shifts: Sequence[int] | None = (0,),
    plain_numbers: bool = True,
    skip: Collection[int] = (),
) -> Iterator[MetadataDifference]:
    """All differences between the metadata and the value of a node.

    `shifts`: by how much the storage offset may exceed that of the metadata; None where it is not compared.
    `plain_numbers`: True if scalars that are not symbolic are constants; a StepGraph has those of its first run.
    `skip`: indices of values that are not compared.
    """
    wanted_leaves, found_leaves = pytree.tree_leaves(wanted), pytree.tree_leaves(found)
    if len(wanted_leaves) != len(found_leaves):
        yield MetadataDifference("number of values", str(len(wanted_leaves)), str(len(found_leaves)))
        return
    for i, (one, other) in enumerate(zip(wanted_leaves, found_leaves, strict=True)):
        if i in skip or (isinstance(one, _NUMBERS) and not plain_numbers):
            continue
        which = str(i) if len(wanted_leaves) > 1 else ""
        for difference in _of_leaf(one, other, symbols, shifts):
            yield MetadataDifference(difference.what, difference.expected, difference.found, which)


def _of_leaf(
    wanted: Any, found: Any, symbols: SymbolValues, shifts: Sequence[int] | None
) -> Iterator[MetadataDifference]:
    if isinstance(wanted, Tensor) and isinstance(found, Tensor):
        yield from _of_tensor(wanted, found, symbols, shifts)
    elif isinstance(wanted, Tensor) and found is None and wanted.shape == (0,):
        return  # the token that orders effects: an empty tensor when traced, None when run
    elif isinstance(wanted, Tensor) or isinstance(found, Tensor):
        yield MetadataDifference("kind", type(wanted).__name__, type(found).__name__)
    elif isinstance(wanted, (*_NUMBERS, *_SYMBOLIC)) and isinstance(found, _NUMBERS):
        yield from _of_number("value", wanted, found, symbols)


def _of_number(what: str, wanted: Any, found: Any, symbols: SymbolValues) -> Iterator[MetadataDifference]:
    expected = symbols.expected(wanted, found)
    if expected is not None and expected != found and not (expected != expected and found != found):
        yield MetadataDifference(what, _shown(wanted, expected), str(found))
    elif reason := symbols.out_of_range(wanted, found):
        yield MetadataDifference(f"range of {what}", reason, str(found))


def _of_tensor(
    wanted: Tensor, found: Tensor, symbols: SymbolValues, shifts: Sequence[int] | None
) -> Iterator[MetadataDifference]:
    for what in ("dtype", "device", "layout"):
        one, other = getattr(wanted, what), getattr(found, what)
        if one != other and not (what == "device" and _same_device(one, other)):
            yield MetadataDifference(what, str(one), str(other))
    if wanted.dim() != found.dim():
        yield MetadataDifference("number of dimensions", str(wanted.dim()), str(found.dim()))
        return
    size = [symbols.expected(one, other) for one, other in zip(wanted.shape, found.shape, strict=True)]
    if any(one is not None and one != other for one, other in zip(size, found.shape, strict=True)):
        yield MetadataDifference("size", _shown(tuple(wanted.shape), tuple(size)), str(tuple(found.shape)))
        return
    for one, other in zip(wanted.shape, found.shape, strict=True):
        if reason := symbols.out_of_range(one, other):
            yield MetadataDifference("range of size", reason, str(other))
    if wanted.layout is not torch.strided or found.layout is not torch.strided:
        return
    if found.numel() > 0:
        yield from _of_memory(wanted, found, symbols, shifts)


def _of_memory(
    wanted: Tensor, found: Tensor, symbols: SymbolValues, shifts: Sequence[int] | None
) -> Iterator[MetadataDifference]:
    stride = [symbols.expected(one, other) for one, other in zip(wanted.stride(), found.stride(), strict=True)]
    pairs = zip(found.shape, stride, found.stride(), strict=True)
    if any(size > 1 and one is not None and one != other for size, one, other in pairs):
        yield MetadataDifference("stride", _shown(wanted.stride(), tuple(stride)), str(found.stride()))
        filled = [other if one is None else one for one, other in zip(stride, found.stride(), strict=True)]
        if is_contiguous(found.shape, filled) != found.is_contiguous():
            yield MetadataDifference(
                "contiguity", *("contiguous", "not contiguous")[:: -1 if found.is_contiguous() else 1]
            )
    if shifts is None:
        return
    starts = [int(found.storage_offset()) - shift for shift in shifts]
    offset = symbols.expected(wanted.storage_offset(), starts[0])
    if offset is not None and offset not in starts:
        yield MetadataDifference("offset", _shown(wanted.storage_offset(), offset), str(starts[0]))


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """True if memory of these sizes and strides is one block in order; dimensions of one element do not count."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return True


def _same_device(one: torch.device, other: torch.device) -> bool:
    """True for `cuda` and `cuda:0`: only one of them has an index."""
    numbers: set[int | None] = {one.index, other.index}
    return one.type == other.type and None in numbers


def _shown(wanted: Any, value: Any) -> str:
    text = str(wanted)
    return text if text == str(value) or value is None else f"{text} = {value}"


class SymbolValues:
    """Values by symbol, for one run of a graph."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self._known: dict[Any, Any] = {}

    def expected(self, wanted: Any, found: int | float | bool) -> Any:
        """The value of `wanted` (a plain or symbolic scalar) in this run; None where it is not known yet.

        `found` is the value of the run: an unbound symbol is bound to it.
        """
        node = getattr(wanted, "node", None)
        if node is None:
            return wanted
        expr = getattr(node, "expr", None)
        if expr is None:  # a symbolic scalar of our own capture: an input, not an expression
            return None
        if expr.is_Symbol and expr not in self.values:
            self.values[expr] = found
            return found
        return self._evaluated(expr)

    def _evaluated(self, expr: Any) -> Any:
        known = self._known.get(expr)
        if known is None:
            if not expr.free_symbols <= self.values.keys():
                return None
            value = expr.xreplace({symbol: sympy.sympify(self.values[symbol]) for symbol in expr.free_symbols})
            known = self._known[expr] = _number(value)
        return known

    def out_of_range(self, wanted: Any, found: int | float | bool) -> str:
        """Why a value cannot be that of a symbol: its range in the ShapeEnv; "" if it can."""
        node = getattr(wanted, "node", None)
        expr, env = getattr(node, "expr", None), getattr(node, "shape_env", None)
        if env is None or not getattr(expr, "is_Symbol", False) or isinstance(found, bool | float):
            return ""
        lower, upper = symbol_range(env, expr)
        if (lower is not None and found < lower) or (upper is not None and found > upper):
            return f"{expr} in [{'-inf' if lower is None else lower}, {'inf' if upper is None else upper}]"
        return ""

    def shown(self) -> str:
        """The bindings for a message: `s0=4, u1=7`."""
        return ", ".join(f"{symbol}={value}" for symbol, value in self.values.items())


def _number(value: Any) -> Any:
    value = sympy.simplify(value) if not value.is_number and not value.is_Boolean else value
    if value in (sympy.true, sympy.false):
        return bool(value)
    if value.is_Integer or value.is_integer:
        return int(value)
    return float(value)


aten = torch.ops.aten

_WORKSPACES: dict[Any, tuple[int, ...]] = {
    aten.mkldnn_rnn_layer.default: (3,),
    aten._scaled_dot_product_efficient_attention.default: (2, 3),
    aten._scaled_dot_product_flash_attention.default: (6, 7),
    aten._scaled_dot_product_cudnn_attention.default: (6, 7),
}
"""Results that only the operator's own backward reads, and whose size the fake kernels do not know; for attention on a
GPU the seed and the offset of its dropout, which are on the CPU except under CUDA graph capture."""

_NORMS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
)
_STATISTICS = {1: "mean", 2: "deviation"}
"""For half-precision inputs with float32 weights (autocast), CPU kernels return these in float32."""

_UNSAFE = (
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
    aten._unsafe_view.default,
)
"""Views whose schema says they are not, so that autograd permits writes (cells of recurrent networks use them)."""


_BACKWARDS = (
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)


def unknown_places(node: fx.Node) -> tuple[int, ...]:
    """Indices of results of a node whose metadata is unknown."""
    source, index = _part_of(node)
    if source is not None:
        return (0,) if index in _WORKSPACES.get(source.target, ()) else ()
    return _WORKSPACES.get(node.target, ())


def is_known(node: fx.Node, difference: MetadataDifference) -> bool:
    """True if a difference is a known fault of torch's fake kernels."""
    if node.op == "placeholder" and difference.what == "device":
        # A seed that the forward saved for the backward.
        return bool(node.users) and all(user.target in _BACKWARDS for user in node.users) and _is_small_integer(node)
    if difference.what in ("memory", "offset"):
        source, _ = _part_of(node)
        return (node if source is None else source).target in _UNSAFE
    if difference.what != "dtype" or difference.found != "torch.float32":
        return False
    source, index = _part_of(node)
    if source is not None:
        return source.target in _NORMS and index in _STATISTICS
    return node.target in _NORMS and difference.which in map(str, _STATISTICS)


def _is_small_integer(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dim() <= 1 and not val.dtype.is_floating_point


def _part_of(node: fx.Node) -> tuple[fx.Node | None, Any]:
    """The producer of a `getitem` node, and the index."""
    source, index = (*node.args, None, None)[:2]
    return (source, index) if node.target is operator.getitem and isinstance(source, fx.Node) else (None, None)
