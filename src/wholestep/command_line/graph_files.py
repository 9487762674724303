"""Commands on graphs in files (`StepGraph.to_json`): report, show, diff, simulate, trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wholestep.command_line.screen import console, say, say_json, table
from wholestep.errors import GraphFormatError, OptionError

if TYPE_CHECKING:
    from wholestep.ir.step_graph import StepGraph
    from wholestep.simulate.machine import GroupSpread, Machine

GraphFile = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="a graph: what StepGraph.to_json() or `wholestep run` wrote")
]
AllowOps = Annotated[
    list[str] | None,
    typer.Option("--allow-op", metavar="NS::OP", help="operators of other libraries that the file may name: mylib::*"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME",
        help="h100, h200, a100, cpu, or a file of Machine.to_json()",
        autocompletion=lambda incomplete: [name for name in _MACHINES if name.startswith(incomplete.lower())],
    ),
]
Groups = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="NAME=RANKSxNODES", help="how a process group lies on machines: 0=64x8"),
]
_PHASES = ("forward", "backward", "update", "optimizer", "epilogue")
_MACHINES = ("h100", "h200", "a100", "cpu")


def read_graph(path: Path, allow_ops: list[str] | None = None) -> StepGraph:
    """The graph in a file; a WS-FORMAT error where there is none."""
    from wholestep.ir.step_graph import StepGraph

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not a text file.", fix="give what StepGraph.to_json() wrote.") from error
    try:
        return StepGraph.from_json(text, allow_ops=allow_ops or ())
    except GraphFormatError as error:
        made = GraphFormatError(f"{path}: {error.what}", fix=error.fix or _instead_of(path), node=error.node)
        raise made from error


def _instead_of(path: Path) -> str:
    """What to give in the place of a file that holds no graph."""
    if path.suffix == ".py":
        return f"to run a script: wholestep run {path}. It writes the graphs of its steps as JSON."
    return "give a file that StepGraph.to_json() or `wholestep run` wrote."


def machine_named(name: str | None) -> Machine | None:
    """A machine by its name, or from a file."""
    if name is None:
        return None
    from wholestep import simulate as models
    from wholestep.simulate.machine import Machine

    if name.lower() in _MACHINES:
        found: Machine = getattr(models, name.upper())
        return found
    if Path(name).is_file():
        try:
            return Machine.from_json(Path(name).read_text(encoding="utf-8"))
        except ValueError as error:
            raise OptionError(
                f"{name} is not the JSON of a machine: {error}", fix="Machine.to_json() writes one."
            ) from error
    known = ", ".join(_MACHINES)
    raise OptionError(f"there is no machine {name!r}.", fix=f"use {known}, or a file that Machine.to_json() wrote.")


def groups_named(given: list[str] | None) -> dict[str, GroupSpread] | None:
    """`0=64x8` as the spread of group 0 over 64 ranks on 8 machines."""
    from wholestep.simulate.machine import GroupSpread

    found = {}
    for text in given or ():
        name, _, size = text.partition("=")
        ranks, _, nodes = size.partition("x")
        if not ranks.isdigit() or not (nodes or "1").isdigit():
            raise OptionError(f"--group {text} is not NAME=RANKSxNODES.", fix="write 0=64x8: 64 ranks on 8 machines.")
        found[name] = GroupSpread(int(ranks), int(nodes or 1))
    return found or None


def report(
    file: GraphFile,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the page; by default FILE with .html")] = None,
    machine: MachineName = None,
    group: Groups = None,
    allow_op: AllowOps = None,
    as_json: AsJson = False,
) -> None:
    """Write a page about a graph: one HTML file that needs no network.

    Example: wholestep report step.json -o step.html
    """
    from wholestep.inspect import report as write_report

    page = out or file.with_suffix(".html")
    graph = read_graph(file, allow_op)
    write_report(graph, page, title=file.stem, machine=machine_named(machine), groups=groups_named(group))
    if as_json:
        say_json({"page": str(page), "bytes": page.stat().st_size})
    else:
        say(f"{page}: {page.stat().st_size / 1e6:.2f} MB, open it in a browser")


def show(
    file: GraphFile,
    module: Annotated[str | None, typer.Option("--module", help="a pattern for module paths: '*.attn'")] = None,
    phase: Annotated[
        str | None,
        typer.Option(
            "--phase",
            help="forward, backward, update, optimizer or epilogue",
            autocompletion=lambda incomplete: [name for name in _PHASES if name.startswith(incomplete.lower())],
        ),
    ] = None,
    op: Annotated[str | None, typer.Option("--op", help="a pattern for operators: mm, '*attention*'")] = None,
    code: Annotated[bool, typer.Option("--code", help="print the whole graph as Python text")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="show memory over the step, by kind")] = False,
    machine: MachineName = None,
    allow_op: AllowOps = None,
    as_json: AsJson = False,
) -> None:
    """Show a graph: in a few lines, or the nodes of some modules, of a phase, of some operators.

    Example: wholestep show step.json --module '*.attn' --phase backward --op mm
    """
    from wholestep.inspect import memory_timeline
    from wholestep.inspect import show as find

    graph = read_graph(file, allow_op)
    if code:
        text = graph.print_readable(print_output=not as_json)
        if as_json:
            say_json({"code": text})
        return
    if memory:
        timeline = memory_timeline(graph)
        if as_json:
            say_json(timeline.as_data())
        else:
            say(str(timeline))
        return
    found = find(graph, module=module, phase=phase, op=op, machine=machine_named(machine))
    if as_json:
        say_json(found.as_data())
    elif not found.asked:
        say(str(graph).rpartition("\n")[0])
        say("  wholestep show FILE --code prints the whole graph")
        _modules(found.rows)
        return
    else:
        say(found.heading, "bold")
        if found.rows:
            head, *rows = found.cells(len(found.rows))
            console().print(table(head, rows, numbers=2))
        else:
            say("\n".join(found.hints()))
    raise typer.Exit(0 if found.rows else 1)


def _modules(rows: Any) -> None:
    """Nodes and predicted time of the largest modules."""
    by: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        entry = by.setdefault((row.module_path or "(outside of modules)", row.phase), [0, 0.0])
        entry[0] += 1
        entry[1] += row.us
    longest = sorted(by.items(), key=lambda item: -item[1][1])[:12]
    lines = [(module, stage, f"{n:.0f}", f"{us / 1e3:.3f}") for (module, stage), (n, us) in longest]
    say()
    console().print(table(("module", "phase", "nodes", "predicted ms"), lines, numbers=2))


def diff(
    a: GraphFile,
    b: GraphFile,
    machine: MachineName = None,
    group: Groups = None,
    allow_op: AllowOps = None,
    as_json: AsJson = False,
) -> None:
    """Say what is different in two graphs, what causes it and what it costs. Exit code 1 if they differ.

    Example: wholestep diff before.json after.json
    """
    from wholestep.inspect import diff as compare

    labels = (a.name, b.name) if a.name != b.name else (str(a), str(b))
    one, other = read_graph(a, allow_op), read_graph(b, allow_op)
    found = compare(one, other, machine=machine_named(machine), groups=groups_named(group), labels=labels)
    if as_json:
        say_json(found.as_data())
    else:
        say(str(found))
    raise typer.Exit(1 if found else 0)


def simulate(
    file: GraphFile,
    machine: MachineName = None,
    group: Groups = None,
    explain: Annotated[str | None, typer.Option("--explain", help="why the collective of that node is exposed")] = None,
    allow_op: AllowOps = None,
    as_json: AsJson = False,
) -> None:
    """Predict the time of a step, what of its communication is exposed and why, and its memory.

    Example: wholestep simulate step.json --machine h100 --group 0=64x8
    """
    from dataclasses import asdict

    from wholestep import simulate as models

    graph = read_graph(file, allow_op)
    timeline = models.step(graph, machine=machine_named(machine), groups=groups_named(group))
    if explain is not None:
        text = timeline.explain(explain)
        if as_json:
            say_json({"node": explain, "text": text})
        else:
            say(text)
    elif as_json:
        data = {name: getattr(timeline, name) for name in ("machine", "step_us", "compute_us", "exposed_us", "gap")}
        data |= {"peak_bytes": timeline.peak_bytes, "peak_at": timeline.peak_at, "bounds": asdict(timeline.bounds)}
        say_json(data | {"exposed": [asdict(each) for each in timeline.exposed()]})
    else:
        say(str(timeline))


def trace(
    file: GraphFile,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the trace; by default FILE with .trace.json")] = None,
    machine: MachineName = None,
    group: Groups = None,
    allow_op: AllowOps = None,
    as_json: AsJson = False,
) -> None:
    """Write a trace of the predicted step for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

    Example: wholestep trace step.json -o trace.json --machine h100
    """
    from wholestep import simulate as models

    target = out or file.with_suffix(".trace.json")
    timeline = models.step(read_graph(file, allow_op), machine=machine_named(machine), groups=groups_named(group))
    timeline.perfetto(target)
    if as_json:
        say_json({"trace": str(target), "step_us": timeline.step_us})
    else:
        say(f"{target}: a step of {timeline.step_us / 1e3:.3f} ms, open it in https://ui.perfetto.dev")
