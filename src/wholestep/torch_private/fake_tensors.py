"""Fake tensors and dispatch modes: what capture runs the user's code on. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch._subclasses import fake_tensor as _fake_tensor
from torch.utils import _pytree as _pytree
from torch.utils._mode_utils import no_dispatch as _no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from wholestep.torch_private.autograd import is_transformed
from wholestep.torch_private.fake_rules import RULES as _FAKE_RULES
from wholestep.torch_private.symbolic_shapes import ShapeEnv

FakeTensor = _fake_tensor.FakeTensor
"""The tensor without data that capture runs the user's code on. 2.11, 2.13."""


class FakeTensorMode(_fake_tensor.FakeTensorMode):  # type: ignore[no-untyped-call]
    """Computes FakeTensors, by our rules where torch's will not do. 2.11, 2.13."""

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """What an operator gives, for fake tensors."""
        rule = _FAKE_RULES.get(func)
        if rule is not None:
            with self:
                found = rule(*args, **(kwargs or {}))
            if found is not None:
                return found
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if type(device) is torch.device and device.type == "cpu" and device.index is not None:
            kwargs = {**kwargs, "device": _CPU}  # where a tensor on "cpu:0" is
        return super().dispatch(func, types, args, kwargs)


_CPU = torch.device("cpu")


DataDependentOutputException = _fake_tensor.DataDependentOutputException


DynamicOutputShapeException = _fake_tensor.DynamicOutputShapeException


UnsupportedOperatorException = _fake_tensor.UnsupportedOperatorException
"""Raised by FakeTensorMode where a result depends on values, or an operator has no fake kernel. 2.11, 2.13."""


@contextmanager
def failures_not_logged() -> Iterator[None]:
    """torch logs a traceback where an operator refuses fake tensors (`log.exception` in `fake_tensor`). 2.11, 2.13."""
    log = _fake_tensor.log
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def without_modes() -> AbstractContextManager[Any]:
    """Run on real tensors inside a dispatch mode (`_disable_current_modes`). 2.11, 2.13."""
    return _disable_current_modes()


def has_symbolic_sizes(tensor: Tensor) -> bool:
    """True if a size or stride of a tensor is a symbol (`Tensor._has_symbolic_sizes_strides`). 2.11, 2.13."""
    return bool(tensor._has_symbolic_sizes_strides)


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor, equal for all its views (`UntypedStorage._cdata`). 2.11, 2.13."""
    return int(tensor.untyped_storage()._cdata)


def new_fake(mode: _fake_tensor.FakeTensorMode, like: Tensor, sizes: Sequence[Any] | None = None) -> Tensor:
    """A FakeTensor with the geometry of `like` and memory of its own, or contiguous with other `sizes`. 2.11, 2.13.

    Much cheaper than `FakeTensorMode.from_tensor`, which also handles subclasses and views of inputs.
    """
    if sizes is None:
        elem = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    else:
        elem = torch.empty(tuple(sizes), dtype=like.dtype, device="meta")
    return FakeTensor(mode, elem, like.device)


def held_by_torch(tensor: Tensor) -> int:
    """References to a tensor's Python object that C++ has (`Tensor._use_count`): one if torch holds the tensor too.

    Before torch 2.12 none, unless Python has none.
    """
    return _COUNTED if tensor._use_count() > 1 else 0  # type: ignore[attr-defined]


def _counted() -> int:
    tensor, holder = torch.zeros(1), torch.zeros(1, requires_grad=True)
    before = sys.getrefcount(tensor)
    holder.grad = tensor
    return sys.getrefcount(tensor) - before


_COUNTED = _counted()


def mark_parameter(tensor: Tensor) -> None:
    """Make `isinstance(tensor, nn.Parameter)` true (`Tensor._is_param`). 2.11, 2.13."""
    tensor._is_param = True


if TYPE_CHECKING:

    class DispatchMode:
        """TorchDispatchMode, which has no types: sees every operator below autograd. 2.11, 2.13."""

        def __enter__(self) -> Self: ...

        def __exit__(self, *error: object) -> None: ...
else:
    DispatchMode = TorchDispatchMode


def fake_tensor(
    mode: _fake_tensor.FakeTensorMode,
    shape: Sequence[Any],
    stride: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    offset: Any = 0,
    requires_grad: bool = False,
) -> Tensor:
    """A FakeTensor of exactly this geometry, made without running the mode (12 us instead of 50). 2.11, 2.13."""
    with torch._C.DisableTorchFunction(), _no_dispatch():
        if isinstance(offset, int) and offset == 0:
            elem = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")
        else:
            extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            elem = torch.empty((extent,), dtype=dtype, device="meta").as_strided(tuple(shape), tuple(stride), offset)
        fake = FakeTensor(mode, elem, device)
    return fake.requires_grad_(True) if requires_grad else fake


_MOST_FAKE_RULES = 30_000  # some 30 MB; the largest captures that were seen need 5,000


def new_fake_mode(env: ShapeEnv | None) -> FakeTensorMode:
    """A mode for one capture. 2.11, 2.13.

    torch remembers for the whole process what each operator returned for each shape (`FakeTensorMode.cache`) and never
    forgets: it is emptied where captures of ever new shapes have filled it.
    """
    if len(FakeTensorMode.cache) > _MOST_FAKE_RULES:
        FakeTensorMode.cache_clear()
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=False)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place (`Tensor._version`); 0 for inference tensors. 2.11, 2.13."""
    return 0 if tensor.is_inference() else int(tensor._version)


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in, whatever it has: no data, no elements (`UntypedStorage._cdata`). 2.11, 2.13."""
    return int(tensor.untyped_storage()._cdata)


no_torch_function = torch._C._disabled_torch_function_impl
"""For tensor classes that only want `__torch_dispatch__`. 2.11, 2.13."""


def wrapper_tensor(cls: type[Tensor], like: Tensor) -> Any:
    """A tensor of a class with the layout of another and no memory (`Tensor._make_wrapper_subclass`). 2.11, 2.13."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )


def why_unreadable(tensor: torch.Tensor) -> str:
    """What a tensor is if its memory is not what it stands for, so that compiled code may not read it: fake, wrapped by
    a function transform, with a tangent, or a view that is read with the other sign (`z.conj().imag`). 2.11, 2.13."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {kind.__name__}"
    if is_transformed(tensor):
        return "a tensor of torch.func"
    if tensor.is_neg():
        return "a negated view (resolve_neg() makes it plain)"
    forward_ad: Any = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return "a dual tensor of forward-mode autograd"
    return ""


def is_unmade_zero(tensor: torch.Tensor) -> bool:
    """Whether a tensor only says that it is zero and has no memory, as forward-mode autograd makes them. 2.11, 2.13."""
    return bool(tensor._is_zerotensor())
