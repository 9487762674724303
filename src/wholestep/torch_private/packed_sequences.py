"""Operators for packed sequences: those of torch read the lengths in C++, where the fakes of a trace have none.

    data, sizes = pack(x, lengths)             data [u0, ..], sizes [u1]: rows and time steps that the lengths decide
    out, h = packed_rnn("gru", data, sizes, ..)
    padded, lengths = pad(out, sizes)

Each runs torch's own, so one graph is right for all lengths, to the bit. The backward of an RNN runs its forward again
and differentiates it. Tried on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from wholestep.torch_private.autograd import recording_again

NAMESPACE = "wholestep_packed"
_SCHEMAS = {
    "pack": "(Tensor input, Tensor lengths, bool batch_first) -> (Tensor, Tensor)",
    "pack_backward": "(Tensor grad, SymInt[] size, Tensor batch_sizes, bool batch_first) -> Tensor",
    "pad": "(Tensor data, Tensor batch_sizes, SymInt batch, bool batch_first, float value, SymInt length)"
    " -> (Tensor, Tensor)",
    "pad_backward": "(Tensor grad, Tensor lengths, SymInt rows, bool batch_first) -> Tensor",
    "packed_rnn": "(str kind, Tensor data, Tensor batch_sizes, Tensor[] hx, Tensor[] weights, bool bias, int layers, "
    "bool bidirectional) -> Tensor[]",
    "packed_rnn_backward": "(str kind, Tensor?[] grads, Tensor data, Tensor batch_sizes, Tensor[] hx, Tensor[] weights,"
    " bool bias, int layers, bool bidirectional, bool[] needed) -> Tensor[]",
}


@cache
def packed_operators() -> Any:
    """The namespace of the operators, which the first call defines."""
    functions: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "pack": (_pack, _fake_pack),
        "pack_backward": (_pack_backward, _fake_pack_backward),
        "pad": (_pad, _fake_pad),
        "pad_backward": (_pad_backward, _fake_pad_backward),
        "packed_rnn": (_packed_rnn, _fake_packed_rnn),
        "packed_rnn_backward": (_packed_rnn_backward, _fake_packed_rnn_backward),
    }
    for name, (kernel, fake) in functions.items():
        tags = (torch.Tag.dynamic_output_shape,) if name == "pack" else ()
        torch.library.define(f"{NAMESPACE}::{name}", _SCHEMAS[name], tags=tags)
        torch.library.impl(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd")(kernel)
        torch.library.register_fake(f"{NAMESPACE}::{name}")(fake)
    return getattr(torch.ops, NAMESPACE)


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    packed: tuple[Tensor, Tensor] = torch.ops.aten._pack_padded_sequence(input, lengths, batch_first)
    return packed


def _fake_pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    steps = input.shape[1 if batch_first else 0]
    rows, context = steps * lengths.shape[0], torch.library.get_ctx()
    count = context.new_dynamic_size(min=1, max=rows if type(rows) is int else None)
    longest = context.new_dynamic_size(min=1, max=steps if type(steps) is int else None)
    return input.new_empty((count, *input.shape[2:])), lengths.new_empty((longest,))


def _pack_backward(grad: Tensor, size: list[int], batch_sizes: Tensor, batch_first: bool) -> Tensor:
    result: Tensor = torch.ops.aten._pack_padded_sequence_backward(grad, size, batch_sizes, batch_first)
    return result.contiguous()


def _fake_pack_backward(grad: Tensor, size: list[int], batch_sizes: Tensor, batch_first: bool) -> Tensor:
    return grad.new_empty(size)


def _pad(
    data: Tensor, batch_sizes: Tensor, batch: int, batch_first: bool, value: float, length: int
) -> tuple[Tensor, Tensor]:
    padded, lengths = torch.ops.aten._pad_packed_sequence(data, batch_sizes, batch_first, value, length)
    return padded.contiguous(), lengths


def _fake_pad(
    data: Tensor, batch_sizes: Tensor, batch: int, batch_first: bool, value: float, length: int
) -> tuple[Tensor, Tensor]:
    sizes = (batch, length) if batch_first else (length, batch)
    return data.new_empty((*sizes, *data.shape[1:])), batch_sizes.new_empty((batch,))


def _pad_backward(grad: Tensor, lengths: Tensor, rows: int, batch_first: bool) -> Tensor:
    return _pack(grad, lengths, batch_first)[0]


def _fake_pad_backward(grad: Tensor, lengths: Tensor, rows: int, batch_first: bool) -> Tensor:
    return grad.new_empty((rows, *grad.shape[2:]))


def _packed_rnn(
    kind: str,
    data: Tensor,
    batch_sizes: Tensor,
    hx: list[Tensor],
    weights: list[Tensor],
    bias: bool,
    layers: int,
    bidirectional: bool,
) -> list[Tensor]:
    state = tuple(hx) if kind == "lstm" else hx[0]
    run = getattr(torch, kind)
    return list(run(data, batch_sizes, state, weights, bias, layers, 0.0, True, bidirectional))


def _fake_packed_rnn(
    kind: str,
    data: Tensor,
    batch_sizes: Tensor,
    hx: list[Tensor],
    weights: list[Tensor],
    bias: bool,
    layers: int,
    bidirectional: bool,
) -> list[Tensor]:
    width = hx[0].shape[2] * (2 if bidirectional else 1)
    return [data.new_empty((data.shape[0], width)), *(each.new_empty(each.shape) for each in hx)]


def _packed_rnn_backward(
    kind: str,
    grads: list[Tensor | None],
    data: Tensor,
    batch_sizes: Tensor,
    hx: list[Tensor],
    weights: list[Tensor],
    bias: bool,
    layers: int,
    bidirectional: bool,
    needed: list[bool],
) -> list[Tensor]:
    given = [data, *hx, *weights]
    with recording_again():
        fresh = [each.detach().requires_grad_(need) for each, need in zip(given, needed, strict=True)]
        states = fresh[1 : 1 + len(hx)]
        results = _packed_rnn(kind, fresh[0], batch_sizes, states, fresh[1 + len(hx) :], bias, layers, bidirectional)
        used = [i for i, grad in enumerate(grads) if grad is not None]
        wanted = [each for each in fresh if each.requires_grad]
        found = torch.autograd.grad(
            [results[i] for i in used], wanted, [grads[i] for i in used], materialize_grads=True
        )
    return [torch.empty_like(each).copy_(grad) for each, grad in zip(wanted, found, strict=True)]


def _fake_packed_rnn_backward(
    kind: str,
    grads: list[Tensor | None],
    data: Tensor,
    batch_sizes: Tensor,
    hx: list[Tensor],
    weights: list[Tensor],
    bias: bool,
    layers: int,
    bidirectional: bool,
    needed: list[bool],
) -> list[Tensor]:
    given = [data, *hx, *weights]
    return [torch.empty_like(each) for each, need in zip(given, needed, strict=True) if need]
