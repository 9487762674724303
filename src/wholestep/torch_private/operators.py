"""Operators of torch: overloads, schemas, names. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils import _pytree as _pytree

# OpOverload: the type of a resolved operator such as `torch.ops.aten.add.Tensor`. 2.11, 2.13.
# OpOverloadPacket: what `torch.ops.aten.add` is; the JSON reader accepts no other object there. 2.11, 2.13.
# HigherOrderOperator: the type of operators that take functions (`cond`, `auto_functionalized`). 2.11, 2.13.


def find_overloads(namespace: str, name: str) -> list[OpOverload]:
    """All overloads of `namespace::name`; none if there is no such operator."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]


def schema_of(op: OpOverload) -> Any:
    """The schema of an operator (`OpOverload._schema`). 2.11, 2.13."""
    return op._schema


def op_name(op: OpOverload) -> str:
    """`aten::add.Tensor`, or `aten::mm` for a default overload (`OpOverload.name`, which has no types). 2.11, 2.13."""
    return str(op.name())  # type: ignore[no-untyped-call]


@lru_cache(maxsize=4096)
def plain_name(op: OpOverload) -> str:
    """The name without its overload, and for torch's own operators without `aten::`: `add_` of `aten::add_.Tensor`."""
    return op_name(op).removeprefix("aten::").partition(".")[0]


def kernel_call(op: OpOverload) -> Callable[..., Any]:
    """What calling an operator calls, without the Python frame around it (`OpOverload._op`). 2.11, 2.13."""
    found: Callable[..., Any] = op._op
    return found


def overload_name(op: OpOverload) -> str:
    """`Tensor` of `aten.add.Tensor` (`OpOverload._overloadname`). 2.11, 2.13."""
    return op._overloadname


def has_autograd_kernel(op: OpOverload) -> bool:
    """Whether an operator of torch.library has a backward of its own (or is a custom_op, whose results never are its
    inputs for autograd). 2.11, 2.13."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), "Autograd"))


def foreach_type_lists() -> list[list[Any]]:
    """The lists of tensor types for which torch picks foreach and fused kernels by default. 2.11, 2.13.

    FakeTensor joins them while a step is traced, so that the trace takes the path eager takes.
    """
    from torch.optim import optimizer as _optimizer
    from torch.utils import _foreach_utils

    lists: list[Any] = [_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types]
    return lists


AMP_UPDATE_SCALE = "_amp_update_scale_"
"""The function of `torch` behind GradScaler.update; takes its factors as plain numbers. 2.11, 2.13."""


FUSED_OPTIMIZER_FUNCTIONS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
"""Functions of `torch` that take hyper-parameters as plain floats; wrapped while tracing. 2.11, 2.13."""


@lru_cache(maxsize=4096)
def may_copy(op: OpOverload) -> bool:
    """Whether the result of an operator that is said to share memory can be a copy: those that are made of others
    (`reshape`, `contiguous`, `to`). `OpOverload._can_decompose` looks at the same key. 2.11, 2.13."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), "CompositeImplicitAutograd"))


def shares_storage(a: Any, b: Any) -> bool:
    """Whether two tensors, which may be fake, are views of the same memory. 2.11, 2.13."""
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


def packet_of(op: OpOverload) -> Any:
    """All overloads of an operator as one function (`OpOverload.overloadpacket`). 2.11, 2.13."""
    return op.overloadpacket


@lru_cache(maxsize=4096)
def argument_names(op: OpOverload) -> tuple[str, ...]:
    """The names of an operator's arguments, in the order of its schema."""
    return tuple(argument.name for argument in schema_of(op).arguments)


def named_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that are not given."""
    return {**dict(zip(argument_names(op), args, strict=False)), **kwargs}


def bound_argument(op: OpOverload, position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument at a schema position of a call, given by position or by name; None if it is not given."""
    return args[position] if position < len(args) else kwargs.get(argument_names(op)[position])
