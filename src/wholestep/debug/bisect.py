"""A compiled step that is wrong narrows itself: which graph, which pass, which region, which node.

    found = ws.debug.bisect(step, (model, optimizer, batch))
    found.stage, found.pass_name, found.region, found.node, found.repro_path

The way of the step is walked as it was: capture, passes (binary search, with the verifier between), lowering. At each
part the graph runs on copies of the inputs and is held against the part before. On several ranks all take the same
decisions (`ranks`).
"""

from __future__ import annotations

import json
import operator
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from wholestep.debug import judge
from wholestep.debug.found import Found
from wholestep.debug.judge import Verdict
from wholestep.debug.minifier.failure import Outcome
from wholestep.debug.minifier.isolation import apart
from wholestep.debug.minifier.minify import minify
from wholestep.debug.ranks import Together
from wholestep.debug.runs import Note
from wholestep.debug.shrink import LowersWrong, MetaIsWrong, PassIsWrong, region_case
from wholestep.debug.versions import Call, capture_call, options_of, with_passes
from wholestep.errors import BisectError, MinifyError
from wholestep.ir.readable import format_node
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.options import Options
from wholestep.torch_private.guard_checks import cuda_is_initialized

_LEVEL = 2
_MOST_TRIALS = 80
_MOST_COMPILED = 40
"""Trials that compile take seconds each."""


def bisect(
    step: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    folder: str | Path | None = None,
    timeout: float = 300.0,
    minimise: bool = True,
    quiet: bool = False,
) -> Found:
    """Find out where a compiled step goes wrong on a call; prints and returns it.

    Nothing of the user's changes. `folder`: for the minimised repro (`minimise=False`: none is made). `timeout`:
    seconds for each question. With a plan, call it on all ranks.
    """
    options = options_of(step)
    if options is None:
        raise BisectError(
            f"a {type(step).__name__} is not a compiled step.",
            fix="give what ws.compile returned.",
        )
    where = Path(tempfile.mkdtemp(prefix="wholestep-bisect-") if folder is None else folder)
    where.mkdir(parents=True, exist_ok=True)
    search = _Bisect(step, options, tuple(args), kwargs or {}, where, timeout, minimise)
    found = search.run()
    if not quiet and search.ranks.rank == 0:
        print(found)
    return found


