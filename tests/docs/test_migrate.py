"""The pages on moving over from other libraries run, and print what they show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from pages import run_page

pytestmark = pytest.mark.fake_group


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


@pytest.mark.parametrize("page", ["functorch", "fx", "pipelining", "spmd"])
def test_every_block_of_a_migration_page_runs(page: str) -> None:
    run_page(f"migrate/{page}.md")
