"""Symbolic scalars as arguments of operators: which stay symbolic, and which fix the shape of a result.

The trace runs on tensors of known shape, so a scalar that a shape depends on is specialised to its value, under a
guard. A scalar that only moves a window of fixed size, or is a value of elements, stays symbolic:

    x * k, x.add_(y, alpha=k)        symbolic
    x[k], x[k:k + 3]                 symbolic; guards: k is in range, the slice has 3 elements
    topk(x, k), x.view(k, -1)        specialised: guard k == 4

`x[k]` is decomposed here (`moving_view`): torch's own indexing reads the plain value of an index. So does dropout with
its probability, which is put back into the operators that it was computed for (`dropout`):

    bernoulli(noise, 1 - p), div(noise, 1 - p)        symbolic, on the CPU; guard: 0 < p < 1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from wholestep.capture.scalars.symbolic_scalars import ScalarNode, scalar_of
from wholestep.ir.effects import OperatorFacts
from wholestep.torch_private.operators import OpOverload, schema_of

aten = torch.ops.aten
SizeOf = Callable[[ScalarNode], torch.SymInt]

_MOVES: dict[Any, tuple[str, ...]] = {
    aten.select.int: ("index",),
    aten.slice.Tensor: ("start", "end"),
    aten.select_backward.default: ("index",),
    aten.slice_backward.default: ("start", "end"),
    aten.roll.default: ("shifts",),
    aten.tril.default: ("diagonal",),
    aten.triu.default: ("diagonal",),
    aten.tril_.default: ("diagonal",),
    aten.triu_.default: ("diagonal",),
    aten.kthvalue.default: ("k",),
    aten.randint.default: ("high",),
    aten.randint.low: ("low", "high"),
    aten.randint_like.default: ("high",),
    aten.randint_like.low_dtype: ("low", "high"),
}
"""Integer arguments that do not determine the shape of the result, except by the length of a slice."""

_SHAPED_BY_SCALARS = frozenset({aten.arange, aten.range, aten.linspace, aten.logspace})
"""Operators whose `Scalar` arguments determine how many elements there are."""


@cache
def _whole_numbers(op: OpOverload) -> frozenset[str]:
    """Names of the arguments that may determine the shape of the result."""
    moves = _MOVES.get(op, ())
    every = op.overloadpacket in _SHAPED_BY_SCALARS
    return frozenset(
        a.name
        for a in schema_of(op).arguments
        if a.name not in moves and (every or _is_whole(str(a.type)) or _is_whole(str(a.real_type)))
    )


def _is_whole(kind: str) -> bool:
    return any(word in kind for word in ("int", "SymInt", "bool", "SymBool"))


def fix_metadata(
    op: Any,
    facts: OperatorFacts,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    fakes: tuple[list[Any], dict[str, Any]],
    nodes: tuple[list[Any], dict[str, Any]],
    size_of: SizeOf,
) -> list[Any]:
    """Fix the scalars that decide shapes, in the arguments of a node. Returns the positional arguments to take a view
    again with: fakes, and the scalars that stay symbolic. `size_of`: the size for a scalar without a value."""
    whole = _whole_numbers(op) if op.namespace == "aten" else frozenset(facts.names)
    for i, arg in enumerate(given[0]):
        if facts.names[i] in whole:
            fakes[0][i], nodes[0][i] = _fixed(op, arg, fakes[0][i], nodes[0][i], size_of)
    again = list(fakes[0])
    for i, arg in enumerate(given[0]):
        if facts.names[i] not in whole and (scalar := scalar_of(arg)) is not None:
            again[i] = scalar
    for name, arg in given[1].items():
        if name in whole:
            fakes[1][name], nodes[1][name] = _fixed(op, arg, fakes[1][name], nodes[1][name], size_of)
    if op is aten.select.int:
        _guard_index(given[0])
    elif op is aten.slice.Tensor:
        _guard_slice(given[0], fakes[0], nodes[0], again, size_of)
    return again


def _fixed(op: Any, arg: Any, fake: Any, node: Any, size_of: SizeOf) -> tuple[Any, Any]:
    """An argument with the values of its scalars, as fake and as node."""
    if isinstance(arg, list | tuple):
        pairs = [_fixed(op, a, f, n, size_of) for a, f, n in zip(arg, fake, node, strict=True)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    scalar = scalar_of(arg)
    if scalar is None:
        return fake, node
    if scalar.is_deferred and scalar.kind is int:
        return size_of(scalar), node
    return fake, scalar.specialise(f"the shape of {op.overloadpacket.__name__}")


def _guard_index(args: tuple[Any, ...]) -> None:
    index = scalar_of(args[2])
    if index is not None:
        index.apply("in_range", int(args[0].shape[args[1]])).specialise("an index")


def _guard_slice(args: tuple[Any, ...], fakes: list[Any], nodes: list[Any], again: list[Any], size_of: SizeOf) -> None:
    """A slice with symbolic bounds: its length is a guard."""
    tensor: Tensor = args[0]
    size: Any = tensor.shape[args[1] if len(args) > 1 else 0]
    bounds = [scalar_of(a) for a in args[2:4]]
    first = next((b for b in bounds if b is not None), None)
    if first is None:
        return
    if any(bound is not None and bound.is_deferred for bound in bounds):
        for i, bound in enumerate(bounds):
            if bound is not None:
                fakes[2 + i] = again[2 + i] = size_of(bound)
        return
    if (len(args) > 4 and args[4] != 1) or not isinstance(size, int) or not all(map(_is_bound, args[2:4])):
        for i, bound in enumerate(bounds):
            if bound is not None:
                nodes[2 + i] = again[2 + i] = bound.specialise("a slice")
        return
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    end = args[3] if len(args) > 3 and args[3] is not None else size
    operands = [scalar_of(a) or first.wrap_int(a) for a in (start, end)]
    operands[0].apply("slice_length", operands[1], size).specialise("the length of a slice")


def _is_bound(value: Any) -> bool:
    return value is None or isinstance(value, int) or scalar_of(value) is not None


def with_items(index: Any) -> Any:
    """An index in which bounds of slices that are tensors are scalars."""
    if isinstance(index, tuple):
        return tuple(map(with_items, index))
    if isinstance(index, slice) and any(isinstance(each, Tensor) for each in (index.start, index.stop, index.step)):
        bounds = (index.start, index.stop, index.step)
        return slice(*(each.item() if isinstance(each, Tensor) else each for each in bounds))
    return index


def moving_view(tensor: Tensor, index: Any) -> Tensor | None:
    """`tensor[index]` if the index contains a symbolic scalar; None if torch's own indexing will do.

    Takes integers and slices, one or a tuple: for those indexing is a view, one dimension after the other.
    """
    items = index if isinstance(index, tuple) else (index,)
    if all(scalar_of(item) is None for item in items):
        return None
    if not all(type(item) in (int, slice) or _is_index(item) for item in items) or len(items) > tensor.dim():
        return None
    dim = 0
    for item in items:
        if not isinstance(item, slice):
            tensor = tensor.select(dim, item)
            continue
        if item != slice(None):
            tensor = tensor[(slice(None),) * dim + (item,)]
        dim += 1
    return tensor


DROPOUTS = frozenset(
    {
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
        *(torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_),
    }
)


_OF_DROPOUT = [aten.bernoulli.p, aten.div.Scalar]
"""The operators of a dropout that take `1 - p`, in order."""


class RecordedNodes(Protocol):
    """The nodes of a trace."""

    def last(self) -> fx.Node | None: ...

    def since(self, before: fx.Node | None) -> list[fx.Node]: ...


def dropout(nodes: RecordedNodes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of dropout: on the CPU, where it is made of operators that take a number, with a
    symbolic probability."""
    given = dict(zip(("input", "p"), args, strict=False)) | kwargs
    p = scalar_of(given.get("p"))
    if p is None or p.hint is None or not 0 < p.hint < 1 or given["input"].device.type != "cpu":
        return func(*args, **kwargs)
    for side, bound in (("gt", 0), ("lt", 1)):
        p.apply(side, bound).specialise("the probability of a dropout")
    kept = p.wrap_int(1).apply("sub", p)
    symbol, before = kept.fx_arg(), nodes.last()
    plain = {"p": p.hint} if len(args) < 2 else {}
    result = func(*args[:1], *([p.hint] if len(args) > 1 else []), *args[2:], **kwargs | plain)
    made = nodes.since(before)
    takes = [node for node in made if node.args[1:] == (kept.hint,) and not node.kwargs]
    others = (each for node in made if node not in takes for each in (*node.args, *node.kwargs.values()))
    if made and ([node.target for node in takes] != _OF_DROPOUT or any(type(each) is float for each in others)):
        p.specialise("a float argument")
    elif made:
        for node in takes:
            node.args = (node.args[0], symbol)
    return result


def _is_index(item: Any) -> bool:
    scalar = scalar_of(item)
    return scalar is not None and scalar.kind is int
