"""The keys of one round of agreement, and the answers of ranks that have nothing to agree on.

A rank that captured a graph for a call writes a record of it and waits for the records of the others. A rank that
already has a graph for that call runs it without a look at the store; if others ask, its watchdog answers for it.

    agree/<step>/<call>/count      how many records there are
    agree/<step>/<call>/verdict    go, or why not: the first who decides decides for all
    agree/<step>/<call>/record/r   what rank r runs
    agree/<step>/<call>/detail/r   its graph line by line, where records differ
    agree/<step>/<call>/asked      number of the event by which records were asked for
    agree/<step>/<call>/done       how many ranks have read everything; the last one deletes all this
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from wholestep.ranks.digest import GraphDigest, LinesDigest
from wholestep.ranks.peers import Board

_MOST_CALLS = 1024
_MOST_QUESTIONS = 256

Call = tuple[str, int]


@dataclass(frozen=True)
class RoundKeys:
    """Where the ranks meet for one call of one step."""

    step: str
    call: int

    def of(self, name: str) -> str:
        """A key that all ranks share."""
        return f"agree/{self.step}/{self.call}/{name}"

    def record(self, rank: int) -> str:
        """What a rank runs."""
        return self.of(f"record/{rank}")

    def detail(self, rank: int) -> str:
        """The lines of its graph."""
        return self.of(f"detail/{rank}")

    def all(self, ranks: Iterable[int]) -> list[str]:
        """Everything that one round leaves."""
        each = [key for rank in ranks for key in (self.record(rank), self.detail(rank))]
        return [*each, *(self.of(name) for name in ("count", "verdict", "asked", "done"))]


def record_of(digest: GraphDigest | LinesDigest) -> dict[str, Any]:
    """The record of a rank that runs a graph for the first time."""
    record: dict[str, Any] = {
        "fingerprint": digest.fingerprint,
        "communication": digest.communication,
        "ragged": digest.ragged,
    }
    scalars = digest.scalars
    if scalars.shared:
        names, values = scalars.hashes()
        record |= {"names": names, "values": values}
    if scalars.teams:
        record |= {"update": scalars.update_hash(), "teams": list(scalars.teams)}
    return record


def detail_of(digest: GraphDigest | LinesDigest, by_nodes: bool) -> dict[str, Any]:
    """What a rank runs, in full: its graph (or only what that communicates) line by line, and its scalars."""
    lines = digest.nodes() if by_nodes else digest.communications()
    scalars = digest.scalars
    return {
        "lines": lines,
        "shared": dict(scalars.shared),
        "read": dict(scalars.read),
        "update": [(line, line) for line in scalars.update],
    }


def answer_of(digest: GraphDigest) -> dict[str, Any]:
    """The record of a rank that has run its graph before, and may be waiting in its first collective."""
    record = record_of(digest)
    # Its scalars are those of the call for which it agreed; of later calls the running hash tells (`ScalarTrail`).
    return {key: value for key, value in record.items() if key not in ("names", "values")} | {"answered": True}


class Answers:
    """What this rank ran lately, and the questions about it that are still open. Belongs to the watchdog."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.ran: deque[tuple[str, int, GraphDigest | None]] = deque(maxlen=_MOST_CALLS)
        """Written by the thread that runs steps: the calls that it came to, the current one included."""
        self.agreed: deque[Call] = deque(maxlen=_MOST_CALLS)
        """Written by the thread that runs steps: the calls that it wrote a record for itself."""
        self._records: dict[Call, None] = {}
        self._details: dict[Call, bool] = {}
        """Whether whole graphs are compared, or only what they communicate."""

    def ask(self, event: dict[str, Any]) -> None:
        """Note a question of another rank."""
        call = (str(event["step"]), int(event["call"]))
        if event["kind"] == "question":
            _remember(self._records, call, None)
        elif event["rank"] == self._rank:
            _remember(self._details, call, bool(event.get("nodes")))

    def give(self, board: Board) -> None:
        """Answer what can be answered now."""
        if not self._records and not self._details:
            return
        ran = {(step, call): digest for step, call, digest in list(self.ran)}
        agreed = set(self.agreed)
        for call in [call for call in self._records if call in ran or call in agreed]:
            del self._records[call]
            digest = ran.get(call)
            if digest is not None and call not in agreed:
                keys = RoundKeys(*call)
                board.write(keys.record(self._rank), answer_of(digest))
                board.count(keys.of("count"), 1)
        for call in [call for call in self._details if call in ran]:
            by_nodes = self._details.pop(call)
            digest = ran[call]
            if digest is not None:
                board.write(RoundKeys(*call).detail(self._rank), detail_of(digest, by_nodes))


def _remember(questions: dict[Call, Any], call: Call, what: Any) -> None:
    questions[call] = what
    if len(questions) > _MOST_QUESTIONS:
        del questions[next(iter(questions))]
