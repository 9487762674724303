"""Autograd: nodes, hooks, sequence numbers, the modes below it, and the profiler. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def below_autograd() -> AbstractContextManager[Any]:
    """Run kernels as autograd runs them: nothing is recorded, and grad mode is unchanged. 2.11, 2.13.

    `no_grad` is not the same: some kernels read the grad mode (oneDNN's LSTM saves its workspace only if it is on).
    """
    return torch._C._AutoDispatchBelowAutograd()


@contextmanager
def recording_again() -> Iterator[None]:
    """Let autograd record within `below_autograd` (`_dispatch_tls_set_dispatch_key_excluded`). 2.11, 2.13."""
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad():
        for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
            torch._C._dispatch_tls_set_dispatch_key_excluded(getattr(torch._C.DispatchKey, name), False)
        yield


def gradient_leaves(functions: Sequence[Any]) -> list[Tensor]:
    """The tensors into which a backward from some functions of autograd accumulates (`AccumulateGrad.variable`).
    2.11, 2.13."""
    found: list[Tensor] = []
    stack, seen = [f for f in functions if f is not None], set()
    while stack:
        function = stack.pop()
        if function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            found.append(function.variable)
        stack += [after for after, _ in function.next_functions if after is not None]
    return found


def current_autograd_node() -> Any:
    """The autograd node whose backward runs on this thread, or None. 2.11, 2.13."""
    return torch._C._current_autograd_node()


def is_accumulating_gradient() -> bool:
    """Whether autograd is storing a gradient into a leaf's `.grad` on this thread. 2.11, 2.13."""
    node = current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def autograd_sequence_number() -> int:
    """The number of autograd nodes created so far; relates a backward node to the line of its forward. 2.11, 2.13."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def node_sequence_number(node: Any) -> int:
    """The sequence number of an autograd node, set when it was created. 2.11, 2.13."""
    return int(node._sequence_nr())


def error_in_backward(message: str) -> Any:
    """A function that returns its argument with a backward that raises (`DelayedError`). 2.11, 2.13."""
    return torch._C._functions.DelayedError(message, 1)


HOOK_ATTRIBUTES = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))
"""Read the hook dicts of a tensor; None if it never had a hook. 2.11, 2.13."""


def tensor_hooks(tensor: Tensor) -> list[Any]:
    """Gradient hooks and post-accumulate hooks of one tensor. 2.11, 2.13."""
    found: list[Any] = list((tensor._backward_hooks or {}).values())
    found.extend((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())
    return found


def hook_dicts(tensor: Tensor) -> list[dict[int, Any]]:
    """The dicts that hold the hooks of one tensor, where it has any. 2.11, 2.13."""
    held = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [hooks for hooks in held if hooks is not None]


def post_accumulate_hooks(tensor: Tensor) -> list[Any]:
    """Only the hooks that run after `.grad` was accumulated. 2.11, 2.13."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def graph_task() -> int:
    """The id of the current run of the autograd engine; -1 outside. 2.11, 2.13."""
    return int(torch._C._current_graph_task_id())


SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled


ENTER_AUTOCAST: Any = torch.amp.autocast_mode._enter_autocast


EXIT_AUTOCAST: Any = torch.amp.autocast_mode._exit_autocast
"""The functions that graphs call to change grad mode and autocast for all nodes that follow. 2.11, 2.13."""


MODE_SWITCHES = frozenset({SET_GRAD_ENABLED, ENTER_AUTOCAST, EXIT_AUTOCAST})


is_profiling = torch._C._autograd._profiler_enabled
"""Whether a profiler is recording, so that named ranges are worth their cost."""


def cpu_bytes_at_most(function: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a function, and its peak of CPU memory in bytes above the level before the call.

    Counts allocations of the CPU allocator by memory events of the legacy profiler (kineto has the same events, and
    prints). 2.11, 2.13.
    """
    autograd: Any = torch.autograd
    details = torch._C._profiler._ExperimentalConfig()
    config = autograd.ProfilerConfig(autograd.ProfilerState.CPU, False, True, False, False, False, details)
    autograd._enable_profiler_legacy(config)
    try:
        result = function()
    finally:
        records: Any = autograd._disable_profiler_legacy()
    now = most = 0
    for thread in records:
        for event in thread:
            if event.kind() == "memory_alloc":
                now += event.cpu_memory_usage()
                most = max(most, now)
    return result, most


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of `torch.vmap` or another transform of torch.func. 2.11, 2.13."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def ones_at(edge: GradientEdge) -> Tensor:
    """Ones with the metadata of the gradient that enters an edge (`Node._input_metadata`). 2.11, 2.13."""
    like = edge.node._input_metadata[edge.output_nr]
    return torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device)


def after_backward(function: Callable[[], None]) -> None:
    """Inside of a backward: call a function when this backward is over (`Variable._execution_engine.queue_callback`,
    which DDP and FSDP2 use). 2.11, 2.13."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


_identities: dict[str, type[torch.autograd.Function]] = {}


def identity_named(name: str) -> Callable[[Tensor], Tensor]:
    """The identity, whose results say that an autograd function of that name made them: `grad_fn=<MulBackward0>`.
    A node of Python takes its name from a class that torch makes (`Function._backward_cls`). 2.13."""
    if name not in _identities:

        class Identity(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor) -> Tensor:
                return value.view_as(value)

        backward_class: Any = Identity._backward_cls
        backward_class.__name__ = name
        _identities[name] = Identity
    apply: Callable[[Tensor], Tensor] = _identities[name].apply
    return apply
