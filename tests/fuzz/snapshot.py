"""Everything that a program can reach, frozen: results, tensors and their gradients, Python attributes, globals, RNG.

`freeze_world` walks from the module of a program through objects, slots, closures, classes and containers, and returns
a flat map from a readable path to bits or (type, text). A fake tensor or a symbolic scalar that was left behind shows
up as a value of another type.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import hashlib
import itertools
import os
import random
import threading
import types
from typing import Any

import numpy as np
import torch
from torch import nn

from harness import bits_of

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.EllipsisType)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_SKIPPED = {
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
    "_opt_called",
}
_Cache = type(functools.lru_cache(lambda: None))


def freeze_world(module: types.ModuleType, result: Any = None) -> dict[str, Any]:
    """What can be seen after a call."""
    walk = _Walk(module.__name__)
    walk.value(result, "result")
    for name, value in sorted(vars(module).items()):
        if not name.startswith("__") and not isinstance(value, types.ModuleType):
            walk.value(value, name)
    return walk.found | process_state()


def process_state() -> dict[str, Any]:
    """Random generators and modes of the process."""
    return {
        "rng.torch": bits_of(torch.get_rng_state()),
        "rng.python": hash(random.getstate()),
        "rng.numpy": _numpy_state(),
        "environ": sorted((k, v) for k, v in os.environ.items() if k.startswith("FUZZ_")),
        "modes": {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "dtype": torch.get_default_dtype(),
            "anomaly": torch.is_anomaly_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "precision": torch.get_float32_matmul_precision(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "function modes": torch._C._len_torch_function_stack(),
        },
    }


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return kind, hashlib.sha256(keys.tobytes()).hexdigest()[:16], *rest


class _Walk:
    def __init__(self, home: str) -> None:
        self.home = home
        self.found: dict[str, Any] = {}
        self.seen: dict[int, str] = {}
        self.alive: list[Any] = []

    def value(self, value: Any, path: str) -> None:
        kind = type(value)
        if isinstance(value, _ATOMS):
            self.found[path] = (kind.__name__, repr(value))
        elif isinstance(value, torch.Tensor):
            self.tensor(value, path)
        elif id(value) in self.seen and not path.endswith("._last_lr"):  # a scheduler's list, or an equal one
            self.found[path] = f"same object as {self.seen[id(value)]}"
        else:
            self.seen[id(value)] = path
            self.alive.append(value)  # an id is only as good as its object
            self.found[path] = kind.__qualname__
            self.contents(value, kind, path)

    def tensor(self, value: torch.Tensor, path: str) -> None:
        if type(value) not in _PLAIN_TENSORS or value.device.type == "meta":
            self.found[path] = f"{type(value).__name__} on {value.device}"
            return
        self.found[path] = bits_of(value)
        self.found[f"{path}.requires_grad"] = (type(value).__name__, value.requires_grad)
        if id(value) in self.seen:
            return
        self.seen[id(value)] = path
        self.alive.append(value)
        if value.is_leaf and value.grad is not None:
            self.tensor(value.grad, f"{path}.grad")
        if vars(value):
            self.mapping(dict(vars(value)), f"{path}.__dict__")

    def contents(self, value: Any, kind: type, path: str) -> None:
        if isinstance(value, torch.Generator):
            self.found[path] = bits_of(value.get_state())
        elif isinstance(value, np.ndarray | np.generic):
            self.found[path] = (kind.__name__, repr(value))
        elif isinstance(value, dict | types.MappingProxyType):
            self.mapping(value, path)
        elif isinstance(value, list | tuple | collections.deque):
            self.found[f"{path}.len"] = len(value)
            for index, item in enumerate(value):
                self.value(item, f"{path}[{index}]")
        elif isinstance(value, set | frozenset):
            self.found[f"{path}.items"] = sorted(map(repr, value))
        elif isinstance(value, contextvars.ContextVar):
            self.value(value.get(None), f"{path}.get()")
        elif isinstance(value, threading.local):
            self.mapping(vars(value), path)
        elif isinstance(value, itertools.count | itertools.cycle | range):
            self.found[path] = repr(value) if not isinstance(value, itertools.cycle) else "cycle"
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            self.mapping({} if frame is None else dict(frame.f_locals), f"{path}.locals")
        elif isinstance(value, functools.partial):
            for part in ("func", "args", "keywords"):
                self.value(getattr(value, part), f"{path}.{part}")
        elif isinstance(value, types.MethodType):
            self.value(value.__self__, f"{path}.__self__")
        elif isinstance(value, types.FunctionType | _Cache):
            self.function(value, path)
        elif isinstance(value, type):
            if value.__module__ == self.home:
                self.class_(value, path)
        elif hasattr(kind, "__length_hint__") and not hasattr(value, "__dict__"):
            self.found[path] = f"{kind.__name__} of {value.__length_hint__()} more"
        else:
            self.attributes(value, kind, path)

    def mapping(self, value: Any, path: str) -> None:
        by_order = path.endswith("_hooks")  # their keys count the hooks of the whole process
        plain = str | int | float | tuple | None
        names = [k if isinstance(k, plain) and not by_order else index for index, k in enumerate(value)]
        self.found[f"{path}.keys"] = [str(n) for n in names]
        for name, item in zip(names, value.values(), strict=True):
            self.value(item, f"{path}[{name!r}]")

    def function(self, value: Any, path: str) -> None:
        value = getattr(value, "__wrapped__", value) if isinstance(value, _Cache) else value
        self.found[path] = value.__qualname__
        if value.__module__ != self.home:
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                inside = cell.cell_contents
            except ValueError:
                inside = "empty"
            self.value(inside, f"{path}.<{name}>")
        for name, default in [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]:
            self.value(default, f"{path}.default[{name}]")
        for name, item in vars(value).items():
            self.value(item, f"{path}.{name}")

    def class_(self, value: type, path: str) -> None:
        for name, item in sorted(vars(value).items()):
            if not name.startswith("__") and not isinstance(
                item, types.MemberDescriptorType | types.GetSetDescriptorType
            ):
                self.value(item, f"{path}.{name}")

    def attributes(self, value: Any, kind: type, path: str) -> None:
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__"):
                    try:
                        self.value(object.__getattribute__(value, name), f"{path}.{name}")
                    except AttributeError:
                        self.found[f"{path}.{name}"] = "not set"
        for name, item in _own_attributes(value).items():
            if name not in _SKIPPED:
                self.value(item, f"{path}.{name}")
        if kind.__module__ == self.home:
            self.value(kind, f"{path}.__class__")


def _own_attributes(value: Any) -> dict[str, Any]:
    """The `__dict__` of an object, past a `__getattribute__` of its own; empty where it has none."""
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}
