"""Run trials in isolation: in a fork (CPU), in a worker process (CUDA does not survive a fork), or in this process.

A trial that dies is an outcome (the signal), and so is one that runs past its timeout: it is killed. Trials report when
the test itself begins: a process that dies earlier says nothing about the graph. A job travels to a worker without
graph objects: targets by name, nodes by number, predicates as `module:name`. The pickle of a `GraphModule` would not
do: it is retraced on arrival, which renames nodes, and edits refer to nodes by name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from wholestep.debug.minifier.search import Case, Edit
from wholestep.debug.minifier.trial import BROKEN, HANG, SIGNAL, Outcome, Recorded, TrialJob, perform
from wholestep.errors import MinifyError, invalid_value
from wholestep.ir.io.repro import importable
from wholestep.torch_private.fx_graphs import lazy_graph_module
from wholestep.torch_private.guard_checks import cuda_is_initialized
from wholestep.torch_private.operators import OpOverload, op_name

_NOTHING = Recorded({}, {}, ())
_STARTING = 120.0
"""Seconds that a worker may take to import torch."""
_ORPHAN = 5.0

TrialAnswer = tuple[Outcome, Recorded]


class Isolation(Protocol):
    """How trials are run."""

    def run(self, job: TrialJob) -> TrialAnswer: ...

    def close(self) -> None: ...


def place_for(isolate: str, job: TrialJob, timeout: float, log: Path) -> Isolation:
    """The isolation that `isolate` names; for "auto" the safest one that is possible."""
    if isolate == "auto":
        on_cuda = cuda_is_initialized()
        sendable = job.predicate is None or importable(job.predicate) is not None
        isolate = ("worker" if sendable else "none") if on_cuda else ("fork" if hasattr(os, "fork") else "none")
    if isolate == "fork":
        return Forked(timeout, log)
    if isolate == "worker":
        if job.predicate is not None and importable(job.predicate) is None:
            raise MinifyError(
                "the predicate cannot be imported by a worker process.",
                fix="define it at the top of a module (not of the script that runs), or use isolate='none'.",
            )
        return Worker(timeout)
    if isolate == "none":
        return Here()
    raise invalid_value("isolate", isolate, "use 'auto', 'fork', 'worker' or 'none'.")


class Here:
    """No isolation: a crash takes this process with it, and there is no timeout."""

    def run(self, job: TrialJob) -> TrialAnswer:
        """The outcome of one trial. RNG states are restored."""
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if cuda_is_initialized() else []):
            return perform(job, lambda recorded: None)

    def close(self) -> None:
        """Nothing is held."""


class Forked:
    """A fork for each trial: it has everything that this process has, and returns nothing but the outcome."""

    def __init__(self, timeout: float, log: Path) -> None:
        self._timeout = timeout
        self._log = log

    def run(self, job: TrialJob) -> TrialAnswer:
        """The outcome of one trial."""
        text, in_time, status = run_forked(lambda writing: perform_and_tell(job, writing), self._timeout, self._log)
        tested, _, answer = text.partition(b"\n")
        if answer:
            found: dict[str, Any] = json.loads(answer)
            outcome, recorded = found["outcome"], found["recorded"]
            outcome["types"] = tuple(outcome["types"])
            recorded["requires_grad"] = tuple(recorded["requires_grad"])
            return Outcome(**outcome), Recorded(**recorded)
        return _without_answer(in_time, status, bool(tested)), _recorded_before(tested)

    def close(self) -> None:
        """Nothing is held."""


def run_forked(work: Callable[[int], bytes], timeout: float, log: Path) -> tuple[bytes, bool, int]:
    """What a fork of this process writes and returns; True if it ended in time; its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with _quiet_fork():
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(work, writing, log)
    os.close(writing)
    try:
        text, in_time = _read_until(reading, time.monotonic() + timeout)
    finally:
        os.close(reading)
        status = _end(pid)
    return text, in_time, status


