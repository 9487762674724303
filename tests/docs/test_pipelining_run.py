"""The page on running a pipeline runs on two ranks, and its last rank prints what it shows."""

from __future__ import annotations

from pages import as_torchrun_starts_it, assert_shown, run_page
from ranks import run_ranks


def test_every_block_of_the_page_runs_on_two_ranks() -> None:
    def code(rank: int) -> None:
        with as_torchrun_starts_it():
            run_page("pipelining-run.md", assert_shown if rank == 1 else lambda *_: None)

    run_ranks(code, 2, deadline=90)
