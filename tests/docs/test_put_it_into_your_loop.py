"""The pages on loops and frameworks run, each in an empty folder, and print what they show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pages import run_page
from selection import each_now

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(pin_memory|num_workers|LeafSpec|max_steps).*"),
    pytest.mark.filterwarnings("ignore:.*`loss_type=None` was set in the config.*"),
]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainers write into an empty folder, and Accelerate, which keeps its state in classes, starts afresh."""
    monkeypatch.chdir(tmp_path)
    forget_accelerate()
    yield
    forget_accelerate()


def forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_put_it_into_your_loop() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    run_page("put-it-into-your-loop.md")


PAGES = ("accelerate.md", "transformers-trainer.md", "lightning.md")


@pytest.mark.parametrize("page", each_now(PAGES, "accelerate.md"))  # the page above trains in the other two as well
def test_pages_of_frameworks(page: str) -> None:
    pytest.importorskip(page.removesuffix(".md").split("-")[0])
    run_page(page)
