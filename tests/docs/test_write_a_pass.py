"""The page on writing a pass runs on two ranks, and prints what it shows; its pass has the 50 lines of the title."""

from __future__ import annotations

from pages import DOCS, as_torchrun_starts_it, assert_shown, blocks_of, run_page
from ranks import run_ranks

PAGE = "write-a-pass.md"


def test_every_block_of_the_page_runs_on_two_ranks() -> None:
    def code(rank: int) -> None:
        with as_torchrun_starts_it():
            run_page(PAGE, assert_shown if rank == 0 else lambda *_: None)

    run_ranks(code, 2, deadline=100)


def test_the_pass_has_at_most_50_lines() -> None:
    blocks = [block.code for block in blocks_of((DOCS / PAGE).read_text(encoding="utf-8"))]
    plan, rewrite = (next(code for code in blocks if f"def {name}" in code) for name in ("plan_narrow", "narrow("))
    lines = [line for line in f"{plan}{rewrite}".splitlines() if line.strip()]
    assert len(lines) <= 50
