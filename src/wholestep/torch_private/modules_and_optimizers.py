"""nn.Module, optimizers and gradient scalers: private methods, hooks and attributes. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}
"""Attributes that torch sets on every module. 2.11, 2.13."""
OPTIMIZER_INTERNALS = frozenset(vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))]))) | {
    "_opt_called",
    "_need_device_dtype_check_for_fused",
    "_step_supports_amp_scaling",
}
"""Attributes that torch sets on every optimizer. 2.11, 2.13."""

MODULE_APPLY = "_apply"
"""The method of nn.Module behind `.to()`, `.half()`, `.cuda()`. 2.11, 2.13."""


RNN_WEIGHTS_CHANGED = "_weights_have_changed"
"""The method of nn.RNNBase that tells whether to re-pack weights; fake weights would count as a change. 2.11, 2.13."""


SCALER_TENSORS = ("_scale", "_growth_tracker")


SCALER_NUMBERS = ("_growth_factor", "_backoff_factor", "_growth_interval")


SCALER_SETTINGS = ("_enabled", "_init_scale")


SCALER_STEP = "_maybe_opt_step"
"""Attributes of a GradScaler: tensors, Python scalars and settings; and the method that branches on inf. 2.11, 2.13."""


VALIDATION_OF_DISTRIBUTIONS = "_validate_args"
"""The attribute that says whether a distribution validates its arguments. 2.11, 2.13."""


def validate_distributions(value: bool) -> bool:
    """Set whether `torch.distributions` validate their arguments, which branches on data; returns the old value.
    2.11, 2.13."""
    before = bool(torch.distributions.Distribution._validate_args)
    torch.distributions.Distribution.set_default_validate_args(value)
    return before


def adafactor_module() -> Any:
    """The module of torch's Adafactor, whose `min` and `max` compare symbolic scalars. 2.11, 2.13."""
    from torch.optim import _adafactor

    return _adafactor


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as stepped; otherwise schedulers warn about the order of calls. 2.11, 2.13."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_behind_hooks(function: FunctionType) -> FunctionType:
    """The `step` of an optimizer without the wrapper that runs hooks, which the first optimizer of a class puts around
    the method (`Optimizer.profile_hook_step`, marked by `hooked`); other functions as they are. 2.11, 2.13."""
    found: FunctionType = vars(function)["__wrapped__"] if vars(function).get("hooked") else function
    return found


def optimizer_step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Hooks around `optimizer.step` and the global ones. 2.11, 2.13."""
    from torch.optim import optimizer as _optimizer

    found: list[Any] = []
    for hooks in (
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),  # absent where __init__ of Optimizer was not called
        getattr(optimizer, "_optimizer_step_post_hooks", {}),
        _optimizer._global_optimizer_pre_hooks,
        _optimizer._global_optimizer_post_hooks,
    ):
        found.extend(hooks.values())
    return found


def weight_computing_hooks() -> tuple[type, ...]:
    """Types of torch's own hooks that compute a weight from other parameters without side effects. 2.11, 2.13."""
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    return WeightNorm, SpectralNorm


def module_hooks(module: torch.nn.Module) -> list[Any]:
    """Forward and backward hooks of one module. 2.11, 2.13."""
    return [hook for hooks in _hooks_of(module) for hook in hooks.values()]


def _hooks_of(module: torch.nn.Module) -> list[dict[int, Any]]:
    return [module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks]


def packing_functions() -> tuple[Any, Any]:
    """What `pack_padded_sequence` and `pad_packed_sequence` call (`torch._VF`). 2.11, 2.13."""
    return torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence


def hook_registries(modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """The dicts in which torch stores hooks, for a guard that compares their lengths at each call. 2.11, 2.13."""
    from torch.nn.modules import module as _module
    from torch.optim import optimizer as _optimizer

    found: list[Any] = [
        _module._global_forward_pre_hooks,
        _module._global_forward_hooks,
        _module._global_backward_hooks,
        _module._global_backward_pre_hooks,
        _optimizer._global_optimizer_pre_hooks,
        _optimizer._global_optimizer_post_hooks,
    ]
    for m in modules:
        found += _hooks_of(m)
    for o in optimizers:
        names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        found += [getattr(o, name, {}) for name in names]  # absent where __init__ of Optimizer was not called
    return found


def global_module_hooks() -> list[Any]:
    """Hooks registered for every module of the process. 2.11, 2.13."""
    from torch.nn.modules import module as _module

    registries = (
        _module._global_forward_pre_hooks,
        _module._global_forward_hooks,
        _module._global_backward_hooks,
        _module._global_backward_pre_hooks,
    )
    return [hook for hooks in registries for hook in hooks.values()]


def python_function_of(scripted: Any) -> Callable[..., Any] | None:
    """The Python function that `torch.jit.script` compiled (`_torchdynamo_inline`); None for others. 2.11, 2.13."""
    return getattr(scripted, "_torchdynamo_inline", None)


CLIP_MODULE = sys.modules["torch.nn.utils.clip_grad"]


TOTAL_NORM, SCALE_BY_NORM = "_get_total_norm", "_clip_grads_with_norm_"
# The two halves of `clip_grad_norm_`. 2.11, 2.13.


SCALER_UNSCALE = "_unscale_grads_"
# GradScaler's loop over gradients; returns found_inf per device. 2.11, 2.13.


def forward_hooks(module: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """The forward pre-hooks and the forward hooks of a module by their numbers; to be changed. 2.11, 2.13."""
    return module._forward_pre_hooks, module._forward_hooks


def is_fsdp_hook(hook: Any) -> bool:
    """Whether a forward hook is one of `fully_shard`'s (a method of its `FSDPState`). 2.11, 2.13."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return isinstance(getattr(hook, "__self__", None), FSDPState)


def _global_pre_hooks() -> tuple[dict[Any, Any], dict[Any, Any]]:
    from torch.nn.modules import module as _module
    from torch.optim import optimizer as _optimizer

    return _module._global_forward_pre_hooks, _optimizer._global_optimizer_pre_hooks


GLOBAL_PRE_HOOKS = _global_pre_hooks()
"""The global hooks before every forward of a module and before every `step` of an optimizer. 2.11, 2.13."""


PARAMETER_ACCESS_METHODS: tuple[tuple[type, str], ...] = (
    (torch.nn.Module, "_apply"),
    (torch.nn.Module, "_named_members"),
    (torch.nn.Module, "train"),
    (torch.optim.Optimizer, "__getstate__"),
)
"""The methods behind `half` and `to`, behind `parameters` and `buffers`, behind `eval`, and behind copies of an
optimizer. 2.11, 2.13."""


def is_non_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a buffer is not part of the state dict (`Module._non_persistent_buffers_set`). 2.11, 2.13."""
    return name in module._non_persistent_buffers_set


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """The result type of `load_state_dict` (`torch.nn.modules.module._IncompatibleKeys`). 2.11, 2.13."""
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)
