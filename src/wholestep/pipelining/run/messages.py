"""What goes from one stage to the next for one microbatch: all values in one message, whose size both sides know.

    | values, each aligned | status | length of the description, of what follows | one byte per value |

Both sides expect that a microbatch looks as it did in the step before. If it does, and all values are there, the
status is 0. If not (the first step, a smaller last microbatch, another batch size), the message says how long the one
behind it is, which begins with a description of the values. So a receive can be posted before the sender has computed,
and nobody needs to know shapes ahead. One message for all values is also fewer messages than one for each; only large
values go by themselves, without a copy. The memory of messages is used again in each step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from wholestep.errors import StageError

_ALIGN = 16
_END = 24
"""Bytes of the status and the two lengths."""
_LARGE = 2**18
"""Bytes from which a copy costs more than another message."""


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


class Size(NamedTuple):
    """How large a microbatch is."""

    weight: float = 1.0
    """In parts of the first microbatch."""
    rows: int = 0
    """The fewest rows that one of its inputs has; 0 if that is not known."""


_USUAL = Size()


@dataclass(frozen=True)
class Layout:
    """The values of one microbatch between two stages."""

    forms: tuple[Form, ...] = ()
    size: Size = _USUAL
    whole: bool = False
    """All in one message, even if it is large."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each value begins; the last is where the lengths begin."""
        places = [0]
        for form in self.forms:
            places.append(places[-1] + -(-form.nbytes // _ALIGN) * _ALIGN)
        return tuple(places)

    @property
    def end_nbytes(self) -> int:
        """Bytes behind the values."""
        return _END + len(self.forms)

    @cached_property
    def large(self) -> bool:
        """Whether values go by themselves, and only the end is a message of ours."""
        return not self.whole and self.offsets[-1] > _LARGE

    @property
    def together(self) -> Layout:
        """The same in one message."""
        return replace(self, whole=True)

    def fits(self, values: Sequence[torch.Tensor], size: Size, gradients: bool) -> bool:
        """Whether values look like this; `gradients`: whether a backward follows. Faster than making a layout."""
        if len(values) != len(self.forms) or size != self.size:
            return False
        for value, form in zip(values, self.forms, strict=True):
            if value.shape != form.shape or value.dtype != form.dtype:
                return False
            if (gradients and value.requires_grad) != form.requires_grad:
                return False
            if value.stride() != form.stride and _stride(value) != form.stride:
                return False
        return True

    @cached_property
    def gradients(self) -> Layout:
        """The message that comes back: a gradient for each value that wants one."""
        return Layout(tuple(form for form in self.forms if form.requires_grad))

    def write(self) -> bytes:
        """As text, for a receiver that expects something else."""
        rows = [[f.shape, f.stride, str(f.dtype).removeprefix("torch."), f.requires_grad] for f in self.forms]
        text = json.dumps({"forms": rows, "size": self.size}).encode()
        return text.ljust(-(-len(text) // _ALIGN) * _ALIGN)

    @classmethod
    def read(cls, text: bytes) -> Layout:
        """What `write` wrote."""
        data = json.loads(text)
        forms = [Form(tuple(a), tuple(b), getattr(torch, c), bool(d)) for a, b, c, d in data["forms"]]
        weight, rows = data["size"]
        return cls(tuple(forms), Size(float(weight), int(rows)))


def layout_of(values: Sequence[torch.Tensor], size: Size, *, gradients: bool) -> Layout:
    """The layout of values that a stage returns. `gradients`: whether a backward follows."""
    forms = [Form(tuple(v.shape), _stride(v), v.dtype, gradients and v.requires_grad) for v in values]
    return Layout(tuple(forms), size)


def _stride(value: torch.Tensor) -> tuple[int, ...]:
    """The strides that a value arrives with: its own, unless its memory has holes or overlaps."""
    if value.is_contiguous() or is_dense(value.shape, value.stride()):
        return value.stride()
    return _contiguous(value.shape)


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


class Packet:
    """The memory of one message, and where its parts are in it."""

    def __init__(self, layout: Layout, device: torch.device, *, front: int = 0, receives: bool) -> None:
        self.layout = layout
        begin = front + (0 if layout.large else layout.offsets[-1])
        self.message = torch.empty(begin + layout.end_nbytes, dtype=torch.uint8, device=device)
        self.end = self.message[begin:]
        self.end.zero_()
        self.status = self.end[:8].view(torch.int64)
        self._marked = False
        self.values: list[torch.Tensor] = []
        """Where values lie; of large ones that are sent, none: they lie where they were computed."""
        if not layout.large:
            self.values = unpack(self.message, layout, front)
        elif receives:
            self.values = [
                torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device) for form in layout.forms
            ]

    def describe(self, text: bytes) -> None:
        """Write a description in front."""
        self.message[: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def fill(self, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Put values in; None is said by the byte of its value. What is to be sent, in order."""
        absent = [place for place, value in enumerate(values) if value is None]
        if absent or self._marked:
            self._mark(1 if absent else 0, absent=absent)
        if not self.layout.large:
            for slot, value in zip(self.values, values, strict=True):
                if value is not None:
                    slot.copy_(value.detach())
            return [self.message]
        return self._rows(values)

    def announce(self, description: int, extra: int) -> list[torch.Tensor]:
        """Say that another message follows, of `extra` bytes. What is to be sent: of large values, anything."""
        self._mark(2, description, extra)
        if not self.layout.large:
            return [self.message]
        return self._rows([None] * len(self.layout.forms))

    def received(self) -> list[torch.Tensor]:
        """Where a message is to be received, in order."""
        if not self.layout.large:
            return [self.message]
        return self._rows(self.values)

    def read_lengths(self) -> tuple[int, int]:
        """How long the description and the message that follows are; 0 and 0 if all is as expected."""
        if self.status.item() != 2:
            return 0, 0
        description, extra = self.end[8:_END].view(torch.int64).tolist()
        return description, extra

    def read_present(self) -> list[torch.Tensor | None]:
        """The values, or None for those that are absent."""
        if self.status.item() == 0:
            return list(self.values)
        absent = self.end[_END:].tolist()
        return [None if missing else value for value, missing in zip(self.values, absent, strict=True)]

    def _rows(self, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        device = self.message.device
        return [*(_flat(v, form, device) for v, form in zip(values, self.layout.forms, strict=True)), self.message]

    def _mark(self, status: int, description: int = 0, extra: int = 0, absent: Sequence[int] = ()) -> None:
        self._marked = status != 0
        end = bytearray(b"".join(number.to_bytes(8, "little") for number in (status, description, extra)))
        end += bytes(int(place in absent) for place in range(len(self.layout.forms)))
        self.end.copy_(torch.frombuffer(end, dtype=torch.uint8))


def unpack(message: torch.Tensor, layout: Layout, front: int) -> list[torch.Tensor]:
    """The values of a message with a description in front, in its memory."""
    spots = zip(layout.offsets[:-1], layout.forms, strict=True)
    return [_slot(message, front + offset, form) for offset, form in spots]


def _slot(message: torch.Tensor, offset: int, form: Form) -> torch.Tensor:
    flat = message[offset : offset + form.nbytes].view(form.dtype)
    return flat.as_strided(form.shape, form.stride, offset // form.dtype.itemsize)


def _flat(value: torch.Tensor | None, form: Form, device: torch.device) -> torch.Tensor:
    """The memory of a large value as one row; of one that is absent, any."""
    count = form.nbytes // form.dtype.itemsize
    if value is None:
        return torch.empty(count, dtype=form.dtype, device=device)
    value = value.detach()
    if value.stride() != form.stride:
        value = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=value.device).copy_(value)
    return value.as_strided((count,), (1,))
