"""The page on cutting a graph runs, and prints what it shows."""

from __future__ import annotations

from pages import run_page


def test_every_block_of_the_page_runs() -> None:
    run_page("cut-a-graph.md")
