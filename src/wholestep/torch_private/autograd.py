"""Autograd: its nodes, hooks, sequence numbers and the modes below it. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as _pytree


def below_autograd() -> AbstractContextManager[Any]:
    """Run kernels as autograd runs them: nothing is recorded, grad mode is not touched. 2.11, 2.13.

    Some kernels look at the grad mode (oneDNN's LSTM keeps its workspace only where it is on): `no_grad` would not do.
    """
    return torch._C._AutoDispatchBelowAutograd()


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
    """How many autograd nodes were made; relates a backward node to the line of its forward. 2.11, 2.13."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def node_sequence_number(node: Any) -> int:
    """The number an autograd node was given when it was made. 2.11, 2.13."""
    return int(node._sequence_nr())


def error_in_backward(message: str) -> Any:
    """A function that returns its argument with a backward that raises (`DelayedError`). 2.11, 2.13."""
    return torch._C._functions.DelayedError(message, 1)


HOOK_ATTRIBUTES = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))
"""Read the hook dictionaries of a tensor; None where it never had a hook. 2.11, 2.13."""


def tensor_hooks(tensor: Tensor) -> list[Any]:
    """Gradient hooks and post-accumulate hooks of one tensor. 2.11, 2.13."""
    found: list[Any] = list((tensor._backward_hooks or {}).values())
    found.extend((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())
    return found


def post_accumulate_hooks(tensor: Tensor) -> list[Any]:
    """Only the hooks that run after `.grad` was accumulated. 2.11, 2.13."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def graph_task() -> int:
    """A number that is the same within one run of the autograd engine; -1 outside. 2.11, 2.13."""
    return int(torch._C._current_graph_task_id())


SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled


ENTER_AUTOCAST: Any = torch.amp.autocast_mode._enter_autocast


EXIT_AUTOCAST: Any = torch.amp.autocast_mode._exit_autocast
"""The functions that graphs call to change grad mode and autocast for all nodes that follow. 2.11, 2.13."""


MODE_SWITCHES = frozenset({SET_GRAD_ENABLED, ENTER_AUTOCAST, EXIT_AUTOCAST})


is_profiling = torch._C._autograd._profiler_enabled
"""Whether a profiler is recording: then calls are worth a name."""


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of `torch.vmap` or another transform of torch.func. 2.11, 2.13."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def ones_at(edge: GradientEdge) -> Tensor:
    """Ones like the gradient that comes in at an edge (`Node._input_metadata`). 2.11, 2.13."""
    like = edge.node._input_metadata[edge.output_nr]
    return torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device)
