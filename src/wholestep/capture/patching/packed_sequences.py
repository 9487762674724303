"""`pack_padded_sequence`, `pad_packed_sequence` and RNNs over packed sequences, as operators of the graph.

    pack_padded_sequence(x, lengths)    data, batch_sizes = wholestep.pack(x, lengths)
    nn.GRU()(packed)                    out, h = wholestep.packed_rnn("gru", data, batch_sizes, ..)
    pad_packed_sequence(packed)         padded, lengths = wholestep.pad(data, batch_sizes, ..)

The number of rows and of time steps are values of the graph. `batch_sizes[0]` is the size of the batch.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import UnsupportedError
from wholestep.ir.meta import user_location
from wholestep.torch_private.modules_and_optimizers import packing_functions
from wholestep.torch_private.packed_sequences import packed_operators

_NEAR = 12


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        data, batch_sizes = packed_operators().pack(x, lengths, batch_first)
        ctx.mark_non_differentiable(batch_sizes)
        ctx.save_for_backward(batch_sizes)
        ctx.size, ctx.batch_first = x.shape, batch_first
        return data, batch_sizes

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        return packed_operators().pack_backward(grad, list(ctx.size), *ctx.saved_tensors, ctx.batch_first), None, None


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        padded, lengths = packed_operators().pad(data, *settings)
        ctx.mark_non_differentiable(lengths)
        ctx.save_for_backward(lengths)
        ctx.rows, ctx.batch_first = data.shape[0], settings[2]
        return padded, lengths

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        found = packed_operators().pad_backward(grad, *ctx.saved_tensors, ctx.rows, ctx.batch_first)
        return found, None, None, None, None, None


class _Rnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: str, states: int, settings: tuple[Any, ...], batch_sizes: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        data, hx, weights = given[0], list(given[1 : 1 + states]), list(given[1 + states :])
        ctx.save_for_backward(batch_sizes, *given)
        ctx.set_materialize_grads(False)
        ctx.call = kind, states, settings
        return tuple(packed_operators().packed_rnn(kind, data, batch_sizes, hx, weights, *settings))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (kind, states, settings), (batch_sizes, *given) = ctx.call, ctx.saved_tensors
        needed = list(ctx.needs_input_grad[4:])
        hx, weights = given[1 : 1 + states], given[1 + states :]
        found = iter(
            packed_operators().packed_rnn_backward(
                kind, list(grads), given[0], batch_sizes, hx, weights, *settings, needed
            )
        )
        return None, None, None, None, *(next(found) if need else None for need in needed)


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    return _Pack.apply(x, lengths, batch_first)  # type: ignore[no-untyped-call]


def _pad(data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, length: Any) -> Any:
    return _Pad.apply(data, batch_sizes, int(batch_sizes[0]), batch_first, float(value), length)  # type: ignore[no-untyped-call]


def _rnn(kind: str, *args: Any) -> Any:
    data, batch_sizes, hx, weights, bias, layers, dropout, train, bidirectional = args
    if torch.is_autocast_enabled(data.device.type):
        raise UnsupportedError(
            "an RNN over a packed sequence runs under autocast.",
            fix="put torch.autocast(..., enabled=False) around the RNN, with its input in float32.",
            location=user_location(),
        )
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    if not (dropout and train and layers > 1):
        out, *last = _layers(kind, data, batch_sizes, states, weights, bias, layers, bidirectional)
        return (out, *last)
    ways = 2 if bidirectional else 1
    per_layer = len(weights) // layers
    finals = []
    for i in range(layers):
        own = tuple(each[i * ways : (i + 1) * ways] for each in states)
        chosen = weights[i * per_layer : (i + 1) * per_layer]
        data, *last = _layers(kind, data, batch_sizes, own, chosen, bias, 1, bidirectional)
        finals.append(last)
        if i < layers - 1:
            data = torch.dropout(data, dropout, True)
    return (data, *(torch.cat(each) for each in zip(*finals, strict=True)))


def _layers(kind: str, data: Any, batch_sizes: Any, states: Any, weights: Any, *settings: Any) -> Any:
    return _Rnn.apply(kind, len(states), settings, batch_sizes, data, *states, *weights)  # type: ignore[no-untyped-call]


_RNNS = {getattr(torch, kind): kind for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
_OTHERS: dict[Any, Any] = dict(zip(packing_functions(), (_pack, _pad), strict=True))
PACKED = frozenset({*_RNNS, *_OTHERS})


def packed_call(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of a function of torch on packed sequences; None for other functions and calls."""
    if func in _OTHERS:
        return _OTHERS[func](*args)
    kind = _RNNS.get(func)
    is_packed = kind is not None and len(args) == 9 and isinstance(args[3], list | tuple)
    return _rnn(kind, *args) if kind is not None and is_packed else None


def is_asked_by_rnn() -> bool:
    """Whether the forward of an RNN of torch asks for a value."""
    frame, near = sys._getframe(1), 0
    while frame.f_back is not None and near < _NEAR:
        if frame.f_code.co_filename == torch.nn.modules.rnn.__file__:
            return True
        frame, near = frame.f_back, near + 1
    return False


def batch_of_packed(node: fx.Node) -> int | None:
    """The size of the batch, if a node is `batch_sizes[0]` of a sequence that the step packed."""
    if node.target is not torch.ops.aten.select.int or node.args[1:] != (0, 0):
        return None
    item = node.args[0]
    packed = item.args[0] if isinstance(item, fx.Node) and item.target is operator.getitem else None
    if not isinstance(packed, fx.Node) or packed.target is not packed_operators().pack.default:
        return None
    size = packed.args[1].meta["val"].shape[0]  # type: ignore[union-attr]
    return size if type(size) is int else None
