"""The page on comparing graphs runs, and prints what it says."""

from __future__ import annotations

from pages import run_page


def test_every_block_of_the_page_runs() -> None:
    run_page("compare-two-graphs.md")
