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

from wholestep.pipelining.messages import Layout, layout_of, pack, pack_announcement, read_end, unpack

_EXTRA_TAG = 7


@dataclass
class Wire:
    """How a stage reaches its neighbours."""

    group: dist.ProcessGroup | None
    device: torch.device
    side: dist.ProcessGroup | None = None
    """Where unexpected messages go: a group of its own for backends without tags; None: the same, with a tag."""
    sending: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    def operation(self, op: object, message: torch.Tensor, peer: int) -> dist.P2POp:
        """A send or receive for the schedule to post."""
        return dist.P2POp(op, message, peer, self.group)  # type: ignore[arg-type]

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
        self._expected: dict[tuple[bool, int], Layout] = {}
        self._sent: dict[int, Layout] = {}
        self._coming: dict[int, torch.Tensor] = {}

    def send(
        self, chunk: int, values: Sequence[torch.Tensor], weight: float, gradients: bool, peer: int
    ) -> list[dist.P2POp]:
        """The operations that send the values of a microbatch."""
        wire = self._wire
        layout = layout_of(values, weight, gradients=gradients)
        expected = self._expected.get((gradients, chunk), _NOTHING)
        if layout == expected:
            self._sent[chunk] = expected  # it has its offsets
            return [wire.operation(dist.isend, pack(expected, values, wire.device), peer)]
        described = layout.write()
        extra = pack(layout, values, wire.device, described)
        announcement = pack_announcement(expected, len(described), extra.numel(), wire.device)
        self._sent[chunk] = self._expected[gradients, chunk] = layout
        return [wire.operation(dist.isend, announcement, peer), *wire.extra(extra, peer)]

    def receive_gradients(self, chunk: int, peer: int) -> list[dist.P2POp]:
        """The operations that receive the gradients of what was sent."""
        layout = self._sent[chunk].gradients
        if not layout.forms:
            return []
        self._coming[chunk] = message = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._wire.device)
        return [self._wire.operation(dist.irecv, message, peer)]

    def take_gradients(self, chunk: int) -> list[torch.Tensor | None]:
        """A gradient, or None, for each value that was sent."""
        sent = self._sent.pop(chunk)
        layout = sent.gradients
        if not layout.forms:
            return [None] * len(sent.forms)
        message = self._coming.pop(chunk)
        absent = read_end(message, layout)[2]
        given = iter(zip(unpack(message, layout), absent, strict=True))
        result: list[torch.Tensor | None] = []
        for form in sent.forms:
            gradient, missing = next(given) if form.requires_grad else (None, 1)
            result.append(None if missing else gradient)
        return result

    def clear(self) -> None:
        """Forget the microbatches of a step, not what the other side expects."""
        self._sent.clear()
        self._coming.clear()


class Receiver:
    """The end of a link that is at the stage behind."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._expected: dict[tuple[bool, int], Layout] = {}
        self._coming: dict[int, tuple[torch.Tensor, bool]] = {}
        self._taken: dict[int, Layout] = {}

    def receive(self, chunk: int, gradients: bool, peer: int) -> list[dist.P2POp]:
        """The operations that receive the values of a microbatch."""
        expected = self._expected.get((gradients, chunk), _NOTHING)
        message = torch.empty(expected.nbytes, dtype=torch.uint8, device=self._wire.device)
        self._coming[chunk] = (message, gradients)
        return [self._wire.operation(dist.irecv, message, peer)]

    def take(self, chunk: int, peer: int) -> tuple[list[torch.Tensor], Layout]:
        """The values that came for a microbatch."""
        message, gradients = self._coming.pop(chunk)
        layout = self._expected.get((gradients, chunk), _NOTHING)
        front, extra, _ = read_end(message, layout)
        if extra:
            message = self._wire.receive_extra(extra, peer)
            layout = Layout.read(bytes(message[:front].tolist()))
            self._expected[gradients, chunk] = layout
        self._taken[chunk] = layout
        return unpack(message, layout, front), layout

    def send_gradients(self, chunk: int, gradients: Sequence[torch.Tensor | None], peer: int) -> list[dist.P2POp]:
        """The operations that send back a gradient, or None, for each value that came."""
        taken = self._taken.pop(chunk)
        wanted = [given for given, form in zip(gradients, taken.forms, strict=True) if form.requires_grad]
        if not wanted:
            return []
        message = pack(taken.gradients, wanted, self._wire.device)
        return [self._wire.operation(dist.isend, message, peer)]

    def clear(self) -> None:
        """Forget the microbatches of a step, not what comes usually."""
        self._coming.clear()
        self._taken.clear()


_NOTHING = Layout()
