"""Run one program in eager and as a compiled step, and say how it went.

equal       six calls, then one in eager, and every reachable value is the same to the bit after each
refused     a wholestep error with a code and a line of the program; nothing of the program's changed
raised      eager raised, and the compiled step raised the same at the same call (in the words of a meta kernel, maybe)

Everything else is a failure: `difference`, `error without a code`, `refusal without a line`, `refusal changed state`,
`no exception`, `hang`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import wholestep as ws
from fuzz.snapshot import freeze_world
from harness import Bits, Frame, differences

CALLS = 6
GOOD = ("equal", "refused", "raised")


class DeadlineError(BaseException):
    """The program ran for too long."""


@dataclass
class Outcome:
    """How a program went. `kind` and `key` together are what a shrunk program must show again."""

    kind: str
    key: str = ""
    detail: str = ""
    graphs: int = 0
    recompiles: list[str] = field(default_factory=list)
    code: str = ""
    eager_raised: bool = False

    def like(self, other: Outcome) -> bool:
        """Whether this is the same failure."""
        mine, its = ((o.kind, o.key, o.eager_raised) for o in (self, other))
        return mine == its

    @property
    def failed(self) -> bool:
        return self.kind not in GOOD

    def __str__(self) -> str:
        return f"{self.kind}: {self.key}" if self.key else self.kind


def run_program(source: str, *, lower: str = "eager", seconds: int = 30, calls: int = CALLS) -> Outcome:
    """Run a program both ways, within a deadline."""
    with tempfile.TemporaryDirectory(prefix="ws_fuzz_") as folder, warnings.catch_warnings(), _environment():
        warnings.simplefilter("ignore")
        file = os.path.join(folder, "program.py")
        with open(file, "w") as out:
            out.write(source)
        try:
            with deadline(seconds):
                return _compare(source, file, lower, calls)
        except DeadlineError:
            return Outcome("hang", f"more than {seconds} s")


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise DeadlineError in the main thread after a time."""

    def stop(signum: int, frame: Any) -> None:
        raise DeadlineError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Put modes and variables back that a program sets."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _reset_modes()


def _reset_modes() -> None:
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.autograd.set_detect_anomaly(False)
    for name in [name for name in os.environ if name.startswith("FUZZ_")]:
        del os.environ[name]


@contextlib.contextmanager
def loaded(source: str, file: str, name: str) -> Iterator[types.ModuleType]:
    """The program as a module with fresh objects, made from the same seed each time."""
    _reset_modes()
    torch.manual_seed(1234)
    random.seed(1234)
    np.random.seed(1234)
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    try:
        exec(compile(source, file, "exec"), vars(module))
        yield module
    finally:
        del sys.modules[name]


@dataclass
class _Played:
    frames: list[Frame]
    error: BaseException | None = None


def _play_eager(module: types.ModuleType, calls: int) -> _Played:
    played = _Played([])
    step = module.step
    if not callable(step):
        raise TypeError("no step")
    for i in range(calls + 1):
        args, kwargs = module.arguments(i), module.keywords(i)
        try:
            result = step(*args, **kwargs)
        except Exception as error:
            played.error = error
            return played
        played.frames.append(Frame(f"call {i + 1}", freeze_world(module, (result, args))))
        module.between(i)
    return played


def _compare(source: str, file: str, lower: str, calls: int) -> Outcome:
    try:
        with loaded(source, file, "fuzz_program") as module:
            eager = _play_eager(module, calls)
    except Exception as error:
        return Outcome("invalid", _key_of(error), _traceback(error))
    with loaded(source, file, "fuzz_program") as module:
        return _Compiled(module, file, lower, calls, eager).play()


