"""Operators of torch: overloads, schemas, names, libraries. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket

# OpOverload: the type of a resolved operator such as `torch.ops.aten.add.Tensor`. 2.11, 2.13.
# OpOverloadPacket: the type of `torch.ops.aten.add`; the JSON reader accepts no other type there. 2.11, 2.13.
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
    """The C++ function of an operator, without the Python frame of `OpOverload.__call__` (`OpOverload._op`).
    2.11, 2.13."""
    found: Callable[..., Any] = op._op
    return found


def overload_name(op: OpOverload) -> str:
    """`Tensor` of `aten.add.Tensor` (`OpOverload._overloadname`). 2.11, 2.13."""
    return op._overloadname


def has_autograd_kernel(op: OpOverload) -> bool:
    """Whether an operator of torch.library has its own backward (or is a custom_op, whose results are never its inputs
    for autograd). 2.11, 2.13."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), "Autograd"))


def foreach_type_lists() -> list[list[Any]]:
    """The lists of tensor types for which torch selects foreach and fused kernels by default. 2.11, 2.13.

    FakeTensor is added to them during a trace, so that the trace selects the same kernels as eager.
    """
    from torch.optim import optimizer as _optimizer
    from torch.utils import _foreach_utils

    lists: list[Any] = [_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types]
    return lists


AMP_UPDATE_SCALE = "_amp_update_scale_"
"""The function of `torch` behind GradScaler.update; takes its factors as Python floats. 2.11, 2.13."""


FUSED_OPTIMIZER_FUNCTIONS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
"""Functions of `torch` that take hyper-parameters as Python floats; wrapped during a trace. 2.11, 2.13."""


@lru_cache(maxsize=4096)
def may_copy(op: OpOverload) -> bool:
    """Whether the result of an operator whose schema says that it is a view can be a copy: composite operators such as
    `reshape`, `contiguous`, `to`. `OpOverload._can_decompose` reads the same key. 2.11, 2.13."""
    if op.namespace == "prim":  # `prim::device`: the dispatcher does not know these
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), "CompositeImplicitAutograd"))


def shares_storage(a: Any, b: Any) -> bool:
    """Whether two tensors, which may be fake, share storage. 2.11, 2.13."""
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
    """The arguments of a call by name, without omitted ones."""
    return {**dict(zip(argument_names(op), args, strict=False)), **kwargs}


def bound_argument(op: OpOverload, position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument at a schema position of a call, passed by position or by name; None if it is omitted."""
    return args[position] if position < len(args) else kwargs.get(argument_names(op)[position])


def operator_namespace(value: object) -> str | None:
    """ "aten" for `torch.ops.aten`; None for any other value (`torch._ops._OpNamespace`). 2.11, 2.13."""
    return str(value.name) if isinstance(value, torch._ops._OpNamespace) else None


def module_that_registers(op: Any) -> str | None:
    """The module whose import registers an operator; "" for torch itself, None if unknown.

    `OpOverload._defined_in_python` and the table of `torch.library.custom_op`. 2.11, 2.13.
    """
    from torch._library.custom_ops import OPDEFS

    if not op._defined_in_python or op.namespace in ("aten", "prims", "rngprims", "prim"):
        return ""
    made = OPDEFS.get(str(op._schema.name))
    module = None if made is None else str(made._init_fn.__module__)
    return None if module == "__main__" else module
