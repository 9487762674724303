"""How values travel between ranks: when a transfer may begin, what it must share, and who waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from wholestep.errors import OptionError

Matching = Literal["buffered", "rendezvous", "ordered"]
Sharing = Literal["nothing", "link", "wire", "port"]


@dataclass(frozen=True)
class Network:
    """`matching`: a transfer may begin when

    - `"buffered"`: its send is reached;
    - `"rendezvous"`: its send and its receive are reached (gloo);
    - `"ordered"`: also everything that either rank began earlier with the other one is done (NCCL: one queue per pair).

    `sharing`: transfers that wait for each other, first come first served:

    - `"nothing"`: none do;
    - `"link"`: those from one rank to another one, each direction for itself;
    - `"wire"`: those between two ranks, both directions together;
    - `"port"`: those that leave a rank, and those that enter one, whoever is at the other end.

    `blocking_sends`: a rank stands still from a send on until the value has arrived.
    """

    matching: Matching = "rendezvous"
    sharing: Sharing = "link"
    blocking_sends: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("matching", self.matching, get_args(Matching)),
            ("sharing", self.sharing, get_args(Sharing)),
        ):
            if value not in known:
                raise OptionError(f"{name}={value!r} is not known.", fix=f"one of {', '.join(map(repr, known))}.")

    def resources(self, sender: int, receiver: int) -> tuple[tuple[str, int, int], ...]:
        """What a transfer needs for itself while it lasts."""
        if self.sharing == "nothing":
            return ()
        if self.sharing == "link":
            return (("link", sender, receiver),)
        if self.sharing == "wire":
            return (("wire", min(sender, receiver), max(sender, receiver)),)
        return (("out", sender, -1), ("in", receiver, -1))
