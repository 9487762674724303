"""Calls on tensors that must not happen as they are while tracing.

print(x), x.numpy(), param.data = ..    refused, or recorded
copy.deepcopy(p.data)                   a recorded clone with the same strides (optimizers begin their state with it)
copy.copy(t)                            another tensor over the same memory, as in eager
pickle, torch.save                      refused: there are no values to write
x.allclose(y)                           a branch on isclose(x, y).all()
F.ctc_loss(.., lengths)                 its mean is decomposed: torch's own makes a tensor of the lengths in C++,
                                        which has no data in a trace. Only for lengths that are Python numbers
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from wholestep.capture.effects.container_stand_ins import StandInContainer
from wholestep.capture.effects.deferred_text import Texts
from wholestep.capture.graph.refusals import HooksOfStep
from wholestep.capture.patching.packed_sequences import PACKED, packed_call
from wholestep.capture.python_reads.clocks import refuse_clocks
from wholestep.capture.results.accounting import Account
from wholestep.capture.scalars.python_scalars import symbolic_scalar
from wholestep.capture.scalars.scalar_operands import DROPOUTS, dropout, moving_view, with_items
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import CapturedTensorError, ItemError, UnsupportedError
from wholestep.ir.meta import user_location
from wholestep.torch_private.autograd import is_transformed
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.fake_tensors import FakeTensor, is_zero_tensor, mark_parameter, storage_key

_LEAVES_GRAPH: dict[Any, str] = {
    Tensor.numpy: ".numpy()",
    Tensor.__array__: "numpy",
    Tensor.__contains__: "`in`",
    torch.equal: "torch.equal",
}
_ALL_CLOSE = frozenset({torch.allclose, Tensor.allclose})
_TEXTS = frozenset({Tensor.__repr__, Tensor.__format__})
_TAKES_VALUE = {
    Tensor.__bool__: "__bool__",
    Tensor.is_nonzero: "is_nonzero",
    torch.is_nonzero: "is_nonzero",
    Tensor.__float__: "__float__",
    Tensor.__int__: "__int__",
    Tensor.__index__: "__index__",
}
_GET_ITEM = Tensor.__getitem__
_INDEXING = frozenset({_GET_ITEM, Tensor.__setitem__})
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GRAD: Any = Tensor.grad
_GET_GRAD, _SET_GRAD = _GRAD.__get__, _GRAD.__set__


_OF_THE_TENSOR: dict[Any, str] = {
    Tensor.requires_grad_: "requires_grad",
    Tensor.requires_grad.__set__: "requires_grad",  # type: ignore[attr-defined]
    _SET_GRAD: "grad",
    _SET_DATA: "data",
    Tensor.retain_grad: "",
    Tensor.register_hook: "",
    Tensor.register_post_accumulate_grad_hook: "",
}
"""What changes a tensor without an operator, with the attribute that it sets."""
_ADD_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})
_POWERS = frozenset({torch.pow, Tensor.__rpow__})
"""`k ** x`: autograd takes the logarithm of the base, which torch has for no symbolic scalar."""
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward})
_OF_THE_MEMORY = frozenset({Tensor.data_ptr, Tensor.untyped_storage, Tensor.__reduce_ex__})
"""Attributes of a real tensor that the real tensor itself returns."""


class InterceptHost(Protocol):
    """What the mode needs from the capture."""

    api: str

    def address_of(self, fake: Tensor) -> int: ...

    session: Any
    sources: Any
    recorder: Any
    texts: Texts
    account: Account
    hooks: HooksOfStep

    def stand_in(self, real: Tensor) -> Tensor: ...

    def replace_data(self, tensor: Tensor, new: Tensor) -> None: ...


class FunctionMode(TorchFunctionMode):
    """Refuses calls that take values out of the graph, and records for the capture which call asks for a value."""

    def __init__(self, host: InterceptHost) -> None:
        super().__init__()
        self._host = host

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(a.__class__ is not FakeTensor and isinstance(a, Tensor | list | tuple) for a in args) and (
            func not in _OF_THE_MEMORY
        ):
            args = tuple(self._traced(a) for a in args)
        if func in _OF_THE_TENSOR and not _is_traced(args[0]):
            self._refuse_change(func, *args, **(kwargs or {}))
        if self._host.sources.clocks.readings:
            refuse_clocks((args, kwargs), "a tensor")
        if func in _BACKWARDS:
            with self._host.account.backward(args[0] if args else (kwargs or {})["tensors"]):
                result = func(*args, **(kwargs or {}))
            if self._host.session is not None:
                self._host.session.after_backward()
            return result
        if func in _TEXTS and _is_traced(args[0]):
            return self._text(func, *args)
        if func is torch.autograd.grad:
            self._host.account.went_back = True
        if func in _LEAVES_GRAPH and any(_is_traced(a) for a in args):
            raise ItemError(
                f"{_LEAVES_GRAPH[func]} takes the value of a tensor of shape {tuple(args[0].shape)} out of the graph.",
                fix="return the tensor from the step and read it outside.",
                location=user_location(),
            )
        if func in _ALL_CLOSE and any(map(_is_traced, args)):
            return bool(torch.isclose(*args, **(kwargs or {})).all())
        if func == _SET_DATA and _is_traced(args[0]):
            self._host.replace_data(args[0], args[1])
            return None
        session = self._host.session
        if session is not None:
            if func == _GET_GRAD:
                session.before_reading_grad(args[0])
            elif func == _SET_GRAD:
                func(*args, **(kwargs or {}))
                session.after_setting_grad(args[0])
                return None
            elif func is torch.autograd.grad:
                session.refuse_gradients(*args, **(kwargs or {}))
        if func in _INDEXING:
            args = (args[0], with_items(args[1]), *args[2:])
            view = moving_view(args[0], args[1])
            if view is not None:
                return view if func is _GET_ITEM else view.__setitem__(..., args[2])
        if func is Tensor.__deepcopy__ and _is_traced(args[0]):
            return deep_copy(func, args[0], args[1] if len(args) > 1 else (kwargs or {})["memo"])
        if func is Tensor.__reduce_ex__ and _is_traced(args[0]):
            return reduce_traced(args[0])
        if func is Tensor.data_ptr and _is_traced(args[0]) and _asked_by_user(sys._getframe(1)):
            return self._host.address_of(args[0])
        if func is Tensor.item:
            return symbolic_scalar(func(*args, **(kwargs or {})))
        if func in PACKED and any(map(_is_traced, args[:2])) and (packed := packed_call(func, args)) is not None:
            return packed
        if func in DROPOUTS:
            return dropout(self._host.recorder.nodes, func, args, kwargs or {})
        if func in CTC_LOSSES:
            return ctc_loss(func, *args, **(kwargs or {}))
        if func in _POWERS and torch.is_grad_enabled() and any(getattr(a, "requires_grad", False) for a in args):
            args = tuple(_as_base(each) for each in args)
        name = _TAKES_VALUE.get(func)
        if name is None:
            result = func(*args, **(kwargs or {}))
            if func in _ADD_HOOKS and not _asked_by_ours(sys._getframe(1)):
                self._host.hooks.put(args[0], result)
            return result
        before, self._host.api = self._host.api, name
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._host.api = before

    def _refuse_change(self, func: Any, tensor: Tensor, value: Any = True, *_: Any, **kwargs: Any) -> None:
        """Refuse to change one of the user's tensors, which the trace found where it cannot put a fake."""
        attribute, value = _OF_THE_TENSOR[func], kwargs.get("requires_grad", value)
        if (attribute and getattr(tensor, attribute) is value) or is_transformed(tensor) or is_zero_tensor(tensor):
            return
        raise CapturedTensorError(
            f"the step {f'sets .{attribute} of' if attribute else f'calls .{func.__name__}() of'} a tensor of shape "
            f"{tuple(tensor.shape)}, which lies where capture cannot replace it by a fake tensor.",
            fix="do it before the step, make the tensor a parameter of a module, or pass it as an argument.",
            location=user_location(),
        )

    def _text(self, func: Any, tensor: Tensor, spec: str = "", **_: Any) -> str:
        """The text of a tensor, filled in after the run; of a single number it is the number's."""
        if func is Tensor.__repr__:
            return self._host.texts.of_tensor(repr, tensor)
        if tensor.dim() == 0 and not isinstance(tensor, nn.Parameter):
            return format(symbolic_scalar(tensor.detach().item()), spec)
        return self._host.texts.of_tensor(format, tensor, spec)

    def _traced(self, value: Any) -> Any:
        """A parameter that some object hid from `discover`: the fake that stands for it. A list that the step writes:
        its contents."""
        if isinstance(value, StandInContainer):
            value = copy.copy(value)
        if isinstance(value, Tensor) and not _is_traced(value) and value.requires_grad and value.is_leaf:
            return self._host.stand_in(value)
        if type(value) in (list, tuple) and any(isinstance(item, Tensor) and not _is_traced(item) for item in value):
            return type(value)(self._traced(item) for item in value)
        return value


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the nearest frame outside of ours (modes call each other) is outside of torch too."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("wholestep."):
        frame = frame.f_back
    return frame is not None and not frame.f_globals.get("__name__", "").startswith("torch.")


