"""Lightning's Trainer with each training batch as one graph: `Trainer(callbacks=[WholestepCallback()])`.

    fit loop                                  here
    batch, on_train_batch_start, ..           as it is
    automatic optimization                    one graph: training_step, backward, clipping, optimizer, and the hooks
                                              between them; its counts (global_step, progress) are set after each run
    manual optimization                       one graph: training_step with all that it does
    self.log(..) inside of these              called after the graph, with its values
    schedulers, on_train_batch_end, loggers,
    checkpoints, validation                   as they are

Lightning's own code runs while a graph is captured. What a hook or callback does besides computing on tensors and
setting numbers (appending to a list, printing a loss) is refused with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import LBFGS

from wholestep.api import compile as compile_step
from wholestep.compiled_step import CompiledStep
from wholestep.errors import UnsupportedError
from wholestep.integrations import framework, lines_of_users
from wholestep.ir.meta import user_location


class CompiledLoops:
    """The part of the callback that does not need Lightning: both optimization loops of a trainer, compiled."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._automatic = compile_step(_automatic, **{"name": "automatic_optimization", **options})
        self._manual = compile_step(_manual, **{"name": "manual_optimization", **options})
        self._loops: list[Any] = []

    @property
    def compiled(self) -> list[CompiledStep[Any, Any]]:
        """What was compiled."""
        return [step for step in (self._automatic, self._manual) if step.graphs]

    def install(self, trainer: Any) -> None:
        """From now on the training batches of a trainer run as graphs."""
        self.remove()
        for step in (self._automatic, self._manual):
            step.reset()  # models of earlier trainings are released
        epoch = trainer.fit_loop.epoch_loop
        automatic, manual = epoch.automatic_optimization, epoch.manual_optimization
        vars(automatic)["run"] = _RunAutomatic(automatic, self._automatic)
        vars(manual)["run"] = _RunManual(manual, self._manual)
        self._loops += [automatic, manual]

    def remove(self) -> None:
        """Lightning's own loops again."""
        while self._loops:
            vars(self._loops.pop()).pop("run", None)


class _LoopRun:
    """In the place of the `run` of a loop."""

    def __init__(self, loop: Any, step: CompiledStep[Any, Any]) -> None:
        self._loop = loop
        self._step = step

    def _stepped(self, *args: Any) -> Any:
        """Run the graph, then log what it computed."""
        trainer = self._loop.trainer
        module = trainer.lightning_module
        with lines_of_users(("lightning",), lambda: type(module).training_step), ExitStack() as stack:
            for loop in _loops(trainer):
                stack.enter_context(_attribute(loop, "_results", _LOGGED))
            result, logged = self._step(module, self._loop, *args)
        hook = module._current_fx_name
        for where, name, value, given, named in logged:
            module._current_fx_name = where
            module.log(name, value, *given, **named)
        module._current_fx_name = hook
        return result


class _RunAutomatic(_LoopRun):
    def __call__(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        should_accumulate = self._loop.trainer.fit_loop._should_accumulate()
        return self._stepped(should_accumulate, optimizer, batch_idx, kwargs)


class _RunManual(_LoopRun):
    def __init__(self, loop: Any, step: CompiledStep[Any, Any]) -> None:
        super().__init__(loop, step)
        # The very same objects in each batch: a graph assumes what an attribute is.
        self._counting = {"_on_before_step": loop._on_before_step, "_on_after_step": loop._on_after_step}

    def __call__(self, kwargs: Any) -> Any:
        with ExitStack() as stack:
            for optimizer in self._loop.trainer.strategy._lightning_optimizers:
                for name, counts in self._counting.items():
                    stack.enter_context(_attribute(optimizer, name, counts))
            result = self._stepped(kwargs)
        self._loop._restarting = False
        return result


def _loops(trainer: Any) -> Iterator[Any]:
    """The loops that keep what was logged, which changes with every batch."""
    for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop):
        if "_results" in vars(loop):
            yield loop


class _Logged:
    """In the place of what was logged, while a step runs."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedError(
            "the step reads what was logged (trainer.callback_metrics, trainer.logged_metrics), which a graph does not "
            "know: it is logged after each run.",
            fix="keep the value in an attribute or a buffer of the module, or read it in on_train_batch_end.",
            location=user_location(),
        )

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __getattr__ = _refuse


_LOGGED = _Logged()


def _automatic(module: Any, loop: Any, should_accumulate: bool, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
    known = _attribute(loop.trainer.fit_loop, "_should_accumulate", lambda: should_accumulate)
    with _as_captured(module, loop.trainer) as logged, known:
        return type(loop).run(loop, optimizer, batch_idx, kwargs), logged


def _manual(module: Any, loop: Any, kwargs: Any) -> Any:
    with _as_captured(module, loop.trainer) as logged:
        before = loop._output
        loop.advance(kwargs)
        output, loop._output = loop._output, before
        return output, logged


@contextmanager
def _as_captured(module: Any, trainer: Any) -> Iterator[list[Any]]:
    """While Lightning's code is captured: logging is noted, and closures of optimizers run before their `step`."""
    precision = trainer.precision_plugin
    logged: list[Any] = []

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        noted = value.detach().clone() if isinstance(value, Tensor) else value
        logged.append((module._current_fx_name, name, noted, args, kwargs))

    optimizer_step = precision.optimizer_step

    def step_after_closure(optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if isinstance(optimizer, LBFGS):
            return optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        with torch.enable_grad():
            result = precision._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    uses_scaler = getattr(precision, "scaler", None) is not None  # then Lightning itself runs the closure first
    with _attribute(module, "log", log):
        if uses_scaler:
            yield logged
        else:
            with _attribute(precision, "optimizer_step", step_after_closure):
                yield logged


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object for a while, in the place of its class's."""
    attributes = vars(owner)
    before = attributes.get(name, _ABSENT)
    attributes[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del attributes[name]
        else:
            attributes[name] = before


_ABSENT = object()

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    class WholestepCallback(Callback):  # type: ignore[misc]
        """Runs the training batches of a Lightning Trainer as graphs. `options`: those of `ws.compile`."""

        def __init__(self, **options: Any) -> None: ...

        @property
        def compiled_steps(self) -> list[CompiledStep[Any, Any]]:
            """What was compiled: automatic or manual optimization."""


def __getattr__(name: str) -> Any:
    if name != "WholestepCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    framework("lightning")
    from lightning.pytorch import Callback

    def __init__(self: Any, **options: Any) -> None:  # noqa: N807
        self._compiled = CompiledLoops(options)

    members = {
        "__module__": __name__,
        "__doc__": "Runs the training batches of a Lightning Trainer as graphs. Options: those of `ws.compile`.",
        "__init__": __init__,
        "compiled_steps": property(lambda self: self._compiled.compiled),
        "on_fit_start": lambda self, trainer, pl_module: self._compiled.install(trainer),
        "teardown": lambda self, trainer, pl_module, stage: self._compiled.remove(),
        "on_exception": lambda self, trainer, pl_module, exception: self._compiled.remove(),
    }
    made = globals()[name] = type(name, (Callback,), members)
    return made
