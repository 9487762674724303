"""`import wholestep` is light, its names come with first use, and each stays the object that it is."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wholestep as ws

PACKAGE = Path(ws.__file__).parent
INTERNAL = {"artefact", "capture", "command_line", "cross_iteration", "guards", "ranks"}
INTERNAL |= {"remat", "runtime", "torch_private"}
"""Packages that are not public. (`ws.capture` is a function.)"""
LEAVES = {
    "command_line",
    "compat",
    "compilers",
    "debug",
    "inspect",
    "integrations",
    "partition",
    "pipelining",
    "simulate",
}


def answer_of(program: str) -> Any:
    """What a program prints as JSON in a process of its own."""
    return json.loads(lines_of(program)[-1])


def lines_of(program: str) -> list[str]:
    """What a program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n{program}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.splitlines()


def test_importing_wholestep_loads_no_other_module_of_it_and_nothing_of_torch() -> None:
    loaded = answer_of("import wholestep, json; print(json.dumps(sorted(sys.modules)))")
    assert [name for name in loaded if name.partition(".")[0] == "wholestep"] == ["wholestep"]
    assert not [name for name in loaded if name.partition(".")[0] in ("torch", "numpy", "scipy", "sympy")]


def test_importing_wholestep_after_torch_loads_no_compiler_no_leaf_package_and_no_framework() -> None:
    modules = sorted(path.stem for path in (PACKAGE / "integrations").glob("*.py") if path.stem != "__init__")
    loaded, with_integrations = answer_of(
        "import torch, json; before = set(sys.modules); import wholestep; after = set(sys.modules)\n"
        f"for name in {modules}: __import__('wholestep.integrations.' + name)\n"
        "print(json.dumps([sorted(after - before), sorted(sys.modules)]))"
    )
    assert not {name.partition(".")[0] for name in with_integrations} & {"accelerate", "lightning", "transformers"}
    heavy = ("torch._inductor", "torch._dynamo", "torch._functorch", *(f"wholestep.{leaf}" for leaf in LEAVES))
    assert not [name for name in loaded if name.startswith(heavy)]


def test_every_public_name_is_the_same_object_after_every_submodule_was_imported() -> None:
    program = """
import importlib, json, os, pkgutil, sys
import torch, torch._inductor.compile_fx, torch.distributed.pipelining  # once for both
first = os.fork() == 0  # the parent imports no submodule of ours until its child has ended
if not first:
    os.wait()
import wholestep as ws
if first:
    before = {name: getattr(ws, name) for name in ws.__all__}
for found in pkgutil.walk_packages(ws.__path__, "wholestep."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
after = {name: getattr(ws, name) for name in ws.__all__}
if first:
    assert all(before[name] is after[name] for name in before)
inner = {}
for name in ws._MODULES:
    module = getattr(ws, name)
    for each in getattr(module, "__all__", ()):
        inner[f"{name}.{each}"] = type(getattr(module, each)).__name__
kinds = {name: type(value).__name__ for name, value in after.items()}
print(json.dumps([kinds, inner, "wholestep.capture" in sys.modules]))
"""
    first, second = map(json.loads, lines_of(program)[-2:])
    assert first == second
    kinds, inner, imported = first
    assert imported
    assert {name for name, kind in kinds.items() if kind == "module"} == set(ws._MODULES)
    assert kinds["capture"] == kinds["check"] == kinds["compile"] == "function"
    assert [name for name, kind in inner.items() if kind == "module"] == ["simulate.pipeline"]


def test_the_package_beside_a_function_of_its_name_is_found_by_import_statements() -> None:
    from wholestep.capture import trace  # `wholestep.capture` is a package here ...

    assert trace.__name__ == "wholestep.capture.trace"
    assert callable(ws.capture)  # ... and a function here


def test_dir_shows_every_public_name_before_any_is_loaded() -> None:
    shown = answer_of("import wholestep, json; print(json.dumps([dir(wholestep), wholestep.__all__]))")
    assert set(shown[1]) <= set(shown[0])
    assert "__version__" in shown[0]


def test_type_checkers_see_the_names_that_are_loaded_at_first_use() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        for alias in node.names:
            assert alias.name == alias.asname
            seen[alias.name] = node.module.removeprefix("wholestep").removeprefix(".")
    assert {name for name, module in seen.items() if not module} == set(ws._MODULES)
    assert {name: module for name, module in seen.items() if module} == ws._NAMES
    assert sorted([*ws._MODULES, *ws._NAMES]) == ws.__all__


def test_every_package_is_public_or_internal() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages - INTERNAL == packages & set(ws._MODULES)


def test_a_name_that_does_not_exist_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'compille'"):
        ws.compille  # noqa: B018


def test_a_misspelt_name_gets_the_one_that_was_meant() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'compil'\. Did you mean: 'compile'"):
        _ = ws.compil


def test_a_public_name_can_be_replaced_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ws.capture
    monkeypatch.setattr(ws, "capture", len)
    assert ws.capture is len  # type: ignore[comparison-overlap]
    monkeypatch.undo()
    assert ws.capture is original
