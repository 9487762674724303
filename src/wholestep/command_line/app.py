"""The command `wholestep`: its commands in order, and how an error is shown.

    run       run a script unchanged, then say what its compiled steps did            run_script.py
    check     the same beside eager; or verify a graph in a file
    report, show, trace, simulate, diff                of graphs in files              graph_files.py
    cache     the graphs that steps have stored                                        prepared_graphs.py
    doctor    what is installed, and what will not work                                doctor.py
    explain   the page of an error code                                                explain.py

A command is a function with the types of its options; typer makes the parser, `--help` and shell completion from them.
torch is imported by the commands that need it, so that `--help` and `explain` are there at once.

Exit codes: 0, 1 (a check failed, graphs differ, nothing was found), 2 (wrong usage, or an error with a code). A script
that `run` runs keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from wholestep.command_line import doctor, explain, graph_files, prepared_graphs, run_script
from wholestep.command_line.screen import with_clean_errors

_EPILOG = "Examples: wholestep run train.py  |  wholestep show step.json --op mm  |  wholestep explain WS-ITEM"


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
        help="A whole PyTorch training step as one FX graph: run, look, compare, predict.",
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
        ("cache", prepared_graphs.cache, {}),
        ("doctor", doctor.doctor, {}),
        ("explain", explain.explain, {}),
    ):
        app.command(name, context_settings=dict(settings))(with_clean_errors(command))
    return app


def _version() -> None:
    """A whole PyTorch training step as one FX graph: run, look, compare, predict."""
