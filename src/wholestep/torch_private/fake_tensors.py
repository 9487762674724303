"""Fake tensors, on which capture runs the user's code, and dispatch modes. Tried on torch 2.11 and 2.13.

Also here: meta rules for operators for which torch has none or a wrong one (`_RULES`). Each takes the arguments of the
operator and computes sizes and strides only. It returns None if torch's own rule has an error to raise.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch._subclasses import fake_tensor as _fake_tensor
from torch.utils._mode_utils import no_dispatch as _no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from wholestep.torch_private.autograd import is_transformed
from wholestep.torch_private.symbolic_shapes import ShapeEnv, new_data_size

FakeTensor = _fake_tensor.FakeTensor
"""The tensor without data on which capture runs the user's code. 2.11, 2.13."""


_aten = torch.ops.aten
_EXPERT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor | None:
    """Matrices of experts, with rows padded to 16 bytes on every device, in float32 and float16 too. torch's rule
    refuses these dtypes, and pads only if torch is built for CUDA."""
    ragged = a.dim() == 2 or b.dim() == 2
    if a.dtype not in _EXPERT_DTYPES or bias is not None or ragged == (offs is None):
        return None
    groups = offs.size(0) if ragged else a.size(0)
    rows, columns = a.size(-2), b.size(-1)
    whole = 16 // (out_dtype or a.dtype).itemsize
    padded = (columns + whole - 1) // whole * whole
    size: tuple[int, ...] = (rows, columns)
    stride: tuple[int, ...] = (padded, 1)
    if a.dim() == b.dim():
        size, stride = (groups, *size), (rows * padded, *stride)
    return torch.empty_strided(size, stride, dtype=out_dtype or a.dtype, device=a.device)


def _cudnn_rnn_backward(input: Tensor, weight: list[Tensor], stride: int, packed: Tensor, *rest: Any) -> Any:
    """Gradients of the input, of both hidden states and of every weight have the layout of their tensors."""
    hx, cx = rest[0], rest[1]
    grad_cx = torch.empty_like(cx) if cx is not None else torch.empty(0, dtype=input.dtype, device=input.device)
    return torch.empty_like(input), torch.empty_like(hx), grad_cx, [torch.empty_like(w) for w in weight]


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Sequence[int], target_lengths: Sequence[int], *rest: Any
) -> tuple[Tensor, Tensor] | None:
    """Lengths that are Python ints determine all sizes: one loss per sequence, and a table over the states of the
    longest one."""
    if log_probs.dim() != 3 or len(target_lengths) != log_probs.size(1):
        return None
    frames, batch, _ = log_probs.shape
    states = 2 * max(target_lengths, default=0) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, states)


