"""What commands write: tables with rich, JSON for machines, and errors as one block without a traceback."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wholestep.errors import WholestepError

F = TypeVar("F", bound=Callable[..., Any])
_WIDE = 160
"""Columns where the width of a terminal is not known: tables are then not cut to 80."""


def console(*, error: bool = False) -> Console:
    """The console: coloured and as wide as the terminal where there is one."""
    stream = sys.stderr if error else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDE)


def say(text: str = "", style: str = "") -> None:
    """Print a line as it is: nothing in it is markup."""
    console().print(Text(text, style=style), soft_wrap=True)


def say_json(data: Any) -> None:
    """Print data for machines."""
    print(json.dumps(data, default=str))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: int = 0) -> Table:
    """A table; the last `numbers` columns are right-aligned. Without names of columns it has no head."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(head))
    for i, name in enumerate(head):
        made.add_column(name, justify="right" if i >= len(head) - numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made


def show_error(error: WholestepError) -> None:
    """An error with a code: its text, the first line in red."""
    head, _, rest = str(error).partition("\n")
    notes = "\n".join(getattr(error, "__notes__", ()))
    text = Text.assemble((head, "bold red"), "\n" if rest else "", rest, f"\n{notes}" if notes else "")
    console(error=True).print(text, soft_wrap=True)


def with_clean_errors(command: F) -> F:
    """A command whose errors with a code, and files that cannot be read or written, are shown as such: exit code 2.

    With `--json` they are an object on stdout as well.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except WholestepError as error:
            show_error(error)
            if kwargs.get("as_json"):
                say_json({"error": {"code": error.code, "what": error.what, "fix": error.fix}})
            raise typer.Exit(2) from None
        except BrokenPipeError:  # `wholestep show step.json | head`
            sys.stderr.close()
            raise typer.Exit(0) from None
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            console(error=True).print(Text(f"wholestep: {what}", style="bold red"), soft_wrap=True)
            if kwargs.get("as_json"):
                say_json({"error": {"code": "", "what": what, "fix": ""}})
            raise typer.Exit(2) from None

    return run  # type: ignore[return-value]
