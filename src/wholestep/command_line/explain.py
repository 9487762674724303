"""`wholestep explain WS-ITEM`: the page of an error code."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from wholestep.command_line.screen import say_json
from wholestep.errors import all_error_types

_PACKAGE = Path(__file__).parents[1]
_PAGE_FOLDERS = (_PACKAGE / "error_pages", _PACKAGE.parents[1] / "docs" / "errors")
"""Where the pages are: beside the code in an installed package (by pyproject.toml), in docs/ in a clone."""


def page_of(code: str) -> Path | None:
    """The page of an error code, or None if there is no such code."""
    found = (folder / f"{code}.md" for folder in _PAGE_FOLDERS)
    return next((page for page in found if page.is_file()), None) if code in error_codes() else None


def error_codes() -> dict[str, str]:
    """Every error code and what it means, in one line."""
    types = (cls for cls in all_error_types() if cls.__module__ == "wholestep.errors")
    return {cls.code: (cls.__doc__ or "").splitlines()[0] for cls in types}


def _complete(begun: str) -> list[str]:
    return [code for code in error_codes() if code.startswith(begun.upper())]


def explain(
    code: Annotated[
        str | None, typer.Argument(help="such as WS-ITEM; without it, all are listed", autocompletion=_complete)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for machines")] = False,
) -> None:
    """Print the page of an error code, or list all codes.

    Example: wholestep explain WS-ITEM
    """
    if code is None:
        if as_json:
            say_json(error_codes())
            return
        for each, title in error_codes().items():
            print(f"{each:22}{title}")
        return
    wanted = code.strip("[]").upper()
    wanted = wanted if wanted.startswith("WS-") else f"WS-{wanted}"
    page = page_of(wanted)
    if page is None:
        near = get_close_matches(wanted, error_codes(), 1)
        hint = f"Did you mean {near[0]}?" if near else "`python -m wholestep explain` lists all codes."
        print(f"There is no error code {code}. {hint}", file=sys.stderr)
        raise typer.Exit(2)
    text = page.read_text(encoding="utf-8")
    if as_json:
        say_json({"code": wanted, "title": error_codes()[wanted], "page": text})
    else:
        print(text, end="")
