"""The page on checking a new step runs, and prints what it shows."""

from __future__ import annotations

from pages import run_page


def test_every_block_of_the_page_runs_and_prints_what_it_shows() -> None:
    run_page("check-a-new-step.md")
