"""Which package imports which: data flows one way, and only `step` knows the whole way of a step through the code.

Every import counts, also those inside of functions and for types only.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError
from pathlib import Path

import pytest

from import_graph import BASE, BEGIN, END, LEAVES, PAGE, files, import_graph, imported_packages, in_layers, picture

WITHIN_BASE: dict[str, set[str]] = {
    "ir": {"errors", "torch_private"},
    "simulate": {"errors", "ir", "torch_private"},
    "options": {"errors", "ir"},
    "errors": set(),
    "progress": set(),
    "torch_private": set(),
}
"""What packages of the base may import of it: nothing that is built on them."""

IMPORTS: dict[str, set[str]] = {
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
    "refused_steps": set(),
    "pipelining": {"parallel", "partition", "ranks"},
    "artefact": {"capture"},
    "step": {
        "artefact",
        "capture",
        "compilers",
        "cross_iteration",
        "guards",
        "lower",
        "parallel",
        "passes",
        "remat",
        "runtime",
    },
    "shown_step": {"capture", "cross_iteration", "inspect", "lower", "runtime", "step"},
    "cache": {"artefact"},
    "stored_graphs": {"artefact", "step"},
    "warmup": {"capture", "cross_iteration", "refused_steps", "step"},
    "compiled_step": {
        "artefact",
        "capture",
        "cross_iteration",
        "lower",
        "parallel",
        "ranks",
        "refused_steps",
        "shown_step",
        "step",
        "stored_graphs",
        "warmup",
    },
    "loaded_step": {"artefact", "compiled_step", "step"},
    "api": {"compiled_step", "cross_iteration", "debug", "loaded_step", "lower", "parallel", "passes", "remat", "step"},
    "inspect": {"passes"},  # what each pass did
    "compilers": {"inspect", "remat"},
    "debug": {
        "capture",
        "compiled_step",
        "compilers",
        "cross_iteration",
        "lower",
        "passes",
        "refused_steps",
        "remat",
        "step",
    },
    "integrations": {"api", "compiled_step"},
    "command_line": {"cache", "compiled_step", "inspect"},
    "compat": {"api", "compiled_step", "compilers", "lower", "parallel", "partition", "passes", "pipelining"},
}
"""Package to the packages that it imports beside the base. An import that is gone goes from here, too."""

REACHED = {
    "step": {"compilers"},  # lower="debug"
    "api": {"debug"},  # ws.check, check_first=
    "shown_step": {"inspect"},  # step.report, step.memory_timeline
}
"""The leaf packages that others reach for, inside of functions: they come with first use."""


@pytest.mark.parametrize("package", IMPORTS)
def test_a_package_imports_the_base_and_what_the_table_says(package: str) -> None:
    assert import_graph()[package] - set(BASE) == IMPORTS[package]


@pytest.mark.parametrize("package", WITHIN_BASE)
def test_a_package_of_the_base_imports_what_the_table_says(package: str) -> None:
    assert import_graph()[package] == WITHIN_BASE[package]


def test_every_package_is_in_a_table() -> None:
    assert set(import_graph()) == set(IMPORTS) | set(WITHIN_BASE)
    assert set(WITHIN_BASE) == set(BASE)


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    try:
        layers = in_layers(import_graph())
    except CycleError as error:
        pytest.fail(f"packages import each other: {' -> '.join(error.args[1])}")
    assert layers[-1] == ["compat", "integrations"]


def test_only_step_and_api_reach_for_leaf_packages_and_only_inside_of_functions() -> None:
    reached = {package: names & set(LEAVES) for package, names in import_graph().items() if package not in LEAVES}
    assert {package: leaves for package, leaves in reached.items() if leaves} == REACHED
    loaded = {
        str(path): leaves
        for package, path in files()
        if package not in LEAVES
        and set(LEAVES) & set(imported_packages(path))
        and (leaves := set(LEAVES) & set(imported_packages(path, at_import=True)))
    }
    assert not loaded


def test_imports_below_if_and_try_count_as_made_at_import(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import wholestep.ir\n"
        "try:\n    import wholestep.debug\nexcept ImportError:\n    pass\n"
        "def use():\n    from wholestep import compat\n"
    )
    assert set(imported_packages(file, at_import=True)) == {"debug"}
    assert set(imported_packages(file)) == {"ir", "debug", "compat"}


def test_no_file_has_two_blocks_of_imports_for_types_or_an_empty_one() -> None:
    blocks = {}
    for _, path in files():
        text = path.read_text()
        found = [
            node
            for node in (ast.parse(text).body if "TYPE_CHECKING" in text else ())
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        if len(found) > 1 or any(isinstance(node, ast.Pass) for block in found for node in block.body):
            blocks[str(path)] = len(found)
    assert not blocks


def test_the_page_on_architecture_shows_the_graph_as_it_is() -> None:
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == picture(), "python tests/import_graph.py writes it anew"


def test_building_a_step_that_runs_operator_by_operator_loads_no_leaf_package() -> None:
    code = (
        "import sys, torch, wholestep as ws\n"
        "step = ws.compile(lambda x: (x * 2).sum(), lower='eager')\n"
        "step(torch.ones(3))\n"
        f"print([n for n in sys.modules if n.startswith({tuple(f'wholestep.{leaf}' for leaf in LEAVES)!r})])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
