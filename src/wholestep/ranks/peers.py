"""The store client of a rank, and the heartbeats of the other ranks that it reads there.

`StoreClient`: ranks exchange small JSON values in the c10d store, without any operation that blocks. `get` of TCPStore
and FileStore blocks until the key exists; `compare_set` with an expected value that is never written is the same read
without blocking, in one round trip.

`Peers`: each rank writes its heartbeat about once a second, with a counter that grows. How long ago a rank was alive is
measured with this rank's clock, from when it saw the counter grow; clocks of machines need not be synchronised.
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
    """The store does not answer any more. Caught inside of `ranks/`; users see PeerFailedError."""


class StoreClient:
    """A client of the store for one thread, with its own key prefix and a short time-out."""

    def __init__(self, store: Store, prefix: str, timeout: float) -> None:
        # A separate connection: the group's client stays locked while another thread waits in it.
        client = own_client(store)
        client.set_timeout(timedelta(seconds=timeout))
        self._client = client
        self._store = store_under(prefix, client)

    def read(self, key: str) -> Any:
        """The value of a key; None if it does not exist."""
        return _decode(self._call(self._store.compare_set, key, _MISSING.decode(), _MISSING.decode()))

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        """The values of keys that are known to exist and are not deleted meanwhile, in one round trip."""
        return [_decode(value) for value in self._call(self._store.multi_get, list(keys))] if keys else []

    def read_some(self, keys: Sequence[str]) -> list[Any]:
        """The values of several keys; None for each that does not exist."""
        return [self.read(key) for key in keys]

    def write(self, key: str, value: Any) -> None:
        """Set a key."""
        self._call(self._store.set, key, _encode(value))

    def write_first(self, key: str, value: Any) -> Any:
        """Set a key if it does not exist; returns its value afterwards."""
        return _decode(self._call(self._store.compare_set, key, "", _json(value).decode()))

    def count(self, key: str, by: int = 0) -> int:
        """Add to a counter; returns its value afterwards."""
        return int(self._call(self._store.add, key, by))

    def remove(self, keys: Iterable[str]) -> None:
        """Delete keys, if the store supports it."""
        for key in keys:
            try:
                self._store.delete_key(key)
            except NotImplementedError:
                return
            except RuntimeError as error:
                raise StoreGoneError(str(error)) from error

    def without_prefix(self, function: Callable[[Store], T]) -> T:
        """Call a function with the store of the group itself, without our prefix."""
        result: T = self._call(function, self._client)
        return result

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


class RankState(StrEnum):
    """The state of a rank."""

    IDLE = "idle"
    COMPILING = "compiling"
    AGREEING = "agreeing"
    RUNNING = "running"
    ABORTED = "aborted"
    LEFT = "left"


@dataclass(frozen=True)
class Position:
    """The call of a step that a rank is in, or was in last, and its state there."""

    state: RankState = RankState.IDLE
    step: str = ""
    call: int = 0


@dataclass(frozen=True)
class Heartbeat:
    """What a rank writes about once a second."""

    number: int
    position: Position
    host: str = ""
    pid: int = 0
    cause: dict[str, Any] | None = None
    """The failure for which a rank aborted its process groups, as JSON."""
    calls: int = 0
    """How many graphs that communicate it has run."""
    run_hash: int = 0
    """The hash of these runs (`watchdog.RunningHash`)."""
    scalars: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By step, the last call and the hash of the shared scalars (`ScalarHistory`)."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Heartbeat:
        """The inverse of `to_json`."""
        position = data["position"]
        return cls(**{**data, "position": Position(**{**position, "state": RankState(position["state"])})})


def heartbeat_key(rank: int) -> str:
    """The key of the heartbeat of a rank."""
    return f"heartbeat/{rank}"


class Peers:
    """The last heartbeat of each of the other ranks, and when it was seen."""

    def __init__(self, others: Iterable[int], gap: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.others = tuple(others)
        self._gap = gap
        """If this rank has not read a heartbeat for longer than this, the time since the last one has no meaning."""
        self._clock = clock
        self._heartbeats: dict[int, Heartbeat] = {}
        self._changed: dict[int, float] = {}
        self._compiled: dict[int, float] = {}
        self._read_at: dict[int, float] = {}
        self._watched_since: dict[int, float] = {}

    def refresh(self, store: StoreClient, ranks: Iterable[int]) -> None:
        """Read the heartbeats of some ranks."""
        chosen = list(ranks)
        keys = [heartbeat_key(rank) for rank in chosen]
        # A heartbeat that exists is never deleted.
        known = all(rank in self._heartbeats for rank in chosen)
        for rank, data in zip(chosen, store.read_all(keys) if known else store.read_some(keys), strict=True):
            self._mark_read(rank)
            if data is not None:
                self.note(rank, Heartbeat.from_json(data))

    def note(self, rank: int, beat: Heartbeat) -> None:
        """Record a heartbeat, and the time if it is a new one."""
        before = self._heartbeats.get(rank)
        if before is None or before.number != beat.number:
            self._heartbeats[rank] = beat
            self._changed[rank] = self._clock()
            if beat.position.state is RankState.COMPILING:
                self._compiled[rank] = self._clock()

    def _mark_read(self, rank: int) -> None:
        now = self._clock()
        if now - self._read_at.get(rank, float("-inf")) > self._gap:
            self._watched_since[rank] = now
            self._changed.pop(rank, None)
        self._read_at[rank] = now

    def beat(self, rank: int) -> Heartbeat | None:
        """The last heartbeat seen."""
        return self._heartbeats.get(rank)

    def state(self, rank: int) -> RankState | None:
        """The last known state of a rank; None without any heartbeat."""
        found = self._heartbeats.get(rank)
        return None if found is None else found.position.state

    def silent_for(self, rank: int) -> float:
        """Seconds since the last new heartbeat of a rank, or since this rank began to read them."""
        seen = self._changed.get(rank, self._watched_since.get(rank))
        return 0.0 if seen is None else self._clock() - seen

    def compiled_at(self, rank: int) -> float:
        """When a rank was last seen compiling, by the clock of this object; 0 if never."""
        return self._compiled.get(rank, 0.0)

    def status_text(self, rank: int) -> str:
        """The last known state of a rank as text, for messages."""
        beat = self._heartbeats.get(rank)
        if beat is None:
            return "has not called a compiled step yet, or died before it did"
        place = f"call {beat.position.call} of {beat.position.step}" if beat.position.step else "no step so far"
        doing = _DOING[beat.position.state].format(place=place)
        why = "" if beat.cause is None else f" ({beat.cause['text'].partition(chr(10))[0]})"
        return f"{doing}{why}; last heartbeat {self.silent_for(rank):.1f} s ago, process {beat.pid} on {beat.host}"


_DOING = {
    RankState.IDLE: "is outside of any step (last: {place})",
    RankState.COMPILING: "is compiling {place}",
    RankState.AGREEING: "is waiting for the other ranks before {place}",
    RankState.RUNNING: "is running {place}",
    RankState.ABORTED: "has aborted its process groups in {place}",
    RankState.LEFT: "has ended or destroyed its process group (last: {place})",
}


def next_heartbeat(
    beat: Heartbeat,
    position: Position,
    cause: dict[str, Any] | None = None,
    runs: tuple[int, int] = (0, 0),
    scalars: dict[str, tuple[int, int]] | None = None,
) -> Heartbeat:
    """The next heartbeat of a rank. `runs`: its `RunningHash.last`."""
    number, (calls, value) = beat.number + 1, runs
    return replace(
        beat, number=number, position=position, cause=cause, calls=calls, run_hash=value, scalars=scalars or {}
    )
