"""Read files that may come from anybody: no links out of the folder, no devices, no more bytes than allowed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from wholestep.errors import DumpError

MOST_JSON = 1 << 28


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The contents of a regular file in its own folder, if it is not larger than allowed."""
    if path.is_symlink():
        raise DumpError(f"{path.name} is a link, which a dump does not have.")
    try:
        # Not blocking: a pipe in the place of a file would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DumpError(f"{path.name} is not a file.")
    with os.fdopen(handle, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise DumpError(f"{path.name} is larger than {max_bytes} bytes.", fix="pass max_bytes= if you trust the file.")
    return data


def read_json(path: Path, format_name: str, version: int) -> dict[str, Any]:
    """The document of a file of ours, of this format and version."""
    try:
        document = json.loads(read_bytes(path, MOST_JSON), parse_constant=_refuse, parse_float=_refuse)
    except DumpError:
        raise
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path.name} is not JSON of ours: {str(error)[:200]}.") from error
    if not isinstance(document, dict) or document.get("format") != format_name:
        raise DumpError(f"{path.name} is no {format_name}: the key 'format' says so in files of ours.")
    if type(document.get("version")) is not int or document["version"] != version:
        raise DumpError(
            f"{path.name} has version {str(document.get('version'))[:20]}, this wholestep reads {version}.",
            fix="read it with the wholestep that wrote it, or write it again.",
        )
    return document


def write_whole(path: Path, text: str) -> None:
    """Write a file that a reader sees whole or not at all."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _refuse(text: str) -> float:
    raise ValueError(f"a bare number {text[:40]!r}; floats are written in hexadecimal")
