"""Complete what a step left pending before anybody sees that it is not done.

    step(batch)                   parameters wait for their update; it runs in the next call of step
    model.state_dict()            the update runs first: hooks of the model and its optimizer see to that
    model(x)                      also before an eager forward, an optimizer's own step, another compiled step
    scaler.get_scale()            a GradScaler has no hooks: tensors that complete the step lie in the place of its own
    model.weight.grad.norm()      neither has a gradient that zero_grad(set_to_none=False) keeps
    model.parameters()            torch's other ways to all parameters are watched (`watching.py`)
    model.weight.sum()            sees the parameter without the update: torch tells nobody. step.flush() comes before

The two hooks of the process (before every forward, before every optimizer step), what is watched and the stand-ins are
there only while something is pending and no compiled step runs, so that no capture and no guard ever meets them.

Torch's ways to all of a model or an optimizer that have no hooks: watched while something is pending.

    model.parameters(), buffers()     AveragedModel, parameters_to_vector, an average or a log that is kept by hand
    model.half(), model.to(...)       a pending update belongs to the tensors that were there before
    model.eval()                      whatever methods of the model read then
    copy.deepcopy(optimizer)          and pickling it

Four methods of `nn.Module` and `Optimizer` are replaced by ones that ask first and then call what was there. They are
put back before any compiled step or capture runs, and as soon as nothing is pending. A tensor that somebody already
holds, or reaches by an attribute, is read without any of these.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.cross_iteration.late_tensor import LateTensor
from wholestep.ir.user_objects.slots import Slot
from wholestep.torch_private.dtensor import dtensor_over, is_dtensor, local_of, spec_of
from wholestep.torch_private.modules_and_optimizers import GLOBAL_PRE_HOOKS, WATCHED_METHODS

log = logging.getLogger("wholestep")

_KEY = "wholestep"
_all: weakref.WeakSet[PendingWork] = weakref.WeakSet()
"""Steps that have something pending. A module's forward is an event of the process, so that this is too."""


class PendingWork:
    """What one compiled step left to do, and the hooks that see to it."""

    def __init__(self) -> None:
        self._complete: Callable[[], None] | None = None
        self._state: list[Tensor] = []
        self._modules: dict[int, nn.Module] = {}
        self._touching: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._hooked: tuple[Any, ...] = ()
        self._unhookable: tuple[Slot, ...] = ()
        self._stand_ins: dict[Slot, tuple[Tensor, Tensor]] = {}
        """What belongs into a slot, and what may stand there for it."""
        self._covers = False

    @property
    def exists(self) -> bool:
        """Whether something is pending."""
        return self._complete is not None

    def left(
        self,
        complete: Callable[[], None],
        state: list[Tensor],
        modules: dict[int, nn.Module],
        owners: tuple[nn.Module | Optimizer, ...],
        without_hooks: tuple[Slot, ...] = (),
    ) -> None:
        """A step left something: `complete` does it. `owners` hold the state, `modules` are all that the step knows.

        `without_hooks`: slots of state in other objects, which cannot say that somebody asks for it.
        """
        self._complete, self._state = complete, state
        if self._unhookable is not without_hooks:
            self._unhookable = without_hooks
            self._stand_ins = {}
        if self._modules is not modules:
            self._modules = modules
            self._touching.clear()
        if self._hooked != owners:
            self._unhook()
            self._hook(owners)
        _all.add(self)

    def cover(self) -> None:
        """Put stand-ins where state without hooks lies."""
        if self._complete is None or self._covers:
            return
        for slot in self._unhookable:
            now = slot.get()
            real, stand_in = self._stand_ins.get(slot, (None, None))
            if real is not now and isinstance(now, Tensor):
                real, stand_in = now, _stand_in(now, weakref.ref(self))
                self._stand_ins[slot] = real, stand_in
            if stand_in is not None and real is now:
                slot.set(stand_in)
        self._covers = True

    def uncover(self) -> None:
        """Put back what the stand-ins stand for, unless somebody put something else there."""
        if not self._covers:
            return
        self._covers = False
        for slot in self._unhookable:
            real, stand_in = self._stand_ins.get(slot, (None, None))
            if stand_in is not None and slot.get() is stand_in:
                slot.set(real)
            else:
                self._stand_ins.pop(slot, None)

    def taken(self) -> None:
        """The step itself goes on with what it left."""
        self.uncover()
        self._complete = None
        self._state = []
        _all.discard(self)
        if not _all:
            suspend()

    def flush(self) -> None:
        """Do what is pending. If that fails it stays pending."""
        complete = self._complete
        if complete is None:
            return
        self._complete = None  # completing may run code that asks again
        self.uncover()
        try:
            complete()
        except BaseException:
            self._complete = complete
            self.cover()
            raise
        self.taken()
        self._stand_ins = {}

    def release(self) -> None:
        """Flush, and take the hooks away from models and optimizers."""
        self.flush()
        self._unhook()

    def holds(self, tensors: Iterable[Any]) -> bool:
        """Whether one of some tensors waits for its update."""
        memory = {_memory(tensor) for tensor in self._state}
        return any(isinstance(t, Tensor) and _memory(t) in memory for t in tensors)

    def concerns(self, module: nn.Module) -> bool:
        """Whether a module is one that the step knows, or contains one."""
        if id(module) in self._modules:
            return True
        if module not in self._touching:
            self._touching[module] = any(id(each) in self._modules for each in module.modules())
        return self._touching[module]

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
    """A hook before something reads or replaces state."""

    def __init__(self, work: Callable[[], PendingWork | None]) -> None:
        self._work = work

    def __call__(self, *_: Any, **__: Any) -> None:
        work = self._work()
        if work is not None:
            work.flush()

    def __deepcopy__(self, memo: dict[int, Any]) -> _FlushFirst:
        """A model is copied parameter by parameter: those that are copied already get the update too."""
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
    return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """The hook of a model that was pickled while an update was pending."""


