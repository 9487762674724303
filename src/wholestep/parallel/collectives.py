"""Collectives on rows of tensors, put into the graph: each with exactly one wait.

The nodes are written directly, with results of the right shape: calling torch's operators on fakes takes a Python
autograd kernel per collective, which made a tenth of a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wholestep._torch_compat import FakeTensor, fake_tensor
from wholestep.capture.recorder import Recorder
from wholestep.parallel.axes import Axis

_comm = torch.ops._c10d_functional
aten = torch.ops.aten


def rows_per_rank(rows: int, size: int) -> int:
    """Rows of the largest shard; all but the last ranks have as many."""
    return -(-rows // size)


class Collectives:
    """Writes collectives of one trace."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def gather_rows(self, local: Tensor, axis: Axis, rows: int) -> Tensor:
        """The whole of a tensor that is sharded by rows along an axis. Shorter shards are padded on the way."""
        if axis.size == 1:
            return local
        padded = self._pad_rows(local, rows_per_rank(rows, axis.size))
        shape = (padded.shape[0] * axis.size, *padded.shape[1:])
        whole = self._call(_comm.all_gather_into_tensor.default, padded, (axis.size, axis.group), shape)
        return whole if shape[0] == rows else self._emit(aten.slice.Tensor, whole, (0, 0, rows), (rows, *shape[1:]))

    def scatter_rows(self, whole: Tensor, axis: Axis, op: str) -> Tensor:
        """This rank's rows of the sum (or mean) over the axis: as many on every rank, the last ones padded."""
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
        """What the first rank of the axis has; of a node, for use after the trace."""
        if axis.size == 1:
            return source
        emit, val = self._recorder.emit_function, source.meta["val"]
        start = emit(_comm.broadcast.default, (source, 0, axis.group), val)
        return emit(_comm.wait_tensor.default, (start,), val)

    def _call(self, op: Any, tensor: Tensor, arguments: tuple[Any, ...], shape: Sequence[int]) -> Tensor:
        recorder = self._recorder
        start = recorder.emit_function(op, (recorder.node_of(tensor), *arguments), self._fake(tensor, shape))
        done = self._fake(tensor, shape)
        recorder.values.register_result(done, recorder.emit_function(_comm.wait_tensor.default, (start,), done))
        return done

    def _pad_rows(self, tensor: Tensor, rows: int) -> Tensor:
        """With zero rows at the end."""
        missing = rows - tensor.shape[0]
        if not missing:
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        padding = [*[0, 0] * (tensor.dim() - 1), 0, missing]
        return self._emit(aten.constant_pad_nd.default, tensor, (padding, 0.0), (rows, *tensor.shape[1:]))

    def _emit(self, op: Any, tensor: Tensor, arguments: tuple[Any, ...], shape: Sequence[int]) -> Tensor:
        """An operator whose result is contiguous and that nobody writes into."""
        made = self._fake(tensor, shape)
        node = self._recorder.emit_function(op, (self._recorder.node_of(tensor), *arguments), made)
        self._recorder.values.register_result(made, node)
        return made

    def _fake(self, tensor: Tensor, shape: Sequence[Any]) -> Tensor:
        if not isinstance(tensor, FakeTensor) or any(type(size) is not int for size in shape):
            values = self._recorder.values
            before, values.paused = values.paused, True
            try:
                return tensor.new_empty(shape)
            finally:
                values.paused = before
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return fake_tensor(tensor.fake_mode, shape, stride[::-1], tensor.dtype, tensor.device)