def _asked_by_ours(frame: FrameType | None) -> bool:
    """Whether the nearest frame outside of torch and of modes, which call each other, is wholestep's: a plan registers
    hooks while the step is traced."""
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_globals.get("__name__", "").startswith("torch.")
    ):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("wholestep.")


def _as_base(value: Any) -> Any:
    scalar = None if isinstance(value, Tensor) else scalar_of(value)
    return value if scalar is None else scalar.specialise("the base of a power")


def _is_traced(value: Any) -> bool:
    return isinstance(local_of(value), FakeTensor)


CTC_LOSSES = (F.ctc_loss, torch.ctc_loss)
_NAMES = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")


def ctc_loss(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of `F.ctc_loss` or `torch.ctc_loss`."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    none, mean, default = ("none", "mean", "mean") if function is F.ctc_loss else (0, 1, 0)
    lengths = given.get("target_lengths")
    if given.get("reduction", default) != mean or not _are_numbers(lengths):
        return function(*args, **kwargs)
    losses: Tensor = function(**(given | {"reduction": none}))
    counts = torch.tensor(list(lengths), dtype=losses.dtype, device=losses.device)
    return (losses / counts.clamp_min(1)).mean()


def _are_numbers(lengths: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(lengths, Sequence) and all(isinstance(length, int) for length in lengths)


_COPY = copy.copy.__code__
_NEAR = 12


def deep_copy(func: Any, tensor: Tensor, memo: dict[Any, Any]) -> Any:
    """The result of `Tensor.__deepcopy__`, as operators of the graph."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    is_parameter = isinstance(tensor, nn.Parameter)
    if not is_parameter and not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    if not is_parameter:
        _refuse_shared_memory(tensor, memo)
    with torch.no_grad():
        new = _clone(tensor.detach())
    if is_parameter:
        mark_parameter(new)
    elif tensor.grad is not None:
        new.grad = copy.deepcopy(tensor.grad, memo)
    new.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = new
    return new


def _clone(tensor: Tensor) -> Tensor:
    """A copy with the same strides, whatever they are."""
    new = tensor.clone()
    if new.stride() == tensor.stride():
        return new
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _refuse_shared_memory(tensor: Tensor, memo: dict[Any, Any]) -> None:
    """Eager copies memory once per deepcopy, so that copies of two views of one tensor share theirs too."""
    key = ("wholestep", storage_key(tensor))
    if key in memo:
        raise UnsupportedError(
            "copy.deepcopy copies two tensors that share memory, and the copies would share theirs.",
            fix="clone() each tensor.",
            location=user_location(),
        )
    memo[key] = tensor


def reduce_traced(tensor: Tensor) -> tuple[Any, ...]:
    """The result of `Tensor.__reduce_ex__` for `copy.copy`; any other caller is refused."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None:
            break
        if frame.f_code is _COPY:
            return _same_memory, (tensor,)
        frame = frame.f_back
    raise ItemError(
        f"pickling (torch.save, multiprocessing) takes the value of a tensor of shape {tuple(tensor.shape)} out of the "
        "graph.",
        fix="save checkpoints outside of the step.",
        location=user_location(),
    )


def _same_memory(tensor: Tensor) -> Tensor:
    new = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        mark_parameter(new)
    return new.requires_grad_(tensor.requires_grad)
