"""What a rank tells the others about a failure, and the error that each of them raises for it."""

from __future__ import annotations

import linecache
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any

from wholestep.errors import DesyncError, PeerFailedError

_PROGRAM = "<wholestep program "
_MESSAGE_LINES = 6
_MESSAGE_CHARACTERS = 1000


class Kind(StrEnum):
    """What happened to the rank that a failure is about."""

    RAISED = "raised"
    DIED = "died"
    LEFT = "left"
    ABORTED = "aborted"
    STORE = "store"
    DESYNC = "desync"


@dataclass(frozen=True)
class Failure:
    """One failure. `rank` is the rank that failed, not the one that noticed."""

    kind: Kind
    rank: int
    step: str
    call: int
    text: str
    """The first lines of the error, or what is known of a rank that says nothing."""
    running: bool = True
    """Whether collectives may be under way: then no process group can be used any more."""
    fix: str = ""
    """What to do, where the usual advice for this kind does not fit."""
    stops: bool = False
    """Communication works and training is wrong: all ranks stop before the same call (`runtime.stopping`)."""
    stops_at: int = 0
    """That call; 0 while it is not decided."""

    @property
    def is_undecided(self) -> bool:
        """Whether ranks hold until they know before which call they stop."""
        return self.stops and not self.stops_at

    def write(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def read(cls, data: dict[str, Any]) -> Failure:
        """From JSON."""
        return cls(**{**data, "kind": Kind(data["kind"])})

    def concerns(self, step: str, call: int) -> bool:
        """Whether a rank that comes to this call of this step would be alone there."""
        if self.stops:
            return self.step == step and call >= self.stops_at
        return self.running or (self.step, self.call) == (step, call)


def as_error(
    failure: Failure, here: int, node: str = "", aborted: bool = False, recording: str = ""
) -> DesyncError | PeerFailedError:
    """The error that rank `here` raises."""
    if failure.kind is Kind.DESYNC:
        return DesyncError(failure.text, fix=failure.fix or DESYNC_FIX, node=node)
    what = _what(failure, here)
    if aborted:
        what += "\nThe process groups of this rank were aborted; no collective can run in them any more."
    if recording:
        what += f"\nFlight recorder: {recording}"
    fix = "look at the log of that rank for its own error; start the job again from the last checkpoint."
    if failure.kind is Kind.RAISED and not failure.running:
        fix = "correct that error; nothing was sent and nothing changed on this rank, so the process groups still work."
    return PeerFailedError(what, fix=fix, node=node, rank=failure.rank, step=failure.step, call=failure.call)


DESYNC_FIX = (
    "make all ranks run the same code on models, optimizers and batches of the same structure; "
    "a branch on the rank around or in the step is the usual cause."
)

SCALARS_FIX = (
    "give all ranks the same values: read them from one file, or broadcast them; a number that rightly belongs to one "
    'rank goes into the plan by its path, such as ws.Replicate(mesh, per_rank=["trainer.noise"]).'
)


def _what(failure: Failure, here: int) -> str:
    place = f"call {failure.call} of {failure.step}" if failure.step else "no step"
    if failure.kind is Kind.RAISED:
        who = f"Rank {failure.rank}" if failure.rank != here else "This rank"
        when = "in" if failure.running else "while compiling"
        return f"{who} raised {when} {place}:\n{_indent(failure.text)}"
    if failure.kind is Kind.STORE:
        return f"The store of the process group is gone in {place} ({failure.text}). {STORE_HOST}"
    return f"Rank {failure.rank} {failure.text}, and this rank needs it in {place}."


STORE_HOST = "Rank 0 hosts a TCPStore (under torchrun, it or the launcher): most likely rank 0 has died or has ended."


def first_lines(error: BaseException) -> str:
    """Type and first lines of a message, short enough for the store and for a log of many ranks."""
    lines = str(error).strip().splitlines()
    shown = "\n".join(lines[:_MESSAGE_LINES])[:_MESSAGE_CHARACTERS]
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def node_in(traceback: TracebackType | None) -> str:
    """The line of the program that was running, which names the node, its module and the user's line."""
    found = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file.startswith(_PROGRAM):
            line = linecache.getline(file, traceback.tb_lineno).strip()
            name, _, rest = line.partition(" = ")
            where = rest.partition("#")[2].strip()
            found = f"{name.partition('_')[2] or line}" + (f" of {where}" if where else "")
        traceback = traceback.tb_next
    return found


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
