"""The tutorials run: all Python of a page in order, in one process, and it prints what the page shows."""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = ["tutorial.md"]

_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A ```python block of a page, where it starts, and the ```text block right behind it."""

    code: str
    line: int
    shown: str | None


def blocks_of(text: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(text):
        yield Block(match["code"], text.count("\n", 0, match.start("code")), match["shown"])


def run(block: Block, file: str, namespace: dict[str, Any]) -> str:
    """Execute one block as lines of a file that are numbered as in the page; what it printed."""
    source = "\n" * block.line + block.code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, file, "exec"), namespace)
    return printed.getvalue()


def assert_shown(expected: str, printed: str, where: str) -> None:
    """Equal texts; `...` in the expected one stands for anything, as in a doctest."""
    checker, example = doctest.OutputChecker(), doctest.Example("", expected.strip() + "\n")
    if not checker.check_output(example.want, printed.strip() + "\n", doctest.ELLIPSIS):
        raise AssertionError(f"{where} prints\n{printed}\nand the page shows\n{expected}")


@pytest.mark.parametrize("page", TUTORIALS)
def test_every_block_of_a_tutorial_runs_and_prints_what_the_page_shows(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    file = page.replace(".md", ".py")
    # The lines of the user's code in messages come from here.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    blocks = list(blocks_of(text))
    assert len(blocks) == text.count("```python\n")
    for block in blocks:
        printed = run(block, file, namespace)
        if block.shown is not None or printed:
            assert_shown(block.shown or "", printed, f"{page}:{block.line + 1}")


def test_a_block_that_prints_something_else_than_shown_is_found() -> None:
    (block,) = blocks_of("```python\nprint(1)\nprint('a', 2)\n```\n\n```text\n1\n...3\n```\n")
    with pytest.raises(AssertionError, match="and the page shows"):
        assert_shown(block.shown or "", run(block, "page.md", {}), "page.md:2")


def test_dots_stand_for_anything() -> None:
    assert_shown("first ...\n...\nlast", "first line\nand\nmore\nlast\n", "page.md:1")
