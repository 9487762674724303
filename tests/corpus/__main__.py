"""`make corpus`: every entry in eager and compiled, a line each, a table in docs/corpus.md.

python -m corpus                       all of them
python -m corpus --only t5 --only gan  those with such a name
python -m corpus --list                names only
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd cannot be forked once it has threads for devices

import torch

from corpus.entry import CALLS, WORKS, Entry, Found, try_entry
from corpus.every_entry import entries
from fuzz.isolated import run_in_batch

PAGE = Path(__file__).parents[2] / "docs" / "corpus.md"
BEGIN, END = "<!-- corpus: written by make corpus -->", "<!-- end of the corpus -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m corpus", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="entries whose group/name contains this")
    parser.add_argument("--lower", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--seconds", type=float, default=300, help="limit of an entry")
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--write-page", action="store_true", help="put the table into docs/corpus.md")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [e for e in entries() if not options.only or any(part in f"{e.group}/{e.name}" for part in options.only)]
    if options.list:
        print("\n".join(f"{e.group}/{e.name}" for e in chosen))
        return 0
    torch.set_num_threads(1)
    found = run(chosen, options.lower, options.seconds)
    if options.json:
        options.json.write_text(json.dumps([row(e, f) for e, f in found], indent=1) + "\n")
    if options.write_page:
        write_page(found)
    return verdict(found)


def run(chosen: list[Entry], lower: str, seconds: float) -> list[tuple[Entry, Found]]:
    """Each entry in a forked process that goes on with the next one; a crash or a hang is named."""
    found: list[tuple[Entry, Found]] = []
    began = time.monotonic()
    attempt: Any = lambda entry: try_entry(entry, lower=lower)  # noqa: E731
    for index, outcome, took in run_in_batch(attempt, chosen, seconds):
        entry = chosen[index]
        result = outcome if isinstance(outcome, Found) else Found(outcome.kind, outcome.key)
        found.append((entry, result))
        mark = " " if result.works else "-" if result.kind == "refused" and result.code == entry.why_refused else "X"
        text = " | ".join(result.text.splitlines())[:200]
        print(f"{mark} {entry.group}/{entry.name:34s} {result.kind:16s} {took:5.1f} s {text}", flush=True)
    print(f"{len(found)} entries in {time.monotonic() - began:.0f} s")
    return found


def row(entry: Entry, found: Found) -> dict[str, Any]:
    """What is recorded of an entry."""
    return {
        "group": entry.group,
        "name": entry.name,
        "outcome": found.kind,
        "code": found.code,
        "line": found.line,
        "graphs": found.graphs,
        "nodes": found.nodes,
        "text": found.text.splitlines()[0] if found.text else "",
    }


def verdict(found: list[tuple[Entry, Found]]) -> int:
    """Print the counts; 1 if an entry is at fault, or refused where it is said to work, or too many are refused."""
    kinds = collections.Counter(result.kind for _, result in found)
    works = sum(kinds[kind] for kind in WORKS)
    print(", ".join(f"{kind}: {count}" for kind, count in kinds.most_common()))
    print(f"{works} of {len(found)} work ({100 * works / max(len(found), 1):.1f}%)")
    wrong = [f"{e.group}/{e.name}" for e, f in found if f.failed or (f.kind == "refused" and f.code != e.why_refused)]
    if wrong:
        print(f"not as expected: {', '.join(wrong)}")
    return int(bool(wrong))


def write_page(found: list[tuple[Entry, Found]]) -> None:
    """Replace the table between the two marks of the page."""
    lines = ["| group | entries | equal to the bit | within rounding | refused |", "|---|---|---|---|---|"]
    groups: dict[str, list[tuple[Entry, Found]]] = {}
    for entry, result in found:
        groups.setdefault(entry.group, []).append((entry, result))
    for group, members in groups.items():
        kinds = collections.Counter(result.kind for _, result in members)
        counts = f"{kinds['equal']} | {kinds['within rounding']} | {kinds['refused']}"
        lines.append(f"| {group} | {len(members)} | {counts} |")
    for group, members in groups.items():
        lines += ["", f"### {group}", "", "| entry | outcome | graphs | nodes |", "|---|---|---|---|"]
        for entry, result in members:
            outcome = result.kind
            if result.kind == "refused":
                at = Path(result.line.split(" ")[0]).name
                outcome = f"refused, [{result.code}](errors/{result.code}.md) at `{at}`"
            lines.append(f"| {entry.name} | {outcome} | {result.graphs or ''} | {result.nodes or ''} |")
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {CALLS} calls of each entry", flush=True)
    sys.exit(main())
