"""Functions with a backward of their own (`torch.autograd.Function`) stay whole.

Export traces the operators of their forward and forgets the backward. So marks are put around each call,

    function_begin(0, [h, w])        what goes in, used by the forward or not
    round(..)                        the forward, for shapes and aliases
    function_end(0, [y])             what comes out

and a stage calls the function itself where the marks are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.torch_private.pipelining import define_tensor_marker
from wholestep.torch_private.pytrees import pytree

BEGIN = define_tensor_marker("wholestep::function_begin")
END = define_tensor_marker("wholestep::function_end")


@dataclass(frozen=True)
class FunctionCall:
    """A call that was traced: the function, its arguments with numbers in place of tensors, and which results count."""

    function: Any
    leaves: tuple[Any, ...]
    """Arguments, flat; None where a tensor was."""
    spec: Any

    def __deepcopy__(self, memo: Any) -> FunctionCall:
        return self  # nothing in it changes

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the function with these tensors; its tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is None else leaf[0] for leaf in self.leaves]
        return tuple(tensors_of(self.function.apply(*pytree.tree_unflatten(leaves, self.spec))))


class FunctionModule(torch.nn.Module):
    """A call in a stage."""

    def __init__(self, call: FunctionCall) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the function."""
        return self.call(*tensors)

    def extra_repr(self) -> str:
        """Which function it is."""
        return str(self.call.function.__name__)


def traced_call(function: Any, args: tuple[Any, ...]) -> FunctionCall:
    """The description of a call."""
    leaves, spec = pytree.tree_flatten(args)
    return FunctionCall(function, tuple(None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves), spec)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_mark(node: fx.Node) -> bool:
    """Whether a node only says where a function begins or ends."""
    return node.target in (BEGIN, END)


def marked(node: fx.Node) -> list[fx.Node]:
    """The tensors that a mark names."""
    return [arg for arg in node.args[1] if isinstance(arg, fx.Node)]  # type: ignore[union-attr]
