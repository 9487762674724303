"""Contracts of private names of torch, and what of `torch_private/` they must cover, read from its sources.

    of = contracts_of("autograd")

    @of("below_autograd", "recording_again")          definitions of torch_private/autograd.py
    def nothing_is_recorded_below_autograd() -> None:
        ...                                            uses them as wholestep does, and asserts what it relies on

A definition is covered if its contracts run every statement with a private name in it and in the helpers below it.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, cache
from pathlib import Path
from types import FrameType
from typing import Any

from wholestep import torch_private

FOLDER = Path(torch_private.__file__).parent

Check = Callable[[], Any]
CONTRACTS: defaultdict[str, list[Check]] = defaultdict(list)
"""By the name of a definition, `autograd.below_autograd`."""

Line = tuple[str, int]
"""A file of `torch_private/` and a line of it."""


def contracts_of(module: str) -> Callable[..., Callable[[Check], Check]]:
    """The decorator for contracts of the definitions in one file."""

    def of(*names: str) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            for name in names:
                CONTRACTS[f"{module}.{name}"].append(check)
            return check

        return add

    return of


_ONCE = {"packed_operators"}
"""Functions that define operators, which a process can do once."""


def forget_results(modules: Iterable[str]) -> None:
    """Clear the caches of functions that other tests have called: their lines are to run."""
    for module in modules:
        for name, value in vars(importlib.import_module(f"wholestep.torch_private.{module}")).items():
            if name not in _ONCE and isinstance(value, _lru_cache_wrapper):
                value.cache_clear()


@cache
def lines_that_run(check: Check) -> frozenset[Line]:
    """Run a contract; the lines of `torch_private/` that ran. A contract on ranks returns those of its processes."""
    files = {str(path): path.stem for path in FOLDER.glob("*.py")}
    forget_results(files.values())
    ran: set[Line] = set()

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        ran.add((files[frame.f_code.co_filename], frame.f_lineno))
        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        return at_line(frame, event, _) if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        elsewhere = check()
    finally:
        sys.settrace(before)
    return frozenset(ran | (elsewhere or set()))


@dataclass
class Definition:
    """A function, class or constant at the top of a file."""

    file: str
    name: str
    private: list[tuple[str, range]] = field(default_factory=list)
    """Private names of torch in it, each with the lines of its statement."""
    uses: set[str] = field(default_factory=set)
    """The names that it reads."""
    runs: bool = True
    """Whether it is code that runs later (a function or a class), and no constant."""

    @property
    def key(self) -> str:
        return f"{self.file}.{self.name}"


@cache
def definitions() -> dict[str, Definition]:
    """All definitions of all files."""
    found: dict[str, Definition] = {}
    for path in sorted(FOLDER.glob("*.py")):
        for statement in ast.parse(path.read_text()).body:
            for name in _names_of(statement):
                made = found.setdefault(f"{path.stem}.{name}", Definition(path.stem, name))
                made.private += _private_names(statement)
                made.uses |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} - {name}
                made.runs = isinstance(statement, ast.FunctionDef | ast.ClassDef)
    return found


def with_helpers(key: str, *, that_run: bool = False) -> list[Definition]:
    """A definition and those below it, in any file. `that_run`: without what made a constant at import."""
    known, todo, seen = definitions(), [key], set[str]()
    while todo:
        each = todo.pop()
        if each not in seen and not (that_run and not known[each].runs):
            seen.add(each)
            todo += [other for other in known if known[other].name in known[each].uses]
    return [known[each] for each in sorted(seen)]


def that_need_contracts() -> dict[str, set[str]]:
    """Public definitions, with the private names of torch in them and in what is below them."""
    found = {}
    for key, each in definitions().items():
        names = {name for below in with_helpers(key) for name, _ in below.private}
        if names and not each.name.startswith("_"):
            found[key] = names
    return found


def _names_of(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
            return [alias.asname or alias.name for alias in names]
        case _:
            return []


def _private_names(statement: ast.stmt) -> list[tuple[str, range]]:
    """Each with the lines of its statement; none where these run when the file is imported."""
    found: list[tuple[str, range]] = []

    def visit(node: ast.AST, around: range) -> None:
        lines = around
        if isinstance(node, ast.stmt) and (lines or isinstance(node, ast.FunctionDef)):
            lines = range(node.lineno, (node.lineno if hasattr(node, "body") else node.end_lineno or node.lineno) + 1)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) if _is_private(name):
                found.append((name, lines))
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                found.extend(
                    (f"{module}.{alias.name}", lines)
                    for alias in names
                    if any(map(_is_private, [*module.split("."), alias.name]))
                )
            case _:
                pass
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        for child in ast.iter_child_nodes(node):
            visit(child, around if child in decorators else lines)

    visit(statement, range(0))
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_").isidentifier()


def never_run(key: str) -> Iterator[str]:
    """The private names in a definition, and in what is below it, whose statements no contract of it runs."""
    if not definitions()[key].runs:
        return  # a constant: what is below it ran when its file was imported
    ran = frozenset[Line]().union(*(lines_that_run(check) for check in CONTRACTS[key]))
    for each in with_helpers(key, that_run=True):
        for name, lines in each.private:
            if lines and not any((each.file, line) in ran for line in lines):
                yield f"{each.name}: {name}"
