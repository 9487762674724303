"""Messages between neighbouring stages: all values of one microbatch in one message, whose size both sides know.

    | values, each aligned | status | length of the description, of the next message | one byte per value |

Both sides expect a microbatch to have the layout of the previous step. If it does, and no value is missing, the status
is 0. If not (the first step, a smaller last microbatch, another batch size), the message has the length of the next
one, which begins with a description of the values. So a receive can be posted before the sender has computed, and no
shapes have to be known ahead. One message for all values is also fewer messages than one each; only large values are
sent by themselves, without a copy. Buffers are reused in each step.

    Sender.send(...)        stage i     values of a microbatch  ->
    Receiver.receive(...)   stage i+1   the operations to post, and later `take` for the values
    and the same for gradients, in the opposite direction

Operations are torch's `P2POp`: the schedule posts and waits for them. Only an unexpected message is received here, with
a tag or group of its own, so that it does not match a receive that was posted before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from wholestep.errors import StageError

_ALIGN = 16
_END = 24
"""Bytes of the status and of the two lengths."""
_LARGE = 2**18
"""Bytes above which a copy costs more than another message."""


@dataclass(frozen=True)
class TensorLayout:
    """The layout of one tensor in a message."""

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


class MicrobatchSize(NamedTuple):
    """The size of a microbatch."""

    weight: float = 1.0
    """Relative to the first microbatch."""
    rows: int = 0
    """The smallest dim 0 of its inputs; 0 if unknown."""


_USUAL = MicrobatchSize()


@dataclass(frozen=True)
class MessageLayout:
    """The layout of the values of one microbatch between two stages."""

    forms: tuple[TensorLayout, ...] = ()
    size: MicrobatchSize = _USUAL
    whole: bool = False
    """Always one message, even if it is large."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each value; the last is that of the status."""
        places = [0]
        for form in self.forms:
            places.append(places[-1] + -(-form.nbytes // _ALIGN) * _ALIGN)
        return tuple(places)

    @property
    def end_nbytes(self) -> int:
        """Bytes after the values."""
        return _END + len(self.forms)

    @cached_property
    def large(self) -> bool:
        """True if values are sent by themselves, and only the status and lengths are a message of ours."""
        return not self.whole and self.offsets[-1] > _LARGE

    @property
    def together(self) -> MessageLayout:
        """The same layout in one message."""
        return replace(self, whole=True)

    def fits(self, values: Sequence[torch.Tensor], size: MicrobatchSize, gradients: bool) -> bool:
        """True if values have this layout; `gradients`: a backward follows. Faster than creating a layout."""
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
    def gradients(self) -> MessageLayout:
        """The layout of the message with the gradients of the values that require one."""
        return MessageLayout(tuple(form for form in self.forms if form.requires_grad))

    def write(self) -> bytes:
        """JSON, for a receiver that expects another layout."""
        rows = [[f.shape, f.stride, str(f.dtype).removeprefix("torch."), f.requires_grad] for f in self.forms]
        text = json.dumps({"forms": rows, "size": self.size}).encode()
        return text.ljust(-(-len(text) // _ALIGN) * _ALIGN)

    @classmethod
    def read(cls, text: bytes) -> MessageLayout:
        """Inverse of `write`."""
        data = json.loads(text)
        forms = [TensorLayout(tuple(a), tuple(b), getattr(torch, c), bool(d)) for a, b, c, d in data["forms"]]
        weight, rows = data["size"]
        return cls(tuple(forms), MicrobatchSize(float(weight), int(rows)))


def layout_of(values: Sequence[torch.Tensor], size: MicrobatchSize, *, gradients: bool) -> MessageLayout:
    """The layout of the outputs of a stage. `gradients`: a backward follows."""
    forms = [TensorLayout(tuple(v.shape), _stride(v), v.dtype, gradients and v.requires_grad) for v in values]
    return MessageLayout(tuple(forms), size)


def _stride(value: torch.Tensor) -> tuple[int, ...]:
    """The strides with which a value is received: its own if it is dense, else contiguous."""
    if value.is_contiguous() or is_dense(value.shape, value.stride()):
        return value.stride()
    return _contiguous(value.shape)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if a tensor is non-overlapping and dense, in any order of its dims."""
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
    """Raise if an output is not a dense plain tensor."""
    for place, value in enumerate(values):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not plain or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise StageError(
                f"stage {stage} returns a {type(value).__name__} as output {place}; only dense tensors can be sent.",
                fix="cut the model where plain tensors cross.",
            )


class Packet:
    """The buffer of one message, with views of its parts."""

    def __init__(self, layout: MessageLayout, device: torch.device, *, front: int = 0, receives: bool) -> None:
        self.layout = layout
        begin = front + (0 if layout.large else layout.offsets[-1])
        self.message = torch.empty(begin + layout.end_nbytes, dtype=torch.uint8, device=device)
        self.end = self.message[begin:]
        self.end.zero_()
        self.status = self.end[:8].view(torch.int64)
        self._marked = False
        self.values: list[torch.Tensor] = []
        """Views of the values in the buffer; empty for large values that are sent, which need no copy."""
        if not layout.large:
            self.values = unpack(self.message, layout, front)
        elif receives:
            self.values = [
                torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device) for form in layout.forms
            ]

    def describe(self, text: bytes) -> None:
        """Write a description at the front."""
        self.message[: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def fill(self, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Copy values in, with the byte of a value set if it is None; returns the tensors to send, in order."""
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
        """Announce another message of `extra` bytes; returns the tensors to send (large values have any content)."""
        self._mark(2, description, extra)
        if not self.layout.large:
            return [self.message]
        return self._rows([None] * len(self.layout.forms))

    def received(self) -> list[torch.Tensor]:
        """The tensors to receive a message into, in order."""
        if not self.layout.large:
            return [self.message]
        return self._rows(self.values)

    def read_lengths(self) -> tuple[int, int]:
        """The lengths of the description and of the next message; 0 and 0 if the layout is the expected one."""
        if self.status.item() != 2:
            return 0, 0
        description, extra = self.end[8:_END].view(torch.int64).tolist()
        return description, extra

    def read_present(self) -> list[torch.Tensor | None]:
        """The values, with None for absent ones."""
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


def unpack(message: torch.Tensor, layout: MessageLayout, front: int) -> list[torch.Tensor]:
    """Views of the values in a message with a description of `front` bytes."""
    spots = zip(layout.offsets[:-1], layout.forms, strict=True)
    return [_slot(message, front + offset, form) for offset, form in spots]


def _slot(message: torch.Tensor, offset: int, form: TensorLayout) -> torch.Tensor:
    flat = message[offset : offset + form.nbytes].view(form.dtype)
    return flat.as_strided(form.shape, form.stride, offset // form.dtype.itemsize)


def _flat(value: torch.Tensor | None, form: TensorLayout, device: torch.device) -> torch.Tensor:
    """The storage of a large value as a flat tensor; for an absent one, an empty tensor of that size."""
    count = form.nbytes // form.dtype.itemsize
    if value is None:
        return torch.empty(count, dtype=form.dtype, device=device)
    value = value.detach()
    if value.stride() != form.stride:
        value = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=value.device).copy_(value)
    return value.as_strided((count,), (1,))


_EXTRA_TAG = 7


@dataclass
class Wire:
    """The point-to-point connection of a stage to its neighbours."""

    group: dist.ProcessGroup | None
    device: torch.device
    side: dist.ProcessGroup | None = None
    """The group for unexpected messages, for backends without tags; None: the same group, with a tag."""
    sending: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    def sends(self, messages: Sequence[torch.Tensor], peer: int) -> list[dist.P2POp]:
        """Sends for the schedule to post."""
        return [dist.P2POp(dist.isend, message, peer, self.group) for message in messages]

    def receives(self, messages: Sequence[torch.Tensor], peer: int) -> list[dist.P2POp]:
        """Receives for the schedule to post."""
        return [dist.P2POp(dist.irecv, message, peer, self.group) for message in messages]

    def extra(self, message: torch.Tensor, peer: int) -> list[dist.P2POp]:
        """Send an unexpected message: an operation for the schedule to post; with `side`, it is sent at once."""
        if self.side is None:
            return [dist.P2POp(dist.isend, message, peer, self.group, _EXTRA_TAG)]
        work = dist.isend(message, peer, group=self.side)
        assert work is not None, "stages only send to ranks of their own group"
        self.sending.append((work, message))
        return []

    def receive_extra(self, nbytes: int, peer: int) -> torch.Tensor:
        """Receive an unexpected message, blocking."""
        message = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self.side is None:
            dist.recv(message, peer, group=self.group, tag=_EXTRA_TAG)
        else:
            dist.recv(message, peer, group=self.side)
        return message

    def finish(self) -> None:
        """Wait for the sends in the side group."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


class Sender:
    """The end of a link at the earlier of two stages: sends values, receives gradients."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._usual: dict[tuple[bool, int], Packet] = {}
        """The packet of a microbatch with the layout of the previous step."""
        self._coming: dict[int, Packet] = {}
        """The packet of its gradients."""
        self._sent: dict[int, MessageLayout] = {}

    def send(
        self, chunk: int, values: Sequence[torch.Tensor], size: MicrobatchSize, gradients: bool, peer: int
    ) -> list[dist.P2POp]:
        """The operations that send the values of a microbatch."""
        usual = self._usual.get((gradients, chunk))
        if usual is None:
            usual = Packet(MessageLayout(), self._wire.device, receives=False)
        if usual.layout.fits(values, size, gradients):
            self._sent[chunk] = usual.layout
            return self._wire.sends(usual.fill(values), peer)
        layout = layout_of(values, size, gradients=gradients)
        described = layout.write()
        small = Packet(layout.together, self._wire.device, front=len(described), receives=False)
        small.describe(described)
        (extra,) = small.fill(values)
        announced = self._wire.sends(usual.announce(len(described), extra.numel()), peer)
        self._usual[gradients, chunk] = Packet(layout, self._wire.device, receives=False)
        self._sent[chunk] = layout
        return [*announced, *self._wire.extra(extra, peer)]

    def receive_gradients(self, chunk: int, peer: int) -> list[dist.P2POp]:
        """The operations that receive the gradients of the values that were sent."""
        layout = self._sent[chunk].gradients
        if not layout.forms:
            return []
        packet = self._coming.get(chunk)
        if packet is None or packet.layout != layout:
            packet = self._coming[chunk] = Packet(layout, self._wire.device, receives=True)
        return self._wire.receives(packet.received(), peer)

    def take_gradients(self, chunk: int) -> list[torch.Tensor | None]:
        """A gradient, or None, for each value that was sent."""
        sent = self._sent.pop(chunk)
        if not sent.gradients.forms:
            return [None] * len(sent.forms)
        given = iter(self._coming[chunk].read_present())
        return [next(given) if form.requires_grad else None for form in sent.forms]

    def clear(self) -> None:
        """Drop the microbatches of a step, but not the layouts that the other side expects."""
        self._sent.clear()


class Receiver:
    """The end of a link at the later of two stages: receives values, sends gradients."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._usual: dict[tuple[bool, int], Packet] = {}
        self._coming: dict[int, tuple[Packet, bool]] = {}
        self._back: dict[int, Packet] = {}
        """The packet of the gradients of a microbatch."""
        self._taken: dict[int, MessageLayout] = {}

    def receive(self, chunk: int, gradients: bool, peer: int) -> list[dist.P2POp]:
        """The operations that receive the values of a microbatch."""
        usual = self._usual.get((gradients, chunk))
        if usual is None:
            usual = Packet(MessageLayout(), self._wire.device, receives=True)
        self._coming[chunk] = (usual, gradients)
        return self._wire.receives(usual.received(), peer)

    def take(self, chunk: int, peer: int) -> tuple[list[torch.Tensor], MessageLayout]:
        """The values received for a microbatch, and their layout."""
        packet, gradients = self._coming.pop(chunk)
        front, extra = packet.read_lengths()
        if extra:
            message = self._wire.receive_extra(extra, peer)
            layout = MessageLayout.read(bytes(message[:front].tolist()))
            values = unpack(message, layout.together, front)
            packet = self._usual[gradients, chunk] = Packet(layout, self._wire.device, receives=True)
        else:
            values = packet.values
        self._taken[chunk] = packet.layout
        return values, packet.layout

    def send_gradients(self, chunk: int, gradients: Sequence[torch.Tensor | None], peer: int) -> list[dist.P2POp]:
        """The operations that send a gradient, or None, for each received value."""
        taken = self._taken.pop(chunk)
        layout = taken.gradients
        if not layout.forms:
            return []
        packet = self._back.get(chunk)
        if packet is None or packet.layout != layout:
            packet = self._back[chunk] = Packet(layout, self._wire.device, receives=False)
        wanted = [given for given, form in zip(gradients, taken.forms, strict=True) if form.requires_grad]
        return self._wire.sends(packet.fill(wanted), peer)

    def clear(self) -> None:
        """Drop the microbatches of a step, but not the expected layouts."""
        self._coming.clear()
        self._taken.clear()
