"""Make a failing program small: drop statements and simplify expressions for as long as it fails in the same way."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator

from fuzz.outcome import Outcome

_BODIES = ("body", "orelse", "finalbody")
Edit = Callable[[], Callable[[], None]]
"""Changes the tree and returns what undoes it."""


def shrink(source: str, wanted: Outcome, run: Callable[[str], Outcome], seconds: float = 120.0) -> str:
    """The smallest program that was found within a time whose outcome is of the same kind."""
    ends = time.monotonic() + seconds
    tree = ast.parse(source)
    progress = True
    while progress and time.monotonic() < ends:
        progress = False
        for edits in (_statements, _unwrapped, _expressions):
            progress |= _try_all(tree, edits, wanted, run, ends)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _try_all(
    tree: ast.Module,
    edits: Callable[[ast.Module], Iterator[Edit]],
    wanted: Outcome,
    run: Callable[[str], Outcome],
    ends: float,
) -> bool:
    changed = False
    position = 0
    while time.monotonic() < ends:
        edit = next((each for index, each in enumerate(edits(tree)) if index == position), None)
        if edit is None:
            break
        before = ast.dump(tree)
        undo = edit()
        if ast.dump(tree) != before and _same(tree, wanted, run):
            changed = True  # the next candidate has moved to this position
        else:
            undo()
            position += 1
    return changed


def _same(tree: ast.Module, wanted: Outcome, run: Callable[[str], Outcome]) -> bool:
    try:
        source = ast.unparse(ast.fix_missing_locations(tree))
        compile(source, "program.py", "exec")
    except (SyntaxError, ValueError):
        return False
    return run(source).like(wanted)


def _statements(tree: ast.Module) -> Iterator[Edit]:
    """Drop runs of statements: all of a block, halves, quarters, single ones; later ones first."""
    blocks = [
        (node, name)
        for node in ast.walk(tree)
        for name in _BODIES
        if isinstance(getattr(node, name, None), list) and not isinstance(node, ast.Lambda)
    ]
    sizes = sorted({max(1, len(getattr(node, name)) >> shift) for node, name in blocks for shift in range(5)})
    for size in reversed(sizes):
        for node, name in blocks:
            body = getattr(node, name)
            if all(isinstance(each, ast.Pass) for each in body):
                continue
            for start in range(len(body) - size, -1, -size):
                yield lambda node=node, name=name, start=start, size=size: _drop(node, name, start, size)


def _drop(node: ast.AST, name: str, start: int, size: int) -> Callable[[], None]:
    body = getattr(node, name)
    rest = body[:start] + body[start + size :]
    if not rest and name == "body" and not isinstance(node, ast.Module):
        rest = [ast.Pass()]
    setattr(node, name, rest)
    return lambda: setattr(node, name, body)


def _unwrapped(tree: ast.Module) -> Iterator[Edit]:
    """Put the body of an `if`, `with`, `for` or `try` in its place."""
    for node in ast.walk(tree):
        for name in _BODIES:
            body = getattr(node, name, None)
            if isinstance(body, list):
                for index, each in enumerate(body):
                    if isinstance(each, ast.If | ast.With | ast.For | ast.Try | ast.While):
                        yield lambda node=node, name=name, index=index: _unwrap(node, name, index)


def _unwrap(node: ast.AST, name: str, index: int) -> Callable[[], None]:
    body = getattr(node, name)
    setattr(node, name, body[:index] + body[index].body + body[index + 1 :])
    return lambda: setattr(node, name, body)


def _expressions(tree: ast.Module) -> Iterator[Edit]:
    """Put a part of an expression in its place."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, ast.expr):
                for part in _parts(value):
                    yield lambda parent=parent, field=field, part=part: _replace(parent, field, part)
            elif isinstance(value, list):
                for index, each in enumerate(value):
                    if isinstance(each, ast.keyword):
                        yield lambda parent=parent, field=field, index=index: _remove(parent, field, index)
                    elif isinstance(each, ast.expr):
                        if isinstance(parent, ast.Tuple | ast.List | ast.ClassDef | ast.FunctionDef):
                            yield lambda parent=parent, field=field, index=index: _remove(parent, field, index)
                        for part in _parts(each):
                            yield lambda value=value, index=index, part=part: _set_item(value, index, part)


def _parts(value: ast.expr) -> list[ast.expr]:
    if isinstance(value, ast.BinOp):
        return [value.left, value.right]
    if isinstance(value, ast.IfExp):
        return [value.body, value.orelse]
    if isinstance(value, ast.UnaryOp):
        return [value.operand]
    if isinstance(value, ast.Call):
        receiver = [value.func.value] if isinstance(value.func, ast.Attribute) else []
        return [*receiver, *(arg for arg in value.args if not isinstance(arg, ast.Starred))]
    if isinstance(value, ast.Subscript):
        return [value.value]
    return []


def _replace(parent: ast.AST, field: str, part: ast.expr) -> Callable[[], None]:
    before = getattr(parent, field)
    setattr(parent, field, part)
    return lambda: setattr(parent, field, before)


def _remove(parent: ast.AST, field: str, index: int) -> Callable[[], None]:
    before = getattr(parent, field)
    setattr(parent, field, before[:index] + before[index + 1 :])
    return lambda: setattr(parent, field, before)


def _set_item(values: list[ast.expr], index: int, part: ast.expr) -> Callable[[], None]:
    before = values[index]
    values[index] = part

    def undo() -> None:
        values[index] = before

    return undo
