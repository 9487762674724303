"""The page on work across iterations runs on two ranks, and prints what it shows."""

from __future__ import annotations

from pages import as_torchrun_starts_it, assert_shown, run_page
from ranks import run_ranks


def test_every_block_of_the_page_runs_on_two_ranks() -> None:
    def code(rank: int) -> None:
        with as_torchrun_starts_it():
            run_page("across-iterations.md", assert_shown if rank == 0 else lambda *_: None)

    run_ranks(code, 2, deadline=100)
