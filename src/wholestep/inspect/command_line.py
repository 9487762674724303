"""The command line: `python -m wholestep explain WS-ITEM` prints the page of an error code.

A command is a parser that names the function to call (`set_defaults(run=...)`), which returns the exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from wholestep.errors import all_error_types

_PACKAGE = Path(__file__).parents[1]
_PAGE_FOLDERS = (_PACKAGE / "error_pages", _PACKAGE.parents[1] / "docs" / "errors")
"""Where the pages are: beside the code in an installed package (by pyproject.toml), in docs/ in a clone."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m wholestep", description="A training step as one FX graph.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    explain = commands.add_parser("explain", help="print the page of an error code")
    explain.add_argument("code", nargs="?", help="such as WS-ITEM; without it, all codes are listed")
    explain.set_defaults(run=lambda given: _explain(given.code))
    given = parser.parse_args(arguments)
    exit_code: int = given.run(given)
    return exit_code


def page_of(code: str) -> Path | None:
    """The page of an error code, or None if there is no such code."""
    found = (folder / f"{code}.md" for folder in _PAGE_FOLDERS)
    return next((page for page in found if page.is_file()), None) if code in _codes() else None


def _explain(code: str | None) -> int:
    if code is None:
        for each, title in _codes().items():
            print(f"{each:22}{title}")
        return 0
    wanted = code.strip("[]").upper()
    wanted = wanted if wanted.startswith("WS-") else f"WS-{wanted}"
    page = page_of(wanted)
    if page is not None:
        print(page.read_text(encoding="utf-8"), end="")
        return 0
    near = get_close_matches(wanted, _codes(), 1)
    hint = f"Did you mean {near[0]}?" if near else "`python -m wholestep explain` lists all codes."
    print(f"There is no error code {code}. {hint}", file=sys.stderr)
    return 2


def _codes() -> dict[str, str]:
    """Every error code and what it means, in one line."""
    types = (cls for cls in all_error_types() if cls.__module__ == "wholestep.errors")
    return {cls.code: (cls.__doc__ or "").splitlines()[0] for cls in types}
