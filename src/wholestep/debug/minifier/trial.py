"""One trial: apply an edit to a case and test whether it still fails. What runs here may raise, crash or hang.

    job -> record the values of nodes that become inputs -> apply the edit -> run the graph or the predicate -> outcome

The process that drives the search never runs a node itself (`isolation`), and reads the recorded values only if the
trial fails in the wanted way. Two failures are the same if type, message (without its digits) and node are equal.

The results of all trials of a search, on disk as they come: an interrupted search is resumed from them.

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
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.debug.minifier.search import Case, Edit, apply_edit
from wholestep.errors import GraphFormatError, MinifyError
from wholestep.ir.effects import is_communication
from wholestep.ir.io.tensor_file import can_write, read_tensors, write_tensors
from wholestep.ir.tensor_copies import copy_tensor, copy_values
from wholestep.passes.engine.pretend_ranks import PretendRanks

Predicate = Callable[[fx.GraphModule, list[Any]], bool]
_NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class TrialJob:
    """The inputs of a trial."""

    case: Case
    edit: Edit
    predicate: Predicate | None
    """None: the graph itself is run, and has to raise."""
    values: Path
    """Where recorded values go."""
    seed: int


@dataclass(frozen=True)
class Recorded:
    """Values of nodes that became inputs; tensors are in a file."""

    numbers: dict[str, Any]
    devices: dict[str, str]
    requires_grad: tuple[str, ...]

    def read(self, path: Path) -> dict[str, Any]:
        """The values by name of node."""
        values = dict(self.numbers)
        tensors = read_tensors(path) if self.devices else {}
        for name, device in self.devices.items():
            try:
                values[name] = tensors[name].to(device).requires_grad_(name in self.requires_grad)
            except (KeyError, RuntimeError) as error:
                raise GraphFormatError(
                    f"{path} does not hold the value of {name[:60]!r} that the log says it holds."
                ) from error
        return values


def perform(job: TrialJob, testing: Callable[[Recorded], None]) -> tuple[Outcome, Recorded]:
    """Run a trial in this process. `testing` is called with what was recorded, right before the test itself."""
    torch.manual_seed(job.seed)
    nothing = Recorded({}, {}, ())
    try:
        values = _record(job.case, job.edit) if job.edit.given else {}
        case = apply_edit(job.case, job.edit, values)
        own = copies_of(case.inputs)
    except Exception as error:
        # An edit that makes no valid graph (shapes that do not fit) is rejected, and no failure of the graph.
        return Outcome(BROKEN, message=f"{type(error).__name__}: {error}"), nothing
    recorded = _keep(values, job.values)
    testing(recorded)
    torch.manual_seed(job.seed)
    return _test(case.gm, own, job.predicate), recorded


def _test(gm: fx.GraphModule, inputs: list[Any], predicate: Predicate | None) -> Outcome:
    if predicate is None:
        return run_to_error(gm, inputs)
    try:
        return Outcome(TRUE if predicate(gm, inputs) else FALSE)
    except Exception as error:
        return raised(error)


def run_to_error(gm: fx.GraphModule, inputs: list[Any]) -> Outcome:
    """Run a graph node by node; the outcome names the node that raised."""
    runner = named_runner(gm)
    try:
        runner.run(*inputs, enable_io_processing=False)
    except Exception as error:
        return raised(error, runner.at)
    return Outcome(RETURNED)


class _Named(fx.Interpreter):
    """Knows which node it runs. Torch's own note on that stays out of messages, which have to be comparable."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.at = ""

    def run_node(self, n: fx.Node) -> Any:
        self.at = n.name
        return super().run_node(n)


class _NamedPretending(_Named, PretendRanks):
    """Collectives are simulated: no other process takes part in a trial."""


def named_runner(gm: fx.GraphModule) -> _Named:
    """What runs a graph in a trial."""
    communicates = any(node.op == "call_function" and is_communication(node.target) for node in gm.graph.nodes)
    return (_NamedPretending if communicates else _Named)(gm)


