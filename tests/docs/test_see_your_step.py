"""The page on pages of a step runs, and the pages that it writes hold what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import run_page


def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("see-your-step.md")
    assert {page.name for page in tmp_path.glob("*.html")} == {"step.html", "on-a-gpu.html", "measured.html"}
