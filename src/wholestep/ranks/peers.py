"""Where the other ranks are, as far as their beats tell.

A rank writes its beat about once a second, with a number that grows. How long ago a rank was alive is measured by this
rank's own clock, from when it saw the number grow: clocks of machines need not agree.

What ranks write for each other in the c10d store: small JSON values, and no operation that waits for a key.

TCPStore and FileStore let `get` wait until somebody writes the key. `compare_set` with an expected value that nobody
ever writes is the same read without the wait, in one round trip.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from wholestep.torch_private.distributed import own_client, store_under

if TYPE_CHECKING:
    from wholestep.torch_private.distributed import Store

T = TypeVar("T")

_MISSING = b"?"
_COMPRESS_FROM = 2048


class StoreGoneError(Exception):
    """The store does not answer any more. Caught inside of `runtime/`; users see PeerFailedError."""


class Board:
    """A client of the store for one thread, under a prefix of its own and with a short time-out."""

    def __init__(self, store: Store, prefix: str, timeout: float) -> None:
        # A client of its own: the group's client stays locked while another thread waits in it.
        client = own_client(store)
        client.set_timeout(timedelta(seconds=timeout))
        self._client = client
        self._store = store_under(prefix, client)

    def read(self, key: str) -> Any:
        """The value of a key; None if nobody wrote it."""
        return _decode(self._call(self._store.compare_set, key, _MISSING.decode(), _MISSING.decode()))

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        """The values of keys that are known to be there and that nobody deletes meanwhile, in one round trip."""
        return [_decode(value) for value in self._call(self._store.multi_get, list(keys))] if keys else []

    def read_some(self, keys: Sequence[str]) -> list[Any]:
        """The values of several keys; None for each that nobody wrote."""
        return [self.read(key) for key in keys]

    def write(self, key: str, value: Any) -> None:
        """Set a key."""
        self._call(self._store.set, key, _encode(value))

    def write_first(self, key: str, value: Any) -> Any:
        """Set a key if nobody did; what it holds afterwards."""
        return _decode(self._call(self._store.compare_set, key, "", _json(value).decode()))

    def count(self, key: str, by: int = 0) -> int:
        """Add to a counter; its value afterwards."""
        return int(self._call(self._store.add, key, by))

    def remove(self, keys: Iterable[str]) -> None:
        """Delete keys, where the store can."""
        for key in keys:
            try:
                self._store.delete_key(key)
            except NotImplementedError:
                return
            except RuntimeError as error:
                raise StoreGoneError(str(error)) from error

    def ask(self, question: Callable[[Store], T]) -> T:
        """What a function finds in the store of the group itself, without our prefix."""
        answer: T = self._call(question, self._client)
        return answer

    def _call(self, operation: Any, *args: Any) -> Any:
        try:
            return operation(*args)
        except RuntimeError as error:  # DistNetworkError, DistStoreError, and what FileStore raises
            raise StoreGoneError(str(error).splitlines()[0]) from error


def _encode(value: Any) -> bytes:
    text = _json(value)
    return b"z" + zlib.compress(text) if len(text) >= _COMPRESS_FROM else text


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _decode(value: bytes) -> Any:
    if value == _MISSING:
        return None
    return json.loads(zlib.decompress(value[1:]) if value[:1] == b"z" else value)


class State(StrEnum):
    """What a rank does."""

    IDLE = "idle"
    COMPILING = "compiling"
    AGREEING = "agreeing"
    RUNNING = "running"
    ABORTED = "aborted"
    LEFT = "left"


@dataclass(frozen=True)
class Position:
    """Where a rank is, or was when it last did something."""

    state: State = State.IDLE
    step: str = ""
    call: int = 0


@dataclass(frozen=True)
class Beat:
    """One sign of life."""

    number: int
    position: Position
    host: str = ""
    pid: int = 0
    cause: dict[str, Any] | None = None
    """The failure for which a rank aborted its process groups, as JSON."""
    calls: int = 0
    """How many graphs it has run, and the hash of them (`Trail`)."""
    trail: int = 0
    scalars: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By step, the last call and the hash of the scalars that ranks must share (`ScalarTrail`)."""

    def write(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def read(cls, data: dict[str, Any]) -> Beat:
        """From JSON."""
        position = data["position"]
        return cls(**{**data, "position": Position(**{**position, "state": State(position["state"])})})


def beat_key(rank: int) -> str:
    """Where a rank writes its beat."""
    return f"beat/{rank}"


class Peers:
    """The last beat of each of the other ranks, and when it came."""

    def __init__(self, others: Iterable[int], gap: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.others = tuple(others)
        self._gap = gap
        """Longer than this without a look, and nothing is known about a silence."""
        self._clock = clock
        self._beats: dict[int, Beat] = {}
        self._changed: dict[int, float] = {}
        self._compiled: dict[int, float] = {}
        self._looked: dict[int, float] = {}
        self._watched_since: dict[int, float] = {}

    def refresh(self, board: Board, ranks: Iterable[int]) -> None:
        """Read the beats of some ranks."""
        chosen = list(ranks)
        keys = [beat_key(rank) for rank in chosen]
        # Once there, a beat stays.
        known = all(rank in self._beats for rank in chosen)
        for rank, data in zip(chosen, board.read_all(keys) if known else board.read_some(keys), strict=True):
            self._look(rank)
            if data is not None:
                self.note(rank, Beat.read(data))

    def note(self, rank: int, beat: Beat) -> None:
        """Remember a beat, and when it came if it is a new one."""
        before = self._beats.get(rank)
        if before is None or before.number != beat.number:
            self._beats[rank] = beat
            self._changed[rank] = self._clock()
            if beat.position.state is State.COMPILING:
                self._compiled[rank] = self._clock()

    def _look(self, rank: int) -> None:
        now = self._clock()
        if now - self._looked.get(rank, float("-inf")) > self._gap:
            self._watched_since[rank] = now
            self._changed.pop(rank, None)
        self._looked[rank] = now

    def beat(self, rank: int) -> Beat | None:
        """The last beat seen."""
        return self._beats.get(rank)

    def state(self, rank: int) -> State | None:
        """What a rank last did; None if it never came."""
        found = self._beats.get(rank)
        return None if found is None else found.position.state

    def silent_for(self, rank: int) -> float:
        """Seconds since a rank gave a sign of life, at most since this rank began to look."""
        seen = self._changed.get(rank, self._watched_since.get(rank))
        return 0.0 if seen is None else self._clock() - seen

    def compiled_at(self, rank: int) -> float:
        """When a rank was last seen compiling, by the clock of this object; 0 if never."""
        return self._compiled.get(rank, 0.0)

    def last_words(self, rank: int) -> str:
        """What is known of a rank, for messages."""
        beat = self._beats.get(rank)
        if beat is None:
            return "has not called a compiled step yet, or has died before"
        place = f"call {beat.position.call} of {beat.position.step}" if beat.position.step else "no step so far"
        doing = _DOING[beat.position.state].format(place=place)
        why = "" if beat.cause is None else f" ({beat.cause['text'].partition(chr(10))[0]})"
        return f"{doing}{why}; last sign of life {self.silent_for(rank):.1f} s ago, process {beat.pid} on {beat.host}"


_DOING = {
    State.IDLE: "is outside of any step (last: {place})",
    State.COMPILING: "compiles {place}",
    State.AGREEING: "waits for the other ranks before {place}",
    State.RUNNING: "runs {place}",
    State.ABORTED: "has aborted its process groups in {place}",
    State.LEFT: "has ended or destroyed its process group (last: {place})",
}


def following(
    beat: Beat,
    position: Position,
    cause: dict[str, Any] | None = None,
    trail: tuple[int, int] = (0, 0),
    scalars: dict[str, tuple[int, int]] | None = None,
) -> Beat:
    """The next beat of a rank."""
    number, (calls, value) = beat.number + 1, trail
    return replace(beat, number=number, position=position, cause=cause, calls=calls, trail=value, scalars=scalars or {})
