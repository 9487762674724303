"""What a process holds on to: live objects by type, sizes of wholestep's own caches, resident memory.

soak_step(device)          a model, its optimizer and a step with a number and a learning rate that change
live_objects()             how many objects of each type are alive, after a collection
cache_sizes()              entries of every container and lru_cache at the level of a wholestep module or class
"""

from __future__ import annotations

import collections
import functools
import gc
import os
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import wholestep
from wholestep.torch_private.fake_tensors import FakeTensorMode

_CONTAINERS = (
    dict,
    list,
    set,
    collections.deque,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)
_ABSTRACT = ("weakref.ReferenceType", "builtins.builtin_function_or_method")
"""What abstract classes remember about each type that they were asked about."""
_Cache = type(functools.lru_cache(lambda: None))


class SoakTrainer:
    """A small step whose learning rate, attribute and argument change at every call."""

    def __init__(self, device: torch.device, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(device)
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        self.scale = 1.0
        self.calls = 0

    def step(self, x: torch.Tensor, weight: float) -> torch.Tensor:
        loss = self.model(x).square().mean() * self.scale * weight
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.calls += 1
        return loss.detach()

    def change(self, i: int) -> None:
        """What the user does between two calls."""
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + i % 100)
        self.scale = 1.0 + 0.01 * (i % 7)


def live_objects() -> collections.Counter[str]:
    """Objects that the collector tracks, by type; dead cycles are collected first."""
    FakeTensorMode.cache_clear()  # torch's own, by shapes; a test of its own sees that it is bounded
    gc.collect()
    counts = collections.Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    for name in _ABSTRACT:
        del counts[name]
    return counts


def grown(before: collections.Counter[str], after: collections.Counter[str], by: int) -> dict[str, tuple[int, int]]:
    """Types of which there are more by more than a number."""
    return {name: (before[name], count) for name, count in after.items() if count - before[name] > by}


def grown_each_time(work: Callable[[], object], by: int) -> dict[str, tuple[int, int]]:
    """Types of which each of three runs leaves more. What one run leaves, because something still holds the last
    capture, does not add up."""
    found: dict[str, tuple[int, int]] = {}
    for _ in range(3):
        before = live_objects()
        work()
        found = grown(before, live_objects(), by)
        if not found:
            break
    return found


def cache_sizes() -> dict[str, int]:
    """Entries of each container that lives as long as the process does."""
    sizes = {}
    for name, module in list(sys.modules.items()):
        if name == wholestep.__name__ or name.startswith(wholestep.__name__ + "."):
            for key, value in list(vars(module).items()):
                _measure(f"{name}.{key}", value, name, sizes)
    return sizes


def _measure(path: str, value: Any, home: str, sizes: dict[str, int]) -> None:
    if isinstance(value, _CONTAINERS):
        sizes[path] = len(value)
    elif isinstance(value, _Cache):
        if getattr(value, "__module__", None) == home:
            sizes[path] = value.cache_info().currsize
    elif isinstance(value, type) and value.__module__ == home:
        for key, item in list(vars(value).items()):
            if isinstance(item, (*_CONTAINERS, _Cache)) and not key.startswith("__"):
                _measure(f"{path}.{key}", item, home, sizes)
    elif isinstance(value, types.FunctionType) and value.__module__ == home:
        for key, item in vars(value).items():
            _measure(f"{path}.{key}", item, home, sizes)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
