"""Optimizers, schedulers, gradient scalers and modules that a step calls although `discover` did not find them.

Every call of such an object is detected while a step is traced, by whatever path the step reached it. Only objects that
are known before the trace are replaced by fakes. So a call of an unknown one ends the trace, all replacements are
undone, and the step is traced again with that object known:

    trace 1    wrapper.step() -> inner.step()    inner is unknown: FoundByCall
    trace 2    inner is known, by the chain wrapper.inner; each link of the chain becomes a guard

An object that no chain leads to is refused: a later call could not find it again. Other things that must exist before
the trace end it too (`TraceAgain`), for example hooks that a model adds to its layers in its first forward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack
from types import CodeType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from wholestep.capture.objects.discover import World, owns
from wholestep.errors import CapturedTensorError, SideEffectError, UnsupportedError, WholestepError
from wholestep.ir.meta import location_of_function, user_location
from wholestep.ir.user_objects.slots import Slot
from wholestep.options import Options
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.fake_tensors import FakeTensor
from wholestep.torch_private.modules_and_optimizers import forward_hooks

Patch = Callable[[Any, str, Callable[..., Any]], None]

_SCALER_METHODS = ("scale", "unscale_", "step", "update", "get_scale")
_OPTIMIZER_METHODS = ("zero_grad", "add_param_group", "load_state_dict", "state_dict")
INSTALL_OUTPUT_HOOKS = "install_all_output_capturing_hooks"
_INSTALLED = "_output_capturing_hooks_installed"
_NEW_RATES = ("get_lr", "_get_closed_form_lr", "_reduce_lr")


class EarlierTraces:
    """What earlier traces of a step found, for the next ones."""

    def __init__(self, options: Options) -> None:
        self._all = options.parallel is not None
        """Under a plan all reachable objects count as called: models are placed before the first trace."""
        self._called: list[weakref.ref[Any]] = []
        self.conversions: list[tuple[dict[str, Any], str]] = []
        """Global namespaces and the name by which a function there makes a number of a tensor: `float` or `int`."""
        self.formats: list[CodeType] = []
        """Code that formats numbers that are not known yet with a text of its own: `"%.3f" % loss.item()`."""
        self.written: list[Any] = []
        """Lists and dicts that outlive the step and that it writes."""
        self.tables = False
        """Whether tables of numbers are read at an index that changes."""
        self.rebound: list[Slot] = []
        """Places that the step sets to tuples, lists or dicts of tensors."""
        self._caches: list[tuple[weakref.ref[Any], Any]] = []
        """Functions with an `lru_cache` that the step calls, and the default dtype and device of the first trace."""

    def calls(self, target: Any) -> bool:
        """Whether the step is known to call an object."""
        return self._all or any(reference() is target for reference in self._called)

    def add_call(self, target: Any) -> None:
        """Add an object whose call ended a trace: the next trace knows it and cannot end there again."""
        assert not self.calls(target), f"{target} is known to be called and was not found"
        self._called = [r for r in self._called if r() is not None]
        self._called.append(weakref.ref(target))

    def refuse_caches_of_other_defaults(self, caches: list[Any]) -> None:
        """Refuse a cached function that makes tensors, if the default dtype or device changed since its first trace:
        eager would use the tensors that it made then."""
        now = (torch.get_default_dtype(), torch.get_default_device())
        for cache in caches:
            first = next((defaults for reference, defaults in self._caches if reference() is cache), None)
            if first is None:
                self._caches.append((weakref.ref(cache), now))
            elif first != now:
                raise UnsupportedError(
                    f"{cache.__qualname__} has an lru_cache and makes tensors: eager keeps using those that it made "
                    f"under {first[0]} on {first[1]}, a graph would recompute them under {now[0]} on {now[1]}.",
                    fix="give the dtype and the device to the function as arguments.",
                    location=location_of_function(cache),
                )


class TraceAgain(BaseException):
    """Ends a trace that found something which the next one must know. Not an error; `trace_step` traces again."""

    refusal: WholestepError | None = None
    """The error to raise if the next trace fails for another reason."""

    def teach(self, earlier: EarlierTraces) -> Callable[[], None]:
        """Record what was found out. Returns the function that takes it back."""
        raise NotImplementedError


class FoundByCall(TraceAgain):
    """Ends a trace: the step called an object that was not known."""

    def __init__(self, target: Any) -> None:
        super().__init__(f"{type(target).__name__} found by being called")
        self.target = target

    def teach(self, earlier: EarlierTraces) -> Callable[[], None]:
        earlier.add_call(self.target)
        return lambda: None


class CallHost(Protocol):
    """What the detection of calls needs from the capture."""

    world: World
    met: Any
    """The first unknown object that was called."""
    called: set[int]
    """Identities of the objects that were called."""

    def begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def end_step(self, optimizer: Optimizer) -> None: ...


def detect_calls(host: CallHost, patch: Patch, stack: ExitStack, *, is_here: Callable[[], bool]) -> None:
    """Detect calls of unknown objects until the stack unwinds. `is_here`: whether this thread traces."""

    def before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_here():
            _notice(host, optimizer)
            host.begin_step(optimizer, args[1:], kwargs)

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_here():
            host.end_step(optimizer)

    # torch calls these hooks also for a `step` that was taken as a bound method before the trace began.
    stack.callback(register_optimizer_step_pre_hook(before_step).remove)
    stack.callback(register_optimizer_step_post_hook(after_step).remove)

    def noticing(original: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        _notice(host, target)
        return original(target, *args, **kwargs)

    for name in _OPTIMIZER_METHODS:
        patch(Optimizer, name, noticing)
    for name in _SCALER_METHODS:
        patch(torch.amp.GradScaler, name, noticing)
    for scheduler in (LRScheduler, *_subclasses(LRScheduler)):
        if "step" in vars(scheduler):
            patch(scheduler, "step", lambda original, *a, **k: _step_scheduler(host, original, *a, **k))
        for name in _NEW_RATES:
            if name in vars(scheduler):
                patch(scheduler, name, _refuse_new_rates)


def _subclasses(cls: type) -> Iterator[type]:
    below: list[type] = cls.__subclasses__()
    for found in below:
        yield found
        yield from _subclasses(found)


def detect_module_call(host: CallHost, module: nn.Module) -> None:
    """Check a module that is called: an unknown one must be found, or have no tensors of the user's."""
    host.called.add(id(module))
    if module not in host.world.modules and id(module) in host.world.behind:
        _found(host, module)


