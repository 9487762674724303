"""`minify`: the smallest graph and inputs (symbolic ones as ints) that still fail, and a script that shows it.

    found = ws.debug.minify(gm, inputs, predicate)               predicate(gm, inputs) -> bool
    found = ws.debug.minify(gm, inputs, error=RuntimeError)      the graph raises: same type, message and node
    found.gm, found.inputs, found.repro_path

Every trial is isolated (`isolation`), so that a graph which kills its process can be minimised too. The result is
written as `repro.py`, whose last line says whether the failure was reproduced.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import fx
from torch.fx.graph import CodeGen

from wholestep.debug.minifier.isolation import Isolation, place_for
from wholestep.debug.minifier.search import Case, Edit, Search, apply_edit
from wholestep.debug.minifier.trial import (
    HANG,
    RAISED,
    SIGNAL,
    TRUE,
    Outcome,
    Predicate,
    TrialJob,
    TrialLog,
    TrialResult,
    is_asked_for,
    same_failure,
)
from wholestep.errors import MinifyError, OptionError, called, invalid_value
from wholestep.ir.graph_walks import copy_graph
from wholestep.ir.io.dump import write_repro
from wholestep.ir.io.repro import importable, source_of
from wholestep.torch_private.fx_graphs import has_plain_codegen, lazy_graph_module, pytree

log = logging.getLogger("wholestep.debug")

_SEED = 0


@dataclass(frozen=True)
class Minified:
    """A minimised graph that fails."""

    gm: fx.GraphModule
    inputs: list[Any]
    repro_path: Path
    """A program that reproduces the failure, in a dump (`ws.compilers.read_dump`); its folder has the trial log too."""
    failure: str
    """How it fails."""
    trials: int
    left_out: tuple[str, ...] = ()
    """What the program could not be given: modules and functions that have no form as text."""

    @property
    def num_nodes(self) -> int:
        """How many nodes are left, with placeholders and output."""
        return len(self.gm.graph.nodes)

    def __str__(self) -> str:
        return f"{self.num_nodes} nodes after {self.trials} trials: {self.failure}\n{self.repro_path}"


def minify(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    predicate: Predicate | BaseException | type[BaseException] | None = None,
    *,
    error: BaseException | type[BaseException] | None = None,
    folder: str | Path | None = None,
    timeout: float = 60.0,
    crash: bool = False,
    hang: bool = False,
    shapes: bool = True,
    isolate: str = "auto",
    progress: bool | None = None,
    max_trials: int | None = None,
    assume_fails: bool = False,
    longest_run: int | None = None,
) -> Minified:
    """Minimise a graph that fails.

    It fails if `predicate(gm, inputs)` is true, or, without one, if running it raises (`error`: what it has to raise;
    every smaller graph has to raise the same at the same node). `crash` and `hang`: dying of a signal and running
    longer than `timeout` seconds are failures too. `folder`: where `repro.py` goes; an interrupted search there is
    resumed. `isolate`: "fork", "worker" (a process, for CUDA), "none", or "auto". `progress`: None shows it on a
    terminal. `max_trials`: stop with what there is. `assume_fails`: with a predicate, do not try the whole graph first.
    `longest_run`: how many nodes become inputs at once, at most.
    """
    if isinstance(predicate, BaseException) or (isinstance(predicate, type) and issubclass(predicate, BaseException)):
        predicate, error = None, predicate
    _check(gm, predicate, timeout)
    where = Path(tempfile.mkdtemp(prefix="wholestep-minify-") if folder is None else folder)
    where.mkdir(parents=True, exist_ok=True)
    case = _case(gm, inputs)
    test: Any = predicate
    job = TrialJob(case, Edit(), test, where / "values.safetensors", _SEED)
    place = place_for(isolate, job, timeout, where / "trial.log")
    try:
        with MinifyProgress(progress, case.size[0]) as bar:
            run = _Minification(case, test, place, TrialLog(where, case), bar, max_trials)
            run.begin(error, crash, hang, assume_fails=assume_fails)
            run.search(shapes, longest_run)
    finally:
        place.close()
    return _finish(run, where, test)


def _finish(run: _Minification, folder: Path, predicate: Predicate | None) -> Minified:
    case = run.case
    case.gm.recompile()
    assert run.wanted is not None
    path, left_out = write_case(folder, case, run.wanted, predicate)
    log.info("%d nodes after %d trials: %s", len(case.nodes), run.trials, path)
    return Minified(case.gm, list(case.inputs), path, str(run.wanted), run.trials, left_out)


def _check(gm: Any, predicate: Any, timeout: Any) -> None:
    if not isinstance(gm, fx.GraphModule):
        raise OptionError(f"{called(gm)} is not a graph module.", fix="give an fx.GraphModule (StepGraph: its .gm).")
    if predicate is not None and not callable(predicate):
        raise invalid_value("predicate", predicate, "give a function of (gm, inputs), or an error.")
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise invalid_value("timeout", timeout, "use a number of seconds.")


def _case(gm: fx.GraphModule, inputs: Sequence[Any]) -> Case:
    """A copy with flat inputs, whatever calling convention the graph has."""
    values = list(inputs) if has_plain_codegen(gm.graph) else pytree.tree_leaves(tuple(inputs))
    places = gm.graph.find_nodes(op="placeholder")
    if len(values) != len(places):
        raise MinifyError(
            f"{len(values)} inputs for a graph with {len(places)} placeholders.",
            fix="give one value for each placeholder, in order.",
        )
    graph = copy_graph(gm.graph)
    graph.set_codegen(CodeGen())
    symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
    plain = [value.node.hint if isinstance(value, symbolic) else value for value in values]
    return Case(lazy_graph_module(gm, graph, "Case"), tuple(plain))


class _Stop(Exception):  # noqa: N818 (not an error)
    """`max_trials` is reached."""


class _Minification:
    """A search with its trial log."""

    def __init__(
        self,
        case: Case,
        predicate: Predicate | None,
        place: Isolation,
        answers: TrialLog,
        progress: MinifyProgress,
        max_trials: int | None,
    ) -> None:
        self.case = case
        self.trials = 0
        self.wanted: Outcome | None = None
        self._predicate = predicate
        self._place = place
        self._answers = answers
        self._progress = progress
        self._most = max_trials

    def begin(self, error: Any, crash: bool, hang: bool, *, assume_fails: bool = False) -> None:
        """Find out how the whole graph fails: only the same failure counts from then on."""
        known = self._answers.first
        if known is None and assume_fails and self._predicate is not None:
            self.wanted = Outcome(TRUE)
            self._answers.begin(self.wanted)
            return
        found = known or self._ask(Edit())[0]
        allowed = {TRUE} if self._predicate is not None else {RAISED}
        allowed |= ({SIGNAL} if crash else set()) | ({HANG} if hang else set())
        if found.kind not in allowed:
            raise self._does_not_fail(found)
        if not is_asked_for(error, found) and known is None:
            raise MinifyError(
                f"the graph fails in another way than was named: {found}.",
                fix="name that error, or none: then whatever it raises counts.",
            )
        self.wanted = found
        if known is None:
            self._answers.begin(found)

    def _does_not_fail(self, found: Outcome) -> MinifyError:
        what = f"the graph does not fail: {found}."
        fix = "check the predicate and the inputs; what a trial printed is in trial.log."
        if found.kind == SIGNAL:
            what, fix = f"the graph {found}, which is not counted as a failure.", "say crash=True."
        elif found.kind == HANG:
            what, fix = "the graph did not end in time, which is not counted.", "say hang=True, or a longer timeout=."
        elif found.kind == RAISED:
            what, fix = f"the predicate itself raised: {found}.", "let it return True or False for the whole graph."
        return MinifyError(what, fix=fix, node=found.node)

    def search(self, shapes: bool, longest_run: int | None = None) -> None:
        try:
            Search(lambda: self.case, self._try, shapes, longest_run).run()
        except _Stop:
            log.info("stopped after %d trials", self.trials)

    def _try(self, stage: str, edit: Edit) -> bool:
        self._progress.show(stage, len(self.case.gm.graph.nodes), self.trials)
        answer = self._answers.known(edit)
        if answer is None:
            if self._most is not None and self.trials >= self._most:
                raise _Stop
            values = self._answers.values_path()
            outcome, recorded = self._ask(edit, values)
            assert self.wanted is not None
            answer = TrialResult(same_failure(self.wanted, outcome), recorded, values)
            self._answers.add(edit, answer)
            log.debug("%s: %s", stage, outcome)
        if answer.fails:
            self.case = apply_edit(self.case, edit, answer.recorded.read(answer.values))
        return answer.fails

    def _ask(self, edit: Edit, values: Path | None = None) -> Any:
        self.trials += 1
        job = TrialJob(self.case, edit, self._predicate, values or self._answers.values_path(), _SEED)
        return self._place.run(job)


def minifier(
    fail_f: fx.GraphModule,
    inps: Sequence[Any],
    module_fails: Callable[[fx.GraphModule, Sequence[Any]], bool],
    dump_state: Callable[[fx.GraphModule, Sequence[Any]], Any] | None = None,
    *,
    save_dir: str | None = None,
    offload_to_disk: bool = False,
    skip_offload: bool = False,
    skip_sanity: bool = False,
    max_granularity: int | None = None,
) -> tuple[fx.GraphModule, list[Any]]:
    """The smallest graph and inputs that `module_fails` is true of: `ws.debug.minify`, called as functorch's.

    `dump_state` is given the result; without one, the path of its `repro.py` is printed. `save_dir` is minify's folder:
    values of nodes are always files there, and an interrupted search continues from them. So `offload_to_disk`
    only needs a `save_dir`, and `skip_offload` changes nothing. `skip_sanity`: the whole graph is not tried first.
    `max_granularity`: the longest run of nodes that is replaced at once, a power of two.
    """
    if offload_to_disk and save_dir is None:
        raise OptionError("offload_to_disk=True without a save_dir.", fix="give the folder: save_dir=...")
    if max_granularity is not None and (max_granularity < 1 or max_granularity & (max_granularity - 1)):
        raise OptionError(f"max_granularity {max_granularity} not power of two", fix="use 1, 2, 4, 8, ...")
    found = minify(fail_f, inps, module_fails, folder=save_dir, assume_fails=skip_sanity, longest_run=max_granularity)
    if dump_state is None:
        print(found)
    else:
        dump_state(found.gm, found.inputs)
    return found.gm, found.inputs


_EVERY = 0.1
_WIDTH = 24


class MinifyProgress:
    """A bar that fills as the graph becomes smaller. The line is gone at the end."""

    def __init__(self, wanted: bool | None, nodes: int) -> None:
        self._shown = sys.stderr.isatty() if wanted is None else wanted
        self._all = max(nodes, 1)
        self._last = 0.0
        self._started = time.monotonic()

    def show(self, stage: str, nodes: int, trials: int) -> None:
        """Show where the search is, at most ten times a second."""
        now = time.monotonic()
        if not self._shown or now - self._last < _EVERY:
            return
        self._last = now
        full = round(_WIDTH * (1 - nodes / self._all))
        bar = "━" * full + "─" * (_WIDTH - full)
        text = f"\r{bar} {nodes} of {self._all} nodes, {trials} trials, {now - self._started:.0f} s, {stage}"
        sys.stderr.write(f"{text:<100}")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown:
            sys.stderr.write("\r" + " " * 100 + "\r")
            sys.stderr.flush()


_RAISES = """
try:
    result = module(*inputs)
