"""The two ends of the way between two neighbouring stages, each on its rank.

    ForwardLink.send(...)      stage i     values of a microbatch  ->
    ForwardLink.receive(...)   stage i+1   the operation to post, and later `take` for the values
    and the same for gradients, which go back along the way of the values

Operations are torch's `P2POp`: the schedule posts and waits for them. Only a message that the other side did not expect
(see messages.py) is received here, along a way of its own, so that it meets no receive that was posted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from wholestep.pipelining.run.messages import Layout, Packet, Size, layout_of, unpack

_EXTRA_TAG = 7


@dataclass
class Wire:
    """How a stage reaches its neighbours."""

    group: dist.ProcessGroup | None
    device: torch.device
    side: dist.ProcessGroup | None = None
    """Where unexpected messages go: a group of its own for backends without tags; None: the same, with a tag."""
    sending: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    def sends(self, messages: Sequence[torch.Tensor], peer: int) -> list[dist.P2POp]:
        """Sends for the schedule to post."""
        return [dist.P2POp(dist.isend, message, peer, self.group) for message in messages]

    def receives(self, messages: Sequence[torch.Tensor], peer: int) -> list[dist.P2POp]:
        """Receives for the schedule to post."""
        return [dist.P2POp(dist.irecv, message, peer, self.group) for message in messages]

    def extra(self, message: torch.Tensor, peer: int) -> list[dist.P2POp]:
        """What sends a message that was not expected: an operation for the schedule, unless it has its own group."""
        if self.side is None:
            return [dist.P2POp(dist.isend, message, peer, self.group, _EXTRA_TAG)]
        work = dist.isend(message, peer, group=self.side)
        assert work is not None, "a stage talks to ranks of its own group"
        self.sending.append((work, message))
        return []

    def receive_extra(self, nbytes: int, peer: int) -> torch.Tensor:
        """Receive now."""
        message = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self.side is None:
            dist.recv(message, peer, group=self.group, tag=_EXTRA_TAG)
        else:
            dist.recv(message, peer, group=self.side)
        return message

    def finish(self) -> None:
        """Wait for what was sent in the group of its own."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


class Sender:
    """The end of a link that is at the stage before."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._usual: dict[tuple[bool, int], Packet] = {}
        """The message of a microbatch as it was in the step before."""
        self._coming: dict[int, Packet] = {}
        """The message of its gradients."""
        self._sent: dict[int, Layout] = {}

    def send(
        self, chunk: int, values: Sequence[torch.Tensor], size: Size, gradients: bool, peer: int
    ) -> list[dist.P2POp]:
        """The operations that send the values of a microbatch."""
        usual = self._usual.get((gradients, chunk))
        if usual is None:
            usual = Packet(Layout(), self._wire.device, receives=False)
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
        """The operations that receive the gradients of what was sent."""
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
        """Forget the microbatches of a step, not what the other side expects."""
        self._sent.clear()


class Receiver:
    """The end of a link that is at the stage behind."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._usual: dict[tuple[bool, int], Packet] = {}
        self._coming: dict[int, tuple[Packet, bool]] = {}
        self._back: dict[int, Packet] = {}
        """The message of the gradients of a microbatch."""
        self._taken: dict[int, Layout] = {}

    def receive(self, chunk: int, gradients: bool, peer: int) -> list[dist.P2POp]:
        """The operations that receive the values of a microbatch."""
        usual = self._usual.get((gradients, chunk))
        if usual is None:
            usual = Packet(Layout(), self._wire.device, receives=True)
        self._coming[chunk] = (usual, gradients)
        return self._wire.receives(usual.received(), peer)

    def take(self, chunk: int, peer: int) -> tuple[list[torch.Tensor], Layout]:
        """The values that came for a microbatch."""
        packet, gradients = self._coming.pop(chunk)
        front, extra = packet.read_lengths()
        if extra:
            message = self._wire.receive_extra(extra, peer)
            layout = Layout.read(bytes(message[:front].tolist()))
            values = unpack(message, layout.together, front)
            packet = self._usual[gradients, chunk] = Packet(layout, self._wire.device, receives=True)
        else:
            values = packet.values
        self._taken[chunk] = packet.layout
        return values, packet.layout

    def send_gradients(self, chunk: int, gradients: Sequence[torch.Tensor | None], peer: int) -> list[dist.P2POp]:
        """The operations that send back a gradient, or None, for each value that came."""
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
        """Forget the microbatches of a step, not what comes usually."""
        self._coming.clear()
        self._taken.clear()
