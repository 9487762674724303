"""Hooks run while a step is traced and never again, so their Python side is lost: they are refused by default.

`hooks="trace"` captures what they compute instead. Hooks that torch itself installs to compute weights
(`weight_norm`, `spectral_norm`) do nothing but tensor arithmetic and are always traced.
"""

from __future__ import annotations

from typing import Any

from wholestep.capture.objects.discover import World
from wholestep.capture.objects.swapped_state import Tracked
from wholestep.errors import HookError
from wholestep.torch_private.autograd import post_accumulate_hooks, tensor_hooks
from wholestep.torch_private.modules_and_optimizers import (
    global_module_hooks,
    module_hooks,
    optimizer_step_hooks,
    weight_computing_hooks,
)

_PURE = weight_computing_hooks()


def refuse_hooks(world: World, parameters: list[Tracked], ours: frozenset[int] = frozenset()) -> None:
    """Raise with a list of all hooks that would only run while tracing; `ours` are the plan's, by identity."""
    found: list[str] = [f"every module: {_name(hook)}" for hook in global_module_hooks()]
    for module, path in world.modules.items():
        hooks = (hook for hook in module_hooks(module) if id(hook) not in ours)
        found += [f"{path}: {_name(hook)}" for hook in hooks if not _is_pure(hook)]
    for tracked in parameters:
        found += [f"{tracked.slot.path}: {_name(hook)}" for hook in tensor_hooks(tracked.real)]
    for optimizer, path in world.optimizers.items():
        found += [f"{path}: {_name(hook)}" for hook in optimizer_step_hooks(optimizer)]
    if found:
        raise HookError(
            f"{len(found)} hook(s) would run while the step is captured and never again:\n          "
            + "\n          ".join(found),
            fix='remove them, or pass hooks="trace" to capture what they compute (their Python effects, such as '
            "appending to a list, then happen once).",
        )


def trace_parameter_hooks(parameters: list[Tracked]) -> None:
    """Give the fakes the hooks of the parameters they stand for."""
    for tracked in parameters:
        after = post_accumulate_hooks(tracked.real)
        for hook in tensor_hooks(tracked.real):
            fake: Any = tracked.fake
            if any(hook is late for late in after):
                fake.register_post_accumulate_grad_hook(hook)
            else:
                fake.register_hook(hook)


def _is_pure(hook: Any) -> bool:
    """Hooks known to do tensor arithmetic only."""
    library = (getattr(hook, "__module__", "") or "").startswith("transformers.")
    return isinstance(hook, _PURE) or (library and hook.__name__ == "make_inputs_require_grads")


def _name(hook: Any) -> str:
    name = getattr(hook, "__qualname__", None) or type(hook).__name__
    code = getattr(hook, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
