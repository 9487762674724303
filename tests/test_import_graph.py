"""Which package imports which: data flows one way, and only `step` knows the whole way of a step through the code.

Every import counts, also those inside of functions and for types only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import wholestep

SOURCE = Path(wholestep.__file__).parent
BASE = {"ir", "simulate", "errors", "environment", "options", "torch_private"}
"""What any package may import."""

WITHIN_BASE = {
    "ir": {"errors", "torch_private"},
    "simulate": {"errors", "ir", "torch_private"},
    "errors": set(),
    "environment": {"errors"},
    "torch_private": {"errors"},
}
"""What packages of the base may import of it: nothing that is built on them."""

IMPORTS: dict[str, set[str]] = {
    "options": {"lower", "parallel", "passes", "remat"},  # they read what the user wrote for them
    "remat": set(),
    "parallel": set(),
    "capture": {"parallel"},  # it traces under a plan
    "passes": set(),
    "partition": set(),
    "lower": {"remat"},
    "runtime": {"remat"},
    "guards": {"runtime"},
    "cross_iteration": {"runtime"},
    "ranks": set(),
    "pipelining": {"parallel", "partition", "ranks"},
    "api": {"cross_iteration", "debug", "lower", "remat", "step"},
    "step": {
        "capture",
        "compilers",
        "cross_iteration",
        "debug",
        "guards",
        "lower",
        "passes",
        "ranks",
        "remat",
        "runtime",
    },
    "inspect": set(),
    "compilers": {"inspect", "remat"},
    "compat": {"api", "compilers", "lower", "parallel", "partition", "passes", "pipelining", "step"},
    "debug": {"capture", "compilers", "cross_iteration", "lower", "passes", "remat", "step"},
}
"""Package to the packages that it imports beside the base. An import that is gone goes from here, too."""

LEAVES = {"inspect", "compilers", "debug", "integrations", "compat"}
"""Nothing imports these but each other; `step` reaches for them inside of functions only."""

KNOWN_CYCLES = {("step", "debug"), ("api", "debug")}
"""A check is a mode of a compiled step."""


def files() -> Iterator[tuple[str, Path]]:
    """Each source file with its package."""
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE)
        package = inside.parts[0] if len(inside.parts) > 1 else inside.stem
        if package not in ("__init__", "__main__"):
            yield package, path


def imported_packages(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """The packages that a file imports something from; `at_import`: when it is imported itself."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_import else ast.walk(tree):
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


def import_graph() -> dict[str, set[str]]:
    """Package to the packages that it imports."""
    found: dict[str, set[str]] = {}
    for package, path in files():
        found.setdefault(package, set()).update(name for name in imported_packages(path) if name != package)
    return found


@pytest.mark.parametrize("package", IMPORTS)
def test_a_package_imports_the_base_and_what_the_table_says(package: str) -> None:
    assert import_graph()[package] - BASE == IMPORTS[package]


@pytest.mark.parametrize("package", WITHIN_BASE)
def test_the_base_imports_nothing_that_is_built_on_it(package: str) -> None:
    assert import_graph()[package] <= WITHIN_BASE[package]


def test_every_package_is_in_a_table() -> None:
    assert set(import_graph()) == set(IMPORTS) | set(WITHIN_BASE)


def test_no_cycle_between_packages_but_the_known_ones() -> None:
    graph = import_graph()
    for one, other in KNOWN_CYCLES:
        graph[one].discard(other)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"packages import each other: {' -> '.join(error.args[1])}")


def test_nothing_loads_a_leaf_package_when_it_is_imported() -> None:
    loads = {
        package: leaves
        for package, path in files()
        if package not in LEAVES and (leaves := LEAVES & set(imported_packages(path, at_import=True)))
    }
    assert not loads
