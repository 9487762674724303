"""Find the part of a compiled step that is wrong: which graph, which pass, which region, which node.

    found = ws.debug.bisect(step, (model, optimizer, batch))
    found.stage, found.pass_name, found.region, found.node, found.repro_path

The stages of the step are repeated as they were: capture, passes (binary search, with the verifier in between),
lowering. At each stage the graph runs on copies of the inputs and is compared with the stage before. What is wrong is
minimised by a predicate of that stage (`PassIsWrong`, `MetaIsWrong`, `LowersWrong`). On several ranks all take the same
decisions: each rank asks the same questions in the same order, and what one of them finds wrong is wrong for all.
"""

from __future__ import annotations

import json
import operator
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from wholestep.debug import bisect_checks as checks
from wholestep.debug.bisect_checks import Verdict, judge_meta
from wholestep.debug.compare import Note, compare_versions, run_nodes
from wholestep.debug.minifier.isolation import apart
from wholestep.debug.minifier.minify import Minified, minify
from wholestep.debug.minifier.search import Case, Edit, apply_edit
from wholestep.debug.minifier.trial import Outcome, copy_of
from wholestep.debug.step_versions import CapturedCall, Version, captured_call, options_of, with_passes
from wholestep.errors import BisectError, MinifyError, WholestepError, called
from wholestep.ir.graph_walks import copy_graph
from wholestep.ir.io.repro import importable
from wholestep.ir.readable import format_node
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.lower.options import LowerOptions
from wholestep.lower.partial_lower import partial_lower
from wholestep.options import Options
from wholestep.passes.engine.contract import BoundPass
from wholestep.passes.engine.manager import apply_pass
from wholestep.torch_private.distributed import is_gloo
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
    """Find the stage and node at which a compiled step goes wrong on a call; prints and returns it.

    No object of the user changes. `folder`: for the minimised repro (`minimise=False`: none is written). `timeout`:
    seconds for each check. With a plan, call it on all ranks.
    """
    options = options_of(step)
    if options is None:
        raise BisectError(
            f"{called(step)} is not a compiled step.",
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
        self._call: CapturedCall = captured_call(self._fn, args, kwargs, options)
        self._right: list[str] = []

    def run(self) -> Found:
        """Check stage after stage, and stop at the first that is wrong."""
        found = self._capture() or self._passes() or self._lowering() or self._guard()
        return found or self._found("nothing", checks.RIGHT)

    def _found(self, stage: str, verdict: Verdict, **more: Any) -> Found:
        known = {name: verdict.get(name, "") for name in ("what", "node", "text", "was", "region")}
        return Found(stage, guard_key=self._key, right=tuple(self._right), **{**known, **more})

    def _ask(self, question: Callable[[Note], Verdict]) -> Verdict:
        """The verdict of this rank. A process that dies in a check has recorded at which node it was."""
        at = self._folder / "at.json"
        at.unlink(missing_ok=True)

        def note(node: fx.Node) -> None:
            at.write_text(json.dumps(checks.describe(node)), encoding="utf-8")

        answer = apart(lambda: question(note), self._timeout, self._folder / "question.log")
        if not isinstance(answer, Outcome):
            return answer
        known: Verdict = json.loads(at.read_text(encoding="utf-8")) if at.exists() else checks.wrong("", kind="died")
        return {**known, "what": f"the process {answer}"}

    def _agree(self, verdict: Verdict, order: Sequence[str]) -> Verdict:
        """The verdict for all ranks: wrong if it is wrong on one, with the first wrong node of any rank."""
        if self.ranks.size == 1:
            return verdict
        if not self.ranks.any(bool(verdict["wrong"])):
            return verdict
        place = list(order).index(verdict["node"]) if verdict.get("node") in order else None
        first = self.ranks.first(place)
        node = "" if first is None else order[first]
        if verdict["wrong"] and verdict.get("node", "") == node:
            return verdict
        return checks.wrong("another rank found it wrong", node, kind=verdict.get("kind", "value"))

    def _capture(self) -> Found | None:
        graph, inputs = self._call.step_graph, self._call.inputs
        order = [node.name for node in graph.gm.graph.nodes]
        verdict = self._agree(self._ask(lambda note: checks.judge_meta(graph.gm, inputs, note)), order)
        if verdict["wrong"]:
            path = self._shrink(graph, MetaIsWrong(verdict["kind"]), shapes=False)
            return self._found("capture", verdict, repro_path=path)
        if self.ranks.size == 1 and self._options.parallel is None and not cuda_is_initialized():
            verdict = self._ask(lambda _: checks.judge_eager(self._call, self._fn, self._args, self._kwargs))
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
                self._ask(lambda _: checks.judge_passes(base, inputs, passes[:count], _LEVEL))["wrong"]
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
        verdict = self._agree(self._ask(lambda note: checks.judge_one_pass(before, inputs, bound, _LEVEL, note)), order)
        path = self._shrink(before, PassIsWrong(bound, verdict.get("kind", "value"), _LEVEL))
        return self._found("pass", verdict, pass_name=bound.name, repro_path=path)

    def _lowering(self) -> Found | None:
        if self._options.lower != "inductor":
            return None
        graph = with_passes(self._call.step_graph, self._options.passes, 0)
        order = [node.name for node in graph.gm.graph.nodes]
        verdict = self._ask(lambda note: checks.judge_lowering(self._call, graph, self._options, note))
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
        verdict = self._agree(self._ask(lambda _: checks.judge_guard(kept, fresh, self._call.inputs)), order)
        if verdict["wrong"]:
            return self._found("guard", verdict)
        self._right.append("the graph of an earlier call is right for this one")
        return None

    def _shrink(self, graph: StepGraph, predicate: Any, *, shapes: bool = True) -> Path | None:
        """The repro of a graph that fails; None where it does not fail alone, or not on this rank."""
        if not self._minimise:
            return None
        found = self._minified(graph.gm, self._call.inputs, predicate, max_trials=_MOST_TRIALS, shapes=shapes)
        return None if found is None else found.repro_path

    def _minified(self, gm: fx.GraphModule, inputs: Sequence[Any], predicate: Any, **limits: Any) -> Minified | None:
        try:
            return minify(
                gm,
                inputs,
                predicate,
                folder=self._folder / "repro",
                progress=False,
                crash=True,
                hang=True,
                timeout=self._timeout,
                **limits,
            )
        except MinifyError as error:
            self._right.append(f"(no repro: {error.what})")
            return None

    def _shrink_region(self, graph: StepGraph, inside: list[str], outside: list[str]) -> tuple[Path, str] | None:
        case = region_case(graph.gm, self._call.inputs, inside, outside)
        lowers_wrong = LowersWrong(self._options.lower_options)
        found = self._minified(case.gm, case.inputs, lowers_wrong, max_trials=_MOST_COMPILED, shapes=False)
        if found is None:
            return None
        # `getitem` takes one of several results, and cannot be wrong.
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


@dataclass(frozen=True)
class Found:
    """Where a step goes wrong; falsy if nothing was found."""

    stage: str
    """nothing, eager, capture, pass, lowering or guard: the first stage that is wrong."""
    what: str = ""
    node: str = ""
    """The node that is wrong."""
    text: str = ""
    """That node as Python, with the user's line."""
    was: str = ""
    """What it was before the pass that is wrong, if that is another text."""
    guard_key: int | None = None
    """Which of `step.graphs` the call would run; None: it would be captured."""
    pass_name: str = ""
    region: str = ""
    repro_path: Path | None = None
    right: tuple[str, ...] = field(default=())
    """What was checked and is right."""

    def __bool__(self) -> bool:
        return self.stage != "nothing"

    def __str__(self) -> str:
        key = "a new graph" if self.guard_key is None else f"graph {self.guard_key} of the step"
        lines = [f"the call runs {key}"]
        lines += [f"  right   {each}" for each in self.right]
        if not self:
            return "\n".join([*lines, "nothing is wrong"])
        part = {"pass": f"pass {self.pass_name}", "lowering": f"lowering, {self.region or 'no region'}"}
        lines.append(f"  wrong   {part.get(self.stage, self.stage)}: {self.what}")
        lines += [f"  node    {self.text or self.node}"] if self.node else []
        lines += [f"  before  {self.was}"] if self.was else []
        lines += [f"  repro   {self.repro_path}"] if self.repro_path is not None else []
        return "\n".join(lines)


_NONE = 1 << 40


class Together:
    """The ranks of the default group; alone where there is none, or where the step has no plan."""

    def __init__(self, parallel: Any) -> None:
        ready = parallel is not None and dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if ready else 1
        self.rank = dist.get_rank() if self.size > 1 else 0

    def any(self, flag: bool) -> bool:
        """True if it is so on some rank."""
        return self.first(0 if flag else None) is not None

    def first(self, place: int | None) -> int | None:
        """The smallest place of all ranks; None where no rank has one."""
        if self.size == 1:
            return place
        device = torch.device("cpu") if is_gloo(dist.group.WORLD) else torch.device("cuda", torch.cuda.current_device())
        found = torch.tensor([_NONE if place is None else place], dtype=torch.int64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return None if int(found) == _NONE else int(found)


_RUN_PASS = """
gm = torch.fx.symbolic_trace(module)
print("before", gm(*make_inputs()))
{call})
gm.recompile()
print("after ", gm(*make_inputs()))
"""

_COMPILE = """
print("eager   ", module(*make_inputs()))
print("compiled", torch.compile(module)(*make_inputs()))
"""


def _is_literal(text: str) -> bool:
    return "<" not in text and " object at " not in text


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    made = fx.GraphModule(gm, copy_graph(gm.graph))
    made.meta.update(gm.meta)
    return made


class PassIsWrong:
    """A pass changes what a graph computes, fails verification, or raises: whichever it did on the whole graph."""

    def __init__(self, bound: BoundPass, kind: str, level: int) -> None:
        self._bound = bound
        self._kind = kind
        self._level = level

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> bool:
        """True if the pass is wrong on this graph too."""
        after, bound = _copy(gm), self._bound
        by_value = self._kind in ("value", "died")
        level = 0 if by_value else self._level
        try:
            apply_pass(bound.graph_pass, after, bound.args, bound.options or {}, allow_rerun=True, level=level)
        except WholestepError:
            return not by_value
        if not by_value:
            return False
        numerics = bound.graph_pass.contract.numerics
        found = compare_versions(Version("before", gm, tuple(inputs)), Version("after", after, tuple(inputs)), numerics)
        return found.first is not None and found.first.gap.kind != "raised"

    def script(self) -> tuple[str, str]:
        """Lines of a script that shows it, where the pass can be imported."""
        bound = self._bound
        found = importable(bound.graph_pass)
        given = [*map(repr, bound.args), *(f"{key}={value!r}" for key, value in (bound.options or {}).items())]
        if found is None or self._kind != "value" or not all(map(_is_literal, given)):
            return "", f"print(module(*inputs))  # {bound.name} is wrong on this graph"
        module, path = found.split(":")
        call = ", ".join([f"{path}.function(gm", *given])
        return f"from {module} import {path.split('.')[0]}", _RUN_PASS.format(call=call)


class MetaIsWrong:
    """Some node has another shape or dtype than its metadata says, or raises."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> bool:
        """True if this graph does too."""
        found = judge_meta(gm, inputs)
        return bool(found["wrong"]) and found["kind"] == self._kind


class LowersWrong:
    """A graph computes other values when it is compiled."""

    def __init__(self, options: LowerOptions) -> None:
        self._options = LowerOptions(1, True, options.remat, options.config)

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> bool:
        """True if this graph does."""
        lowered = partial_lower(_copy(gm), options=self._options)
        versions = Version("graph", gm, tuple(inputs)), Version("lowered", lowered, tuple(inputs))
        with torch.no_grad():  # regions run compiled only where autograd does not record
            return compare_versions(*versions, "reassociates").first is not None

    def script(self) -> tuple[str, str]:
        """Lines of a script that shows it, with torch alone."""
        return "", _COMPILE


def region_case(gm: fx.GraphModule, inputs: Sequence[Any], inside: list[str], outside: list[str]) -> Case:
    """A region of a graph by itself, with the values that it is given."""
    known = {node.name for node in gm.graph.nodes}
    wanted = {name for name in inside if name in known}
    values: dict[str, Any] = {}

    def visit(node: fx.Node, value: Any) -> bool:
        if node.name in wanted and node.op != "placeholder":
            values[node.name] = copy_of(value)
        return True

    run_nodes(gm, inputs, visit)
    ends = tuple(name for name in outside if name in known)
    return apply_edit(Case(gm, tuple(inputs)), Edit(outputs=ends, given=tuple(values)), values)
