"""The pages on cutting a model run, and print what they show."""

from __future__ import annotations

import pytest

from pages import run_page


@pytest.mark.parametrize("page", ["pipelining.md", "tied-weights-and-skips.md"])
def test_every_block_of_the_page_runs(page: str) -> None:
    run_page(page)
