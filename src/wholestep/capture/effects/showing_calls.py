"""`print`, `logging` and progress bars while tracing: recorded, and made after each run.

    print("loss", loss.item())             print itself, with the number of the run
    log.info("loss %.3f", loss.item())     the logger's handlers, with the user's line in the record
    pbar.set_postfix(loss=loss.item())     the method of the bar
    sys.stdout.write(f"{loss.item()}")     the stream that is there then

Only calls of user code are recorded. What libraries print themselves (a warning that is issued once) is printed at
capture, as in the first call of eager. The table `_SHOWING` names the methods of packages.
"""

from __future__ import annotations

import builtins
import functools
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from wholestep.capture.effects.deferred_text import has_mark
from wholestep.capture.objects.user_code import kind_of_code
from wholestep.ir.captured_step import NamesReplaced
from wholestep.torch_private.modes import import_what_keeps_print

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

_LOGGING = os.path.dirname(logging.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "fatal": logging.CRITICAL,
    "exception": logging.ERROR,
}

_SHOWING: dict[str, dict[str, tuple[str, ...]]] = {
    "tqdm.std": {
        "tqdm": (
            *("update", "set_postfix", "set_postfix_str", "set_description", "set_description_str"),
            *("write", "refresh", "display", "clear", "reset", "unpause"),
        )
    },
    "rich.console": {"Console": ("print", "log", "rule")},
    "rich.progress": {"Progress": ("update", "advance", "refresh")},
    "torch.utils.tensorboard.writer": {
        "SummaryWriter": (
            *("add_scalar", "add_scalars", "add_histogram", "add_text", "add_image", "add_images", "add_figure"),
            *("add_hparams", "add_embedding", "flush"),
        )
    },
    "wandb": {"": ("log",)},
    "wandb.sdk.wandb_run": {"Run": ("log",)},
    "mlflow": {"": ("log_metric", "log_metrics", "log_param", "log_params", "log_text")},
}
"""By module and class ("" for functions of the module): calls that show values and return nothing that a step uses."""

_PRINT = builtins.print


