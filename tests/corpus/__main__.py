"""`make corpus`: every entry in eager and compiled, a line each, a table in docs/corpus.md.

python -m corpus                       all of them
python -m corpus --only t5 --only gan  those with such a name
python -m corpus --list                names only

In parts: results are kept in a file, after every entry; entries that it has are not run again.

python -m corpus --results FILE --minutes 15    as many more as fit into 15 minutes; again and again until none is left
python -m corpus --results FILE --again --only t5   these again
python -m corpus --results A --results B --minutes 0 --write-page   the page from what is in A and B; nothing is run
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd cannot be forked once it has threads for devices

import torch

from corpus.entry import CALLS, WORKS, Entry, Found, try_entry
from corpus.every_entry import entries
from fuzz.isolated import run_in_batch, warm_up

PAGE = Path(__file__).parents[2] / "docs" / "corpus.md"
BEGIN, END = "<!-- corpus: written by make corpus -->", "<!-- end of the corpus -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m corpus", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="entries whose group/name contains this")
    parser.add_argument("--lower", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--seconds", type=float, default=300, help="limit of an entry")
    parser.add_argument("--results", action="append", default=[], type=Path, help="results are read and kept here")
    parser.add_argument("--minutes", type=float, help="start no other entry after this time")
    parser.add_argument("--again", action="store_true", help="run also what the results have")
    parser.add_argument("--write-page", action="store_true", help="put the table into docs/corpus.md")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    every = entries()
    chosen = [e for e in every if not options.only or any(part in e.title for part in options.only)]
    if options.list:
        print("\n".join(e.title for e in chosen))
        return 0
    torch.set_num_threads(1)
    kept = read_results(options.results)
    to_run = [e for e in chosen if options.again or e.title not in kept]
    for entry, result in run(to_run, options.lower, options.seconds, options.minutes):
        kept[entry.title] = result
        if options.results:
            keep_result(options.results[0], entry, result)
    found = [(e, kept[e.title]) for e in chosen if e.title in kept]
    print(f"{len(chosen) - len(found)} of {len(chosen)} are not tried yet")
    if options.write_page:
        write_page([(e, kept[e.title]) for e in every if e.title in kept])
    return verdict(found)


def run(chosen: list[Entry], lower: str, seconds: float, minutes: float | None = None) -> Iterator[tuple[Entry, Found]]:
    """Each entry in a forked process that goes on with the next one; a crash or a hang is named."""
    if not chosen or minutes == 0:
        return
    import transformers  # noqa: F401  # once, for all processes

    warm_up()
    began, count = time.monotonic(), 0
    attempt: Any = lambda entry: try_entry(entry, lower=lower)  # noqa: E731
    with contextlib.closing(run_in_batch(attempt, chosen, seconds)) as outcomes:
        for index, outcome, took in outcomes:
            entry = chosen[index]
            result = outcome if isinstance(outcome, Found) else Found(outcome.kind, outcome.key)
            mark = " " if result.works else "-" if as_expected(entry, result) else "X"
            text = " | ".join(result.text.splitlines())[:200]
            print(f"{mark} {entry.title:46s} {result.kind:16s} {took:5.1f} s {text}", flush=True)
            count += 1
            yield entry, result
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                break
    print(f"{count} entries in {time.monotonic() - began:.0f} s")


def read_results(files: list[Path]) -> dict[str, Found]:
    """What earlier parts found, by title; a later line replaces an earlier one."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return {title: Found(**fields) for title, fields in map(json.loads, lines)}


def keep_result(file: Path, entry: Entry, found: Found) -> None:
    """Append one line: nothing is lost where a later entry ends the process."""
    with file.open("a") as out:
        out.write(json.dumps([entry.title, asdict(found)]) + "\n")


def as_expected(entry: Entry, found: Found) -> bool:
    return found.works if found.kind != "refused" else found.code == entry.why_refused


def verdict(found: list[tuple[Entry, Found]]) -> int:
    """Print the counts; 1 if an entry is at fault, or refused where it is said to work, or too many are refused."""
    kinds = collections.Counter(result.kind for _, result in found)
    works = sum(kinds[kind] for kind in WORKS)
    print(", ".join(f"{kind}: {count}" for kind, count in kinds.most_common()))
    print(f"{works} of {len(found)} work ({100 * works / max(len(found), 1):.1f}%)")
    wrong = [e.title for e, f in found if not as_expected(e, f)]
    if wrong:
        print(f"not as expected: {', '.join(wrong)}")
    return int(bool(wrong))


def write_page(found: list[tuple[Entry, Found]]) -> None:
    """Replace the table between the two marks of the page."""
    works = sum(result.works for _, result in found)
    share = f"{works} work ({100 * works / len(found):.1f}%)"
    lines = [
        f"{len(found)} entries, {CALLS} calls of each, torch {torch.__version__}: {share}.",
        "",
        "| group | entries | equal to the bit | within rounding | refused |",
        "|---|---|---|---|---|",
    ]
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
            elif entry.options:
                outcome += ", `assume=True`"
            lines.append(f"| {entry.name} | {outcome} | {result.graphs or ''} | {result.nodes or ''} |")
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {CALLS} calls of each entry", flush=True)
    sys.exit(main())
