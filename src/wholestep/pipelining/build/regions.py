"""Blocks of a model that change how operators run: autocast, gradients on or off, activation checkpointing.

While a graph is cut it is flat, and each node knows the blocks around it, the outermost first:

    with torch.autocast("cpu", torch.bfloat16):       h = linear(x, w)      regions: (autocast,)
        h = self.fc(x)
    y = h * 2                                         y = mul(h, 2)         regions: ()

A stage puts them back: nodes that follow each other in one block become a module that runs them inside of it. A block
that is cut becomes two.
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

from wholestep.pipelining.build import functions
from wholestep.pipelining.build.functions import FunctionCall, tensors_of, traced_call
from wholestep.torch_private.pipelining import checkpoints_replaced, define_marker, functions_replaced

KEY = "wholestep_regions"
BEGIN = define_marker("wholestep::region_begin", "(int number) -> ()")
END = define_marker("wholestep::region_end", "(int number) -> ()")


@dataclass(frozen=True)
class Region:
    """One block."""

    kind: Literal["autocast", "grad", "checkpoint", "function"]
    settings: tuple[Any, ...]
    """autocast: (device, dtype, enabled, cache); grad: (enabled,); checkpoint: (preserve_rng_state,); function: ()."""
    number: int
    """Tells two blocks with the same settings apart."""
    context_fn: Any = field(default=None, compare=False)
    """checkpoint: what selects the values to keep."""
    call: FunctionCall | None = field(default=None, compare=False)
    """function: what is called in the place of the nodes."""

    def enter(self) -> AbstractContextManager[Any]:
        """The block, for autocast and gradients."""
        if self.kind == "autocast":
            device, dtype, enabled, cache = self.settings
            return torch.autocast(device, dtype, enabled=enabled, cache_enabled=cache)
        assert self.kind == "grad"
        return torch.set_grad_enabled(self.settings[0])

    def run(self, body: Callable[..., Any], held: int, args: Sequence[Any]) -> Any:
        """Call a function inside of the block. The first `held` arguments are state: as in eager, it is not saved with
        the inputs of a checkpoint, so that buffers may be written in it."""
        if self.kind != "checkpoint":
            with self.enter():
                return body(*args)
        chosen = {} if self.context_fn is None else {"context_fn": self.context_fn}
        with_state = partial(body, *args[:held])
        return checkpoint(with_state, *args[held:], use_reentrant=False, preserve_rng_state=self.settings[0], **chosen)

    def on_device(self, old: str, new: str) -> Region:
        """The block after a move: autocast for the device that the stage was on is now for the one it is on."""
        if self.kind != "autocast" or self.settings[0] != old or new == "meta":
            return self
        return replace(self, settings=(new, *self.settings[1:]))

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.settings))})"


def regions_of(node: fx.Node) -> tuple[Region, ...]:
    """The blocks around a node, the outermost first."""
    found: tuple[Region, ...] = node.meta.get(KEY, ())
    return found


class RegionModule(torch.nn.Module):
    """The nodes of one block in a stage. All that they read comes in as arguments, state first."""

    def __init__(self, region: Region, body: fx.GraphModule, held: int) -> None:
        super().__init__()
        self.region = region
        self.body = body
        self.held = held

    def forward(self, *args: Any) -> Any:
        """Run the nodes inside of the block."""
        return self.region.run(self.body, self.held, args)

    def extra_repr(self) -> str:
        """Which block it is."""
        return str(self.region)


class RegionMarks:
    """Marks around what export itself would leave no trace of, while a model is exported."""

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Put marks around each checkpoint and around each function with a backward of its own."""
        with checkpoints_replaced(self._around), functions_replaced(self._call):
            yield

    def _call(self, function: Any, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        number = len(self.regions)
        self.regions[number] = Region("function", (), number, call=traced_call(function, args))
        functions.BEGIN(number, tensors_of(args))
        result = apply(*args)
        functions.END(number, tensors_of(result))
        return result

    @contextmanager
    def _around(self, preserve_rng_state: bool, context_fn: Any) -> Iterator[None]:
        number = len(self.regions)
        self.regions[number] = Region("checkpoint", (bool(preserve_rng_state),), number, context_fn)
        BEGIN(number)
        yield
        END(number)
