"""Flush pending updates before user code reads the state that they update.

    step(batch)                   the update of the parameters is pending; it runs in the next call of step
    model.state_dict()            flushes first, by hooks of the model and of its optimizer
    model(x)                      so does an eager forward, an optimizer's own step, another compiled step
    model.parameters()            and a few methods that give access to all parameters (below)
    scaler.get_scale()            a GradScaler has no hooks: its tensors are replaced by late tensors, which flush
    model.weight.grad.norm()      the same for a gradient that zero_grad(set_to_none=False) keeps
    model.weight.sum()            reads the parameter without the update: no hook exists. Call step.flush() before

The two global hooks (before every forward, before every optimizer step), the replaced methods and the late tensors are
installed only while an update is pending and no compiled step runs, so no capture and no guard ever sees them.

Methods without hooks that are replaced while an update is pending:

    model.parameters(), buffers()     for AveragedModel, parameters_to_vector, averages or logs by hand
    model.half(), model.to(...)       the pending update belongs to the tensors from before the conversion
    model.eval()                      methods of the model that run then may read parameters
    copy.deepcopy(optimizer)          and pickling it

The replacements of these methods of `nn.Module` and `Optimizer` flush and then call the original. They are removed
before any compiled step or capture runs, and as soon as nothing is pending. A tensor that user code already holds, or
reads as an attribute, is read without a flush.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.ir.user_objects.slots import Slot
from wholestep.torch_private.distributed import dtensor_over, is_dtensor, local_of, spec_of
from wholestep.torch_private.fake_tensors import no_torch_function, wrapper_tensor
from wholestep.torch_private.fx_graphs import pytree
from wholestep.torch_private.modules_and_optimizers import GLOBAL_PRE_HOOKS, PARAMETER_ACCESS_METHODS

log = logging.getLogger("wholestep")

_KEY = "wholestep"
_all: weakref.WeakSet[PendingWork] = weakref.WeakSet()
"""All steps with pending updates. Global, because the hooks of modules are."""


class PendingWork:
    """The pending updates of one compiled step, and the hooks that flush them."""

    def __init__(self) -> None:
        self._complete: Callable[[], None] | None = None
        self._state: list[Tensor] = []
        self._modules: dict[int, nn.Module] = {}
        self._concerned: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._hooked: tuple[Any, ...] = ()
        self._without_hooks: tuple[Slot, ...] = ()
        self._late_tensors: dict[Slot, tuple[Tensor, Tensor]] = {}
        """By slot, the tensor and the late tensor that may replace it."""
        self._installed = False

    @property
    def exists(self) -> bool:
        """Whether an update is pending."""
        return self._complete is not None

    def set(
        self,
        complete: Callable[[], None],
        state: list[Tensor],
        modules: dict[int, nn.Module],
        owners: tuple[nn.Module | Optimizer, ...],
        without_hooks: tuple[Slot, ...] = (),
    ) -> None:
        """A step has left updates pending; `complete` runs them.

        `state`: the tensors that they update. `modules`: all modules of the step. `owners`: the modules and optimizers
        that hold the state. `without_hooks`: slots of state in objects that have no hook for reads.
        """
        self._complete, self._state = complete, state
        if self._without_hooks is not without_hooks:
            self._without_hooks = without_hooks
            self._late_tensors = {}
        if self._modules is not modules:
            self._modules = modules
            self._concerned.clear()
        if self._hooked != owners:
            self._unhook()
            self._hook(owners)
        _all.add(self)

    def install_late_tensors(self) -> None:
        """Put late tensors into the slots of state without hooks."""
        if self._complete is None or self._installed:
            return
        for slot in self._without_hooks:
            now = slot.get()
            real, late = self._late_tensors.get(slot, (None, None))
            if real is not now and isinstance(now, Tensor):
                real, late = now, _late_tensor(now, weakref.ref(self))
                self._late_tensors[slot] = real, late
            if late is not None and real is now:
                slot.set(late)
        self._installed = True

    def remove_late_tensors(self) -> None:
        """Put the real tensors back, except into slots that user code has set meanwhile."""
        if not self._installed:
            return
        self._installed = False
        for slot in self._without_hooks:
            real, late = self._late_tensors.get(slot, (None, None))
            if late is not None and slot.get() is late:
                slot.set(real)
            else:
                self._late_tensors.pop(slot, None)

    def clear(self) -> None:
        """Nothing is pending any more: the updates were completed, or run as a part of the next iteration."""
        self.remove_late_tensors()
        self._complete = None
        self._state = []
        _all.discard(self)
        if not _all:
            suspend()

    def flush(self) -> None:
        """Complete the pending updates. If that raises they stay pending."""
        complete = self._complete
        if complete is None:
            return
        self._complete = None  # completing may run code that flushes again
        self.remove_late_tensors()
        try:
            complete()
        except BaseException:
            self._complete = complete
            self.install_late_tensors()
            raise
        self.clear()
        self._late_tensors = {}

    def release(self) -> None:
        """Flush, and remove the hooks from models and optimizers."""
        self.flush()
        self._unhook()

    def updates_any(self, tensors: Iterable[Any]) -> bool:
        """Whether an update of one of some tensors is pending."""
        memory = {_memory(tensor) for tensor in self._state}
        return any(isinstance(t, Tensor) and _memory(t) in memory for t in tensors)

    def concerns(self, module: nn.Module) -> bool:
        """Whether a module is one of the step's, or contains one."""
        if id(module) in self._modules:
            return True
        if module not in self._concerned:
            self._concerned[module] = any(id(each) in self._modules for each in module.modules())
        return self._concerned[module]

    def _hook(self, owners: tuple[nn.Module | Optimizer, ...]) -> None:
        self._hooked = owners
        hook = _FlushFirst(weakref.ref(self))
        for owner in owners:
            self._handles.append(owner.register_state_dict_pre_hook(hook))
            self._handles.append(owner.register_load_state_dict_pre_hook(hook))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooked = ()


