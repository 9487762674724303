"""The pages on schedules run, and print and show what they say."""

from __future__ import annotations

import pytest

from pages import DOCS, run_page
from wholestep.simulate import pipeline


@pytest.mark.parametrize("page", ["read-a-schedule.md", "choose-a-schedule.md"])
def test_every_block_of_the_page_runs(page: str) -> None:
    run_page(page)


def test_the_picture_is_what_is_drawn_now() -> None:
    times = pipeline.Times(F=1, B=2)
    plain = pipeline.simulate("1F1B", times, ranks=4, microbatches=6)
    halves = pipeline.simulate("InterleavedZeroBubble", times, ranks=4, microbatches=6, stages_per_rank=1)
    titles = ("1F1B", "InterleavedZeroBubble with one stage per rank (ZB-H1)")
    drawn = pipeline.svg(plain, halves, titles=titles, width=1000)
    assert (DOCS / "pictures" / "schedules.svg").read_text(encoding="utf-8") == drawn
