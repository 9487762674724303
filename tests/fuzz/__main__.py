"""`python -m fuzz`: many programs on given seeds, or for a given time on new ones; failures are shrunk and printed.

make fuzz                            2,000 programs, 50 of them also compiled with Inductor
make fuzz SEED=70000 COUNT=300       others
make fuzz SECONDS=3600               an hour, from a seed that the clock gives
python -m fuzz --show 17             the program of a seed, its outcome, and a smaller one if it fails
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("WHOLESTEP_PROGRESS", "0")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd cannot be forked once it has threads for devices

import torch

from fuzz.grammar import write_program
from fuzz.isolated import run_alone, run_in_batch, shrink_alone, warm_up
from fuzz.outcome import CALLS, GOOD, Outcome, run_program
from fuzz.switched_off import SWITCHED_OFF

_BATCH = 25
Ran = tuple[int, str, list[str], Outcome]
"""Seed, source, names of its parts, and how it went."""


@dataclass
class Campaign:
    """Counts of what was seen."""

    shrunk_per_kind: int
    folder: Path | None
    without: dict[str, str]
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    graphs: collections.Counter[int] = field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    codes: collections.Counter[str] = field(default_factory=collections.Counter)
    parts: collections.Counter[str] = field(default_factory=collections.Counter)
    parts_failed: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: dict[str, list[int]] = field(default_factory=dict)
    every_call: list[int] = field(default_factory=list)
    to_shrink: list[tuple[int, str, Outcome, str]] = field(default_factory=list)

    def run(self, seeds: list[int], lower: str) -> list[Ran]:
        """Run programs in a forked process."""
        programs = [write_program(seed, self.without) for seed in seeds]
        limit = 60.0 if lower == "eager" else 400.0
        run = lambda source: run_program(source, lower=lower, seconds=int(limit) - 10)  # noqa: E731
        ran = run_in_batch(run, [source for source, _ in programs], limit)
        return [(seeds[index], *programs[index], outcome) for index, outcome, _ in ran]

    def note_all(self, ran: list[Ran], lower: str) -> None:
        """Count what was seen, and shrink what failed."""
        for each in ran:
            self.note(*each, lower)

    def note(self, seed: int, source: str, parts: list[str], outcome: Outcome, lower: str) -> None:
        self.kinds[outcome.kind] += 1
        self.parts.update(set(parts))
        if outcome.kind == "refused":
            self.codes[outcome.code] += 1
        if not outcome.failed:
            self.graphs[outcome.graphs] += 1
            if outcome.kind == "equal" and outcome.graphs >= CALLS:
                self.every_call.append(seed)
                self.reasons.update({re.sub(r"\d+(\.\d+)?", "N", reason) for reason in outcome.recompiles[1:]})
            return
        self.parts_failed.update(set(parts))
        key = str(outcome) if lower == "eager" else f"{lower}: {outcome}"
        self.failures.setdefault(key, []).append(seed)
        print(f"\nFAILED seed {seed}: {key}", flush=True)
        if len(self.failures[key]) <= self.shrunk_per_kind:
            self.to_shrink.append((seed, source, outcome, lower))

    def shrink(self, failure: tuple[int, str, Outcome, str]) -> None:
        """Print the smallest program that fails like this one."""
        seed, source, outcome, lower = failure
        alone = run_alone(source, lower)
        if not alone.like(outcome):
            print(
                f"\n# seed {seed}: {outcome}\n# alone it is: {alone} (earlier programs left something)\n{source}",
                flush=True,
            )
            return
        small = shrink_alone(source, alone) if lower == "eager" else source
        print(f"\n# seed {seed}: {outcome}\n{small}\n# {outcome.detail[-900:]}", flush=True)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"seed_{seed}.py").write_text(f"# {outcome}\n{small}")

    def summary(self, seconds: float) -> str:
        total = sum(self.kinds.values())
        bad = {kind: count for kind, count in self.kinds.items() if kind not in GOOD}
        lines = [
            f"{total} programs in {seconds:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in self.kinds.most_common()),
            "graphs per program: " + ", ".join(f"{n}: {count}" for n, count in sorted(self.graphs.items())),
            "refused: " + ", ".join(f"{code} {count}" for code, count in self.codes.most_common()),
            f"a graph at every call: {len(self.every_call)} programs, seeds {self.every_call[:10]}",
            *(f"  {count} x {reason}" for reason, count in self.reasons.most_common(8)),
        ]
        if bad:
            lines.append("failures:")
            lines += [f"  {len(v)} x {key} (seeds {v[:6]})" for key, v in sorted(self.failures.items(), key=_many)]
            lines.append("parts that fail most often:")
            rates = [(self.parts_failed[part] / self.parts[part], part) for part in self.parts_failed]
            lines += [
                f"  {part}: {self.parts_failed[part]} of {self.parts[part]}"
                for _, part in sorted(rates, reverse=True)[:40]
            ]
        return "\n".join(lines)


def _many(item: tuple[str, list[int]]) -> int:
    return -len(item[1])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=None, help="the first seed")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=None, help="run for this long on new seeds instead")
    parser.add_argument("--compiled", type=int, default=50, help="how many also run with Inductor")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--shrink", type=int, default=2, help="shrink so many failures of a kind")
    parser.add_argument("--all", action="store_true", help="with the parts that are switched off")
    parser.add_argument("--save", type=Path, default=None, help="a folder for shrunk programs")
    parser.add_argument("--show", type=int, default=None, help="print the program of one seed and run it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    without = {} if given.all else SWITCHED_OFF
    if given.show is not None:
        return _show(given.show, without)
    seed = given.seed if given.seed is not None else (int(time.time()) % 10**7 * 1000 if given.seconds else 10_000)
    campaign = Campaign(given.shrink, given.save, without)
    started = time.monotonic()
    print(f"seeds from {seed}", flush=True)
    warm_up()
    done = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        while time.monotonic() - started < given.seconds if given.seconds is not None else done < given.count:
            sizes = [_BATCH] * given.jobs
            if given.seconds is None:
                sizes = [max(0, min(_BATCH, given.count - done - _BATCH * job)) for job in range(given.jobs)]
            firsts = [seed + done + sum(sizes[:job]) for job in range(given.jobs)]
            batches = [list(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True) if size]
            for each in pool.map(lambda seeds: campaign.run(seeds, "eager"), batches):
                campaign.note_all(each, "eager")
            done += sum(sizes)
            failed = sum(map(len, campaign.failures.values()))
            print(f"\r{done} programs, {failed} failed, {time.monotonic() - started:.0f} s ", end="", flush=True)
        list(pool.map(campaign.shrink, campaign.to_shrink))
    print()
    print(campaign.summary(time.monotonic() - started))
    if given.compiled:
        compiled = Campaign(given.shrink, given.save, without)
        begun = time.monotonic()
        batches = [list(range(seed, seed + given.compiled))[job :: given.jobs] for job in range(given.jobs)]
        with ThreadPoolExecutor(given.jobs) as pool:
            for each in pool.map(lambda seeds: compiled.run(seeds, "inductor"), batches):
                compiled.note_all(each, "inductor")
            list(pool.map(compiled.shrink, compiled.to_shrink))
        print("with Inductor, within rounding:\n" + compiled.summary(time.monotonic() - begun))
        campaign.failures |= compiled.failures
    return int(bool(campaign.failures))


def _show(seed: int, without: dict[str, str]) -> int:
    source, _ = write_program(seed, without)
    print(source)
    outcome = run_alone(source)
    print(f"# {outcome}, {outcome.graphs} graphs\n{outcome.detail}")
    for reason in outcome.recompiles:
        print(f"# captured again: {reason}")
    if outcome.failed:
        print(shrink_alone(source, outcome))
    return int(outcome.failed)


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    sys.exit(main())
