"""One real process in a modelled world: rank 0 of many, whose collectives complete after their modelled time.

    with modelled_world(64, machine):                     torch.distributed believes in 64 ranks
        mesh = init_device_mesh("cpu", (64,))             groups of any shape
        ...                                               train as usual: eager, DDP, fully_shard, wholestep

Every group has a queue: a collective begins when it is issued and those before it in its group are done, and takes what
`machine.collectives` says for its kind, its bytes and how its ranks lie on nodes. One thread completes them; it sleeps
in between, so communication costs no time of a core. Waiting is that of torch (`wait_tensor`, `Work.wait`).

Nothing arrives from the other ranks. Small results (counts, shapes, norms) are those of ranks that all hold what this
one holds; large ones are left as they were allocated, because copying them would be work that a network does not make.
So parameters are meaningless after a step: denormals are flushed, because arithmetic on them is slow.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore

from wholestep.simulate import GroupSpread, Machine

_SMALL = 1 << 14
"""Bytes up to which results are filled in."""


class _Clock:
    """Completes futures at their time."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Future[Any], Any]] = []
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def complete(self, at: float, result: Any) -> Future[Any]:
        done: Future[Any] = Future()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="modelled network")
                self._thread.start()
            heapq.heappush(self._due, (at, next(self._numbers), done, result))
            if self._due[0][2] is done:
                self._changed.notify()
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or (rest := self._due[0][0] - time.perf_counter()) > 0:
                    self._changed.wait(rest if self._due else None)
                _, _, done, result = heapq.heappop(self._due)
            done.set_result(result)


_clock = _Clock()


class ModelledGroup(dist.ProcessGroup):
    """A process group of which only this rank exists."""

    def __init__(self, rank: int, size: int, spread: GroupSpread, machine: Machine) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._spread, self._machine = rank, size, spread, machine
        self._free_at = 0.0
        self.issued: list[tuple[str, int, float]] = []
        """Kind, bytes that the rank puts in, and modelled seconds of each collective."""

    def getBackendName(self) -> str:
        return "modelled"

    @property
    def group_name(self) -> str:
        """The name under which torch registered the group."""
        return dist.distributed_c10d._world.pg_names[self]

    def _issue(self, kind: str, given: Sequence[Tensor], result: Any) -> dist.Work:
        size = sum(tensor.nbytes for tensor in given)
        seconds = self._machine.collectives.seconds(kind, self._spread, size)
        self.issued.append((kind, size, seconds))
        self._free_at = max(time.perf_counter(), self._free_at) + seconds
        return _create_work_from_future(_clock.complete(self._free_at, result))

    def _fill(self, output: Tensor, source: Tensor) -> None:
        if output.nbytes <= _SMALL:
            with torch.no_grad():
                copies = output.numel() // max(source.numel(), 1)
                output.view(-1).copy_(source.reshape(-1).repeat(max(copies, 1))[: output.numel()])

    # What a group is asked for, by the names of torch 2.11 to 2.13.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._issue("all_reduce", tensors, tensors)

    allreduce_coalesced = allreduce

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        self._fill(output, given)
        return self._issue("all_gather_into_tensor", [given], output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], given: list[Tensor], opts: Any = None) -> dist.Work:
        for output, source in zip(outputs, given, strict=True):
            self._fill(output, source)
        return self._issue("all_gather_into_tensor", given, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> dist.Work:
        for listed, source in zip(outputs, given, strict=True):
            for output in listed:
                self._fill(output, source)
        return self._issue("all_gather_into_tensor", given, outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        self._fill(output, given)
        return self._issue("reduce_scatter_tensor", [given], output)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, source in zip(outputs, given, strict=True):
            self._fill(output, source)
        return self._issue("reduce_scatter_tensor", given, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        self._fill(output, given)
        return self._issue("all_to_all_single", [given], output)

    alltoall_base = all_to_all_single

    def scatter(self, outputs: list[Tensor], given: list[list[Tensor]], opts: Any = None) -> dist.Work:
        for output, sources in zip(outputs, given, strict=True):
            output.copy_(sources[self._rank])
        return self._issue("broadcast", outputs, outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._issue("broadcast", tensors, tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._issue("all_reduce", [torch.zeros(1)], None)


@contextmanager
def modelled_world(ranks: int, machine: Machine) -> Iterator[None]:
    """This process as rank 0 of so many. Groups count as fake ones: wholestep waits for no other rank to agree."""
    plugins = dist.Backend._plugins

    def make(common: Any, _options: Any) -> ModelledGroup:
        members = tuple(common.global_ranks_in_group) or tuple(range(common.group_size))
        return ModelledGroup(common.group_rank, common.group_size, machine.spread(members), machine)

    before = plugins["FAKE"]
    plugins["FAKE"] = dist.Backend._BackendPlugin(make, True)
    torch.set_flush_denormal(True)
    try:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        yield
    finally:
        plugins["FAKE"] = before
        torch.set_flush_denormal(False)
        if dist.is_initialized():
            dist.destroy_process_group()
