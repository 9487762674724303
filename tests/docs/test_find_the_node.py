"""The page on finding faults runs, and prints what it shows."""

from __future__ import annotations

from pages import run_page


def test_every_block_of_the_page_runs_and_prints_what_it_shows() -> None:
    run_page("find-the-node-that-is-wrong.md")
