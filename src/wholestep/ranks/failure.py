"""`Failure`: the record of a failure that one rank posts to all, and the error that each of them raises for it."""

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


class FailureKind(StrEnum):
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

    kind: FailureKind
    rank: int
    step: str
    call: int
    text: str
    """The first lines of the error, or the last known state of a rank that does not answer."""
    running: bool = True
    """Whether collectives may be in flight; then no process group can be used any more."""
    fix: str = ""
    """What to do, if the usual advice for this kind does not fit."""
    stops: bool = False
    """Communication works but training is wrong: all ranks stop before the same call (`watchdog.CoordinatedStop`)."""
    stops_at: int = 0
    """That call; 0 while it is not decided."""

    @property
    def is_undecided(self) -> bool:
        """Whether ranks still have to agree on the call before which they stop."""
        return self.stops and not self.stops_at

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Failure:
        """The inverse of `to_json`."""
        return cls(**{**data, "kind": FailureKind(data["kind"])})

    def concerns(self, step: str, call: int) -> bool:
        """Whether a rank that begins this call of this step would wait for ranks that do not take part."""
        if self.stops:
            return self.step == step and call >= self.stops_at
        return self.running or (self.step, self.call) == (step, call)


def as_error(
    failure: Failure, here: int, node: str = "", aborted: bool = False, recording: str = ""
) -> DesyncError | PeerFailedError:
    """The error that rank `here` raises."""
    if failure.kind is FailureKind.DESYNC:
        return DesyncError(failure.text, fix=failure.fix or DESYNC_FIX, node=node)
    what = _what(failure, here)
    if aborted:
        what += "\nThe process groups of this rank were aborted; no collective can run in them any more."
    if recording:
        what += f"\nFlight recorder: {recording}"
    fix = "look for the error in the log of that rank, and restart the job from the last checkpoint."
    if failure.kind is FailureKind.RAISED and not failure.running:
        fix = "fix that error; nothing was sent and nothing changed on this rank, so the process groups still work."
    return PeerFailedError(what, fix=fix, node=node, rank=failure.rank, step=failure.step, call=failure.call)


DESYNC_FIX = (
    "run the same code on all ranks, with models, optimizers and batches of the same structure; "
    "the usual cause is a branch on the rank in the step or around it."
)

SCALARS_FIX = (
    "give all ranks the same values (read them from one file, or broadcast them). If a value is meant to differ "
    'between ranks, name its path in the plan: ws.Replicate(mesh, per_rank=["trainer.noise"]).'
)


def _what(failure: Failure, here: int) -> str:
    place = f"call {failure.call} of {failure.step}" if failure.step else "no step"
    if failure.kind is FailureKind.RAISED:
        which = f"Rank {failure.rank}" if failure.rank != here else "This rank"
        when = "in" if failure.running else "while compiling"
        return f"{which} raised {when} {place}:\n{_indent(failure.text)}"
    if failure.kind is FailureKind.STORE:
        return f"The store of the process group is gone in {place} ({failure.text}). {STORE_HOST}"
    return f"Rank {failure.rank} {failure.text}, and this rank needs it in {place}."


STORE_HOST = "A TCPStore lives on rank 0 (under torchrun, there or in the launcher); most likely rank 0 died or ended."


def first_lines(error: BaseException) -> str:
    """The type and the first lines of an error, short enough for the store and for the log of many ranks."""
    lines = str(error).strip().splitlines()
    shown = "\n".join(lines[:_MESSAGE_LINES])[:_MESSAGE_CHARACTERS]
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def node_in(traceback: TracebackType | None) -> str:
    """The node whose line of the generated program raised, with its module and the user's line; "" if there is none."""
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
