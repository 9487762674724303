"""Miniature forms of the classes by which libraries and users wrap an optimizer."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer


class Forwarding:
    """`step` and `zero_grad` of the optimizer that `self.inner()` returns."""

    def inner(self) -> Any:
        raise NotImplementedError

    def step(self) -> None:
        self.inner().step()

    def zero_grad(self) -> None:
        self.inner().zero_grad()


class InPrivateAttribute(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def inner(self) -> Any:
        return self._optimizer


class InSlots:
    __slots__ = ("_optimizer",)

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


class ByGetattr:
    def __init__(self, optimizer: Optimizer) -> None:
        object.__setattr__(self, "_hidden", optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_hidden"), name)


class ByGetattrOverSlots:
    __slots__ = ("_hidden",)

    def __init__(self, optimizer: Optimizer) -> None:
        object.__setattr__(self, "_hidden", optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_hidden"), name)


@dataclass(slots=True)
class InSlotDataclass:
    optimizer: Any

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class AsBoundMethods:
    def __init__(self, optimizer: Optimizer) -> None:
        self.step = optimizer.step
        self.zero_grad = optimizer.zero_grad


class AsPartials:
    def __init__(self, optimizer: Optimizer) -> None:
        self.step = functools.partial(type(optimizer).step, optimizer)
        self.zero_grad = functools.partial(optimizer.zero_grad, set_to_none=True)


class InDeepLists(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self.nest: Any = optimizer
        for _ in range(9):
            self.nest = [self.nest]

    def inner(self) -> Any:
        found = self.nest
        while isinstance(found, list):
            found = found[0]
        return found


class InDeepObjects(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self.next: Any = optimizer
        for _ in range(9):
            self.next = types.SimpleNamespace(next=self.next)

    def inner(self) -> Any:
        found = self.next
        while isinstance(found, types.SimpleNamespace):
            found = found.next
        return found


class ByWeakReference(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self._reference = weakref.ref(optimizer)

    def inner(self) -> Any:
        return self._reference()


class InClassAttribute(Forwarding):
    held: Any = None

    def __init__(self, optimizer: Optimizer) -> None:
        type(self).held = optimizer

    def inner(self) -> Any:
        return self.held


class InGenerator(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        def endless() -> Iterator[Any]:
            held = optimizer
            while True:
                yield held

        self._generator = endless()

    def inner(self) -> Any:
        return next(self._generator)


class InEndlessIterator(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self._iterator = itertools.repeat(optimizer)

    def inner(self) -> Any:
        return next(self._iterator)


class InDeque(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self._queue = collections.deque([optimizer])

    def inner(self) -> Any:
        return self._queue[-1]


class Pair(NamedTuple):
    label: str
    optimizer: Any


class InNamedTuple(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self._pair = Pair("first", optimizer)

    def inner(self) -> Any:
        return self._pair.optimizer


class InMappingProxy(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self._mapping = types.MappingProxyType({"optimizer": optimizer})

    def inner(self) -> Any:
        return self._mapping["optimizer"]


class InClosure(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self._get: Callable[[], Any] = lambda: optimizer

    def inner(self) -> Any:
        return self._get()


class InProperty(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self.__optimizer = optimizer

    @property
    def optimizer(self) -> Any:
        return self.__optimizer

    def inner(self) -> Any:
        return self.optimizer


class InFunctionAttribute(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        def get() -> Any:
            return get.optimizer  # type: ignore[attr-defined]

        get.optimizer = optimizer  # type: ignore[attr-defined]
        self._get = get

    def inner(self) -> Any:
        return self._get()


class InCache(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        once = [optimizer]
        self._get = functools.lru_cache(lambda: once.pop())
        self._get()

    def inner(self) -> Any:
        return self._get()


class InThreadLocal(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self._local = threading.local()
        self._local.optimizer = optimizer

    def inner(self) -> Any:
        return self._local.optimizer


class WithSameGroups(Optimizer):
    """Calls `super().__init__` with the groups of the base: another list of the same dicts."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, dict(base.defaults))
        self.base = base
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["average"] = state["average"] * 0.9 + parameter * 0.1 if state else parameter.clone()