class _FlushFirst:
    """A hook that flushes before state is read or replaced."""

    def __init__(self, work: Callable[[], PendingWork | None]) -> None:
        self._work = work

    def __call__(self, *_: Any, **__: Any) -> None:
        work = self._work()
        if work is not None:
            work.flush()

    def __deepcopy__(self, memo: dict[int, Any]) -> _FlushFirst:
        """Flush while a model is copied parameter by parameter: copies that exist already get the update, too."""
        work = self._work()
        if work is not None and work.exists:
            state = list(work._state)
            work.flush()
            for tensor in state:
                copy = memo.get(id(tensor))
                if isinstance(copy, Tensor):
                    copy.data.copy_(tensor.data)
        return _FlushFirst(lambda: None)

    def __reduce__(self) -> Any:
        self()
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """The hook in a model that was pickled while an update was pending."""


def flush_others(work: PendingWork, tensors: Callable[[], Iterable[Any] | None]) -> None:
    """Flush the other steps whose pending updates concern some tensors (None: unknown, so flush all)."""
    if not _all:
        return
    others = [each for each in _all if each is not work]
    if not others:
        return
    concerned = tensors()
    for each in others:
        if concerned is None or each.updates_any(concerned):
            each.flush()


def flush_all() -> None:
    """Flush all steps; before a capture."""
    suspend()
    for each in list(_all):
        each.flush()


def suspend() -> None:
    """Remove the global hooks, replaced methods and late tensors; before a compiled step or a capture."""
    for work in _all:
        work.remove_late_tensors()
    forwards, steps = GLOBAL_PRE_HOOKS
    if forwards or steps:
        forwards.pop(_KEY, None)
        steps.pop(_KEY, None)
    restore_methods()


def resume() -> None:
    """Install the global hooks, replaced methods and late tensors again if an update is pending."""
    if _all:
        for work in _all:
            work.install_late_tensors()
        forwards, steps = GLOBAL_PRE_HOOKS
        forwards[_KEY] = _before_forward
        steps[_KEY] = _before_optimizer
        replace_methods(_flush_for, _flush_for_optimizer)


def finally_flush(work: PendingWork) -> None:
    """Flush for a step that is deleted or left by an exception: its model may be used further."""
    try:
        work.release()
    except Exception:
        log.exception("the pending updates of a compiled step could not be completed")


def _before_forward(module: nn.Module, args: Any) -> None:
    _flush_for(module)


def _before_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _flush_for_optimizer(optimizer)


def _flush_for(module: nn.Module) -> None:
    for work in list(_all):
        if work.concerns(module):
            work.flush()


def _flush_for_optimizer(optimizer: Optimizer) -> None:
    for work in list(_all):
        if work.updates_any(p for group in optimizer.param_groups for p in group["params"]):
            work.flush()


class LateTensor(torch.Tensor):
    """A tensor whose value a pending update computes: it has the metadata, and every operator on it flushes the step.

    zero_grad(); loss.backward(); optimizer.step()     the update is pending, and with it the reduction of the gradient
    p.grad.norm()                                      flushes the step, then reads the reduced gradient
    """

    _flushed: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, like: Any, flushed: Callable[[], Tensor]) -> LateTensor:
        late: LateTensor = wrapper_tensor(cls, like)
        return late

    def __init__(self, like: Any, flushed: Callable[[], Tensor]) -> None:
        """`flushed`: completes the update and returns the tensor."""
        self._flushed = flushed

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._flushed())

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(LateTensor, lambda late: late._flushed(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _late_tensor(real: Tensor, work: Callable[[], PendingWork | None]) -> Tensor:
    """A late tensor with the metadata of another one, also of a DTensor."""
    local: Tensor = local_of(real)
    late = LateTensor(local, functools.partial(_after_flush, work, local))
    return dtensor_over(late, spec_of(real)) if is_dtensor(real) else late


def _after_flush(work: Callable[[], PendingWork | None], tensor: Tensor) -> Tensor:
    """A tensor after a flush; a step that was deleted has flushed already."""
    found = work()
    if found is not None:
        found.flush()
    return tensor


def _memory(tensor: Tensor) -> int:
    local: Tensor = local_of(tensor)
    return local.untyped_storage().data_ptr()


_replaced: list[tuple[type, str, Any, Any]] = []
"""Class, method name, original and replacement. Global, because the classes are."""


def replace_methods(flush_module: Callable[[nn.Module], None], flush_optimizer: Callable[[Optimizer], None]) -> None:
    """Replace the methods that give access to all parameters by ones that flush first."""
    if _replaced:
        return
    for owner, name in PARAMETER_ACCESS_METHODS:
        original = owner.__dict__[name]
        flush: Callable[[Any], None] = flush_module if owner is nn.Module else flush_optimizer
        replacement = _flushing_first(original, flush, only_eval=name == "train")
        setattr(owner, name, replacement)
        _replaced.append((owner, name, original, replacement))


def restore_methods() -> None:
    """Restore the originals, except of a method that other code has replaced meanwhile."""
    for owner, name, original, replacement in _replaced:
        if owner.__dict__.get(name) is replacement:
            setattr(owner, name, original)
    _replaced.clear()


def _flushing_first(original: Callable[..., Any], flush: Callable[[Any], None], only_eval: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def flushing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not only_eval or not (args[0] if args else kwargs.get("mode", True)):
            flush(self)
        return original(self, *args, **kwargs)

    return flushing
