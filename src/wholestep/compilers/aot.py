"""Compile the forward and backward of a function or module, once for each shape of its inputs.

torch's `aot_function` traces at the first call and replays that trace on whatever comes later; here a call whose inputs
differ in shape, stride, dtype, device, sharing of memory or requires_grad, whose other arguments differ, or that runs
in another grad mode, autocast or train/eval state is traced on its own. Parameters that a module has twice go in once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from wholestep._torch_compat import aot_function, pytree, storage_key


def aot(fn: Callable[..., Any], **settings: Any) -> Any:
    """`fn` with `fw_compiler`, `bw_compiler` and the other settings of torch's `aot_function`; a module stays one."""
    return AOTModule(fn, settings) if isinstance(fn, nn.Module) else AOTFunction(fn, settings)


class AOTFunction:
    """A function and what was compiled of it."""

    def __init__(self, fn: Callable[..., Any], settings: dict[str, Any], state: Callable[[], Hashable] = tuple) -> None:
        self.fn = fn
        self._settings = settings
        self._state = state
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = (self._state(), *_modes(), *_shape_of((args, kwargs)))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = _traced(self.fn, self._settings)
        return compiled(*args, **kwargs)

    @property
    def graphs(self) -> int:
        """How many times the function was traced."""
        return len(self._compiled)


def _traced(fn: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """torch's `aot_function`, which makes a list of a tuple of tensors; here it stays a tuple."""
    returned: list[type] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        returned[:] = [type(result)]
        return result

    compiled = aot_function(noting, **settings)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        return tuple(result) if type(result) is list and returned == [tuple] else result

    return call


class AOTModule(nn.Module):
    """A module whose forward and backward are compiled; its parameters are those of `orig_module`."""

    def __init__(self, module: nn.Module, settings: dict[str, Any]) -> None:
        super().__init__()
        self.orig_module = module
        state = dict(self._state())
        self.compiled = AOTFunction(
            self._call, {"num_params_buffers": len(state), **settings}, lambda: _training(module)
        )

    def _state(self) -> list[tuple[str, Tensor]]:
        return [*self.orig_module.named_parameters(), *self.orig_module.named_buffers()]

    def _call(self, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return torch.func.functional_call(self.orig_module, state, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.compiled(dict(self._state()), args, kwargs)


def _training(module: nn.Module) -> Hashable:
    return tuple(each.training for each in module.modules())


def _modes() -> tuple[Hashable, ...]:
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def _shape_of(tree: Any) -> tuple[Hashable, ...]:
    leaves, spec = pytree.tree_flatten(tree)
    first: dict[int, int] = {}
    found: list[Hashable] = [str(spec)]
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            found.append((type(leaf), leaf if isinstance(leaf, Hashable) else id(leaf)))
            continue
        geometry: tuple[Hashable, ...] = (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad, type(leaf))
        if leaf.layout is torch.strided:
            # Two inputs that share memory, or are one tensor, are traced as such.
            geometry += (leaf.stride(), leaf.storage_offset(), first.setdefault(storage_key(leaf), place))
            geometry += (first.setdefault(-id(leaf), place),)
        found.append(geometry)
    return tuple(found)
