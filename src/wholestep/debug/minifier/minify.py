"""The smallest graph and inputs that still fail.

    found = ws.debug.minify(gm, inputs, predicate)               predicate(gm, inputs) -> bool
    found = ws.debug.minify(gm, inputs, error=RuntimeError)      the graph raises: same type, message and node
    found.gm, found.inputs, found.repro_path

Every trial runs by itself (`isolation`), so that a graph which kills its process can be made smaller too.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from wholestep.debug.minifier.answers import Answer, Answers
from wholestep.debug.minifier.case import Case, Edit, apply_edit
from wholestep.debug.minifier.failure import HANG, RAISED, SIGNAL, TRUE, Outcome, is_asked_for, same_failure
from wholestep.debug.minifier.isolation import Place, place_for
from wholestep.debug.minifier.progress import Progress
from wholestep.debug.minifier.report import write_case
from wholestep.debug.minifier.search import Search
from wholestep.debug.minifier.trial import Job, Predicate
from wholestep.errors import MinifyError, OptionError, invalid_value
from wholestep.ir.graphs import copy_graph
from wholestep.torch_private.fx_graphs import has_plain_codegen, lazy_graph_module
from wholestep.torch_private.pytrees import pytree

log = logging.getLogger("wholestep.debug")

_SEED = 0


@dataclass(frozen=True)
class Minified:
    """What is left of a graph that fails."""

    gm: fx.GraphModule
    inputs: list[Any]
    repro_path: Path
    """A script that shows the failure; its folder also keeps the state of the search."""
    failure: str
    """How it fails."""
    trials: int
    left_out: tuple[str, ...] = ()
    """What the script could not be given: modules and functions that have no form as text."""

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
) -> Minified:
    """Make a graph that fails as small as possible.

    It fails if `predicate(gm, inputs)` is true, or, without one, if running it raises (`error`: what it has to raise;
    every smaller graph has to raise the same at the same node). `crash` and `hang`: dying of a signal and running
    longer than `timeout` seconds are failures too. `folder`: where `repro.py` goes; a search that was interrupted there
    goes on. `isolate`: "fork", "worker" (a process, for CUDA), "none", or "auto". `progress`: None shows it on a
    terminal. `max_trials`: stop with what there is.
    """
    if isinstance(predicate, BaseException) or (isinstance(predicate, type) and issubclass(predicate, BaseException)):
        predicate, error = None, predicate
    _check(gm, predicate, timeout)
    where = Path(tempfile.mkdtemp(prefix="wholestep-minify-") if folder is None else folder)
    where.mkdir(parents=True, exist_ok=True)
    case = _case(gm, inputs)
    test: Any = predicate
    job = Job(case, Edit(), test, where / "values.safetensors", _SEED)
    place = place_for(isolate, job, timeout, where / "trial.log")
    try:
        with Progress(progress, case.size[0]) as bar:
            run = _Run(case, test, place, Answers(where, case), bar, max_trials)
            run.begin(error, crash, hang)
            run.search(shapes)
    finally:
        place.close()
    return _finish(run, where, test)


def _finish(run: _Run, folder: Path, predicate: Predicate | None) -> Minified:
    case = run.case
    case.gm.recompile()
    assert run.wanted is not None
    path, left_out = write_case(folder, case, run.wanted, predicate)
    log.info("%d nodes after %d trials: %s", len(case.nodes), run.trials, path)
    return Minified(case.gm, list(case.inputs), path, str(run.wanted), run.trials, left_out)


def _check(gm: Any, predicate: Any, timeout: Any) -> None:
    if not isinstance(gm, fx.GraphModule):
        raise OptionError(
            f"a {type(gm).__name__} is no graph module.", fix="give an fx.GraphModule (StepGraph: its .gm)."
        )
    if predicate is not None and not callable(predicate):
        raise invalid_value("predicate", predicate, "give a function of (gm, inputs), or an error.")
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise invalid_value("timeout", timeout, "use a number of seconds.")


def _case(gm: fx.GraphModule, inputs: Sequence[Any]) -> Case:
    """A copy that takes its inputs one by one, whatever calling convention the graph has."""
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


class _Stop(Exception):  # noqa: N818 (it is no error)
    """As many trials as were allowed."""


class _Run:
    """A search with its answers."""

    def __init__(
        self,
        case: Case,
        predicate: Predicate | None,
        place: Place,
        answers: Answers,
        progress: Progress,
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

    def begin(self, error: Any, crash: bool, hang: bool) -> None:
        """Find out how the whole graph fails: nothing else counts from then on."""
        known = self._answers.first
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

    def search(self, shapes: bool) -> None:
        try:
            Search(lambda: self.case, self._try, shapes).run()
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
            answer = Answer(same_failure(self.wanted, outcome), recorded, values)
            self._answers.add(edit, answer)
            log.debug("%s: %s", stage, outcome)
        if answer.fails:
            self.case = apply_edit(self.case, edit, answer.recorded.read(answer.values))
        return answer.fails

    def _ask(self, edit: Edit, values: Path | None = None) -> Any:
        self.trials += 1
        job = Job(self.case, edit, self._predicate, values or self._answers.values_path(), _SEED)
        return self._place.run(job)
