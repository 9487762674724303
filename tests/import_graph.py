"""The import graph of wholestep's packages, computed from the sources, and its picture in docs/architecture.md.

python tests/import_graph.py          writes the picture into the page
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "wholestep"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- import graph: written by tests/import_graph.py -->\n", "<!-- end of the import graph -->"

BASE = ("torch_private", "errors", "ir", "options", "progress", "simulate")
"""What any package may import."""
LEAVES = ("command_line", "compat", "compilers", "debug", "inspect", "integrations")
"""Nothing is built on these."""


def files() -> Iterator[tuple[str, Path]]:
    """Each source file with its package; a file beside the packages is one by itself."""
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE)
        package = inside.parts[0] if len(inside.parts) > 1 else inside.stem
        if package not in ("__init__", "__main__"):
            yield package, path


@cache
def imported_packages(path: Path, *, at_import: bool = False) -> tuple[str, ...]:
    """The packages that a file imports something from; `at_import`: when it is imported itself."""
    return tuple(_imported_packages(path, at_import))


def _imported_packages(path: Path, at_import: bool) -> Iterator[str]:
    text = path.read_text()
    if "wholestep" not in text:
        return
    tree = ast.parse(text)
    for node in _executed(tree) if at_import else ast.walk(tree):
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


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: neither bodies of functions nor what is for type checkers."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if is_function or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            continue
        yield node
        yield from _executed(node)


def import_graph(*, at_import: bool = False) -> dict[str, set[str]]:
    """Package to the packages that it imports."""
    found: dict[str, set[str]] = {}
    for package, path in files():
        names = imported_packages(path, at_import=at_import)
        found.setdefault(package, set()).update(name for name in names if name != package)
    return found


def in_layers(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Packages by layer, the lowest first: each imports only what is in layers below it. Raises CycleError."""
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    layers: list[list[str]] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        layers.append(ready)
        sorter.done(*ready)
    return layers


def picture() -> str:
    """The graph as text: a line for each package, the highest layer first; imports of the base are left out."""
    graph = import_graph()
    lines = []
    for layer in reversed(in_layers(graph)):
        for package in layer:
            above = sorted(graph[package] - set(BASE)) if package not in BASE else sorted(graph[package])
            lines.append(f"{package:<16} -> {', '.join(above)}".removesuffix(" -> ").rstrip())
    base = [line for line in lines if line.split()[0] in BASE]
    others = [line for line in lines if line.split()[0] not in BASE]
    return "\n".join(["```", *others, "", *base, "```", ""])


def write(page: Path = PAGE) -> None:
    """Put the picture into the page."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    page.write_text(before + BEGIN + picture() + END + rest.partition(END)[2])


if __name__ == "__main__":
    write()
