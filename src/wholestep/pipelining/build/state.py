"""The parameters and buffers of a model, with all their names, and the stages in which each lives.

The union of the stages' state dicts is the model's: a tied weight has all its names wherever it is, buffers are as
persistent as they were, and state that no operator uses lives beside its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.torch_private.modules_and_optimizers import is_non_persistent


@dataclass(frozen=True)
class Entry:
    """One name of one tensor (or submodule) that graphs read."""

    name: str
    value: Any
    is_parameter: bool
    persistent: bool


class ModelState:
    """What the graphs of a model may read by name."""

    def __init__(self, module: torch.nn.Module, constants: Iterable[Mapping[str, Any]] = ()) -> None:
        self.entries: dict[str, Entry] = {}
        for path, submodule in module.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
                self._add(Entry(prefix + name, parameter, True, True))
            for name, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False):
                self._add(Entry(prefix + name, buffer, False, not is_non_persistent(submodule, name)))
        self.in_model = tuple(self.entries)
        for table in constants:
            for name, value in table.items():
                self._add(Entry(name, value, False, False))
        self._names: dict[int, list[str]] = {}
        for name, entry in self.entries.items():
            self._names.setdefault(id(entry.value), []).append(name)

    def _add(self, entry: Entry) -> None:
        self.entries.setdefault(entry.name, entry)

    def names(self, name: str) -> tuple[str, ...]:
        """All names of the tensor that has this one, in the model's order."""
        return tuple(self._names[id(self.entries[name].value)])

    def key(self, name: str) -> str:
        """The first name of a tensor: one for all its names."""
        return self.names(name)[0]


def place(state: ModelState, used: Mapping[str, Sequence[int]]) -> list[list[Entry]]:
    """The entries of each stage, in the model's order. `used` has the stages of each key that graphs read."""
    stages = 1 + max((stage for row in used.values() for stage in row), default=0)
    homes = dict(used)
    by_module: dict[str, int] = {}
    for name in state.in_model:
        for prefix in _prefixes(name):
            for stage in used.get(state.key(name), ())[:1]:
                by_module.setdefault(prefix, stage)
    for name in state.in_model:
        if state.key(name) not in homes:
            near = next((by_module[prefix] for prefix in _prefixes(name) if prefix in by_module), 0)
            homes[state.key(name)] = (near,)
    found: list[list[Entry]] = [[] for _ in range(stages)]
    for name, entry in state.entries.items():
        for stage in homes.get(state.key(name), ()):
            found[stage].append(entry)
    return found


def _prefixes(name: str) -> list[str]:
    """`a.b.weight` lives in `a.b`, which lives in `a`."""
    path = name.split(".")[:-1]
    return [".".join(path[:length]) for length in range(len(path), -1, -1)]


def attach(root: torch.nn.Module, entry: Entry) -> None:
    """Put a tensor or submodule under its name, with empty modules on the way."""
    *path, last = entry.name.split(".")
    for atom in path:
        if atom not in root._modules:
            root.add_module(atom, torch.nn.Module())
        root = root.get_submodule(atom)
    if isinstance(entry.value, torch.nn.Module):
        root.add_module(last, entry.value)
    elif entry.is_parameter:
        root.register_parameter(last, entry.value)
    else:
        root.register_buffer(last, entry.value, persistent=entry.persistent)
