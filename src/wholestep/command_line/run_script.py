"""`wholestep run train.py`: run a script as `python train.py` would, then say what its compiled steps did.

The script is not changed, and neither is what it computes. While it runs, each step that `ws.compile` makes is noted;
at its end (also if it raises) there is a summary of each, its graphs as JSON, and a page (`ws.inspect.report`).
`wholestep check train.py` runs it with `check_first=` for every step: the first calls run in eager as well.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unittest import mock

import typer

from wholestep.command_line.graph_files import read_graph
from wholestep.command_line.screen import console, say, say_json, show_error, table
from wholestep.errors import WholestepError

if TYPE_CHECKING:
    from wholestep.compiled_step import CompiledStep

Arguments = Annotated[list[str] | None, typer.Argument(help="arguments of the script")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for machines, as the last line of stdout")]
_FRAMES = (runpy.__file__, __file__, "<frozen runpy>")


def run(
    script: Annotated[str, typer.Argument(help="a Python file; with -m, a module")],
    arguments: Arguments = None,
    module: Annotated[bool, typer.Option("-m", help="run a module, as `python -m` does")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="the folder for pages and graphs")] = Path("wholestep-run"),
    no_files: Annotated[bool, typer.Option("--no-files", help="write no pages and no graphs")] = False,
    lower: Annotated[str | None, typer.Option("--lower", help="how all steps run: inductor, eager or debug")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a script unchanged; at its end, say what each of its compiled steps did, with a page for each.

    Options of wholestep come before the script, those of the script behind it.

    Example: wholestep run train.py --epochs 3     or     wholestep run -m package.train
    """
    with watched_steps(lower=lower) as steps:
        code = run_script(script, arguments or [], module=module)
    summaries = [summary_of(step) for step in steps]
    if not no_files and os.environ.get("RANK", "0") == "0":
        for step, summary in zip(steps, summaries, strict=True):
            summary["files"] = write_files(step, out, _file_name(summary["name"], steps.index(step), len(steps)))
    elif not no_files:
        for step, summary in zip(steps, summaries, strict=True):
            name = f"{_file_name(summary['name'], steps.index(step), len(steps))}-rank{os.environ['RANK']}"
            summary["files"] = write_files(step, out, name, page=False)
    if as_json:
        say_json({"exit_code": code, "steps": summaries})
    else:
        for summary in summaries:
            show_summary(summary)
        if not steps and code == 0:
            say("wholestep: the script compiled no step (nothing called ws.compile).", "yellow")
    raise typer.Exit(code)