class OfTwo:
    """Two optimizers in a tuple, one for each half of the parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = optimizer.param_groups[0]["params"]
        first = torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9)
        self._optimizers = (first, torch.optim.RMSprop(parameters[2:], lr=1e-2))

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


class InTurns:
    """One of two optimizers, by a counter in a slot."""

    __slots__ = ("calls", "first", "second")

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = optimizer.param_groups[0]["params"]
        self.first = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.second = torch.optim.SGD(parameters, lr=0.01)
        self.calls = 0

    def step(self) -> None:
        self.calls += 1
        (self.first if self.calls % 2 else self.second).step()

    def zero_grad(self) -> None:
        self.first.zero_grad()


class Accumulating:
    """Steps at each third call."""

    __slots__ = ("calls", "optimizer")

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.calls = 0

    def step(self) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        return None


class LikeAccelerate(Optimizer):
    """`AcceleratedOptimizer`: an Optimizer whose groups and state are properties."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0
        self._is_overflow = False

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self._is_overflow = False
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        self.optimizer.zero_grad()


class LikeFabric:
    """`_FabricOptimizer`: takes over the attributes and the class of the optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        taken = {k: v for k, v in vars(optimizer).items() if k not in ("state_dict", "step", "zero_grad")}
        self.__dict__ = taken
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        self._optimizer = optimizer
        self._callbacks: list[Any] = []

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    @property
    def state(self) -> Any:
        return self._optimizer.state_dict()

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step()


class LikeTimmLookahead(Optimizer):
    """Shares the groups of the base, keeps its slow weights in the state of the base, counts in the groups."""

    def __init__(self, base: Optimizer, alpha: float = 0.5, k: int = 3) -> None:
        self._optimizer_step_pre_hooks = collections.OrderedDict()  # timm: super().__init__() is not called on purpose
        self._optimizer_step_post_hooks = collections.OrderedDict()
        self._base_optimizer = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = collections.defaultdict(dict)
        for group in base.param_groups:
            group |= {"lookahead_alpha": alpha, "lookahead_k": k, "lookahead_step": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self._base_optimizer.step(closure)
        for group in self._base_optimizer.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                self._update_slow(group)
        return loss

    def _update_slow(self, group: dict[str, Any]) -> None:
        for fast in group["params"]:
            if fast.grad is None:
                continue
            state = self._base_optimizer.state[fast]
            if "slow" not in state:
                state["slow"] = torch.empty_like(fast)
                state["slow"].copy_(fast)
            slow = state["slow"]
            slow.add_(fast - slow, alpha=group["lookahead_alpha"])
            fast.copy_(slow)


class CountingLookahead(Optimizer):
    """Slow weights in a state of its own, the counter in a private attribute of the wrapper."""

    def __init__(self, base: Optimizer, alpha: float = 0.5, k: int = 3) -> None:
        self._optimizer_step_pre_hooks = collections.OrderedDict()
        self._optimizer_step_post_hooks = collections.OrderedDict()
        self._optimizer = base
        self.param_groups = base.param_groups
        self.defaults = {"alpha": alpha}
        self.state = collections.defaultdict(dict)
        self._alpha, self._k, self._counter = alpha, k, 0
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self._optimizer.step()
        self._counter += 1
        if self._counter >= self._k:
            self._counter = 0
            for group in self.param_groups:
                for fast in group["params"]:
                    slow = self.state[fast]["slow"]
                    slow.lerp_(fast, self._alpha)
                    fast.copy_(slow)


class SharpnessAware(Forwarding):
    """SAM in two calls; the perturbation lies in the state of the base."""

    def __init__(self, optimizer: Optimizer, rho: float = 0.05) -> None:
        self._base = optimizer
        self._rho = rho

    def inner(self) -> Any:
        return self._base

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self._base.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._base.state[parameter]["moved"] = parameter.grad * self._rho
                    parameter.add_(self._base.state[parameter]["moved"])
        self._base.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self._base.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self._base.state[parameter]["moved"])
        self._base.step()
        self._base.zero_grad()


class InContextVariable(Forwarding):
    def __init__(self, optimizer: Optimizer) -> None:
        self._variable: contextvars.ContextVar[Any] = contextvars.ContextVar("optimizer")
        self._variable.set(optimizer)

    def inner(self) -> Any:
        return self._variable.get()


class BehindCode(Forwarding):
    """Nothing leads from this object to the optimizer: it is an object of C."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._box = ctypes.py_object(optimizer)

    def inner(self) -> Any:
        return self._box.value


class ModelInSlots:
    __slots__ = ("net",)

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]
