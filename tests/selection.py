"""Which of many similar cases `make test` runs, and which only `make test-all` runs: those have the mark `long`.

    @pytest.mark.parametrize("cases", some_now(CASES, "lstm", "attention"))        two tests: the named, all others
    def test_networks_have_the_bits_of_ddp(cases: list[Case]) -> None:

    @pytest.mark.parametrize("name", each_now(NAMES, "slice", "power"))            a test for each
    def test_a_compiled_step_follows_an_int_that_changes(name: str) -> None:

The named ones stand for each mechanism once. A case is called by its `name` or `__name__`, or by its text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_now(cases: Iterable[Any], *names: str) -> list[Any]:
    """Values for `parametrize`: the list of the cases that are named, and that of all others, which is long."""
    now, later = _divided(cases, names)
    return [pytest.param(now, id="some"), pytest.param(later, id="others", marks=pytest.mark.long)]


def each_now(cases: Iterable[Any], *names: str) -> list[Any]:
    """Values for `parametrize`: each case; those that are not named are long."""
    now, later = _divided(cases, names)
    return [*now, *(pytest.param(case, marks=pytest.mark.long) for case in later)]


def _divided(cases: Iterable[Any], names: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    cases = list(cases)
    called = [str(getattr(case, "name", getattr(case, "__name__", case))) for case in cases]
    unknown = [name for name in names if name not in called]
    assert not unknown, f"there is no {unknown} among {called}"
    pairs = list(zip(cases, called, strict=True))
    return [case for case, name in pairs if name in names], [case for case, name in pairs if name not in names]