def apart(work: Callable[[], dict[str, Any]], timeout: float, log: Path) -> dict[str, Any] | Outcome:
    """What a function returns (as JSON) in a process of its own; in this one where it cannot fork."""
    if cuda_is_initialized() or not hasattr(os, "fork"):
        return work()
    text, in_time, code = run_forked(lambda _: json.dumps(work()).encode(), timeout, log)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    return _without_answer(in_time, code, tested=True)


def _without_answer(in_time: bool, code: int, tested: bool) -> Outcome:
    if not tested:
        return Outcome(BROKEN, message="ended before the test began")
    if not in_time:
        return Outcome(HANG)
    if code < 0:
        return Outcome(SIGNAL, message=signal.Signals(-code).name)
    return Outcome(SIGNAL, message=f"exit code {code}")


def _recorded_before(tested: bytes) -> Recorded:
    if not tested:
        return _NOTHING
    found = json.loads(tested)
    found["requires_grad"] = tuple(found["requires_grad"])
    return Recorded(**found)


def _child(work: Callable[[int], bytes], writing: int, log: Path) -> None:
    """The whole life of a fork. It ends by `_exit`: nothing of its parent is flushed, closed or removed."""
    code = 1
    try:
        os.setsid()  # a process group, to be killed with its own children
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.enable(file=file)
        torch.set_num_threads(1)  # the threads of the parent are not in a fork, and OpenMP would wait for them
        warnings.simplefilter("ignore")
        _write(writing, work(writing))
        code = 0
    except BaseException as error:  # a fork has no caller to raise to
        os.write(2, "".join(traceback.format_exception(error)).encode())
    finally:
        os._exit(code)


def perform_and_tell(job: TrialJob, writing: int) -> bytes:
    """The outcome as JSON; recorded values are reported before the test, in case it does not return."""

    def testing(recorded: Recorded) -> None:
        _write(writing, json.dumps(asdict(recorded)).encode() + b"\n")

    outcome, recorded = perform(job, testing)
    head = b"" if outcome.kind != BROKEN else b"\n"
    return head + json.dumps({"outcome": asdict(outcome), "recorded": asdict(recorded)}).encode()


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _read_until(file: int, end: float) -> tuple[bytes, bool]:
    """All bytes until the other side closes (True) or the deadline passes (False)."""
    pieces: list[bytes] = []
    while True:
        ready, _, _ = select.select([file], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return b"".join(pieces), False
        piece = os.read(file, 1 << 20)
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)


def _end(pid: int) -> int:
    """The exit code of a child that has closed its pipe or passed its deadline; negative: a signal."""
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Python 3.12 warns about forks of processes with threads; a held lock ends in the timeout."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"This process .*is multi-threaded, use of fork\(\)", DeprecationWarning)
        yield


