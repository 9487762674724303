"""The page on the command line runs, and prints what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import run_page


def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("command-line.md")
    assert (tmp_path / "step.json").exists()