def _record(case: Case, edit: Edit) -> dict[str, Any]:
    """Values of the nodes that are to become inputs: those that are tensors or scalars, and that can be computed."""
    wanted = set(edit.given)
    nodes = case.nodes
    last = max(i for i, node in enumerate(nodes) if node.name in wanted or node.name == edit.before)
    runner = named_runner(case.gm)
    usable = _is_finite if all(map(_is_finite, case.inputs)) else _is_plain
    values: dict[str, Any] = {}
    env: dict[fx.Node, Any] = {}
    runner.env = env
    given = iter(copies_of(case.inputs))
    for node in nodes[: last + 1]:
        if node.name == edit.before:
            break
        if node.op == "placeholder":
            env[node] = next(given)
            continue
        try:
            env[node] = runner.run_node(node)
        except Exception:
            if edit.before is None:
                break  # the failure itself: what ran before it is recorded
            raise
        if node.name in wanted and edit.before is None and usable(env[node]):
            values[node.name] = copy_of(env[node])
    if edit.before is not None:
        values = {node.name: copy_of(v) for node, v in env.items() if node.name in wanted and usable(v)}
    return values


def _is_plain(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or can_write(value)


def _is_finite(value: Any) -> bool:
    """True if a value may become an input where all inputs are finite: NaN as an input hides its origin."""
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return can_write(value) and bool(value.isfinite().all())
    return _is_plain(value)


def copy_of(value: Any) -> Any:
    """A copy of a value that may be written."""
    if isinstance(value, Tensor):
        return copy_tensor(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, list | tuple):
        return type(value)(copy_of(item) for item in value)
    return value


def copies_of(values: Sequence[Any]) -> list[Any]:
    """The same for all inputs of a graph; those that share memory share it in the copies too."""
    return [value if isinstance(value, Tensor) else copy_of(value) for value in copy_values(values)]


def _keep(values: Mapping[str, Any], path: Path) -> Recorded:
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if tensors:
        write_tensors(path, {name: tensor.detach() for name, tensor in tensors.items()})
    return Recorded(
        {name: value for name, value in values.items() if name not in tensors},
        {name: str(tensor.device) for name, tensor in tensors.items()},
        tuple(name for name, tensor in tensors.items() if tensor.requires_grad),
    )


TRUE, FALSE, RETURNED, RAISED, SIGNAL, HANG, BROKEN = "true", "false", "returned", "raised", "signal", "hang", "broken"

_DIGITS = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Outcome:
    """How a run of a graph, or of a predicate on it, ended."""

    kind: str
    """true, false: of a predicate; returned, raised: of a graph; signal, hang; broken: the test did not begin."""
    type: str = ""
    message: str = ""
    node: str = ""
    """The node that raised."""
    types: tuple[str, ...] = ()
    """The error's class and those above it."""

    def __str__(self) -> str:
        where = f" at {self.node}" if self.node else ""
        first = self.message.splitlines()[0] if self.message else ""
        if self.kind == RAISED:
            return f"{self.type.rsplit('.', 1)[-1]}{where}: {first}"
        if self.kind == SIGNAL:
            return f"died of {self.message}"
        return {HANG: "did not end in time", TRUE: "the predicate holds", FALSE: "the predicate does not hold"}.get(
            self.kind, f"{self.kind} {first}".strip()
        )


def raised(error: BaseException, node: str = "") -> Outcome:
    """The outcome of an exception."""
    types = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__)
    return Outcome(RAISED, types[0], str(error)[:4000], node, types)


def same_failure(wanted: Outcome, found: Outcome) -> bool:
    """True if a smaller case fails as the first one did."""
    if wanted.kind != found.kind:
        return False
    if wanted.kind == SIGNAL:
        return wanted.message == found.message
    if wanted.kind == RAISED:
        same_node = not wanted.node or wanted.node == found.node
        return wanted.type == found.type and plain(wanted.message) == plain(found.message) and same_node
    return wanted.kind in (TRUE, HANG)


def plain(message: str) -> str:
    """A message without digits and addresses, which change with shapes and from run to run."""
    return re.sub(r"(#[, ]*)+", "#", _DIGITS.sub("#", message)).strip()


def is_asked_for(error: Any, found: Outcome) -> bool:
    """True if the first failure is the one that the user named: a class, an instance, or nothing."""
    if error is None:
        return True
    if found.kind != RAISED:
        return False
    if isinstance(error, type):
        return f"{error.__module__}.{error.__qualname__}" in found.types
    wanted = raised(error)
    return wanted.type == found.type and plain(wanted.message.split("\n\nWhile executing")[0]) == plain(found.message)


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