def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _ctc_loss_of_lengths(
    env: Any, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Lengths that are tensors: the longest target, and with it the size of the table, is known only in a run."""
    frames, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, new_data_size(env))


_RULES_WITH_NEW_SIZES: dict[Any, Callable[..., Any]] = {_aten._ctc_loss.Tensor: _ctc_loss_of_lengths}
"""Rules for operators that have a size which only a run decides; they take the ShapeEnv first."""


def _like_operands(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The gradient of a pointwise function has the layout that its operands agree on, the gradient first. torch's rule
    is a decomposition, whose `where` begins with a condition on x."""
    return torch.add(grad, x)


def _contiguous(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The gradient of a mean or sum of losses begins as contiguous zeros."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_input(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.softplus_backward.default: _like_operands,
    _aten.hardtanh_backward.default: _like_operands,
    _aten.logit_backward.default: _like_operands,
    _aten.hardswish_backward.default: _like_operands,
    _aten.hardsigmoid_backward.default: _like_operands,
    _aten.mse_loss_backward.default: _contiguous,
    _aten.huber_loss_backward.default: _contiguous,
    _aten.smooth_l1_loss_backward.default: _contiguous,
    _aten._log_softmax_backward_data.default: _contiguous,
    _aten.binary_cross_entropy_backward.default: _like_input,
    _aten._grouped_mm.default: _grouped_mm,
    _aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss_backward.default: _ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}


class FakeTensorMode(_fake_tensor.FakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's FakeTensorMode with our meta rules (`_RULES`). 2.11, 2.13."""

    def dispatch(self, func: Any, kinds: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """The fake result of an operator."""
        if func in _RULES_WITH_NEW_SIZES:
            if self.shape_env is None:
                raise DynamicOutputShapeException(func)
            with self:
                return _RULES_WITH_NEW_SIZES[func](self.shape_env, *args, **(kwargs or {}))
        rule = _RULES.get(func)
        if rule is not None:
            with self:
                found = rule(*args, **(kwargs or {}))
            if found is not None:
                return found
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if type(device) is torch.device and device.type == "cpu" and device.index is not None:
            kwargs = {**kwargs, "device": _CPU}  # where a tensor on "cpu:0" is
        return super().dispatch(func, kinds, args, kwargs)


_CPU = torch.device("cpu")


DataDependentOutputException = _fake_tensor.DataDependentOutputException


DynamicOutputShapeException = _fake_tensor.DynamicOutputShapeException


UnsupportedOperatorException = _fake_tensor.UnsupportedOperatorException
"""Raised by FakeTensorMode if a result depends on values, or an operator has no fake kernel. 2.11, 2.13."""


@contextmanager
def failures_not_logged() -> Iterator[None]:
    """Silence the traceback that torch logs if an operator refuses fake tensors (`log.exception` in `fake_tensor`).
    2.11, 2.13."""
    log = _fake_tensor.log
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def without_modes() -> AbstractContextManager[Any]:
    """Run on real tensors inside a dispatch mode (`_disable_current_modes`). 2.11, 2.13."""
    return _disable_current_modes()


@contextmanager
def without_functions_and_modes() -> Iterator[None]:
    """Run on real tensors, with function modes off as well (`torch._C.DisableTorchFunction`). 2.11, 2.13."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def has_symbolic_sizes(tensor: Tensor) -> bool:
    """True if a size or stride of a tensor is a symbol (`Tensor._has_symbolic_sizes_strides`). 2.11, 2.13."""
    return bool(tensor._has_symbolic_sizes_strides)


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage of a tensor, equal for all its views, also without data or elements
    (`UntypedStorage._cdata`). 2.11, 2.13."""
    return int(tensor.untyped_storage()._cdata)


def new_fake(mode: _fake_tensor.FakeTensorMode, like: Tensor, sizes: Sequence[Any] | None = None) -> Tensor:
    """A FakeTensor with the layout of `like` and its own storage, or contiguous with other `sizes`. 2.11, 2.13.

    Much cheaper than `FakeTensorMode.from_tensor`, which also handles subclasses and views of inputs.
    """
    if sizes is None:
        elem = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    else:
        elem = torch.empty(tuple(sizes), dtype=like.dtype, device="meta")
    return FakeTensor(mode, elem, like.device)


def held_by_torch(tensor: Tensor) -> int:
    """The number of references from C++ to a tensor's Python object (`Tensor._use_count`): 1 if torch holds the tensor.

    Before torch 2.12 it is 0 while Python has a reference.
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


def take_class(fake: Tensor, kind: type[Tensor]) -> None:
    """Make a fake an object of a subclass of Parameter too, so that `isinstance` and its methods answer as in eager."""
    fake.__class__ = types.new_class(kind.__name__, (FakeTensor, kind))


def overrides_functions(kind: type[Tensor]) -> bool:
    """Whether results of torch functions on a subclass differ from those on a tensor: it has a `__torch_function__` of
    its own, or that of Tensor, which makes results of the subclass (`torch._C._disabled_torch_function_impl`)."""
    return kind not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and (
        kind.__torch_function__ is not no_torch_function
    )


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
    """A FakeTensor of exactly this layout, created without running the mode (12 us instead of 50). 2.11, 2.13."""
    with torch._C.DisableTorchFunction(), _no_dispatch():
        if isinstance(offset, int) and offset == 0:
            elem = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")
        else:
            extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            elem = torch.empty((extent,), dtype=dtype, device="meta").as_strided(tuple(shape), tuple(stride), offset)
        fake = FakeTensor(mode, elem, device)
    return fake.requires_grad_(True) if requires_grad else fake


_MAX_CACHED_RESULTS = 30_000  # about 30 MB; the largest captures seen need 5,000


def new_fake_mode(env: ShapeEnv | None) -> FakeTensorMode:
    """A mode for one capture. 2.11, 2.13.

    torch caches the result of each operator for each shape for the life of the process (`FakeTensorMode.cache`). The
    cache is cleared when captures of many shapes have filled it.
    """
    if len(FakeTensorMode.cache) > _MAX_CACHED_RESULTS:
        FakeTensorMode.cache_clear()
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=False)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place (`Tensor._version`); 0 for inference tensors. 2.11, 2.13."""
    return 0 if tensor.is_inference() else int(tensor._version)


@contextmanager
def version_reads(noticed: Callable[[Tensor], None]) -> Iterator[None]:
    """In the block, who asks a fake for `_version` in Python is noticed first (`TensorBase._version`). 2.11, 2.13."""
    getter: Any = torch._C.TensorBase.__dict__["_version"]

    def read(tensor: Tensor) -> Any:
        noticed(tensor)
        return getter.__get__(tensor)

    FakeTensor._version = property(read)  # type: ignore[assignment]
    try:
        yield
    finally:
        del FakeTensor._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter of a tensor whose contents were restored (`_unsafe_set_version_counter`). 2.11, 2.13."""
    if tensor._version != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


no_torch_function = torch._C._disabled_torch_function_impl
"""`__torch_function__` of tensor classes that only need `__torch_dispatch__`. 2.11, 2.13."""


def wrapper_tensor(cls: type[Tensor], like: Tensor) -> Any:
    """A tensor of a subclass with the layout of `like` and no storage (`Tensor._make_wrapper_subclass`). 2.11, 2.13."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )


def why_unreadable(tensor: torch.Tensor) -> str:
    """The kind of tensor if its storage does not hold its plain values, so that compiled code may not read it: fake,
    wrapped by a function transform, with a tangent, or a negated view (`z.conj().imag`); else "". 2.11, 2.13."""
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


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a ZeroTensor: zeros without storage, as in forward-mode autograd. 2.11, 2.13."""
    return bool(tensor._is_zerotensor())
