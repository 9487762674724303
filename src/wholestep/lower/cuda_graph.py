"""The device part of a step as one CUDA graph.

    call 1    runs the device part operator by operator: kernels are loaded and tuned, and the step counts
    call 2    records it (nothing runs), then replays the recording
    call 3..  the host part; batch and numbers into their buffers; replay

Parameters and state are updated where they are: a recording holds while their addresses do. A number that is a constant
of a recording (a weight decay) has a recording per value, up to a few. Results are copied out, because the next replay
writes over them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import CudaGraphError, CudaGraphWarning
from wholestep.ir.meta import node_meta
from wholestep.lower.host_and_device import NotRecordableError, Split, split_host_and_device

log = logging.getLogger("wholestep.lower")

_MOST_RECORDINGS = 8
Program = Callable[..., Any]
MakeProgram = Callable[[fx.GraphModule], Program]


class GraphPool:
    """Memory that all recordings of a step share: only one of them runs at a time."""

    def __init__(self) -> None:
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


@dataclass(eq=False)
class _Recording:
    graph: torch.cuda.CUDAGraph
    addresses: list[int]
    """Of the inputs that are not copied."""
    outputs: tuple[Any, ...]
    is_new: list[bool]
    """Whether an output is memory of the recording; the others are parameters, or views of them."""


def cuda_graph_step(
    gm: fx.GraphModule,
    batch: Sequence[int],
    pool: GraphPool,
    make_program: MakeProgram,
    *,
    must: bool,
) -> Program | None:
    """A function that runs a lowered graph by replaying its device part; None, with a warning, where it cannot be.

    `batch`: places of the inputs that are new tensors at each call. `must`: raise instead of a warning.
    """
    try:
        split = split_host_and_device(gm)
    except NotRecordableError as problem:
        if must:
            raise _error(problem) from None
        if any(_is_on_cuda(node) for node in gm.graph.find_nodes(op="placeholder")):
            warnings.warn(CudaGraphWarning(f"this step runs without a CUDA graph: {problem}."), stacklevel=2)
        return None
    return CudaGraphStep(split, frozenset(batch), pool, make_program, must=must)


def _is_on_cuda(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.is_cuda


def _error(problem: NotRecordableError) -> CudaGraphError:
    node = problem.node
    return CudaGraphError(
        f"this step cannot be one CUDA graph: {problem}.",
        fix='use cuda_graph="auto" to run it without, or keep that out of the step.',
        node="" if node is None else str(node.format_node()),
        location=None if node is None else node_meta(node).location,
    )


def _buffer_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class CudaGraphStep:
    """Runs a step whose device part is recorded."""

    def __init__(
        self,
        split: Split,
        batch: frozenset[int],
        pool: GraphPool,
        make_program: MakeProgram,
        *,
        must: bool,
    ) -> None:
        self._split = split
        self._host = make_program(split.host)
        self._device = make_program(split.device)
        self._pool = pool
        self._must = must
        self._copied = [i for i, place in enumerate(split.device_inputs) if place in batch]
        """Positions among the device inputs of tensors that are copied into buffers."""
        self._kept = [i for i, place in enumerate(split.device_inputs) if place not in batch]
        self._copied += range(len(split.device_inputs), len(split.device_inputs) + split.uploads)
        self._buffers: dict[Any, list[Tensor]] = {}
        """By the shapes of the batch: a step with dynamic sizes has a recording for each."""
        self._packs: list[Tensor] = []
        self._recordings: dict[tuple[Any, Any], _Recording] = {}
        """By the numbers that are constants of a recording, and the shapes of the batch."""
        self._warmed = False
        self._given_up = False

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        split = self._split
        lists, numbers, uploads, from_host = self._host(*map(inputs.__getitem__, split.host_inputs))
        tensors = [*map(inputs.__getitem__, split.device_inputs), *uploads]
        from_device = self._run(tensors, lists, numbers)
        found: dict[str, Sequence[Any]] = {"host": from_host, "device": from_device, "input": inputs}
        return tuple(value if kind == "value" else found[kind][value] for kind, value in split.outputs)

    def _run(self, tensors: list[Any], lists: Sequence[list[float]], numbers: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._given_up or not self._warmed:
            self._warmed = True
            packs = [
                torch.tensor(values, dtype=dtype).to(device)
                for values, (dtype, device, _) in zip(lists, self._split.packs, strict=True)
            ]
            found: tuple[Any, ...] = self._device(*tensors, *packs, *numbers)
            return found
        shapes = tuple((tensors[i].shape, tensors[i].stride()) for i in self._copied)
        buffers = self._fill(tensors, shapes, lists)
        addresses = list(map(Tensor.data_ptr, map(tensors.__getitem__, self._kept)))
        key = (numbers, shapes)
        recording = self._recordings.get(key)
        if recording is None or recording.addresses != addresses:
            made = self._record(tensors, buffers, key, addresses)
            if made is None:
                return self._run(tensors, lists, numbers)
            recording = made
        recording.graph.replay()
        return tuple(
            value.clone() if is_new else value
            for value, is_new in zip(recording.outputs, recording.is_new, strict=True)
        )

    def _fill(self, tensors: list[Any], shapes: tuple[Any, ...], lists: Sequence[list[float]]) -> list[Tensor]:
        """Put the batch and the numbers where the recording reads them; returns the buffers of the batch."""
        buffers = self._buffers.get(shapes)
        if buffers is None:
            buffers = self._buffers[shapes] = [_buffer_like(tensors[i]) for i in self._copied]
        for buffer, i in zip(buffers, self._copied, strict=True):
            buffer.copy_(tensors[i], non_blocking=True)
        if not self._packs and self._split.packs:
            self._packs = [torch.empty(n, dtype=dtype, device=device) for dtype, device, n in self._split.packs]
        for pack, values in zip(self._packs, lists, strict=True):
            # Ordinary memory: CUDA takes a few bytes of it along at once, so it may go while the copy is under way.
            pack.copy_(torch.tensor(values, dtype=pack.dtype), non_blocking=True)
        return buffers

    def _record(
        self, tensors: list[Any], buffers: list[Tensor], key: tuple[Any, Any], addresses: list[int]
    ) -> _Recording | None:
        numbers = key[0]
        if len(self._recordings) >= _MOST_RECORDINGS and key not in self._recordings:
            names = ", ".join(self._split.numbers)
            what = f"one of its numbers ({names})" if names else "the shape of its batch"
            self._give_up(f"{what} changes again and again")
            return None
        inputs = list(tensors)
        for buffer, i in zip(buffers, self._copied, strict=True):
            inputs[i] = buffer
        graph = torch.cuda.CUDAGraph()
        self._recordings.pop(key, None)
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool.handle, capture_error_mode="thread_local"):
                outputs = self._device(*inputs, *self._packs, *numbers)
        except RuntimeError as error:
            self._give_up(str(error).strip().splitlines()[0])
            return None
        state = {tensors[i].untyped_storage().data_ptr() for i in self._kept}
        is_new = [isinstance(v, Tensor) and v.untyped_storage().data_ptr() not in state for v in outputs]
        recording = _Recording(graph, addresses, outputs, is_new)
        self._recordings[key] = recording
        log.info("recorded a CUDA graph (%d so far)", len(self._recordings))
        return recording

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._recordings.clear()
        self._buffers.clear()
        if self._must:
            raise _error(NotRecordableError(reason))
        warnings.warn(CudaGraphWarning(f"this step goes on without a CUDA graph: {reason}."), stacklevel=2)
