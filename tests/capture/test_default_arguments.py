"""Default arguments of functions and methods that change between calls are used by the next call."""

from __future__ import annotations

from typing import Any

import pytest

from capture.followed import assert_follows


class Scale:
    def by(self, *, k: float = 1.5) -> float:
        return k

    def of(self, k: float = 1.5) -> float:
        return k

    @staticmethod
    def first(k: list[float] = [1.5]) -> float:  # noqa: B006
        return k[0]


def by_keyword(*, k: float = 1.5) -> float:
    return k


def in_place(function: Any, i: int) -> None:
    function.__kwdefaults__["k"] = 0.5 * i


def replaced(function: Any, i: int) -> None:
    function.__kwdefaults__ = {"k": 0.5 * i}


def element(function: Any, i: int) -> None:
    function.__defaults__[0][0] = 0.5 * i


def positional(function: Any, i: int) -> None:
    function.__defaults__ = (0.5 * i,)


CHANGES: dict[str, tuple[Any, Any, Any, int | None]] = {
    "keyword of a function": (by_keyword, lambda: by_keyword(), in_place, 2),
    "keywords of a function": (by_keyword, lambda: by_keyword(), replaced, None),
    "keyword of a method": (Scale.by, lambda: SCALE.by(), in_place, 2),
    "of a method": (Scale.of, lambda: SCALE.of(), positional, None),
    "list of a static method": (Scale.first, lambda: SCALE.first(), element, None),
}
SCALE = Scale()


@pytest.mark.parametrize("name", CHANGES)
def test_a_default_argument_that_changes_is_seen(name: str) -> None:
    function, read, change, graphs = CHANGES[name]

    def make() -> tuple[Any, ...]:
        function.__defaults__ = None if function.__defaults__ is None else ([1.5],) if "list" in name else (1.5,)
        function.__kwdefaults__ = None if function.__kwdefaults__ is None else {"k": 1.5}
        return read, lambda i: change(function, i)

    assert_follows(make, graphs, steps=4)
