"""Folders of searches that were given none go away with the test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short path: sockets that processes talk through are made there too."""
    folder = tempfile.mkdtemp(prefix="ws")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)
