"""The page on memory budgets runs."""

from __future__ import annotations

from pages import run_page


def test_every_block_of_the_page_runs() -> None:
    run_page("bigger-model-same-memory.md")
