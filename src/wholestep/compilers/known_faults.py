"""Where torch's own fake kernels say something else than its kernels do, in ordinary models: no news to anybody."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from wholestep.compilers.check_values import Difference

aten = torch.ops.aten

_WORKSPACES: dict[Any, tuple[int, ...]] = {
    aten.mkldnn_rnn_layer.default: (3,),
    aten._scaled_dot_product_efficient_attention.default: (2, 3),
    aten._scaled_dot_product_flash_attention.default: (6, 7),
    aten._scaled_dot_product_cudnn_attention.default: (6, 7),
}
"""Results that only the operator's own backward reads, and whose size the fake kernels do not know; of attention on a
GPU the seed and the offset of its dropout, which are on the CPU unless kernels are being recorded."""

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
"""Of half-precision inputs with float32 weights (autocast) kernels on the CPU keep these in float32."""

_UNSAFE = (
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
    aten._unsafe_view.default,
)
"""Views that say they are none, so that autograd lets them be written (cells of recurrent networks use them)."""


_BACKWARDS = (
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)


def unknown_places(node: fx.Node) -> tuple[int, ...]:
    """Places of results of a node that metadata knows nothing about."""
    source, index = _part_of(node)
    if source is not None:
        return (0,) if index in _WORKSPACES.get(source.target, ()) else ()
    return _WORKSPACES.get(node.target, ())


def is_known(node: fx.Node, difference: Difference) -> bool:
    """Whether a difference is one that torch has everywhere."""
    if node.op == "placeholder" and difference.what == "device":
        # A seed that a forward kept, on its way to the backward.
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
    """The node with several results that a node takes one of, and which."""
    source, index = (*node.args, None, None)[:2]
    return (source, index) if node.target is operator.getitem and isinstance(source, fx.Node) else (None, None)