def flush_others(work: PendingWork, tensors: Callable[[], Iterable[Any] | None]) -> None:
    """Complete what other steps left, where it concerns some tensors (None: not known, so all of it)."""
    if not _all:
        return
    others = [each for each in _all if each is not work]
    if not others:
        return
    known = tensors()
    for each in others:
        if known is None or each.holds(known):
            each.flush()


def flush_all() -> None:
    """Complete what any step left: a capture begins."""
    suspend()
    for each in list(_all):
        each.flush()


def suspend() -> None:
    """Take the hooks of the process and all stand-ins away: a compiled step, or a capture, begins."""
    for work in _all:
        work.uncover()
    forwards, steps = GLOBAL_PRE_HOOKS
    if forwards or steps:
        forwards.pop(_KEY, None)
        steps.pop(_KEY, None)
    unwatch()


def resume() -> None:
    """Put the hooks of the process and the stand-ins back where something is pending."""
    if _all:
        for work in _all:
            work.cover()
        forwards, steps = GLOBAL_PRE_HOOKS
        forwards[_KEY] = _before_forward
        steps[_KEY] = _before_optimizer
        watch(_flush_for, _flush_for_optimizer)


def finally_flush(work: PendingWork) -> None:
    """The step is gone, its model may live on."""
    try:
        work.release()
    except Exception:
        log.exception("what a compiled step had left pending could not be completed")


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
        if work.holds(p for group in optimizer.param_groups for p in group["params"]):
            work.flush()


def _stand_in(real: Tensor, work: Callable[[], PendingWork | None]) -> Tensor:
    """A tensor that looks like another one, and completes the step when somebody asks what is in it."""
    local: Tensor = local_of(real)
    late = LateTensor(local, functools.partial(_completed, work, local))
    return dtensor_over(late, spec_of(real)) if is_dtensor(real) else late


def _completed(work: Callable[[], PendingWork | None], tensor: Tensor) -> Tensor:
    """A tensor after what is pending was done; a step that is gone has done it."""
    found = work()
    if found is not None:
        found.flush()
    return tensor


def _memory(tensor: Tensor) -> int:
    local: Tensor = local_of(tensor)
    return local.untyped_storage().data_ptr()


Ask = Callable[[Any], None]

_replaced: list[tuple[type, str, Any, Any]] = []
"""Class, name, what stood there and what stands there now: of the process, as the classes are."""


def watch(ask_module: Callable[[nn.Module], None], ask_optimizer: Callable[[Optimizer], None]) -> None:
    """From now on ask before somebody gets to parameters by one of these ways."""
    if _replaced:
        return
    for owner, name in WATCHED_METHODS:
        original = owner.__dict__[name]
        ask: Ask = ask_module if owner is nn.Module else ask_optimizer
        asking = _asks_first(original, ask, only_eval=name == "train")
        setattr(owner, name, asking)
        _replaced.append((owner, name, original, asking))


def unwatch() -> None:
    """Put back what was there, unless somebody else has put something in its place since."""
    for owner, name, original, asking in _replaced:
        if owner.__dict__.get(name) is asking:
            setattr(owner, name, original)
    _replaced.clear()


def _asks_first(original: Callable[..., Any], ask: Ask, only_eval: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def asking(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not only_eval or not (args[0] if args else kwargs.get("mode", True)):
            ask(self)
        return original(self, *args, **kwargs)

    return asking
