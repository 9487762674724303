"""The Python of a page of the documentation, and how it runs: in one process, or on ranks as torchrun starts them."""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

DOCS = Path(__file__).parents[1] / "docs"

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
        exec(compile(source, file, "exec", dont_inherit=True), namespace)  # not our `from __future__`
    return printed.getvalue()


def assert_shown(expected: str, printed: str, where: str) -> None:
    """Equal texts; `...` in the expected one stands for anything, as in a doctest."""
    checker, example = doctest.OutputChecker(), doctest.Example("", expected.strip() + "\n")
    if not checker.check_output(example.want, printed.strip() + "\n", doctest.ELLIPSIS):
        raise AssertionError(f"{where} prints\n{printed}\nand the page shows\n{expected}")


def run_page(
    page: str,
    compare: Callable[[str, str, str], None] = assert_shown,
    given: Mapping[str, Any] | None = None,
) -> None:
    """All blocks in order, in one namespace; `compare` gets what the page shows, what was printed, and where.

    `given`: what the page speaks of and does not make, such as the model of a README.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    file = page.replace(".md", ".py")
    # The lines of the user's code in messages come from here.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": file.removesuffix(".py"), **(given or {})}
    blocks = list(blocks_of(text))
    assert len(blocks) == text.count("```python\n")
    for block in blocks:
        printed = run(block, file, namespace)
        if block.shown is not None or printed:
            compare(block.shown or "", printed, f"{page}:{block.line + 1}")


@contextlib.contextmanager
def as_torchrun_starts_it() -> Iterator[None]:
    """`init_process_group("gloo")` works as under torchrun; for a rank of `run_ranks`, whose group it is then."""
    original = dist.init_process_group

    def init(backend: str, **options: Any) -> None:
        if options:
            original(backend, **options)
        else:
            assert dist.get_backend() == backend

    with mock.patch.object(dist, "init_process_group", init):
        yield
