"""Normalise collectives to the one form that bucketing works on, for graphs from any source.

    all_reduce(input=g, reduce_op='sum', group_name='0')     all_reduce(g, 'sum', '0')
    wait_tensor(wait_tensor(a))                              wait_tensor(a)
    meta["tensor_meta"] of ShapeProp, no `val`               meta["val"]: the same as a fake tensor

A StepGraph has that form already.  Cost: the collectives, and their neighbours where values are missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import PassError
from wholestep.ir.effects import is_wait
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import format_node
from wholestep.ir.rewrite_rules import apply_rules, rewrite_rule
from wholestep.torch_private.fake_tensors import FakeTensorMode, fake_tensor
from wholestep.torch_private.operators import OpOverload, schema_of

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@rewrite_rule(_WAIT)
def _waited_twice(node: fx.Node, tensor: Any) -> fx.Node | None:
    """Waiting for an arrived result does nothing: `make_fx` of a step that waits itself has two waits for each."""
    return tensor if isinstance(tensor, fx.Node) and is_wait(tensor.target) else None


def make_plain(graph: fx.Graph, collectives: Iterable[fx.Node]) -> None:
    """Give some collectives positional arguments, one wait each and known values."""
    for wait in graph.find_nodes(op="call_function", target=_WAIT):
        _by_position(wait)
    apply_rules(graph, [_waited_twice])
    found = list(collectives)
    for node in found:
        _by_position(node)
    _know_values(found)


def arguments_by_position(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in the order of the schema, up to the last one that is given."""
    if not kwargs:
        return args
    rest = list(schema_of(op).arguments)[len(args) :]
    while rest and rest[-1].name not in kwargs:
        rest.pop()
    return (*args, *(kwargs.get(a.name, a.default_value) for a in rest if not a.kwarg_only))


def _by_position(node: fx.Node) -> None:
    if node.kwargs and isinstance(node.target, OpOverload):
        args = arguments_by_position(node.target, node.args, dict(node.kwargs))
        if len(args) == len(node.args) + len(node.kwargs):
            node.args, node.kwargs = args, {}


def _know_values(collectives: list[fx.Node]) -> None:
    unknown = {
        node: None
        for collective in collectives
        for node in (*collective.all_input_nodes, collective, *collective.users)
        if node.meta.get("val") is None
    }
    if not unknown:
        return
    mode = FakeTensorMode()
    for node in unknown:
        value = _from_tensor_meta(node.meta.get("tensor_meta"), mode)
        if value is not None:
            node.meta["val"] = value
    for collective in collectives if len(collectives) > 1 else ():
        for node in (*collective.all_input_nodes, collective):
            if node.meta.get("val") is None:
                raise PassError(
                    f"{node.name} has no `val`: what {collective.name} communicates has no known size and dtype.",
                    fix="run FakeTensorProp or ShapeProp on the graph module before, or set node.meta['val'].",
                    node=format_node(node),
                    location=node_meta(node).location,
                )


def _from_tensor_meta(meta: Any, mode: FakeTensorMode) -> Tensor | list[Any] | None:
    """The fake for what ShapeProp records, which has no device; only sizes and dtypes matter here."""
    shape, stride, dtype = (getattr(meta, name, None) for name in ("shape", "stride", "dtype"))
    if shape is not None and stride is not None and dtype is not None:
        return fake_tensor(mode, shape, stride, dtype, torch.device("cpu"))
    if isinstance(meta, list | tuple) and meta:
        return [_from_tensor_meta(item, mode) for item in meta]
    return None


def known_or_noted(node: fx.Node) -> Any:
    """The value of a node, from `val` or from the record of ShapeProp."""
    value = node.meta.get("val")
    return value if value is not None else _from_tensor_meta(node.meta.get("tensor_meta"), FakeTensorMode())