class _Bisect:
    def __init__(
        self,
        step: Any,
        options: Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        folder: Path,
        timeout: float,
        minimise: bool,
    ) -> None:
        self.ranks = Together(options.parallel)
        self._options = options
        self._folder = folder / f"rank{self.ranks.rank}" if self.ranks.size > 1 else folder
        self._folder.mkdir(exist_ok=True)
        self._timeout = timeout
        self._minimise = minimise
        self._fn = step.__wholestep_function__
        self._args, self._kwargs = args, kwargs
        instance = getattr(step, "_instance", None)
        whole = (instance, *args) if instance is not None else args
        self._kept, self._key = _kept_graph(getattr(step, "_step", step), whole, kwargs)
        self._call: Call = capture_call(self._fn, args, kwargs, options)
        self._right: list[str] = []

    def run(self) -> Found:
        """Walk the way of the step, and stop at what is wrong."""
        found = self._capture() or self._passes() or self._lowering() or self._guard()
        return found or self._found("nothing", judge.RIGHT)

    def _found(self, stage: str, verdict: Verdict, **more: Any) -> Found:
        known = {name: verdict.get(name, "") for name in ("what", "node", "text", "was", "region")}
        return Found(stage, guard_key=self._key, right=tuple(self._right), **{**known, **more})

    def _ask(self, question: Callable[[Note], Verdict]) -> Verdict:
        """An answer of this rank. A process that dies of the question has said at which node it was."""
        at = self._folder / "at.json"
        at.unlink(missing_ok=True)

        def note(node: fx.Node) -> None:
            at.write_text(json.dumps(judge.describe(node)), encoding="utf-8")

        answer = apart(lambda: question(note), self._timeout, self._folder / "question.log")
        if not isinstance(answer, Outcome):
            return answer
        known: Verdict = json.loads(at.read_text(encoding="utf-8")) if at.exists() else judge.wrong("", kind="died")
        return {**known, "what": f"the process {answer}"}

    def _agree(self, verdict: Verdict, order: Sequence[str]) -> Verdict:
        """The verdict for all ranks: wrong if it is on one, with the node that comes first on any."""
        if self.ranks.size == 1:
            return verdict
        if not self.ranks.any(bool(verdict["wrong"])):
            return verdict
        place = list(order).index(verdict["node"]) if verdict.get("node") in order else None
        first = self.ranks.first(place)
        node = "" if first is None else order[first]
        if verdict["wrong"] and verdict.get("node", "") == node:
            return verdict
        return judge.wrong("another rank found it wrong", node, kind=verdict.get("kind", "value"))

    def _capture(self) -> Found | None:
        graph, inputs = self._call.step_graph, self._call.inputs
        order = [node.name for node in graph.gm.graph.nodes]
        verdict = self._agree(self._ask(lambda note: judge.judge_meta(graph.gm, inputs, note)), order)
        if verdict["wrong"]:
            path = self._shrink(graph, MetaIsWrong(verdict["kind"]), shapes=False)
            return self._found("capture", verdict, repro_path=path)
        if self.ranks.size == 1 and self._options.parallel is None and not cuda_is_initialized():
            verdict = self._ask(lambda _: judge.judge_eager(self._call, self._fn, self._args, self._kwargs))
            if verdict["wrong"]:
                return self._found("eager" if verdict["kind"] == "eager" else "capture", verdict)
            self._right.append("the captured graph computes what the function computes")
        else:
            self._right.append("the captured graph gives what its metadata say")
        return None

    def _passes(self) -> Found | None:
        passes = self._options.passes
        if not passes:
            return None
        base, inputs = self._call.step_graph, self._call.inputs

        def is_wrong(count: int) -> bool:
            return self.ranks.any(
                self._ask(lambda _: judge.judge_passes(base, inputs, passes[:count], _LEVEL))["wrong"]
            )

        if not is_wrong(len(passes)):
            self._right.append(f"{len(passes)} passes: {', '.join(bound.name for bound in passes)}")
            return None
        right, wrong = 0, len(passes)
        while wrong - right > 1:
            middle = (right + wrong) // 2
            right, wrong = (right, middle) if is_wrong(middle) else (middle, wrong)
        if right:
            self._right.append(f"{right} passes: {', '.join(bound.name for bound in passes[:right])}")
        bound = passes[right]
        before = with_passes(base, passes[:right], 0)
        order = [node.name for node in before.gm.graph.nodes]
        verdict = self._agree(self._ask(lambda note: judge.judge_one_pass(before, inputs, bound, _LEVEL, note)), order)
        path = self._shrink(before, PassIsWrong(bound, verdict.get("kind", "value"), _LEVEL))
        return self._found("pass", verdict, pass_name=bound.name, repro_path=path)

    def _lowering(self) -> Found | None:
        if self._options.lower != "inductor":
            return None
        graph = with_passes(self._call.step_graph, self._options.passes, 0)
        order = [node.name for node in graph.gm.graph.nodes]
        verdict = self._ask(lambda note: judge.judge_lowering(self._call, graph, self._options, note))
        inside, outside = verdict.get("inputs", []), verdict.get("outputs", [])
        verdict = self._agree(verdict, order)
        if not verdict["wrong"]:
            self._right.append("compiled regions")
            return None
        path = None
        if self._minimise and outside:
            small = self._shrink_region(graph, inside, outside)
            if small is not None:
                path, node = small
                text = next((format_node(each) for each in graph.gm.graph.nodes if each.name == node), "")
                verdict = {**verdict, "node": node, "text": text}
        return self._found("lowering", verdict, repro_path=path)

    def _guard(self) -> Found | None:
        kept = self._kept
        if kept is None:
            return None
        fresh = with_passes(self._call.step_graph, self._options.passes, 0)
        order = [node.name for node in kept.gm.graph.nodes]
        verdict = self._agree(self._ask(lambda _: judge.judge_guard(kept, fresh, self._call.inputs)), order)
        if verdict["wrong"]:
            return self._found("guard", verdict)
        self._right.append("the graph of an earlier call is right for this one")
        return None

    def _shrink(self, graph: StepGraph, predicate: Any, *, shapes: bool = True) -> Path | None:
        """The repro of a graph that fails; None where it does not fail by itself, or on this rank."""
        if not self._minimise:
            return None
        try:
            found = minify(
                graph.gm,
                self._call.inputs,
                predicate,
                folder=self._folder / "repro",
                progress=False,
                crash=True,
                hang=True,
                max_trials=_MOST_TRIALS,
                shapes=shapes,
                timeout=self._timeout,
            )
        except MinifyError as error:
            self._right.append(f"(no repro: {error.what})")
            return None
        return found.repro_path

    def _shrink_region(self, graph: StepGraph, inside: list[str], outside: list[str]) -> tuple[Path, str] | None:
        case = region_case(graph.gm, self._call.inputs, inside, outside)
        try:
            found = minify(
                case.gm,
                case.inputs,
                LowersWrong(self._options.lower_options),
                folder=self._folder / "repro",
                progress=False,
                crash=True,
                hang=True,
                max_trials=_MOST_COMPILED,
                shapes=False,
                timeout=self._timeout,
            )
        except MinifyError as error:
            self._right.append(f"(no repro: {error.what})")
            return None
        # One of several results is taken by a node of its own, which cannot be wrong.
        calls = [n for n in found.gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        return found.repro_path, calls[-1].name if calls else ""


def _kept_graph(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[StepGraph | None, int | None]:
    """The graph that the step would run for a call, and its number. The step itself stays as it is."""
    last = step._last
    leaves, structure = leaves_of((args, kwargs))
    try:
        found = step._find(leaves, structure)
    finally:
        step._last = last
    if found is None:
        return None, None
    return found[0].step_graph, step._entries.index(found[0])
