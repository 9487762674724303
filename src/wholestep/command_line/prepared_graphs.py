"""`wholestep cache`: what lies in the folder of prepared graphs (`ws.compile(cache=...)`), and how it is emptied."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from wholestep.command_line.screen import console, say, say_json, table

_MOST_ROWS = 20


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
