"""Run a function on several ranks: forked processes, gloo, one thread each, and a deadline on everything.

    def rank_code(rank: int, shift: float) -> torch.Tensor:
        total = torch.full((2,), rank + shift)
        dist.all_reduce(total)
        return total

    first, second = run_ranks(rank_code, 2, 0.5, deadline=20)

Fork, not spawn: a rank starts in milliseconds and takes the function, its arguments and the random state of the test
as they are, without pickling. Results travel back by value. No wait is without an end: the group's own time-out and
the parent both hold the deadline, and a rank whose parent died ends itself.

Twice in some fifty runs of the whole suite a thread of gloo, not one of Python's, died with SIGSEGV while the rank did
arithmetic in Python, and once glibc aborted a rank because its heap was damaged (`malloc_consolidate(): unaligned
fastbin chunk detected`) while torch's own all-gather ran, eagerly. Millions of collectives without wholestep in the
process and hundreds of ranks with it did not repeat it, 28 runs of the file that aborted neither (three of them under
`glibc.malloc.check=3`), and valgrind sees no wrong access in them. Wholestep has no native code of its own, so these
ranks start once more; `CRASHES` keeps what was seen, and the end of the test run prints it. Any other crash, or a
second one, is a failure.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_ORPHAN_SECONDS = 10.0
_DUMP_SECONDS = 1.0

CRASHES: list[str] = []
"""Crashes in native code of torch, after which the ranks were started again."""


class RanksFailed(Exception):  # noqa: N818 (it is about several, so no Error of one)
    """Some ranks raised, died or hung: the text for each of them, and what the others returned."""

    def __init__(self, failures: dict[int, str], results: dict[int, Any]) -> None:
        super().__init__("\n".join(f"rank {rank} {text.rstrip()}" for rank, text in sorted(failures.items())))
        self.failures = failures
        self.results = results

    @property
    def in_native_code_of_torch(self) -> bool:
        """Whether a rank died in a thread that Python does not know, or was aborted by glibc inside of an operator.

        faulthandler calls no thread the current one if Python does not know the thread that crashed. An abort is shown
        in the thread that met the damage, which need not be the one that did it.
        """
        return any(
            ("Fatal Python error: Segmentation fault" in text and "Current thread" not in text)
            or ("Fatal Python error: Aborted" in text and "/torch/_ops.py" in text)
            for text in self.failures.values()
        )


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, deadline: float = 60.0) -> list[Any]:
    """What `fn(rank, *args)` returns on each rank, in order. Raises RanksFailed, naming the ranks that did not return.

    The default process group is there when `fn` starts. A rank keeps its connections until all ranks have returned; one
    that raises goes at once, so that its peers see it go.
    """
    try:
        return _run_once(fn, world_size, args, deadline)
    except RanksFailed as failed:
        if not failed.in_native_code_of_torch:
            raise
        CRASHES.append(str(failed))
    return _run_once(fn, world_size, args, deadline)


def _run_once(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], deadline: float) -> list[Any]:
    end = time.monotonic() + deadline
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        ranks = [_Rank(number, Path(folder) / f"stack{number}") for number in range(world_size)]
        try:
            for each in ranks:
                each.start(fn, args, world_size, Path(folder) / "rendezvous", deadline)
            _receive_until(ranks, end)
            _dump_stacks([each for each in ranks if each.running])
        finally:
            for each in ranks:
                each.dismiss()
            for each in ranks:
                each.end()
        failures = {each.number: each.failure(deadline) for each in ranks if not each.returned}
        results = {each.number: each.result for each in ranks if each.returned}
    if failures:
        raise RanksFailed(failures, results)
    return [results[number] for number in range(world_size)]


@dataclass
class _Rank:
    """One process as its parent sees it."""

    number: int
    stack: Path
    process: BaseProcess | None = None
    pipe: Connection | None = None
    returned: bool = False
    result: Any = None
    raised: str | None = None

    @property
    def running(self) -> bool:
        return self.pipe is not None and not self.returned

    def start(self, fn: Callable[..., Any], args: tuple[Any, ...], size: int, meet: Path, deadline: float) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        code = (fn, args, self.number, size, meet, self.stack, theirs, self.pipe, deadline)
        self.process = context.Process(target=_rank_main, args=code, daemon=True, name=f"rank {self.number}")
        with fork_from_threads():
            self.process.start()
        theirs.close()

    def receive(self) -> None:
        """Take the one message that a rank sends; the end of the pipe instead means that it died."""
        assert self.pipe is not None
        try:
            kind, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.pipe = None
            return
        if kind == "returned":
            self.returned, self.result = True, value
        else:
            self.pipe, self.raised = None, value

    def dismiss(self) -> None:
        """Let a rank that returned take its connections down; kill one that runs."""
        if self.running and self.process is not None:
            self.process.kill()
        elif self.pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                self.pipe.send_bytes(b"all have returned")

    def end(self) -> None:
        """The process is gone after this, whatever it does."""
        if self.process is not None:
            self.process.join(_ORPHAN_SECONDS)
            if self.process.is_alive():
                self.process.kill()
            self.process.join()

    def failure(self, deadline: float) -> str:
        if self.raised is not None:
            return f"raised:\n{self.raised}"
        if self.running:
            stack = self.stack.read_text() if self.stack.exists() else ""
            return f"did not return within {deadline:g} s and was killed:\n{stack or 'no stack'}"
        code = None if self.process is None else self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        stack = self.stack.read_text() if self.stack.exists() else ""
        return f"died without returning ({how})" + (f":\n{stack}" if stack else "")


def _receive_until(ranks: list[_Rank], end: float) -> None:
    while waiting := {each.pipe: each for each in ranks if each.running}:
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            waiting[pipe].receive()


def _dump_stacks(ranks: list[_Rank]) -> None:
    """Ask hanging ranks where they are; faulthandler answers even when Python does not run."""
    for each in ranks:
        if each.process is not None and each.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.process.pid, signal.SIGUSR1)
    end = time.monotonic() + _DUMP_SECONDS
    while time.monotonic() < end and any(not each.stack.exists() or not each.stack.stat().st_size for each in ranks):
        time.sleep(0.02)
    if ranks:
        time.sleep(0.05)  # the last line of a stack that has begun


@contextlib.contextmanager
def fork_from_threads() -> Iterator[None]:
    """Python 3.12 warns when a process with threads forks: a lock that another thread holds stays locked in the child.

    The other thread here is the one by which a pytest-xdist worker talks to its controller, which a rank never uses;
    torch has one thread (conftest.py). If a lock is held after all, the deadline turns it into a failure.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"This process .*is multi-threaded, use of fork\(\)", DeprecationWarning)
        yield


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    meet: Path,
    stack: Path,
    pipe: Connection,
    parents_end: Connection,
    deadline: float,
) -> None:
    parents_end.close()
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        faulthandler.disable()  # handlers that a package put in its place are replaced
        faulthandler.enable(file=file, all_threads=True)
        faulthandler.dump_traceback_later(deadline + _ORPHAN_SECONDS, exit=True, file=file)
        try:
            gc.freeze()  # what the parent made is not looked at: every page that is would be copied
            torch.set_num_threads(1)
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "gloo", f"file://{meet}", timedelta(seconds=deadline), rank=rank, world_size=world_size
            )
            message = pickle.dumps(("returned", fn(rank, *args)))
        except BaseException:
            pipe.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
            return
        pipe.send_bytes(message)
        with contextlib.suppress(EOFError, ConnectionResetError):
            pipe.recv_bytes()  # comes when all ranks have returned
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
