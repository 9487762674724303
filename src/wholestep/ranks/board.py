"""What ranks write for each other in the c10d store: small JSON values, and no operation that waits for a key.

TCPStore and FileStore let `get` wait until somebody writes the key. `compare_set` with an expected value that nobody
ever writes is the same read without the wait, in one round trip.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
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
