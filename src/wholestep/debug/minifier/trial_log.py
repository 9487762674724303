"""The results of all trials of a search, on disk as they come: an interrupted search is resumed from them.

    trials.jsonl            {"format": "wholestep.minify", "version": 1, "case": digest, "outcome": {..}}
                            {"edit": digest, "fails": true, "values": "values-12.safetensors", "numbers": {..}, ..}
    values-12.safetensors   of nodes that became inputs in trial 12

The graph itself is not in it: the caller passes the same graph, inputs and predicate again. A partial last line (the
process died while writing) is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholestep.debug.minifier.graph_edits import Case, Edit
from wholestep.debug.minifier.trial import Outcome, Recorded
from wholestep.errors import GraphFormatError, MinifyError

FORMAT = "wholestep.minify"
VERSION = 1
FILE = "trials.jsonl"


@dataclass(frozen=True)
class TrialResult:
    """The result of one trial."""

    fails: bool
    recorded: Recorded
    values: Path


class TrialLog:
    """All results of one search, old ones first."""

    def __init__(self, folder: Path, case: Case) -> None:
        self._folder = folder
        self._path = folder / FILE
        self._case = digest_of(case)
        self._old = self._read()
        self._next = 0
        self._count = 0

    @property
    def first(self) -> Outcome | None:
        """How the whole graph failed, if the log has it."""
        return None if self._old is None else _outcome(self._old[0])

    def begin(self, outcome: Outcome) -> None:
        """A new search."""
        self._old = None
        head = {"format": FORMAT, "version": VERSION, "case": self._case, "outcome": asdict(outcome)}
        self._path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def values_path(self) -> Path:
        """Where the next trial may put values."""
        return self._folder / f"values-{self._count}.safetensors"

    def known(self, edit: Edit) -> TrialResult | None:
        """The result of the next trial, if the log has it."""
        lines = [] if self._old is None else self._old[1:]
        if self._next >= len(lines):
            return None
        line = lines[self._next]
        if line.get("edit") != edit.digest:
            # Another version of wholestep proposes other edits: the log up to here stays, the rest is run again.
            self._old = self._old[: self._next + 1] if self._old is not None else None
            self._rewrite()
            return None
        values = self._folder / f"values-{self._next}.safetensors"
        recorded = _recorded(line)
        if recorded.devices and not values.is_file():
            raise MinifyError(f"{values} is gone.", fix=f"remove {self._folder} to begin anew.")
        self._next += 1
        self._count += 1
        return TrialResult(bool(line.get("fails")), recorded, values)

    def add(self, edit: Edit, answer: TrialResult) -> None:
        """Append a result."""
        line: dict[str, Any] = {"edit": edit.digest, "fails": answer.fails}
        if answer.fails:
            line |= asdict(answer.recorded)
        elif answer.values.exists():
            answer.values.unlink()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._count += 1

    def _read(self) -> list[dict[str, Any]] | None:
        if not self._path.exists():
            return None
        lines = []
        for text in self._path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not isinstance(line, dict):
                break
            lines.append(line)
        if not lines or lines[0].get("format") != FORMAT or lines[0].get("version") != VERSION:
            raise GraphFormatError(f"{self._path} is not the log of a search that this wholestep can resume.")
        if lines[0].get("case") != self._case:
            raise MinifyError(
                f"{self._folder} has the log of another graph, or of other inputs.",
                fix="give another folder=, or the graph and inputs that it was begun with.",
            )
        return lines

    def _rewrite(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in self._old or ()), encoding="utf-8")
        os.replace(part, self._path)


def _outcome(line: dict[str, Any]) -> Outcome:
    found = line.get("outcome")
    if not isinstance(found, dict) or not all(isinstance(found.get(k), str) for k in ("kind", "type", "message")):
        raise GraphFormatError("the first line of the trial log does not say how the graph failed.")
    return Outcome(found["kind"], found["type"], found["message"], str(found.get("node", "")))


def _recorded(line: dict[str, Any]) -> Recorded:
    numbers, devices = line.get("numbers", {}), line.get("devices", {})
    with_grad = line.get("requires_grad", [])
    if not isinstance(numbers, dict) or not isinstance(devices, dict) or not isinstance(with_grad, list):
        raise GraphFormatError("a line of the trial log does not say which values it recorded.")
    if not all(value is None or isinstance(value, bool | int | float) for value in numbers.values()):
        raise GraphFormatError("a line of the trial log has something else than numbers.")
    return Recorded(numbers, {str(k): str(v) for k, v in devices.items()}, tuple(map(str, with_grad)))


def digest_of(case: Case) -> str:
    """Equal for the same graph and inputs of the same layout."""
    found = hashlib.sha256()
    for node in case.gm.graph.nodes:
        found.update(f"{node.op} {node.name} {_target(node.target)} {node.args} {node.kwargs}\n".encode())
    for value in case.inputs:
        found.update(f"{_layout(value)}\n".encode())
    return found.hexdigest()[:32]


def _layout(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    stride = value.stride() if value.layout is torch.strided else value.layout
    return f"{value.dtype} {tuple(value.shape)} {stride}"


def _target(target: Any) -> str:
    """A target without the address that some functions have in their text."""
    return str(getattr(target, "__qualname__", None) or target)