class ShowingCalls:
    """What is replaced while one step is traced."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._thread = threading.get_ident()
        self.replacements: dict[int, Any] = {id(_PRINT): self._print}
        """Replacements of functions that user code holds under names of its own, by identity."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record in the block."""
        import_what_keeps_print()
        with ExitStack() as stack:

            def patch(owner: Any, name: str, replacement: Any) -> None:
                before = vars(owner)[name]
                setattr(owner, name, replacement)
                NamesReplaced.note(stack, owner, name, before)
                stack.callback(setattr, owner, name, before)

            patch(builtins, "print", self._print)
            patch(warnings, "warn", self._warn(warnings.warn))
            for name, level in _LEVELS.items():
                if name in vars(logging.Logger):
                    patch(logging.Logger, name, self._logger(vars(logging.Logger)[name], level, name))
            patch(logging.Logger, "log", self._log(logging.Logger.log))
            patch(logging.Logger, "_log", self._log(vars(logging.Logger)["_log"]))
            patch(logging.LoggerAdapter, "log", self._adapter(logging.LoggerAdapter.log))
            for name in ("stdout", "stderr"):
                if (stream := getattr(sys, name)) is not None:
                    patch(sys, name, _Stream(self, stream, name))
            for module, classes in _SHOWING.items():
                for kind, methods in classes.items() if module in sys.modules else ():
                    self._patch_package(patch, sys.modules[module], kind, methods)
            yield

    def _patch_package(self, patch: Callable[..., None], module: Any, kind: str, methods: tuple[str, ...]) -> None:
        owner = getattr(module, kind, None) if kind else module
        for each in (owner, *_subclasses(owner)) if isinstance(owner, type) else (owner,):
            for name in methods if each is not None else ():
                real = vars(each).get(name)
                if real is not None:
                    patch(each, name, self._showing(real, each.__module__ if kind else module.__name__, name))

    def is_here(self) -> bool:
        """Whether the thread is the one that traces."""
        return threading.get_ident() == self._thread

    def show(self, text: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Record a call."""
        self._capture.effects.show(text, function, args, kwargs)

    # The replacements.

    def _print(self, *args: Any, **kwargs: Any) -> None:
        file = kwargs.get("file")
        own = isinstance(file, io.StringIO) or (file is None and not isinstance(sys.stdout, _Stream))
        if own or not self.is_here() or asking_frame() is None:  # a text that the step puts together itself
            _PRINT(*args, **kwargs)
            return
        if isinstance(file, _Stream):
            kwargs = {**kwargs, "file": None}
            self.show("print", _print_to, file.name, args, kwargs)
        else:
            self.show("print", _PRINT, *args, **kwargs)

    def _warn(self, real: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(real)
        def warn(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **rest: Any) -> None:
            frame = asking_frame() if self.is_here() else None
            if frame is None:
                real(message, category, stacklevel + 1, source, **rest)
                return
            where = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")
            self.show("warnings.warn", _warn_again, message, category or UserWarning, *where)

        return warn

    def _logger(self, real: Any, level: int, name: str) -> Any:
        @functools.wraps(real)
        def method(logger: logging.Logger, msg: Any, *args: Any, **kwargs: Any) -> None:
            frame = asking_frame() if self.is_here() else None
            if frame is None:
                kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
                real(logger, msg, *args, **kwargs)
                return
            if name == "exception":
                kwargs.setdefault("exc_info", True)
            self._record(logger, level, msg, args, kwargs, frame)

        return method

    def _log(self, real: Any) -> Any:
        @functools.wraps(real)
        def log(logger: logging.Logger, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
            frame = asking_frame() if self.is_here() else None
            if frame is None:
                kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
                real(logger, level, msg, *args, **kwargs)
                return
            if real.__name__ == "_log" and args:
                args, *rest = args
                kwargs = dict(zip(("exc_info", "extra", "stack_info", "stacklevel"), rest, strict=False)) | kwargs
            self._record(logger, level, msg, tuple(args), kwargs, frame)

        return log

    def _adapter(self, real: Any) -> Any:
        @functools.wraps(real)
        def log(adapter: Any, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
            if not self.is_here() or asking_frame() is None:
                real(adapter, level, msg, *args, **kwargs)
                return
            msg, kwargs = adapter.process(msg, kwargs)
            adapter.logger.log(level, msg, *args, **kwargs)

        return log

    def _record(
        self,
        logger: logging.Logger,
        level: int,
        msg: Any,
        args: tuple[Any, ...],
        options: dict[str, Any],
        frame: FrameType,
    ) -> None:
        exc_info = options.get("exc_info")
        if exc_info and not isinstance(exc_info, tuple | BaseException):
            exc_info = sys.exc_info()
        if isinstance(exc_info, BaseException):
            exc_info = (type(exc_info), exc_info, None)
        for _ in range(options.get("stacklevel", 1) - 1):
            frame = frame.f_back or frame
        where = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        again = functools.partial(_log_again, logger, level, where, exc_info, options.get("extra"))
        self.show("logging", again, msg, *args)

    def _showing(self, real: Any, module: str, name: str) -> Any:
        plain = real.__func__ if isinstance(real, classmethod | staticmethod) else real

        @functools.wraps(plain)
        def method(*args: Any, **kwargs: Any) -> Any:
            frame = asking_frame() if self.is_here() else None
            if frame is None or frame.f_globals.get("__name__", "").split(".")[0] == module.split(".")[0]:
                return plain(*args, **kwargs)
            self.show(f"{module.split('.')[0]}.{name}", plain, *args, **kwargs)
            return None

        return type(real)(method) if isinstance(real, classmethod | staticmethod) else method


class _Stream:
    """Replaces `sys.stdout`: writes of user code are recorded, others pass through."""

    def __init__(self, calls: ShowingCalls, real: Any, name: str) -> None:
        self._calls = calls
        self.wholestep_real = real
        self.name = name

    def write(self, text: str) -> int:
        if not self._calls.is_here() or asking_frame() is None:
            return int(self.wholestep_real.write(text))
        self._calls.show(f"sys.{self.name}.write", _write_to, self.name, text)
        return 0 if has_mark(text) else len(text)

    def flush(self) -> None:
        self.wholestep_real.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wholestep_real, name)


# What a replay calls.


def _print_to(stream: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _PRINT(*args, **{**kwargs, "file": getattr(sys, stream)})


def _write_to(stream: str, text: str) -> None:
    getattr(sys, stream).write(text)


def _warn_again(message: str, category: type[Warning], file: str, line: int, module: str) -> None:
    registry = vars(sys.modules[module]).setdefault("__warningregistry__", {}) if module in sys.modules else None
    warnings.warn_explicit(message, category, file, line, module, registry)


def _log_again(
    logger: logging.Logger,
    level: int,
    where: tuple[str, int, str],
    exc_info: Any,
    extra: Any,
    msg: Any,
    *args: Any,
) -> None:
    if logger.isEnabledFor(level):
        file, line, function = where
        logger.handle(logger.makeRecord(logger.name, level, file, line, msg, args, exc_info, function, extra, None))


def asking_frame() -> FrameType | None:
    """The frame of user code that calls; None if the call is a library's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(_LOGGING) or (file.startswith(_HERE) and frame.f_globals.get("__name__") == __name__)):
            kind = kind_of_code(frame.f_code)
            if kind != "through":
                return frame if kind == "user" else None
        frame = frame.f_back
    return None


def _subclasses(kind: type) -> Iterator[type]:
    children: list[type] = kind.__subclasses__()
    for each in children:
        yield each
        yield from _subclasses(each)
