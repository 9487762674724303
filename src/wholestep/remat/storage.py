"""Which memory the values of a graph are: pieces, each made by one node, seen by every node that is a view of it.

a = mm(x, w)          a new piece
b = view(a)           the same piece
c = add_(a, b)        the same piece
d = split(a)          the same piece
e, f = var_mean(a)    two new pieces
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import shared_inputs
from wholestep.ir.io.values import tensor_bytes
from wholestep.torch_private.operators import OpOverload, may_copy, op_name, shares_storage

_UNSAFE_SPLITS = frozenset({"aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"})


@dataclass
class Pieces:
    """The memory of a graph's values."""

    size: list[int] = field(default_factory=list)
    """Bytes of each piece."""
    maker: list[fx.Node] = field(default_factory=list)
    seen_by: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """The pieces that the value of a node is in."""
    made_by: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """The pieces that a node makes; those of a list, one for each element."""


def find_pieces(graph: fx.Graph, device: torch.device | None = None) -> Pieces:
    """All pieces of memory of a graph; inputs and constants are pieces of their own. Other devices count nothing."""
    found = Pieces()
    forms: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        source = node.args[0] if node.target is operator.getitem else None
        form = forms.get(source) if isinstance(source, fx.Node) else None
        if isinstance(form, list) and isinstance(node.args[1], int):
            forms[node] = form[node.args[1]]
            found.seen_by[node] = tuple(_flat(forms[node]))
        elif shared := _shared(node):
            found.seen_by[node] = tuple(dict.fromkeys(p for s in shared for p in found.seen_by.get(s, ())))
        else:
            forms[node] = _make(found, node, node.meta.get("val"), device)
            found.seen_by[node] = found.made_by[node] = tuple(_flat(forms[node]))
    return found


def _make(pieces: Pieces, node: fx.Node, value: Any, device: torch.device | None) -> Any:
    """New pieces for a value: a number, or a list of the form of the value; None where there is no tensor."""
    if isinstance(value, list | tuple):
        return [_make(pieces, node, item, device) for item in value]
    if not isinstance(value, Tensor):
        return None
    pieces.size.append(tensor_bytes(value) if device is None or value.device == device else 0)
    pieces.maker.append(node)
    return len(pieces.size) - 1


def _flat(form: Any) -> Iterator[int]:
    if isinstance(form, list):
        for item in form:
            yield from _flat(item)
    elif form is not None:
        yield form


def _shared(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the result of a node is, views and tensors that it writes into."""
    if node.op != "call_function":
        return []
    if is_unsafe_split(node):
        return node.all_input_nodes[:1]
    shared = shared_inputs(node)
    if shared and isinstance(node.target, OpOverload) and may_copy(node.target):
        return [source for source in shared if shares_storage(node.meta.get("val"), source.meta.get("val"))]
    return shared


def is_unsafe_split(node: fx.Node) -> bool:
    """Whether a node makes views that are said to be new tensors. Cells of recurrent networks write into them, and so
    into what they are parts of: that is no longer what they were made of, and they are not made again."""
    return isinstance(node.target, OpOverload) and op_name(node.target).split(".")[0] in _UNSAFE_SPLITS


def read_by(node: fx.Node) -> list[fx.Node]:
    """The values that a node needs in memory: of a list that it takes an element of, only that element, its own."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and isinstance(source.meta.get("val"), list | tuple):
        return []
    return node.all_input_nodes