def check(
    script: Annotated[str, typer.Argument(help="a Python file, or the JSON of a graph")],
    arguments: Arguments = None,
    module: Annotated[bool, typer.Option("-m", help="run a module, as `python -m` does")] = False,
    calls: Annotated[int, typer.Option("--calls", min=1, help="how many first calls run in eager as well")] = 3,
    lower: Annotated[str | None, typer.Option("--lower", help="how all steps run: inductor, eager or debug")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a script with the first calls of its compiled steps beside eager; or verify a graph in a file.

    Exit code 1 if a step differs from eager, or a graph breaks a rule.

    Example: wholestep check train.py     or     wholestep check step.json
    """
    if script.endswith(".json") and not module:
        _verify(Path(script), as_json)
        return
    with watched_steps(check_first=calls, lower=lower) as steps:
        code = run_script(script, arguments or [], module=module)
    rows: list[dict[str, Any]] = []
    for step in steps:
        checked = calls - getattr(step, "_to_check", calls)
        why = "" if step.options.parallel is None else "not with parallel="
        rows.append({"step": step._name, "calls": step._calls, "checked": checked, "why_not": why})
    if as_json:
        say_json({"exit_code": code, "steps": rows})
    else:
        cells = [(r["step"], r["calls"], r["checked"], r["why_not"] or _verdict(r["checked"], code)) for r in rows]
        console().print(table(("step", "calls", "beside eager", "result"), cells))
        if not steps and code == 0:
            say("wholestep: the script compiled no step (nothing called ws.compile).", "yellow")
    raise typer.Exit(code)


def _verdict(checked: int, code: int) -> str:
    if code:
        return "see the error"
    return "agrees with eager" if checked else "was not called"


def _verify(path: Path, as_json: bool) -> None:
    """Verify a graph in a file at the level that needs nothing to run."""
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}")
    graph, problem = read_graph(path), None
    try:
        graph.verify(2)
    except WholestepError as error:
        problem = error
    if as_json:
        say_json({"ok": problem is None, "nodes": graph.num_nodes, "error": None if problem is None else str(problem)})
    elif problem is None:
        say(f"{path}: {graph.num_nodes} nodes, in order", "green")
    else:
        show_error(problem)
    raise typer.Exit(0 if problem is None else 1)


@contextmanager
def watched_steps(check_first: int = 0, lower: str | None = None) -> Iterator[list[CompiledStep[Any, Any]]]:
    """The compiled steps that are made meanwhile, in order. `check_first`, `lower`: options for all of them."""
    from wholestep.compiled_step import CompiledStep
    from wholestep.options import Options

    made: list[CompiledStep[Any, Any]] = []
    init, of = CompiledStep.__init__, Options.of

    def noting(self: CompiledStep[Any, Any], fn: Any, options: Any) -> None:
        init(self, fn, options)
        made.append(self)

    def with_options(**given: Any) -> Options:
        if check_first and given.get("parallel") is None:
            given["check_first"] = check_first
        if lower is not None:
            given["lower"] = lower
        return of(**given)

    with mock.patch.object(CompiledStep, "__init__", noting), mock.patch.object(Options, "of", with_options):
        yield made


def run_script(script: str, arguments: list[str], *, module: bool) -> int:
    """Run a script as the main program; its exit code. What it raises is shown as Python shows it."""
    before = sys.argv, sys.path[0]
    if not module and not Path(script).exists():
        raise typer.BadParameter(f"there is no file {script}")
    if not module and Path(script).is_dir() and not (Path(script) / "__main__.py").exists():
        raise typer.BadParameter(f"{script} is a folder without a __main__.py")
    sys.argv = [script, *arguments]
    sys.path[0] = "" if module else str(Path(script).resolve().parent)
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except WholestepError as error:
        show_error(error)
        return 1
    except Exception as error:
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if f.filename not in _FRAMES])
        print("".join(shown.format()), end="", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("wholestep: the script was interrupted", file=sys.stderr)
        return 130
    finally:
        sys.argv, sys.path[0] = before
    return 0


def summary_of(step: CompiledStep[Any, Any]) -> dict[str, Any]:
    """What a step did, as plain data."""
    from wholestep import simulate

    found: dict[str, Any] = {
        "name": step._name,
        "calls": step._calls,
        "graphs": len(step.graphs),
        "recompiles": [str(each) for each in step.recompiles],
        "capture_seconds": step.capture_seconds,
        "lower": step.options.lower,
        "files": [],
    }
    if step.last is None:
        return found | {"nodes": 0}
    timeline = simulate.step(step.last)
    found |= {
        "nodes": step.last.num_nodes,
        "machine": timeline.machine,
        "predicted_us": timeline.step_us,
        "exposed_us": timeline.exposed_us,
        "collectives": len(timeline.index.collectives),
        "peak_bytes": step.memory_timeline().peak_bytes,
    }
    if step.lowering is not None:
        inside = sum(region.operators for region in step.lowering.regions)
        found |= {"regions": len(step.lowering.regions), "compiled_operators": inside}
        found |= {"nodes_outside": len(step.lowering.outside)}
    return found


def show_summary(summary: dict[str, Any]) -> None:
    """A step in a few lines."""
    from wholestep.ir.step_graph import shown

    say()
    say(f"{summary['name']}: {_count(summary['calls'], 'call')}, {_count(summary['graphs'], 'graph')}", "bold")
    rows = []
    if not summary["nodes"]:
        rows.append(("", "no graph: every call ran in eager, or there was none"))
    else:
        rows.append(("graph", f"{summary['nodes']} nodes, captured in {summary['capture_seconds']:.2f} s"))
        rows.append(("runs", _how(summary)))
        rows += [("captured again", reason) for reason in summary["recompiles"][-3:]]
        rows.append(("memory", f"{shown(summary['peak_bytes'])} at the peak, as simulated without regions"))
        predicted = f"{summary['predicted_us'] / 1e3:.3f} ms on {summary['machine']}"
        if summary["collectives"]:
            exposed = f"{summary['exposed_us'] / 1e3:.3f} ms of {_count(summary['collectives'], 'collective')} exposed"
            predicted += f", {exposed}"
        rows.append(("predicted", predicted))
    rows += [("written", name) for name in summary["files"]]
    console().print(table((), rows), soft_wrap=True)


def _how(summary: dict[str, Any]) -> str:
    if "regions" not in summary:
        return f"operator by operator (lower={summary['lower']!r})"
    inside = f"{_count(summary['regions'], 'compiled region')} with {summary['compiled_operators']} operators"
    return f"{inside}, {_count(summary['nodes_outside'], 'node')} outside"


def write_files(step: CompiledStep[Any, Any], folder: Path, name: str, *, page: bool = True) -> list[str]:
    """The graphs of a step as JSON, and its page."""
    from wholestep.errors import GraphFormatError
    from wholestep.inspect import report

    if step.last is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for i, graph in enumerate(step.graphs[-4:], max(len(step.graphs) - 3, 1)):
        path = folder / (f"{name}-{i}.json" if len(step.graphs) > 1 else f"{name}.json")
        try:
            path.write_text(graph.to_json(), encoding="utf-8")
        except GraphFormatError as error:
            say(f"wholestep: graph {i} of {name} has no form in a file: {error.what}", "yellow")
            continue
        written.append(str(path))
    if page:
        written.append(str(report(step, folder / f"{name}.html", title=step._name)))
    return written


def _file_name(name: str, i: int, steps: int) -> str:
    plain = re.sub(r"[^\w.-]+", "_", name.rpartition(">.")[2]).strip("_") or "step"
    return f"{plain}-step{i + 1}" if steps > 1 else plain


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