def _step_scheduler(host: CallHost, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    replaced = vars(scheduler).get("step")
    if scheduler in host.world.schedulers and replaced is not None:
        return replaced(*args, **kwargs)  # `step` was looked up on the class: `LRScheduler.step(scheduler)`
    if not getattr(scheduler, "_is_initial", False):
        _notice(host, scheduler)
    return original(scheduler, *args, **kwargs)


def _refuse_new_rates(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(scheduler, "_is_initial", False):
        return original(scheduler, *args, **kwargs)
    raise SideEffectError(
        f"a {type(scheduler).__name__} computes new learning rates while the step is captured.",
        fix="call scheduler.step() on the scheduler itself, not a bound method that was taken before.",
        location=user_location(),
    )


def _notice(host: CallHost, target: Any) -> None:
    world = host.world
    host.called.add(id(target))
    if world.knows(target) or any(target is wrapper for wrapper, _ in world.wrappers):
        return
    if id(target) in world.behind:
        _found(host, target)
    if _is_of_the_trace(target):
        return
    raise CapturedTensorError(
        f"the step calls a {type(target).__name__} that is not reachable from its arguments, closure, globals or "
        "modules, so a later call could not find it again.",
        fix="pass it as an argument, or keep it in an attribute of an object that the step is given.",
        location=user_location(),
    )


def _found(host: CallHost, target: Any) -> None:
    host.met = target
    raise FoundByCall(target)


def _is_of_the_trace(target: Any) -> bool:
    """Whether an object was made by the step itself, out of fakes."""
    if isinstance(target, Optimizer):
        return all(_is_fake(p) for group in target.param_groups for p in group["params"])
    if isinstance(target, LRScheduler):
        return _is_of_the_trace(target.optimizer)
    scale = vars(target).get("_scale")
    return isinstance(target, torch.amp.GradScaler) and (scale is None or _is_fake(scale))


def _is_fake(value: Any) -> bool:
    return isinstance(local_of(value), FakeTensor)


class UnknownOptimizers:
    """The param groups of optimizers that are not known: a trace that changes them does so for real."""

    def __init__(self, world: World) -> None:
        self._optimizers = [
            (chain.target, [dict(group) for group in chain.target.param_groups])
            for chain in world.behind.values()
            if isinstance(chain.target, Optimizer) and owns(chain.target, "param_groups")
        ]

    def changed(self) -> Optimizer | None:
        """An optimizer whose groups the step changed."""
        for optimizer, groups in self._optimizers:
            if len(groups) != len(optimizer.param_groups) or any(
                before.keys() != now.keys() or any(now[key] is not value for key, value in before.items())
                for before, now in zip(groups, optimizer.param_groups, strict=True)
            ):
                return optimizer
        return None

    def restore(self) -> None:
        for optimizer, groups in self._optimizers:
            del optimizer.param_groups[len(groups) :]
            for before, now in zip(groups, optimizer.param_groups, strict=True):
                now.clear()
                now.update(before)


def output_hooks_module() -> ModuleType | None:
    """The module of transformers that installs such hooks, if it is loaded. 5.22."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return module if hasattr(module, INSTALL_OUTPUT_HOOKS) else None


def install_before_trace(
    known: Container[nn.Module], original: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Ends the trace that is about to install hooks in a model that outlives the step."""
    if model in known:
        raise InstallsHooks(model, original)
    original(model, *args, **kwargs)


class InstallsHooks(TraceAgain):
    """Ends a trace: its forward would add hooks to a model (transformers with `output_hidden_states=True`).

        trace 1    the forward is about to add hooks: the trace ends, and they are added to the user's model
        trace 2    the hooks are there before the step begins, as in the second call of eager

    They stay, as in eager, and do nothing in a forward that asks for no such output. A capture that fails removes them.
    """

    def __init__(self, model: nn.Module, install: Callable[[nn.Module], None]) -> None:
        super().__init__(f"{type(model).__name__} adds hooks to its layers")
        self._model, self._install = model, install

    def teach(self, earlier: EarlierTraces) -> Callable[[], None]:
        """Install them. Returns the function that removes them."""
        before = [
            (module, forward_hooks(module)[1], set(forward_hooks(module)[1]), _INSTALLED in vars(module))
            for module in self._model.modules()
        ]
        self._install(self._model)

        def remove() -> None:
            for module, registry, hooks, installed in before:
                for added in set(registry) - hooks:
                    del registry[added]
                if not installed:
                    vars(module).pop(_INSTALLED, None)

        return remove
