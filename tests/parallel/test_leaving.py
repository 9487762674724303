"""A rank that leaves the training loop early is named by the others within the deadline, however it left."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import weakref
from datetime import timedelta
from multiprocessing.synchronize import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import wholestep as ws
from cases.parts import train_step
from ranks import RanksFailed, run_ranks
from wholestep.ranks.channel import Channel

FAILURES = (ws.errors.PeerFailedError, ws.errors.DesyncError)


def new_event() -> Event:
    """For ranks that wait for each other without a collective."""
    return multiprocessing.get_context("fork").Event()


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


class Job:
    """A model under a plan, ready to train."""

    def __init__(self, plan: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.step = ws.compile(train_step, parallel=plan)

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self.step(self.model, self.optimizer, torch.ones(2, 6))


def exit_as_python_does(code: int) -> None:
    """What the interpreter does at its end; the harness' processes, which are forked, skip it."""
    finalizers: Any = weakref.finalize
    finalizers._registry.clear()  # the parent's: among them its temporary folders
    atexit._run_exitfuncs()
    os._exit(code)


def returns() -> None:
    exit_as_python_does(0)


def exits() -> None:
    try:
        sys.exit(3)
    except SystemExit:
        exit_as_python_does(3)


def raises() -> None:
    try:
        raise ValueError("the data loader of this rank")
    except ValueError:
        exit_as_python_does(1)


def ends_at_once() -> None:
    os._exit(5)


LEAVING = {"returns": returns, "exits": exits, "raises": raises, "ends at once": ends_at_once}


def leaves(rank: int, kind: Any, how: str) -> str:
    job = Job(kind(world_mesh(), deadline=4))
    job.run(3)
    if rank == 1:
        LEAVING[how]()
    with pytest.raises(FAILURES) as caught:
        job.run(2)
    return str(caught.value)


ENDS = [*((ws.Replicate, how) for how in LEAVING), pytest.param(ws.FullyShard, "returns", marks=pytest.mark.long)]


@pytest.mark.parametrize(("kind", "how"), ENDS)
def test_a_rank_whose_process_ends_is_named(kind: Any, how: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(leaves, 3, kind, how, deadline=60)
    assert set(failed.value.failures) == {1}
    for survivor in (0, 2):
        message = failed.value.results[survivor]
        assert "ank 1 " in message
        assert "call 4 of train_step" in message


def destroys_its_group(rank: int, raised: Event) -> str:
    job = Job(ws.Replicate(world_mesh(), deadline=4))
    job.run(3)
    if rank == 1:
        dist.destroy_process_group()
        raised.wait(40)  # it goes on, without the others
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the harness to destroy
        return ""
    with pytest.raises(FAILURES) as caught:
        job.run(2)
    raised.set()
    return str(caught.value)


def test_a_rank_that_destroys_its_group_is_named() -> None:
    first, _ = run_ranks(destroys_its_group, 2, new_event(), deadline=60)
    assert "Rank 1 has ended or destroyed its process group" in first
    assert "call 4 of train_step" in first


class Records(logging.Handler):
    """What is logged, and whether anything was."""

    def __init__(self, warned: Event | None = None) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.warned = warned

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if self.warned is not None:
            self.warned.set()


def expect_soon() -> None:
    """From now on. While graphs are captured, ranks may be further apart than that on a busy machine."""
    channel = Channel.current()
    assert channel is not None
    channel.deadline = 1.0


def breaks_out(rank: int, raised: Event) -> tuple[list[str], str]:
    """Rank 1 has one batch fewer and does something else; the backend waits for 6 seconds."""
    records = Records()
    logging.getLogger("wholestep").addHandler(records)
    group = dist.new_group(timeout=timedelta(seconds=6))
    job = Job(ws.Replicate(group))
    job.run(3)
    if rank == 1:
        raised.wait(40)
        return records.texts, ""
    expect_soon()
    with pytest.raises(FAILURES) as caught:
        job.run(1)
    raised.set()
    return records.texts, str(caught.value)


def test_a_rank_that_breaks_out_of_the_loop_and_lives_is_named() -> None:
    """In the log after the deadline, since it may only be late, and in the error when the backend gives up."""
    (warned, message), _ = run_ranks(breaks_out, 2, new_event(), deadline=60)
    for text in (" ".join(warned), message):
        assert "rank 1 is outside of any step (last: call 3 of train_step)" in text


def late(rank: int, warned: Event) -> list[str]:
    """A rank that evaluates for longer than the deadline is waited for, with a word in the log."""
    records = Records(warned)
    logging.getLogger("wholestep").addHandler(records)
    job = Job(ws.Replicate(world_mesh()))
    job.run(3)
    if rank == 1:
        assert warned.wait(40), "the other rank did not say that this one is late"
    else:
        expect_soon()
    job.run(3)
    return records.texts


def test_a_late_rank_is_waited_for() -> None:
    first, second = run_ranks(late, 2, new_event(), deadline=60)
    assert len([text for text in first if "rank 1 is outside of any step (last: call 3 of" in text]) == 1
    assert not second


class Interrupted(nn.Module):
    """Ctrl-C, or an error, in the middle of a capture on one rank."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.layer(x)


def interrupted(rank: int, error: BaseException) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = Interrupted(error if rank == 1 else None)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = ws.compile(train_step, parallel=ws.Replicate(world_mesh(), deadline=20))
    expected = type(error) if rank == 1 else FAILURES
    with pytest.raises(expected) as caught:
        step(model, optimizer, torch.ones(2, 6))
    model.error = None
    first = step(model, optimizer, torch.ones(2, 6))  # nothing was sent: the groups work, and all ranks go on
    return str(caught.value), bool(torch.isfinite(first))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2), RuntimeError("no memory")], ids=repr)
def test_an_interrupted_capture_is_told_to_the_other_ranks(error: BaseException) -> None:
    (message, can_continue), (_, also) = run_ranks(interrupted, 2, error, deadline=60)
    assert f"Rank 1 raised while compiling call 1 of train_step:\n    {type(error).__name__}" in message
    assert can_continue
    assert also
