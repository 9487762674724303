"""A folder of saved graphs, each under a key of all that decided it: a second process binds one instead of tracing.

    <folder>/ab/abcd..0123-<hash of the contents>.ws       one graph in the format of `file_format.py`

The key has the code that the step reaches, the form of its arguments, options and versions. What a key does not have
(values that the step read, shapes of state, hooks, modes) is compared when a graph is bound (`SavedGraph.bind`): one
that does not fit is a miss. Entries are written whole or not at all, so that processes need no lock; the least recently
used are deleted where the folder is larger than its limit. A file that cannot be read is a miss.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wholestep.artefact.code_table import digest
from wholestep.artefact.file_format import SavedStep, read_saved, write_file, write_saved
from wholestep.artefact.saved_graph import SavedGraph
from wholestep.errors import ArtefactError

log = logging.getLogger("wholestep.cache")

_SUFFIX = ".ws"
_MOST_OF_ONE_KEY = 64
"""Graphs of one step that are tried: each guard key of a process is one."""


@dataclass(frozen=True)
class CacheEntry:
    """One graph in a folder."""

    path: Path
    bytes: int
    used: float
    """When it was last used, in seconds since 1970."""

    @property
    def key(self) -> str:
        """The key that it lies under."""
        return self.path.name.partition("-")[0]


@dataclass(frozen=True)
class CacheStats:
    """What a folder holds."""

    folder: Path
    entries: int
    bytes: int
    limit: int
    steps: int
    """Keys: one for each step, options and form of arguments."""


@dataclass(frozen=True)
class DiskCache:
    """A folder, and how many bytes it may hold."""

    folder: Path
    limit: int

    def find(self, key: str) -> Iterator[SavedGraph]:
        """The graphs under a key, the most recently used first; damaged ones are deleted."""
        found = sorted(_entries(self.folder / key[:2], key), key=lambda entry: -entry.used)
        for entry in found[:_MOST_OF_ONE_KEY]:
            try:
                saved = read_saved(entry.path.read_bytes(), entry.path.name)
            except OSError as error:
                log.info("cache: %s cannot be read: %s", entry.path.name, error)
                continue
            except ArtefactError as error:
                log.warning("cache: %s is deleted: %s", entry.path.name, error.what)
                _delete(entry.path)
                continue
            yield from saved.graphs
            _touch(entry.path)  # the caller used it or continues with the next

    def store(self, key: str, name: str, graph: SavedGraph) -> None:
        """Write a graph, and delete the least recently used ones above the limit."""
        try:
            contents = write_saved(SavedStep(name, {}, [graph]))
            folder = self.folder / key[:2]
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{key}-{digest(graph.graph, repr(graph.facts.snapshot))}{_SUFFIX}"
            if not path.exists():
                write_file(path, contents)
            self._shrink(path)
        except (OSError, ArtefactError) as error:
            log.warning("cache: %s is not stored: %s", name, error)

    def _shrink(self, kept: Path) -> None:
        found = sorted(_entries(self.folder), key=lambda entry: entry.used)
        total = sum(entry.bytes for entry in found)
        for entry in found:
            if total <= self.limit:
                return
            if entry.path != kept or entry.bytes > self.limit:
                total -= entry.bytes
                _delete(entry.path)


def entries(folder: Path) -> list[CacheEntry]:
    """All graphs in a folder, the most recently used first."""
    return sorted(_entries(folder), key=lambda entry: -entry.used)


def clear(folder: Path) -> int:
    """Delete all graphs of a folder; returns how many."""
    return sum(_delete(entry.path) for entry in _entries(folder))


def stats(cache: DiskCache) -> CacheStats:
    """How much a folder holds."""
    found = entries(cache.folder)
    keys = {entry.key for entry in found}
    return CacheStats(cache.folder, len(found), sum(entry.bytes for entry in found), cache.limit, len(keys))


def _entries(folder: Path, key: str = "") -> Iterator[CacheEntry]:
    for path in folder.rglob(f"{key}*{_SUFFIX}"):
        try:
            found = path.stat()
        except OSError:  # another process deleted it
            continue
        yield CacheEntry(path, found.st_size, found.st_mtime)


def _touch(path: Path) -> None:
    try:
        os.utime(path, (now := time.time(), now))
    except OSError as error:
        log.debug("cache: the time of %s is not set: %s", path.name, error)


def _delete(path: Path) -> bool:
    try:
        path.unlink()
    except OSError as error:
        log.info("cache: %s is not deleted: %s", path, error)
        return False
    return True
