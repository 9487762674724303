"""Which room imports which: data flows one way, and only `step` knows the whole way of a step through the code.

Every import counts, also those inside of functions and for types only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import wholestep

SOURCE = Path(wholestep.__file__).parent
BASE = {"ir", "simulate", "errors", "environment", "options"}
"""Rooms that any room may import. (Files for torch's private names may be imported by all, too.)"""

ARROWS: dict[str, set[str]] = {
    "ir": set(),
    "simulate": set(),
    "errors": set(),
    "environment": set(),
    "options": {"lower", "parallel", "passes", "remat"},  # they read what the user wrote for them
    "remat": set(),
    "parallel": {"capture"},  # it records the collectives of its placements while capture traces
    "capture": {"parallel"},  # it traces under a plan
    "passes": set(),
    "partition": set(),
    "inspect": set(),
    "compilers": {"inspect", "remat"},
    "lower": {"remat"},
    "guards": {"capture", "runtime"},
    "runtime": {"capture", "cross_iteration", "guards", "lower", "remat"},  # it runs what these made
    "cross_iteration": {"lower", "runtime"},
    "ranks": {"capture", "runtime"},
    "pipelining": {"parallel", "partition", "ranks"},
    "debug": {"capture", "compilers", "cross_iteration", "lower", "passes", "remat", "runtime"},
    "step": {"capture", "compilers", "cross_iteration", "debug", "lower", "passes", "ranks", "remat", "runtime"},
}
"""Room to the rooms that it imports beside the base. An arrow that is gone goes from here, too."""

UNDER_THE_BASE = {"ir": {"errors"}, "simulate": {"errors", "ir"}, "errors": set(), "environment": {"errors"}}
"""What the rooms of the base may import of it: nothing that is built on them."""


def rooms() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE)
        yield (inside.parts[0] if len(inside.parts) > 1 else inside.stem), path


def imported_rooms(path: Path) -> Iterator[str]:
    """The rooms that a file imports something from."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: a relative import"
            whole = node.module == "wholestep"
            names = [f"wholestep.{name.name}" for name in node.names] if whole else [node.module]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "wholestep" and len(parts) > 1:
                yield parts[1]


def found_arrows() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for room, path in rooms():
        others = found.setdefault(room, set())
        others.update(name for name in imported_rooms(path) if name not in (room, "torch_private"))
    return {room: others for room, others in found.items() if room != "__init__"}


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_the_base_and_what_the_table_says(room: str) -> None:
    assert found_arrows()[room] - BASE == ARROWS[room]


@pytest.mark.parametrize("room", UNDER_THE_BASE)
def test_the_base_imports_nothing_that_is_built_on_it(room: str) -> None:
    assert found_arrows()[room] <= UNDER_THE_BASE[room]


def test_every_room_is_in_the_table() -> None:
    assert set(found_arrows()) - {"torch_private"} == set(ARROWS)


def test_what_wraps_torch_imports_no_room() -> None:
    assert found_arrows()["torch_private"] <= {"errors"}
