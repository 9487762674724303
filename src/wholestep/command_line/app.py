"""The command `wholestep`: its commands in order, and how an error is shown.

    run       run a script unchanged, then say what its compiled steps did            run_script.py
    check     the same beside eager; or verify a graph in a file
    report, show, trace, simulate, diff                of graphs in files              graph_files.py
    cache     the graphs that steps have stored                                        here
    doctor    what is installed, and what will not work                                doctor.py
    explain   the page of an error code                                                here

A command is a function with the types of its options; typer makes the parser, `--help` and shell completion from them.
torch is imported by the commands that need it, so that `--help` and `explain` are there at once.

Exit codes: 0, 1 (a check failed, graphs differ, nothing was found), 2 (wrong usage, or an error with a code). A script
that `run` runs keeps its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from wholestep.command_line import doctor, graph_files, run_script
from wholestep.command_line.screen import console, say, say_json, table, with_clean_errors
from wholestep.errors import all_error_types

_EPILOG = "Examples: wholestep run train.py  |  wholestep show step.json --op mm  |  wholestep explain WS-ITEM"
_PACKAGE = Path(__file__).parents[1]
_PAGE_FOLDERS = (_PACKAGE / "error_pages", _PACKAGE.parents[1] / "docs" / "errors")
"""Where the pages are: beside the code in an installed package (by pyproject.toml), in docs/ in a clone."""
_MOST_ROWS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    app = make_app()
    try:
        app(args=None if arguments is None else list(arguments), prog_name="wholestep")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


def make_app() -> typer.Typer:
    """The application with its commands, in the order in which help lists them."""
    app = typer.Typer(
        help="A whole PyTorch training step as one FX graph: run, inspect, compare, predict.",
        epilog=_EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
    )
    app.callback()(_version)
    behind = {"allow_interspersed_args": False}
    for name, command, settings in (
        ("run", run_script.run, behind),
        ("check", run_script.check, behind),
        ("report", graph_files.report, {}),
        ("show", graph_files.show, {}),
        ("diff", graph_files.diff, {}),
        ("simulate", graph_files.simulate, {}),
        ("trace", graph_files.trace, {}),
        ("cache", cache, {}),
        ("doctor", doctor.doctor, {}),
        ("explain", explain, {}),
    ):
        app.command(name, context_settings=dict(settings))(with_clean_errors(command))
    return app


def _print_version(asked: bool) -> None:
    if asked:
        import wholestep

        print(f"wholestep {wholestep.__version__}")
        raise typer.Exit(0)


def _version(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A whole PyTorch training step as one FX graph: run, inspect, compare, predict."""


def cache(
    folder: Annotated[Path | None, typer.Option("--folder", help="by default the one that steps use")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="delete all graphs")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for machines")] = False,
) -> None:
    """List the graphs that steps have prepared and stored, or delete them.

    Example: wholestep cache --clear
    """
    from wholestep import cache as stored
    from wholestep.ir.step_graph import shown

    if clear:
        count = stored.clear(folder)
        if as_json:
            say_json({"deleted": count})
        else:
            say(f"{count} graph{'' if count == 1 else 's'} deleted")
        return
    found, entries = stored.stats(folder), stored.ls(folder)
    if as_json:
        say_json(asdict(found) | {"graphs": [{**asdict(each), "key": each.key} for each in entries]})
        return
    graphs = f"{found.entries} graph{'' if found.entries == 1 else 's'} of {found.steps} steps"
    say(f"{found.folder}: {graphs}, {shown(found.bytes)} of at most {shown(found.limit)}", "bold")
    rows = [
        (each.path.name, time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used)), shown(each.bytes))
        for each in entries[:_MOST_ROWS]
    ]
    if rows:
        console().print(table(("graph", "last used", "bytes"), rows, numbers=1))
    if len(entries) > _MOST_ROWS:
        say(f"and {len(entries) - _MOST_ROWS} others")


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
