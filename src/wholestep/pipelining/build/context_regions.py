"""Regions of a model that change how operators run: autocast, grad mode, activation checkpointing, autograd Functions.

While a graph is cut it is flat, and each node knows the regions around it, the outermost first:

    with torch.autocast("cpu", torch.bfloat16):       h = linear(x, w)      regions: (autocast,)
        h = self.fc(x)
    y = h * 2                                         y = mul(h, 2)         regions: ()

A stage restores them: consecutive nodes of one region become a module that runs them inside it. A region that is cut
becomes two.

A `torch.autograd.Function` is never cut. Export traces the operators of its forward and loses its backward. So markers
are put around each call,

    function_begin(0, [h, w])        inputs, whether the forward uses them or not
    round(..)                        the forward, for shapes and aliases
    function_end(0, [y])             outputs

and a stage calls the function itself between the markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from wholestep.torch_private.fx_graphs import pytree
from wholestep.torch_private.pipelining import (
    checkpoints_replaced,
    define_marker,
    define_tensor_marker,
    functions_replaced,
)

FUNCTION_BEGIN = define_tensor_marker("wholestep::function_begin")
FUNCTION_END = define_tensor_marker("wholestep::function_end")


@dataclass(frozen=True)
class FunctionCall:
    """A traced call: the function and its arguments, without the tensors."""

    function: Any
    leaves: tuple[Any, ...]
    """Flat arguments, each non-tensor leaf in a tuple; None for a tensor."""
    spec: Any

    def __deepcopy__(self, memo: Any) -> FunctionCall:
        return self  # immutable

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the function with these tensors; returns the tensors of its result."""
        given = iter(tensors)
        leaves = [next(given) if leaf is None else leaf[0] for leaf in self.leaves]
        return tuple(tensors_of(self.function.apply(*pytree.tree_unflatten(leaves, self.spec))))


class FunctionModule(torch.nn.Module):
    """A call of an autograd Function in a stage."""

    def __init__(self, call: FunctionCall) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the function."""
        return self.call(*tensors)

    def extra_repr(self) -> str:
        """The name of the function."""
        return str(self.call.function.__name__)


def traced_call(function: Any, args: tuple[Any, ...]) -> FunctionCall:
    """The description of a call."""
    leaves, spec = pytree.tree_flatten(args)
    return FunctionCall(function, tuple(None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves), spec)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_function_mark(node: fx.Node) -> bool:
    """True for a marker of the begin or end of a function."""
    return node.target in (FUNCTION_BEGIN, FUNCTION_END)


def marked_tensors(node: fx.Node) -> list[fx.Node]:
    """The tensors that a marker refers to."""
    return [arg for arg in node.args[1] if isinstance(arg, fx.Node)]  # type: ignore[union-attr]


REGIONS_KEY = "wholestep_regions"
REGION_BEGIN = define_marker("wholestep::region_begin", "(int number) -> ()")
REGION_END = define_marker("wholestep::region_end", "(int number) -> ()")


@dataclass(frozen=True)
class ContextRegion:
    """One region."""

    kind: Literal["autocast", "grad", "checkpoint", "function"]
    settings: tuple[Any, ...]
    """autocast: (device, dtype, enabled, cache); grad: (enabled,); checkpoint: (preserve_rng_state,); function: ()."""
    number: int
    """Distinguishes regions with the same settings."""
    context_fn: Any = field(default=None, compare=False)
    """checkpoint: the function that selects the values to save."""
    call: FunctionCall | None = field(default=None, compare=False)
    """function: the call that replaces the nodes."""

    def enter(self) -> AbstractContextManager[Any]:
        """The context manager of an autocast or grad region."""
        if self.kind == "autocast":
            device, dtype, enabled, cache = self.settings
            return torch.autocast(device, dtype, enabled=enabled, cache_enabled=cache)
        assert self.kind == "grad"
        return torch.set_grad_enabled(self.settings[0])

    def run(self, body: Callable[..., Any], held: int, args: Sequence[Any]) -> Any:
        """Call a function inside the region. The first `held` arguments are state: as in eager, it is not saved with
        the inputs of a checkpoint, so that the region may write buffers."""
        if self.kind != "checkpoint":
            with self.enter():
                return body(*args)
        chosen = {} if self.context_fn is None else {"context_fn": self.context_fn}
        with_state = partial(body, *args[:held])
        return checkpoint(with_state, *args[held:], use_reentrant=False, preserve_rng_state=self.settings[0], **chosen)

    def on_device(self, old: str, new: str) -> ContextRegion:
        """The region after a move of the stage: autocast for the old device becomes autocast for the new one."""
        if self.kind != "autocast" or self.settings[0] != old or new == "meta":
            return self
        return replace(self, settings=(new, *self.settings[1:]))

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.settings))})"


def regions_of(node: fx.Node) -> tuple[ContextRegion, ...]:
    """The regions around a node, the outermost first."""
    found: tuple[ContextRegion, ...] = node.meta.get(REGIONS_KEY, ())
    return found


class RegionModule(torch.nn.Module):
    """The nodes of one region in a stage. Everything they read is passed as arguments, state first."""

    def __init__(self, region: ContextRegion, body: fx.GraphModule, held: int) -> None:
        super().__init__()
        self.region = region
        self.body = body
        self.held = held

    def forward(self, *args: Any) -> Any:
        """Run the nodes inside the region."""
        return self.region.run(self.body, self.held, args)

    def extra_repr(self) -> str:
        """The kind and settings of the region."""
        return str(self.region)


class RegionMarks:
    """Inserts markers for regions that export does not record."""

    def __init__(self) -> None:
        self.regions: dict[int, ContextRegion] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Insert markers around each checkpoint and each call of a `torch.autograd.Function`."""
        with checkpoints_replaced(self._around), functions_replaced(self._call):
            yield

    def _call(self, function: Any, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        number = len(self.regions)
        self.regions[number] = ContextRegion("function", (), number, call=traced_call(function, args))
        FUNCTION_BEGIN(number, tensors_of(args))
        result = apply(*args)
        FUNCTION_END(number, tensors_of(result))
        return result

    @contextmanager
    def _around(self, preserve_rng_state: bool, context_fn: Any) -> Iterator[None]:
        number = len(self.regions)
        self.regions[number] = ContextRegion("checkpoint", (bool(preserve_rng_state),), number, context_fn)
        REGION_BEGIN(number)
        yield
        REGION_END(number)
