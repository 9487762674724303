"""The page on simulated steps runs, and prints what it says."""

from __future__ import annotations

import pytest

from pages import run_page


@pytest.mark.fake_group
def test_every_block_of_the_page_runs() -> None:
    run_page("where-does-my-communication-go.md")
