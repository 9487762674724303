"""`Collectives`: adds collectives on rows of tensors to the graph of a trace, each with exactly one wait.

Nodes are created directly, with fake results of the right shape. Calling torch's operators on fake tensors runs a
Python autograd kernel per collective, which took a tenth of the time of a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.trace_protocol import TraceRecorder
from wholestep.parallel.plan import Axis
from wholestep.torch_private.fake_tensors import FakeTensor, fake_tensor

_comm = torch.ops._c10d_functional
aten = torch.ops.aten


def rows_per_rank(rows: int, size: int) -> int:
    """Rows of the largest shard. Only the last ranks may have fewer."""
    return -(-rows // size)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(stride[::-1])


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order of dimensions."""
    step = 1
    for dim in reversed(_outermost_first(shape, stride)):
        if stride[dim] != step:
            return False
        step *= shape[dim]
    return 0 not in shape


def _outermost_first(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions with more than one element, by descending stride."""
    return sorted((d for d, size in enumerate(shape) if size != 1), key=lambda d: -stride[d])


class Collectives:
    """Adds collectives to the graph of one trace."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def gather_rows(self, local: Tensor, axis: Axis, rows: int) -> Tensor:
        """The unsharded tensor of a tensor that is sharded by rows along an axis. Shorter shards are padded first."""
        if axis.size == 1:
            return local
        padded = self._pad_rows(local, rows_per_rank(rows, axis.size))
        shape = (padded.shape[0] * axis.size, *padded.shape[1:])
        whole = self._call(_comm.all_gather_into_tensor.default, padded, (axis.size, axis.group), shape)
        return whole if shape[0] == rows else self._emit(aten.slice.Tensor, whole, (0, 0, rows), (rows, *shape[1:]))

    def scatter_rows(self, whole: Tensor, axis: Axis, op: str) -> Tensor:
        """This rank's rows of the sum (or mean) over the axis; all ranks get the same number, the last ones padded."""
        if axis.size == 1:
            return whole
        each = rows_per_rank(whole.shape[0], axis.size)
        padded = self._pad_rows(whole, each * axis.size)
        shape = (each, *padded.shape[1:])
        return self._call(_comm.reduce_scatter_tensor.default, padded, (op, axis.size, axis.group), shape)

    def all_reduce(self, tensor: Tensor, axis: Axis, op: str) -> Tensor:
        """The sum, mean or maximum over the axis, the same on all its ranks."""
        if axis.size == 1:
            return tensor
        return self._call(_comm.all_reduce.default, tensor, (op, axis.group), tensor.shape)

    def broadcast(self, source: fx.Node, axis: Axis) -> fx.Node:
        """Broadcast the value of a node from the first rank of the axis; for use after the trace."""
        if axis.size == 1:
            return source
        emit, val = self._recorder.emit_function, source.meta["val"]
        start = emit(_comm.broadcast.default, (source, 0, axis.group), val)
        return emit(_comm.wait_tensor.default, (start,), val)

    def with_stride(self, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        """Copy a contiguous tensor into a layout with other dense strides.

        transposed = permute(tensor, order); copied = clone(transposed); as_strided(copied, shape, stride)
        """
        shape = tuple(tensor.shape)
        if stride == contiguous_stride(shape):
            return tensor
        order = _outermost_first(shape, stride)
        if order != sorted(order):
            order += [d for d in range(len(shape)) if shape[d] == 1]
            permuted = tuple(shape[d] for d in order)
            base = contiguous_stride(shape)
            tensor = self._emit(aten.permute.default, tensor, (order,), permuted, tuple(base[d] for d in order))
            tensor = self._emit(aten.clone.default, tensor, (), permuted, memory_format=torch.contiguous_format)
        # Strides of dimensions with one element are exact, too: torch recognises channels last by them.
        return self._emit(aten.as_strided.default, tensor, (list(shape), list(stride), 0), shape, stride)

    def _call(self, op: Any, tensor: Tensor, arguments: tuple[Any, ...], shape: Sequence[int]) -> Tensor:
        recorder = self._recorder
        start = recorder.emit_function(op, (recorder.node_of(tensor), *arguments), self._fake(tensor, shape))
        done = self._fake(tensor, shape)
        recorder.values.register_result(done, recorder.emit_function(_comm.wait_tensor.default, (start,), done))
        return done

    def _pad_rows(self, tensor: Tensor, rows: int) -> Tensor:
        """Append zero rows."""
        missing = rows - tensor.shape[0]
        if not missing:
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        if isinstance(tensor, FakeTensor) and tensor.stride() != contiguous_stride(tensor.shape):
            # Padding keeps the memory format of its input, even if only strides of size-1 dimensions show it.
            tensor = self._emit(aten.clone.default, tensor, (), tensor.shape, memory_format=torch.contiguous_format)
        padding = [*[0, 0] * (tensor.dim() - 1), 0, missing]
        return self._emit(aten.constant_pad_nd.default, tensor, (padding, 0.0), (rows, *tensor.shape[1:]))

    def _emit(
        self,
        op: Any,
        tensor: Tensor,
        arguments: tuple[Any, ...],
        shape: Sequence[int],
        stride: tuple[int, ...] | None = None,
        **options: Any,
    ) -> Tensor:
        """Add an operator whose result is not written to later; it is contiguous unless `stride` is set."""
        made = self._fake(tensor, shape, stride)
        node = self._recorder.nodes.create(op, (self._recorder.node_of(tensor), *arguments), options, made)
        self._recorder.values.register_result(made, node)
        return made

    def _fake(self, tensor: Tensor, shape: Sequence[Any], stride: tuple[int, ...] | None = None) -> Tensor:
        if not isinstance(tensor, FakeTensor) or any(type(size) is not int for size in shape):
            values = self._recorder.values
            before, values.paused = values.paused, True
            try:
                return tensor.new_empty(shape) if stride is None else tensor.new_empty_strided(shape, stride)
            finally:
                values.paused = before
        return fake_tensor(
            tensor.fake_mode, shape, list(stride or contiguous_stride(shape)), tensor.dtype, tensor.device
        )
