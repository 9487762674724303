"""docs/captured-and-refused.md says what is so: one small program for each row of each table."""

from __future__ import annotations

import importlib

import pytest

from docs.rows.page import PROGRAMS, programs_of, rows_of_page

for section in (
    "optimizers",
    "randomness_and_modes",
    "python",
    "numbers",
    "effects",
    "odd_places",
    "leftovers",
    "operators",
    "arguments",
    "ranks",
):
    importlib.import_module(f"docs.rows.{section}")

ROWS = rows_of_page()


@pytest.mark.parametrize("cell", ROWS, ids=lambda cell: cell[:60])
def test_a_row_says_what_happens(cell: str) -> None:
    keys = programs_of(cell)
    assert len(keys) == 1, f"one program for each row, not {keys}"
    PROGRAMS[keys[0]]()


def test_every_program_belongs_to_a_row() -> None:
    assert [key for key in PROGRAMS if not any(cell.startswith(key) for cell in ROWS)] == []
