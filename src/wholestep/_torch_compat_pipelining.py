"""Private names of torch that the pipelining room uses, each with what it is for. Tried on 2.11 and 2.13."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch.distributed.pipelining import microbatch as _microbatch

from wholestep._torch_compat import DispatchMode

WholeValue: Any = _microbatch._Replicate
"""In a chunk spec: every microbatch gets the whole value. The class itself stands there."""


def define_marker(name: str, schema: str) -> Any:
    """An operator that does nothing and that export keeps as a node, with its place among the others.

    `BackendSelect` is the key for operators without tensor inputs, the one that torch's own `pipe_split` uses.
    """
    namespace, short = name.split("::")
    torch.library.define(name, schema)

    def nothing(*args: Any) -> None:
        return None

    torch.library.impl(name, "BackendSelect")(nothing)
    torch.library.register_fake(name)(nothing)
    op = getattr(getattr(torch.ops, namespace), short).default
    fx.node.has_side_effect(op)
    return op


def torchs_markers() -> tuple[Any, ...]:
    """torch's own split marks, if its pipelining was imported: the operator (`pippy::_pipe_split`) and the function."""
    module = sys.modules.get("torch.distributed.pipelining._IR")
    return () if module is None else (module.aten_pipe_split_alias, module.pipe_split)


@contextmanager
def checkpoints_replaced(around: Callable[[bool, Any], Any]) -> Iterator[None]:
    """Let `torch.utils.checkpoint.checkpoint` run its function within `around(preserve_rng_state, context_fn)`.

    Users hold the function itself, so what it calls is replaced: the generator of the way without reentrant autograd
    (`_checkpoint_without_reentrant_generator`) and the autograd function of the other (`CheckpointFunction`).
    """
    module: Any = torch.utils.checkpoint
    generator, function_class = module._checkpoint_without_reentrant_generator, module.CheckpointFunction

    def marked(fn: Any, preserve_rng_state: bool = True, context_fn: Any = None, *rest: Any, **kwargs: Any) -> Any:
        with around(preserve_rng_state, None if context_fn is module.noop_context_fn else context_fn):
            yield

    def apply(fn: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        with around(preserve_rng_state, None):
            return fn(*args)

    module._checkpoint_without_reentrant_generator = marked
    module.CheckpointFunction = SimpleNamespace(apply=apply)
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = generator
        module.CheckpointFunction = function_class


def region_operators() -> tuple[Any, Any]:
    """The higher-order operators that export makes of `autocast` and of `no_grad` blocks (`wrap_with_autocast`,
    `wrap_with_set_grad_enabled`): (device, dtype, enabled, cache, body, *operands) and (enabled, body, *operands)."""
    return torch.ops.higher_order.wrap_with_autocast, torch.ops.higher_order.wrap_with_set_grad_enabled


def checks_of_export() -> tuple[Any, ...]:
    """Operators by which export checks dtype, device and sizes again: of no use to a stage, and bound to a device."""
    names = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
    return tuple(getattr(torch.ops.aten, name).default for name in names)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Warnings that torch gives about itself while it exports are not the user's; those from user code are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        # About attributes such as the flat weights of an LSTM, which point to parameters: said from `contextlib`.
        warnings.filterwarnings("ignore", message=r"The tensor attribute")
        # When it fails, export prints the graph so far: a thousand lines, also where the next attempt succeeds.
        names: dict[str, Any] = importlib.import_module("torch.export._trace").__dict__
        before = names.get("print", print)
        names["print"] = lambda *_, **__: None
        try:
            yield
        finally:
            names["print"] = before


def define_tensor_marker(name: str) -> Any:
    """An operator that takes a number and tensors and does nothing; export keeps it."""
    namespace, short = name.split("::")
    torch.library.define(name, "(int number, Tensor[] tensors) -> ()")

    def nothing(*args: Any) -> None:
        return None

    torch.library.impl(name, "CompositeExplicitAutograd")(nothing)
    torch.library.register_fake(name)(nothing)
    op = getattr(getattr(torch.ops, namespace), short).default
    fx.node.has_side_effect(op)
    return op


@contextmanager
def functions_replaced(call: Callable[..., Any]) -> Iterator[None]:
    """Let `SomeFunction.apply(*args)` of a user's `torch.autograd.Function` be `call(SomeFunction, apply, args)`.

    Classes inherit `apply`, so it is replaced on `Function` itself. torch's own private functions are left alone.
    """
    base: Any = torch.autograd.Function
    original = vars(base)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        if cls.__module__.startswith("torch._") or kwargs:
            return bound(*args, **kwargs)
        return call(cls, bound, args)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = original


class RecordCalls(DispatchMode):
    """While it is on, calls of these operators go to `record` and do nothing else. For operators without tensors,
    which a symbolic trace does not see."""

    def __init__(self, operators: Container[Any], record: Callable[[], Any]) -> None:
        super().__init__()
        self._operators = operators
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operators:
            self._record()
            return None
        return func(*args, **(kwargs or {}))


def hooks_around(module: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """The forward hooks of a module: before and after (`_forward_pre_hooks`, `_forward_hooks`)."""
    return list(module._forward_pre_hooks.values()), list(module._forward_hooks.values())
