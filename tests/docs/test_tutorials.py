"""The tutorials run: all Python of a page in order, and it prints what the page shows."""

from __future__ import annotations

import warnings

import pytest

from pages import as_torchrun_starts_it, assert_shown, blocks_of, run, run_page
from ranks import run_ranks


@pytest.mark.parametrize("page", ["tutorial.md", "cut-a-graph.md", "steps-that-depend-on-data.md"])
def test_every_block_of_a_tutorial_runs_and_prints_what_the_page_shows(page: str) -> None:
    run_page(page)


def test_the_parallel_tutorial_runs_on_two_ranks_and_prints_what_the_page_shows() -> None:
    def code(rank: int) -> None:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # the page says so
        with as_torchrun_starts_it():
            run_page("parallel.md", assert_shown if rank == 0 else lambda *_: None)

    run_ranks(code, 2, deadline=150)


def test_a_block_that_prints_something_else_than_shown_is_found() -> None:
    (block,) = blocks_of("```python\nprint(1)\nprint('a', 2)\n```\n\n```text\n1\n...3\n```\n")
    with pytest.raises(AssertionError, match="and the page shows"):
        assert_shown(block.shown or "", run(block, "page.md", {}), "page.md:2")


def test_dots_stand_for_anything() -> None:
    assert_shown("first ...\n...\nlast", "first line\nand\nmore\nlast\n", "page.md:1")
