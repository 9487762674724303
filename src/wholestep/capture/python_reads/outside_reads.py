"""What user code reads from outside of the process while a step is traced: environment variables and files.

Reading them again has no effects, so they are guarded: the value of a variable, the size and time of a file, the
answer of `os.getcwd()` or of an event. What cannot be read twice (random bytes of the system, other processes, the
keyboard) and what is written is refused.
"""

from __future__ import annotations

import builtins
import copy
import decimal
import functools
import gc
import io
import locale
import logging
import multiprocessing.synchronize
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from typing import Any, NoReturn

import numpy
import torch

from wholestep.capture.objects.user_code import called_by_user, caller_location, is_user_code
from wholestep.errors import RandomStateError, SideEffectError
from wholestep.ir.captured_step import CallResult, NamesReplaced

_READ_STATE: tuple[tuple[Any, str], ...] = (
    (os, "getcwd"),
    (os, "getcwdb"),
    (numpy, "geterr"),
    (numpy, "geterrcall"),
    (torch, "initial_seed"),
    (torch.random, "initial_seed"),
    (sys, "getrecursionlimit"),
    (gc, "isenabled"),
    (locale, "getlocale"),
    (torch, "get_num_threads"),
    (torch, "get_num_interop_threads"),
    (torch, "is_warn_always_enabled"),
    (threading, "active_count"),
    (gc, "get_threshold"),
    (os, "cpu_count"),
    (os, "getpid"),
    (os, "getloadavg"),
    (sys, "getswitchinterval"),
    (tempfile, "gettempdir"),
    (torch.__future__, "get_overwrite_module_params_on_conversion"),
    (torch.__future__, "get_swap_module_params_on_conversion"),
)
"""Functions that read process state: calling them again has no effects."""
STATE_READS: Mapping[str, Callable[[], Any]] = {
    **{f"{owner.__name__}.{name}()": getattr(owner, name) for owner, name in _READ_STATE},
    "numpy.get_printoptions()": numpy.get_printoptions,
    "decimal.getcontext()": lambda: repr(decimal.getcontext()),
}
"""Those that another process can call by name."""
_SMALL = 1 << 20
_SETTLED = 2.0
"""Seconds after which a file that is written again is certain to have another time."""
_CHANGING = ("/proc/", "/sys/", "/dev/")
_GET_RANDOM: Any = getattr(os, "getrandom", os.urandom)
"""Not on all systems."""
UNREPEATABLE = frozenset(
    {id(os.urandom), id(_GET_RANDOM), id(uuid.uuid1), id(uuid.uuid4), id(builtins.open), id(builtins.print)}
)
UNREPEATABLE |= {id(getattr(owner, name)) for owner, name in _READ_STATE}
_CHANGES_FILES: dict[str, str] = {
    "mkdir": "creates the directory",
    "rmdir": "removes the directory",
    "unlink": "deletes",
    "remove": "deletes",
    "rename": "renames",
    "replace": "renames",
    "link": "links to",
    "symlink": "links to",
    "chmod": "sets the mode of",
    "utime": "sets the times of",
    "truncate": "truncates",
    "write": "writes to the file descriptor",
    "pwrite": "writes to the file descriptor",
    "chdir": "goes to the directory",
}
UNREPEATABLE |= {id(getattr(os, name)) for name in _CHANGES_FILES if hasattr(os, name)}
"""Functions that user code may hold by a name of its own, by identity."""
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class FileState:
    """A file as the step read it, or the fact that there was none."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stat = _stat_of(path)
        self._contents = _contents(path, self._stat)
        self._settled = False

    def is_same(self) -> bool:
        """Whether the file is unchanged. One that was written just before is compared by its contents as well: its time
        may be the same."""
        now = _stat_of(self.path)
        if now != self._stat:
            return False
        if self._settled or now is None or self._contents is None:
            return True
        settled = time.time() - now[0] / 1e9 > _SETTLED
        same = _contents(self.path, now) == self._contents
        self._settled = settled and same
        return same


def _stat_of(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = _REAL_STAT(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


def _contents(path: str, found: tuple[int, int, int, int] | None) -> bytes | None:
    if found is None or found[1] > _SMALL or not stat.S_ISREG(found[3]):
        return None
    with _REAL_OPEN(path, "rb") as file:
        data: bytes = file.read()
        return data


_REAL_STAT, _REAL_OPEN = os.stat, builtins.open
_REAL_IS_SET: dict[type, Callable[[Any], bool]] = {
    kind: kind.is_set for kind in (threading.Event, multiprocessing.synchronize.Event)
}


def _is_set(event: Any) -> bool:
    return next(_REAL_IS_SET[base] for base in type(event).__mro__ if base in _REAL_IS_SET)(event)


class OutsideReads:
    """The reads of one capture."""

    def __init__(self) -> None:
        self.environment: dict[str, str | None] = {}
        self.whole_environment: dict[str, str] | None = None
        self.files: dict[str, FileState] = {}
        self.call_results: dict[str, CallResult] = {}
        """The results of functions that read process state, by their call as text."""
        self._thread = threading.get_ident()
        self.replacements: dict[int, Any] = {
            id(_GET_RANDOM): lambda *a, **k: self._random(_GET_RANDOM, "os.getrandom", *a, **k),
            id(os.urandom): lambda *a: self._random(os.urandom, "os.urandom", *a),
            id(uuid.uuid1): lambda *a, **k: self._random(uuid.uuid1, "uuid.uuid1", *a, **k),
            id(uuid.uuid4): lambda *a, **k: self._random(uuid.uuid4, "uuid.uuid4", *a, **k),
            id(builtins.open): lambda *a, **k: self._open(_REAL_OPEN, *a, **k),
        }
        for owner, name in _READ_STATE:
            real = getattr(owner, name)
            self.replacements[id(real)] = functools.partial(self._call, f"{owner.__name__}.{name}()", real)
        for name in _CHANGES_FILES.keys() & vars(os).keys():
            self.replacements[id(getattr(os, name))] = functools.partial(self._change, name, getattr(os, name))
        """Stand-ins for such functions, by their identity."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record reads in the block."""
        with ExitStack() as stack:

            def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
                real = vars(owner)[name]

                def only_here(*args: Any, **kwargs: Any) -> Any:
                    if threading.get_ident() != self._thread or not called_by_user():
                        return real(*args, **kwargs)
                    return replacement(real, *args, **kwargs)

                setattr(owner, name, only_here)
                NamesReplaced.note(stack, owner, name, real)
                stack.callback(setattr, owner, name, real)

            environ = type(os.environ)
            patch(environ, "__getitem__", self._variable)
            patch(environ, "__iter__", self._variables)
            patch(environ, "copy", self._variables)
            for name in ("__setitem__", "__delitem__"):
                patch(environ, name, self._set_variable)
            for owner in (builtins, io):
                patch(owner, "open", self._open)
            for name in ("stat", "listdir", "scandir"):
                patch(os, name, self._stat)
            if hasattr(os, "getrandom"):
                patch(os, "getrandom", lambda real, *a, **k: self._random(real, "os.getrandom", *a, **k))
            for module, name in _READ_STATE:
                patch(
                    module,
                    name,
                    lambda real, *a, _name=f"{module.__name__}.{name}()", **k: self._call(_name, real, *a, **k),
                )
            for name in ("isEnabledFor", "getEffectiveLevel", "hasHandlers"):
                patch(logging.Logger, name, functools.partial(self._call_of_logger, name))
            for name in _CHANGES_FILES.keys() & vars(os).keys():
                patch(os, name, functools.partial(self._change, name))
            patch(os, "open", self._open_descriptor)
            patch(threading, "current_thread", self._current_thread)
            for kind in (threading.Event, multiprocessing.synchronize.Event):
                patch(kind, "is_set", self._read_event)
                patch(kind, "wait", self._read_event)
                patch(kind, "set", functools.partial(self._set_event, True))
                patch(kind, "clear", functools.partial(self._set_event, False))
            patch(SynchronizedArray, "__getitem__", self._read_shared)
            patch(SynchronizedArray, "__setitem__", lambda real, *a: _refuse("writes to a multiprocessing.Array"))
            stack.enter_context(self._shared_values())
            patch(os, "urandom", lambda real, *a: self._random(real, "os.urandom", *a))
            patch(random, "_urandom", lambda real, *a: self._random(real, "the system's random bytes", *a))
            for name in ("uuid1", "uuid4"):
                patch(uuid, name, lambda real, *a, _name=name, **k: self._random(real, f"uuid.{_name}", *a, **k))
            patch(random.Random, "seed", self._seed)
            patch(subprocess.Popen, "__init__", lambda real, *a, **k: _refuse("starts another process"))
            patch(BaseProcess, "start", lambda real, *a: _refuse("starts another process"))
            patch(threading.Thread, "start", lambda real, *a: _refuse("starts a thread"))
            for pool in (ThreadPoolExecutor, ProcessPoolExecutor):
                patch(pool, "submit", lambda real, *a, **k: _refuse("gives work to another thread or process"))
            patch(Executor, "map", lambda real, *a, **k: _refuse("gives work to another thread or process"))
            patch(os, "system", lambda real, *a: _refuse("starts another process"))
            patch(os, "umask", lambda real, *a: _refuse("sets the umask"))
            patch(builtins, "input", lambda real, *a: _refuse("asks for input"))
            yield

    def _variable(self, real: Any, environ: Any, key: Any) -> Any:
        if isinstance(key, str | bytes):
            try:
                self.environment[os.fsdecode(key)] = os.fsdecode(real(environ, key))
            except KeyError:
                self.environment[os.fsdecode(key)] = None
        return real(environ, key)

    def _call(self, name: str, real: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function whose result is compared before each replay."""
        result = real(*args, **kwargs)
        if called_by_user():
            self.call_results.setdefault(name, CallResult(name, lambda: real(*args, **kwargs), copy.copy(result)))
        return result

    def _call_of_logger(self, name: str, real: Any, logger: Any, *args: Any) -> Any:
        arguments = ", ".join(map(repr, args))
        return self._call(f"logging.getLogger({logger.name!r}).{name}({arguments})", real, logger, *args)

    def _read_event(self, real: Any, event: Any, *args: Any) -> Any:
        """Ask an event whether it is set."""
        call = functools.partial(_is_set, event)
        self.call_results.setdefault(f"an Event at {id(event):x}", CallResult("Event.is_set()", call, call()))
        return real(event, *args)

    def _set_event(self, value: bool, real: Any, event: Any) -> Any:
        if _is_set(event) is not value:
            _refuse(f"{'sets' if value else 'clears'} an Event")
        return self._read_event(real, event)

    def _current_thread(self, real: Any) -> Any:
        if is_user_code(sys._getframe(2).f_code):
            name = CallResult("threading.current_thread().name", lambda: real().name, real().name)
            self.call_results.setdefault("thread", name)
        return real()

    def _read_shared(self, real: Any, array: Any, index: Any) -> Any:
        result = real(array, index)
        name = f"multiprocessing.Array(..)[{index!r}]"
        call = functools.partial(real, array, index)
        self.call_results.setdefault(f"{name} at {id(array):x}", CallResult(name, call, copy.copy(result)))
        return result

    @contextmanager
    def _shared_values(self) -> Iterator[None]:
        """Record reads of `multiprocessing.Value`, and refuse writes."""
        real: Any = vars(Synchronized)["value"]

        def is_here() -> bool:
            return threading.get_ident() == self._thread and called_by_user()

        def read(shared: Any) -> Any:
            result = real.fget(shared)
            if is_here():
                call = functools.partial(real.fget, shared)
                name = "multiprocessing.Value(..).value"
                self.call_results.setdefault(f"{name} at {id(shared):x}", CallResult(name, call, result))
            return result

        def write(shared: Any, value: Any) -> None:
            if is_here():
                _refuse("writes to a multiprocessing.Value")
            real.fset(shared, value)

        kind: Any = Synchronized
        kind.value = property(read, write)
        try:
            yield
        finally:
            kind.value = real

    def _change(self, name: str, real: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """A function of `os` that changes files: allowed where it fails, as `os.makedirs(path, exist_ok=True)` may."""
        if not called_by_user():
            return real(path, *args, **kwargs)
        named = isinstance(path, str | bytes | os.PathLike)
        fails = named and os.path.lexists(path) == (name == "mkdir")
        if not fails:
            _refuse(f"{_CHANGES_FILES[name]} {path}")
        self._note(path)
        return real(path, *args, **kwargs)

    def _open_descriptor(self, real: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if flags & _WRITE_FLAGS:
            _refuse(f"opens {path} for writing")
        self._note(path)
        return real(path, flags, *args, **kwargs)

    def _variables(self, real: Any, environ: Any) -> Any:
        self.whole_environment = dict(zip(os.environ._data, os.environ._data.values(), strict=True))  # type: ignore[attr-defined]
        return real(environ)

    def _set_variable(self, real: Any, environ: Any, key: Any, *value: Any) -> NoReturn:
        _refuse(f"sets the environment variable {key}")

    def _open(self, real: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not called_by_user():
            return real(file, mode, *args, **kwargs)
        if set(mode) & set("wax+"):
            _refuse(f"opens {file} for writing")
        self._note(file)
        return real(file, mode, *args, **kwargs)

    def _stat(self, real: Any, path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("dir_fd"):
            self._note(path)
        return real(path, *args, **kwargs)

    def _note(self, file: Any) -> None:
        if not isinstance(file, str | bytes | os.PathLike):
            return
        path = os.fspath(file)
        name = os.path.abspath(os.fsdecode(path))
        if name.startswith(_CHANGING) and name != os.devnull:
            _refuse(f"reads {name}, which may differ each time,")
        if name not in self.files:
            self.files[name] = FileState(name)

    def _random(self, real: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if not called_by_user():
            return real(*args, **kwargs)
        raise RandomStateError(
            f"the step draws from {name}; every replay would use the same value.",
            fix="draw it outside of the step, and pass it as an argument; or draw with torch.",
            location=caller_location(),
        )

    def _seed(self, real: Any, generator: Any, a: Any = None, *args: Any, **kwargs: Any) -> Any:
        if a is None:
            self._random(real, "a generator that the system seeds (random.Random())")
        return real(generator, a, *args, **kwargs)


def _refuse(what: str) -> NoReturn:
    raise SideEffectError(
        f"the step {what} and a replay would not.",
        fix="do it outside of the step.",
        location=caller_location(),
    )
