"""The folder of prepared graphs (`ws.compile(cache=...)`): what lies in it, how much it holds, and how to empty it.

`folder` is what `cache=` takes; None is the folder that steps use where nothing else is said (WHOLESTEP_CACHE, or that
of the user).
"""

from __future__ import annotations

import os

from wholestep.artefact import disk_cache
from wholestep.artefact.disk_cache import CacheEntry as CacheEntry
from wholestep.artefact.disk_cache import CacheStats as CacheStats
from wholestep.artefact.disk_cache import DiskCache
from wholestep.options import cache_folder, cache_limit


def ls(folder: str | os.PathLike[str] | None = None) -> list[CacheEntry]:
    """All graphs, the most recently used first."""
    return disk_cache.entries(_cache(folder).folder)


def stats(folder: str | os.PathLike[str] | None = None) -> CacheStats:
    """How many graphs there are, of how many steps, and their bytes."""
    return disk_cache.stats(_cache(folder))


def clear(folder: str | os.PathLike[str] | None = None) -> int:
    """Delete all graphs; returns how many."""
    return disk_cache.clear(_cache(folder).folder)


def _cache(folder: str | os.PathLike[str] | None) -> DiskCache:
    found = cache_folder(folder) or cache_folder("auto")
    assert found is not None
    return DiskCache(found, cache_limit())
