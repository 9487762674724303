"""What goes from one stage to the next for one microbatch: all values in one message, whose size both sides know.

    | values, each aligned | int64 description length, extra length | one byte per value |

Both sides expect that a microbatch looks as it did in the step before. If it does, the two lengths are 0 and the values
are there. If not (the first step, a smaller last microbatch, another batch size), the message says how long the one
behind it is, which begins with a description of the values. So a receive can be posted before the sender has computed,
and nobody needs to know shapes ahead. One message for all values is also fewer messages than one for each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from wholestep.errors import StageError

_ALIGN = 16
_LENGTHS = 16


@dataclass(frozen=True)
class Form:
    """How one tensor lies in a message."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The values of one microbatch between two stages."""

    forms: tuple[Form, ...] = ()
    weight: float = 1.0
    """Its size in parts of the first microbatch."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each value begins; the last is where the lengths begin."""
        places = [0]
        for form in self.forms:
            places.append(places[-1] + -(-form.nbytes // _ALIGN) * _ALIGN)
        return tuple(places)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.offsets[-1] + _LENGTHS + len(self.forms)

    @cached_property
    def gradients(self) -> Layout:
        """The message that comes back: a gradient for each value that wants one."""
        return Layout(tuple(form for form in self.forms if form.requires_grad))

    def write(self) -> bytes:
        """As text, for a receiver that expects something else."""
        rows = [[f.shape, f.stride, str(f.dtype).removeprefix("torch."), f.requires_grad] for f in self.forms]
        text = json.dumps({"forms": rows, "weight": self.weight}).encode()
        return text.ljust(-(-len(text) // _ALIGN) * _ALIGN)

    @classmethod
    def read(cls, text: bytes) -> Layout:
        """What `write` wrote."""
        data = json.loads(text)
        forms = [Form(tuple(a), tuple(b), getattr(torch, c), bool(d)) for a, b, c, d in data["forms"]]
        return cls(tuple(forms), float(data["weight"]))


def layout_of(values: Sequence[torch.Tensor], weight: float, *, gradients: bool) -> Layout:
    """The layout of values that a stage returns. `gradients`: whether a backward follows."""
    return Layout(tuple([_form(value, gradients) for value in values]), weight)


def _form(value: torch.Tensor, gradients: bool) -> Form:
    shape = tuple(value.shape)
    stride = value.stride()
    if not value.is_contiguous() and not is_dense(shape, stride):
        stride = _contiguous(shape)
    return Form(shape, stride, value.dtype, gradients and value.requires_grad)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor fills its memory without holes or overlap, in whatever order of its dims."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def check_values(values: Sequence[object], stage: int) -> None:
    """Only plain tensors travel."""
    for place, value in enumerate(values):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not plain or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise StageError(
                f"stage {stage} returns a {type(value).__name__} as value {place}; only dense tensors travel.",
                fix="cut the model where plain tensors cross.",
            )


def pack(
    layout: Layout, values: Sequence[torch.Tensor | None], device: torch.device, described: bytes = b""
) -> torch.Tensor:
    """The message with these values; None is said by the byte of its value. `described`: put this text in front."""
    front = len(described)
    message = torch.empty(front + layout.nbytes, dtype=torch.uint8, device=device)
    if front:
        message[:front].copy_(torch.frombuffer(bytearray(described), dtype=torch.uint8))
    absent = bytearray(_LENGTHS + len(layout.forms))
    for place, (form, value) in enumerate(zip(layout.forms, values, strict=True)):
        if value is None:
            absent[_LENGTHS + place] = 1
        else:
            _slot(message, front + layout.offsets[place], form).copy_(value.detach())
    _write_end(message, absent)
    return message


def pack_announcement(expected: Layout, description: int, extra: int, device: torch.device) -> torch.Tensor:
    """The message of the expected size that says: another one follows, of `extra` bytes."""
    message = torch.empty(expected.nbytes, dtype=torch.uint8, device=device)
    lengths = description.to_bytes(8, "little") + extra.to_bytes(8, "little")
    _write_end(message, bytearray(lengths) + bytearray(len(expected.forms)))
    return message


def read_end(message: torch.Tensor, layout: Layout) -> tuple[int, int, list[int]]:
    """The two lengths, and for each value whether it is absent."""
    end = bytes(message[-(_LENGTHS + len(layout.forms)) :].tolist())
    return int.from_bytes(end[:8], "little"), int.from_bytes(end[8:16], "little"), list(end[_LENGTHS:])


def unpack(message: torch.Tensor, layout: Layout, front: int = 0) -> list[torch.Tensor]:
    """The values of a message, in its memory."""
    return [
        _slot(message, front + offset, form) for offset, form in zip(layout.offsets[:-1], layout.forms, strict=True)
    ]


def _slot(message: torch.Tensor, offset: int, form: Form) -> torch.Tensor:
    flat = message[offset : offset + form.nbytes].view(form.dtype)
    return flat.as_strided(form.shape, form.stride, offset // form.dtype.itemsize)


def _write_end(message: torch.Tensor, end: bytearray) -> None:
    place = message[-len(end) :]
    if any(end):
        place.copy_(torch.frombuffer(end, dtype=torch.uint8))
    else:
        place.zero_()  # the usual case: nothing is copied to the device
