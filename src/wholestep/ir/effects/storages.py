"""The storages of a graph's values: each is allocated by one node and kept alive by every value in it.

a = mm(x, w)          a new storage
b = view(a)           the same storage
c = add_(a, b)        the same storage
d = split(a)          the same storage
e, f = var_mean(a)    two new storages
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects.nodes import stored_in
from wholestep.ir.io.node_values import tensor_bytes


@dataclass
class Storages:
    """The storages of a graph's values, by number."""

    size: list[int] = field(default_factory=list)
    """Bytes of each storage."""
    maker: list[fx.Node] = field(default_factory=list)
    """The node that allocates each storage."""
    seen_by: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """The storages that the value of a node lies in."""
    made_by: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """The storages that a node allocates; those of a list, one for each element."""


def find_storages(graph: fx.Graph, device: torch.device | None = None) -> Storages:
    """All storages of a graph; inputs and constants have their own. Those on another device count 0 bytes."""
    found = Storages()
    forms: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        source = node.args[0] if node.target is operator.getitem else None
        form = forms.get(source) if isinstance(source, fx.Node) else None
        if isinstance(form, list) and isinstance(node.args[1], int):
            forms[node] = form[node.args[1]]
            found.seen_by[node] = tuple(_flat(forms[node]))
        elif shared := stored_in(node):
            found.seen_by[node] = tuple(dict.fromkeys(p for s in shared for p in found.seen_by.get(s, ())))
        else:
            forms[node] = _make(found, node, node.meta.get("val"), device)
            found.seen_by[node] = found.made_by[node] = tuple(_flat(forms[node]))
    return found


def _make(storages: Storages, node: fx.Node, value: Any, device: torch.device | None) -> Any:
    """New storages for a value: a number, or a list of the form of the value; None where there is no tensor."""
    if isinstance(value, list | tuple):
        return [_make(storages, node, item, device) for item in value]
    if not isinstance(value, Tensor):
        return None
    storages.size.append(tensor_bytes(value) if device is None or value.device == device else 0)
    storages.maker.append(node)
    return len(storages.size) - 1


def _flat(form: Any) -> Iterator[int]:
    if isinstance(form, list):
        for item in form:
            yield from _flat(item)
    elif form is not None:
        yield form


def read_by(node: fx.Node) -> list[fx.Node]:
    """The values that must be in memory while a node runs: of a list whose element it takes, only that element."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and isinstance(source.meta.get("val"), list | tuple):
        return []
    return node.all_input_nodes
