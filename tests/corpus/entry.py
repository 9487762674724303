"""One entry of the corpus, and what became of it: the same calls in eager and compiled, from one seed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import wholestep as ws
from harness import SEED, Run, differences, play

CALLS = 4
WORKS = ("equal", "within rounding")


@dataclass(frozen=True)
class Entry:
    """A training step by group and name. Its `make` imports the package that it is about."""

    group: str
    name: str
    make: Callable[[], Run]
    why_refused: str | None = None
    """The code with which it is refused, where it is."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `ws.compile` that it needs, such as assume=True."""

    @property
    def title(self) -> str:
        return f"{self.group}/{self.name}"


@dataclass(frozen=True)
class Found:
    """What became of an entry: equal, within rounding, refused; or a fault: different, crash, eager fails, hang."""

    kind: str
    text: str = ""
    code: str = ""
    line: str = ""
    graphs: int = 0
    nodes: int = 0

    @property
    def works(self) -> bool:
        return self.kind in WORKS

    @property
    def failed(self) -> bool:
        return not self.works and self.kind != "refused"


def fresh(entry: Entry) -> Run:
    """The objects of an entry, from the same seed each time."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return entry.make()


def try_entry(entry: Entry, calls: int = CALLS, **options: Any) -> Found:
    """Play an entry in eager and compiled, and compare all state after every call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages: deprecated calls of torch, advice
        try:
            run = fresh(entry)
            expected = play(run, run.step, calls)
        except Exception as error:
            return Found("eager fails", f"{type(error).__name__}: {error}")
        run = fresh(entry)
        step = ws.compile(run.step, progress=False, **{**entry.options, **options})
        try:
            actual = play(run, step, calls)
        except ws.errors.WholestepError as error:
            where = error.location
            line = "" if where is None else str(where)
            return Found("refused" if line else "refused without a line", str(error), error.code, line)
        except Exception as error:
            return Found("crash", f"{type(error).__name__}: {error}")
        size = max((len(graph.gm.graph.nodes) for graph in step.graphs), default=0)
        for want, got in zip(expected, actual, strict=True):
            lines = differences(want, got)
            if lines:
                close = _all_close(want.seen, got.seen)
                kind = "within rounding" if close else "different"
                return Found(kind, f"{want.label}: {lines[0]}", graphs=len(step.graphs), nodes=size)
    return Found("equal", graphs=len(step.graphs), nodes=size)


def _all_close(want: dict[str, Any], got: dict[str, Any]) -> bool:
    """Whether all values that differ do so by rounding: 1e-5 of the largest value of the tensor."""
    if want.keys() != got.keys():
        return False
    for path, value in want.items():
        other = got[path]
        if value == other:
            continue
        if not (hasattr(value, "value") and hasattr(other, "value") and value.value.shape == other.value.shape):
            return False
        a, b = value.value.double(), other.value.double()
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-5 * max(float(a.abs().max()), 1e-6)):
            return False
    return True
