"""The pages on lowering run, and print what they show."""

from __future__ import annotations

import pytest

from pages import run_page

pytestmark = pytest.mark.compiles


def test_every_block_of_the_page_on_regions_runs() -> None:
    run_page("what-was-lowered.md")


def test_every_block_of_the_page_on_cuda_graphs_runs() -> None:
    run_page("cuda-graph.md")
