"""The page on compile time runs, and prints what it shows."""

from __future__ import annotations

import pytest

from pages import run_page

pytestmark = pytest.mark.compiles


def test_every_block_of_the_page_runs() -> None:
    run_page("start-fast.md")