class Worker:
    """One process for all trials, restarted after it died or was killed. For graphs on CUDA."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(self, job: TrialJob) -> TrialAnswer:
        """The outcome of one trial."""
        if self._process is None:
            self._start()
        assert self._pipe is not None
        packed = pack_job(job)
        self._pipe.send(packed)
        recorded, tested = _NOTHING, False
        end = time.monotonic() + self._timeout
        try:
            while self._pipe.poll(max(0.0, end - time.monotonic())):
                kind, value = self._pipe.recv()
                if kind == "answer":
                    answer: TrialAnswer = value
                    return answer
                recorded, tested = value, True
        except (EOFError, ConnectionResetError):
            return _without_answer(True, self._gone(), tested), recorded
        self.close()
        return _without_answer(False, 0, tested), recorded

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True, name="wholestep trials")
        self._process.start()
        theirs.close()
        if not self._pipe.poll(_STARTING):
            self.close()
            raise MinifyError(f"a worker process did not start within {_STARTING:g} s.", fix="use isolate='none'.")
        self._pipe.recv()

    def _gone(self) -> int:
        assert self._process is not None
        self._process.join(_ORPHAN)
        code = self._process.exitcode
        self.close()
        return 0 if code is None else code

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join(_ORPHAN)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    pipe.send("ready")
    while True:
        try:
            packed: Packed = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        answer = perform(unpack_job(packed), lambda recorded: pipe.send(("recorded", recorded)))
        pipe.send(("answer", answer))


@dataclass(frozen=True)
class _Ref:
    number: int


@dataclass(frozen=True)
class _Op:
    name: str


@dataclass(frozen=True)
class _Placed:
    tensor: Tensor
    device: str


@dataclass(frozen=True)
class Packed:
    """A job that can be sent."""

    nodes: list[tuple[Any, ...]]
    attributes: dict[str, Any]
    inputs: tuple[Any, ...]
    edit: Edit
    predicate: str | None
    values: str
    seed: int


def pack_job(job: TrialJob) -> Packed:
    """A job without graph objects. Tensors travel through the CPU."""
    number: dict[fx.Node, int] = {}
    lines = []
    attributes: dict[str, Any] = {}
    for node in job.case.gm.graph.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: _Ref(number[n]))  # type: ignore[arg-type, return-value]
        target = _Op(op_name(node.target)) if isinstance(node.target, OpOverload) else node.target
        lines.append((node.op, target, _sent(args), _sent(kwargs), node.name))
        number[node] = len(number)
        if node.op in ("get_attr", "call_module"):
            attributes[str(node.target)] = _attribute(job.case.gm, str(node.target))
    predicate = None if job.predicate is None else importable(job.predicate)
    inputs = tuple(_down(value) for value in job.case.inputs)
    return Packed(lines, attributes, inputs, job.edit, predicate, str(job.values), job.seed)


def _down(value: Any) -> Any:
    """Memory of a GPU belongs to its process, which may die: values travel through the CPU."""
    on_device = isinstance(value, Tensor) and value.device.type != "cpu"
    return _Placed(value.detach().cpu(), str(value.device)) if on_device else value


def _up(value: Any) -> Any:
    return value.tensor.to(value.device) if isinstance(value, _Placed) else value


def _sent(value: Any) -> Any:
    if isinstance(value, OpOverload):
        return _Op(op_name(value))
    if isinstance(value, list | tuple):
        return type(value)(_sent(item) for item in value)
    return {key: _sent(item) for key, item in value.items()} if isinstance(value, dict) else value


def unpack_job(packed: Packed) -> TrialJob:
    """The job again, in the process that runs it."""
    graph = fx.Graph()
    made: list[fx.Node] = []
    for op, target, args, kwargs, name in packed.nodes:
        target = _op(target.name) if isinstance(target, _Op) else target
        node = graph.create_node(op, target, _received(args, made), _received(kwargs, made), name)
        node.name = name
        made.append(node)
    root = nn.Module()
    for path, value in packed.attributes.items():
        _attach(root, path, value)
    case = Case(lazy_graph_module(root, graph, "Case"), tuple(_up(value) for value in packed.inputs))
    predicate = None if packed.predicate is None else imported(packed.predicate)
    return TrialJob(case, packed.edit, predicate, Path(packed.values), packed.seed)


def imported(name: str) -> Any:
    """What `module:path` names."""
    module, path = name.split(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _received(value: Any, made: list[fx.Node]) -> Any:
    if isinstance(value, _Ref):
        return made[value.number]
    if isinstance(value, _Op):
        return _op(value.name)
    if isinstance(value, list | tuple):
        return type(value)(_received(item, made) for item in value)
    return {key: _received(item, made) for key, item in value.items()} if isinstance(value, dict) else value


def _op(name: str) -> OpOverload:
    namespace, base = name.split("::")
    base, _, overload = base.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    return found


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _attach(root: nn.Module, path: str, value: Any) -> None:
    *parts, last = path.split(".")
    holder: Any = root
    for part in parts:
        if not hasattr(holder, part):
            setattr(holder, part, nn.Module())
        holder = getattr(holder, part)
    setattr(holder, last, value)
