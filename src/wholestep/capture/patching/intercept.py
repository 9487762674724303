"""Calls on tensors that must not happen as they are while tracing: printing, `.numpy()`, `param.data = ..`."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wholestep.capture.patching.copies import deep_copy, reduce_traced
from wholestep.capture.patching.ctc import CTC_LOSSES, ctc_loss
from wholestep.capture.python_reads.clocks import refuse_clocks
from wholestep.capture.results.accounting import Account
from wholestep.capture.scalars.graph_numbers import graph_number
from wholestep.capture.scalars.scalar_operands import moving_view
from wholestep.errors import ItemError, ParameterDataError
from wholestep.ir.user_location import user_location
from wholestep.torch_private.dtensor import local_of
from wholestep.torch_private.fake_tensors import FakeTensor

_LEAVES_GRAPH = {
    Tensor.tolist: ".tolist()",
    Tensor.numpy: ".numpy()",
    Tensor.__repr__: "printing or repr()",
    Tensor.__format__: "formatting",
    Tensor.__array__: "numpy",
    Tensor.__contains__: "`in`",
    torch.equal: "torch.equal",
    torch.allclose: "torch.allclose",
}
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


_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward})
_OF_THE_MEMORY = frozenset({Tensor.data_ptr, Tensor.untyped_storage, Tensor.__reduce_ex__})
"""Asked of a real tensor, these are answered by the real tensor."""


class InterceptHost(Protocol):
    """What the mode tells the capture."""

    api: str

    def address_of(self, fake: Tensor) -> int: ...

    session: Any
    sources: Any
    account: Account

    def stand_in(self, real: Tensor) -> Tensor: ...


class FunctionMode(TorchFunctionMode):
    """Refuses calls that take values out of the graph, and tells the capture by which name a value is asked for."""

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
        if self._host.sources.clocks.was_read:
            refuse_clocks((args, kwargs), "a tensor")
        if func in _BACKWARDS:
            with self._host.account.backward(args[0] if args else (kwargs or {})["tensors"]):
                return func(*args, **(kwargs or {}))
        if func in _LEAVES_GRAPH and any(_is_traced(a) for a in args):
            raise ItemError(
                f"{_LEAVES_GRAPH[func]} takes the value of a tensor of shape {tuple(args[0].shape)} out of the graph.",
                fix="return the tensor from the step and look at it outside.",
                location=user_location(),
            )
        if func == _SET_DATA and _is_traced(args[0]):
            raise ParameterDataError(
                f"the step replaces .data of a tensor of shape {tuple(args[0].shape)}.",
                fix="write into it under torch.no_grad(): param.copy_(new).",
                location=user_location(),
            )
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
            return graph_number(func(*args, **(kwargs or {})))
        if func in CTC_LOSSES:
            return ctc_loss(func, *args, **(kwargs or {}))
        name = _TAKES_VALUE.get(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        before, self._host.api = self._host.api, name
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._host.api = before

    def _traced(self, value: Any) -> Any:
        """A parameter that some object hid from `discover` is the fake that stands for it, with the fake's gradient."""
        if isinstance(value, Tensor) and not _is_traced(value) and value.requires_grad and value.is_leaf:
            return self._host.stand_in(value)
        if type(value) in (list, tuple) and any(isinstance(item, Tensor) and not _is_traced(item) for item in value):
            return type(value)(self._traced(item) for item in value)
        return value


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the nearest frame that is not ours (modes call each other) is not torch's."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("wholestep."):
        frame = frame.f_back
    return frame is not None and not frame.f_globals.get("__name__", "").startswith("torch.")


def _is_traced(value: Any) -> bool:
    return isinstance(local_of(value), FakeTensor)
