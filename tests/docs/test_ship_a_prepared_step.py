"""The page on saved steps runs, and prints what it shows."""

from __future__ import annotations

from pages import run_page


def test_every_block_of_the_page_on_saved_steps_runs() -> None:
    run_page("ship-a-prepared-step.md")