except {name} as error:
    print("REPRODUCED:", type(error).__name__, str(error).splitlines()[0])
else:
    raise SystemExit("NOT REPRODUCED: the graph returned")
"""

_ASKS = """
module = torch.fx.symbolic_trace(module)
if not {name}(module, inputs):
    raise SystemExit("NOT REPRODUCED")
print("REPRODUCED")
"""


_NO_PREDICATE = "the predicate, which is a lambda, or needs more than modules from around it"
_UNASKED = """
print(module(*inputs))
print("NOT ASKED: put the predicate here; it has no form as text")
"""


def write_case(
    folder: Path, case: Case, failure: Outcome, predicate: Predicate | None, *, title: str = "", check: str = ""
) -> tuple[Path, tuple[str, ...]]:
    """Write `repro.py`; returns its path and what could not be written."""
    setup, lines = _predicate(predicate) if predicate is not None else ("", "")
    if not check:
        check = lines or _check_lines(failure)
    title = title or f"The smallest graph that fails as the whole one did: {failure}"
    path, left_out = write_repro(folder, case.gm, case.inputs, title=title, check=check, setup=setup, seed=_SEED)
    return path, (*left_out, *([_NO_PREDICATE] if check == _UNASKED else []))


def _check_lines(failure: Outcome) -> str:
    if failure.kind == RAISED:
        module, _, name = failure.type.rpartition(".")
        known = module in ("builtins", "torch") or module.startswith("torch.")
        shown = name if module == "builtins" else failure.type
        return _RAISES.format(name=shown if known and "<" not in shown else "Exception")
    ends = {SIGNAL: f"dies: {failure.message}", HANG: "does not end"}.get(failure.kind, "")
    return "print(module(*inputs))" + (f"  # {ends}" if ends else "")


def _predicate(predicate: Predicate) -> tuple[str, str]:
    """Lines that define the predicate, and lines that call it."""
    script = getattr(predicate, "script", None)
    if script is not None:
        setup, check = script()
        return str(setup), str(check)
    ask = _ASKS
    found = importable(predicate)
    if found is not None:
        module, path = found.split(":")
        first, *_ = path.split(".")
        return f"from {module} import {first}", ask.format(name=path)
    source = source_of(predicate)
    if source is not None:
        return source, ask.format(name=predicate.__name__)
    return "", _UNASKED