class _Compiled:
    def __init__(self, module: types.ModuleType, file: str, lower: str, calls: int, eager: _Played) -> None:
        self.module, self.file, self.calls, self.eager = module, file, calls, eager
        self.close = lower != "eager"
        self.step = ws.compile(module.step, lower=lower)
        self.code = ""

    def outcome(self, kind: str, key: str = "", detail: str = "") -> Outcome:
        reasons = [str(reason) for reason in self.step.recompiles]
        raised = self.eager.error is not None
        return Outcome(kind, key, detail, len(self.step.graphs), reasons, self.code, raised)

    def play(self) -> Outcome:
        refused: ws.errors.WholestepError | None = None
        for i in range(self.calls + 1):
            args, kwargs = self.module.arguments(i), self.module.keywords(i)
            before = freeze_world(self.module, args)
            expected = self.eager.frames[i] if i < len(self.eager.frames) else None
            # A step that was refused is tried once more, at the last call: each try is a trace, or several.
            tried = i < self.calls and (refused is None or i == self.calls - 1)
            step = self.step if tried else self.module.step
            try:
                result = step(*args, **kwargs)
            except ws.errors.WholestepError as error:
                bad = self.judge_refusal(error, before, args)
                if bad is not None:
                    return bad
                refused = refused or error
                if getattr(self.module, "NOT_REPEATABLE", False):
                    break
                try:
                    result = self.module.step(*args, **kwargs)
                except Exception as own:
                    return self.judge_error(own, expected, i, "in eager, after a refusal")
            except Exception as error:
                return self.judge_error(error, expected, i, "" if i < self.calls else "in eager, after the calls")
            if expected is None:
                return self.outcome("no exception", _key_of(self.eager.error), f"eager raised at call {i + 1}")
            actual = Frame(expected.label, freeze_world(self.module, (result, args)))
            lines = self.differences(expected, actual)
            if lines:
                after = "" if refused is None else " after a refusal"
                detail = f"after {expected.label}:\n  " + "\n  ".join(lines[:12])
                return self.outcome("difference", f"in {_stem(lines[0])}{after}", detail)
            self.module.between(i)
        if refused is not None:
            return self.outcome("refused", f"{refused.code}", str(refused))
        return self.outcome("equal")

    def differences(self, expected: Frame, actual: Frame) -> list[str]:
        lines = differences(expected, actual)
        if not self.close or not lines:
            return lines
        return [line for line in lines if not _close_at(line, expected, actual)]

    def judge_refusal(self, error: ws.errors.WholestepError, before: dict[str, Any], args: Any) -> Outcome | None:
        self.code = error.code
        where = error.location
        if where is None or where.file != self.file:
            return self.outcome("refusal without a line", f"{error.code} {_key_of(error)}", _traceback(error))
        lines = differences(Frame("", before), Frame("", freeze_world(self.module, args)))
        if lines:
            detail = f"{error}\n" + "\n".join(lines[:12])
            return self.outcome("refusal changed state", f"{error.code} {_stem(lines[0])}", detail)
        return None

    def judge_error(self, error: Exception, expected: Frame | None, i: int, where: str) -> Outcome:
        own = self.eager.error
        same_type = expected is None and own is not None and type(own) is type(error)
        if same_type and (str(own) == str(error) or _from_a_meta_kernel(error)):
            return self.outcome("raised", _key_of(own))
        return self.outcome(
            "error without a code", f"{_key_of(error)} {where}".strip(), f"call {i + 1}\n{_traceback(error)}"
        )


_META_KERNELS = ("torch/_meta_registrations.py", "torch/_decomp/", "torch/_subclasses/", "torch/_refs/")


def _from_a_meta_kernel(error: BaseException) -> bool:
    """Whether torch's rules for shapes and dtypes raised it: they say what the kernel says in other words."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(part in file for file in files for part in _META_KERNELS)


def _close_at(line: str, expected: Frame, actual: Frame) -> bool:
    """Whether what a line says differs is within rounding."""
    path = next((p for p in expected.seen if line.startswith(p + ": ")), None)
    if path is None or path not in actual.seen:
        return False
    want, got = expected.seen[path], actual.seen[path]
    if isinstance(want, Bits) and isinstance(got, Bits) and want.shape == got.shape and want.dtype == got.dtype:
        if not want.value.is_floating_point():
            return False
        scale = max(1e-3, float(want.value.abs().max()) if want.value.numel() else 0.0)
        return torch.allclose(want.value, got.value, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)
    if isinstance(want, tuple) and isinstance(got, tuple) and want[0] == got[0] == "float":
        return abs(float(want[1]) - float(got[1])) <= 1e-3 * abs(float(want[1])) + 1e-5
    return False


def _key_of(error: BaseException | None) -> str:
    """The type and the first words of an exception, without what differs between programs."""
    text = str(error).strip().split("\n")[0]
    text = re.sub(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|\d+(\.\d+)?|`[^`]*`", "_", text)
    return f"{type(error).__name__}: {text[:80]}"


_PLACES = (
    ("modes", "modes"),
    ("rng", "rng."),
    ("gradient", ".grad"),
    ("parameter", "_parameters"),
    ("buffer", "_buffers"),
    ("optimizer state", ".state["),
    ("parameter group", "param_groups"),
    ("result", "result[0]"),
    ("batch", "result[1]"),
)


def _stem(line: str) -> str:
    """The kind of place that a difference is in."""
    path = line.split(": ")[0]
    return next((name for name, mark in _PLACES if mark in path), "Python state")


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-3000:]
