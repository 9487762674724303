"""The names under which modules and tensors lie in the split module, such that no two things share one.

call_module "layers.0.linear"     child: "layers_0_linear", or "layers_0_linear_1" if the graph also has that name
get_attr "layers.0.weight"        base: "layers.0.weight", unless it starts like a child ("submod_0.weight")
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from wholestep.partition.assign import Attributes
from wholestep.torch_private.modules_and_optimizers import is_non_persistent


class FlatNames:
    """Names without dots for qualified names: one for each, none for two."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken: dict[str, str] = {name: name for name in reserved}
        self._names: dict[str, str] = {}

    def name_of(self, target: str) -> str:
        """The name for a target, always the same."""
        name = self._names.get(target)
        if name is None:
            flat = name = target.replace(".", "_")
            count = 0
            while self._taken.get(name, target) != target:
                count += 1
                name = f"{flat}_{count}"
            self._taken[name] = target
            self._names[target] = name
        return name


def install(owner: nn.Module, values: dict[str, Any]) -> None:
    """Put values under their qualified names, shallow ones first, with empty modules on the way where none is."""
    for target in sorted(values, key=lambda name: name.count(".")):
        _install(owner, target, values[target])


def keep_persistence(owner: nn.Module, target: str, source: Attributes, original: str) -> None:
    """A buffer that is not in the state dict of the original stays out of the new one."""
    holder = source.owner_of(original)
    if holder is None or not is_non_persistent(holder, original.rpartition(".")[2]):
        return
    prefix, _, name = target.rpartition(".")
    new = owner.get_submodule(prefix)
    if new is not holder:
        new.register_buffer(name, new.get_buffer(name), persistent=False)


def _install(owner: nn.Module, target: str, value: Any) -> None:
    *prefix, name = target.split(".")
    for atom in prefix:
        inner = getattr(owner, atom, None)
        if inner is None:
            inner = nn.Module()
            setattr(owner, atom, inner)
        owner = inner
    if getattr(owner, name, None) is value and value is not None:
        return  # came along with a module that holds it
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        owner.register_buffer(name, value)
    else:
        setattr(owner, name, value)
