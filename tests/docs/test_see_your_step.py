"""The page on pages of a step runs, and the pages that it writes hold what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import run_page


def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("see-your-step.md")
    written = {page.stem for page in tmp_path.glob("*.html")}
    assert written == {"step", "on-a-gpu", "measured", "ranks", "pipeline"}
