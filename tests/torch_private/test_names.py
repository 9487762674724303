"""Every private name of torch that `torch_private/` uses exists on this torch, and no other file uses one.

What wholestep relies on in each of them: `test_contracts.py`.
"""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wholestep import torch_private

pytestmark = pytest.mark.compiles  # resolving some names imports Inductor

FOLDER = Path(torch_private.__file__).parent


def used_names(path: Path) -> Iterator[str]:
    """The dotted names of torch that a file imports or reads."""
    tree = ast.parse(path.read_text())
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "torch":
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            dotted = _dotted(node)
            if dotted is not None and dotted.startswith("torch."):
                yield dotted


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def private_names() -> list[str]:
    names = {name for path in FOLDER.glob("*.py") for name in used_names(path)}
    return sorted(name for name in names if any(part.startswith("_") for part in name.split(".")))


def resolve(name: str) -> Any:
    """What a dotted name leads to: modules are imported as far as there are any."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:i]))
        found = getattr(found, part)
    return found


def test_there_are_private_names() -> None:
    assert len(private_names()) > 60


def test_torch_has_the_names() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own imports warn
        assert [name for name in private_names() if not exists(name)] == []


def exists(name: str) -> bool:
    try:
        resolve(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    source = FOLDER.parent
    found = {
        f"{path.relative_to(source)}: {name}"
        for path in source.rglob("*.py")
        if path.parent != FOLDER
        for name in used_names(path)
        if any(part.startswith("_") and not part.startswith("__") for part in _without_operators(name))
    }
    assert not found


def _without_operators(name: str) -> list[str]:
    """`torch.ops.aten._foo.default` and `torch._foreach_add` are operators, which have names and no privacy."""
    parts = name.split(".")
    return [] if parts[1] == "ops" or parts[1].startswith(("_foreach_", "_fused_")) else parts[1:]
