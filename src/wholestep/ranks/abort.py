"""Take this rank out of all its process groups, so that a thread that waits in a collective returns.

NCCL has an abort for that. Gloo has none (`ProcessGroup.abort` does nothing there, 2.11 to 2.13): a wait ends when the
connections do. So the connections are shut down below it; the wait then raises "Connection closed by peer", later
collectives raise the same at once, and the group can still be destroyed. Gloo's connections are those with an end at an
address where some rank listens for gloo; ranks write these addresses to the store when they make a group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from wholestep.torch_private.distributed import abort_nccl, group_names, is_gloo

if TYPE_CHECKING:
    from wholestep.torch_private.distributed import Store

log = logging.getLogger("wholestep")

Address = tuple[str, int]

_KEY = re.compile(r"(?:(?P<group>.+)//)?[a-z]+//\d+/\d+")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def gloo_addresses(store: Store) -> frozenset[Address]:
    """Where the ranks of this rank's gloo groups listen. Reads keys that are there; nothing is waited for."""
    names = {name for group, name in group_names().items() if is_gloo(group)}
    if not names:
        return frozenset()
    try:
        present = store.list_keys()
    except NotImplementedError:
        log.warning("%s cannot list its keys: gloo's waits end only with the backend's time-out", type(store).__name__)
        return frozenset()
    keys = [key for key in present if (match := _KEY.fullmatch(key)) and match["group"] in {None, *names}]
    found = (_listener(value) for value in (store.multi_get(keys) if keys else ()))
    return frozenset(address for address in found if address is not None)


def abort_groups(listeners: Iterable[Address]) -> None:
    """Abort every process group of this process."""
    abort_nccl()
    closed = _shut_down(frozenset(listeners))
    log.info("aborted %d process groups (%d connections)", len(group_names()), closed)


def _listener(value: bytes) -> Address | None:
    """The address in what gloo writes for a rank: length and host name, length and `sockaddr_storage`, ..."""
    try:
        (length,) = struct.unpack_from("=Q", value)
        start = 8 + length + 8
        (family,) = struct.unpack_from("=H", value, start)
        (port,) = struct.unpack_from(">H", value, start + 2)
        if family == socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, value[start + 4 : start + 8]), port
        if family == socket.AF_INET6:
            return socket.inet_ntop(socket.AF_INET6, value[start + 8 : start + 24]), port
    except (struct.error, ValueError, OverflowError):
        log.debug("not an address of gloo: %r", value[:64])
    return None


def _shut_down(listeners: frozenset[Address]) -> int:
    closed = 0
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), _duplicate(int(name)) as end:  # suppressed: closed since, or not connected
            if end is not None and listeners & {_address(end.getsockname()), _address(end.getpeername())}:
                end.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


@contextlib.contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        yield None
        return
    with socket.socket(fileno=os.dup(descriptor)) as end:
        yield end if end.family in _FAMILIES else None


def _address(name: tuple[object, ...]) -> Address:
    host, port = str(name[0]), name[1]
    assert isinstance(port, int)
    return host.removeprefix("::ffff:"), port
