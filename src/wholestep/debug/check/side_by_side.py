"""One call twice from the same state: eager, then compiled.

    save the state                  a graph is captured first, so that a refusal comes before anything runs
    eager, observed                 the reference
    put the state back
    (eager moved by rounding, and in float64; put back)      where the compiled step may round differently
    compiled, observed              its results stay if they agree
    different: put the state back

Whatever raises on the way, the state is put back.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from wholestep.capture.trace import steps_as_functions
from wholestep.debug.check.findings import Finding, Status, Tolerance, counts, findings
from wholestep.debug.check.observation import Observation, observe
from wholestep.debug.check.reachable import Part, roots_of
from wholestep.debug.check.reference import NoReference, in_float64, move_by_rounding, usable_reference
from wholestep.debug.check.snapshot import Roots, Snapshot
from wholestep.debug.numbers import eps_of
from wholestep.errors import CheckError, WholestepError
from wholestep.passes.engine.contract import Numerics


@dataclass(frozen=True)
class StepCall:
    """The function of a step and the arguments of one call."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def roots(self) -> Roots:
        """Where a walk over its state starts."""
        return roots_of(self.fn, self.args, self.kwargs)


@dataclass
class Compared:
    """What one call came to."""

    findings: list[Finding]
    counts: dict[Part, int]
    numerics: Numerics
    reference: str
    """Why there is no float64 reference; "" where there is one, or none is needed."""
    shared: dict[str, str]
    result: Any = None
    """What the compiled step returned."""

    @property
    def different(self) -> list[Finding]:
        """What is not explained by rounding."""
        return [each for each in self.findings if each.status is Status.DIFFERENT]


def compare_call(
    step: Any,
    call: StepCall,
    *,
    in_double: bool = True,
    more_roots: Roots | None = None,
    on_difference: Callable[[Compared], None] | None = None,
) -> Compared:
    """Run a call in eager and compiled. If they differ, or anything raises, the state is as before the call.

    `on_difference` is called then, in that state.
    """
    roots = [*call.roots, *(more_roots or [])]
    step.flush()
    before = Snapshot(roots)
    try:
        step._ready(call.fn, call.args, call.kwargs)
        before.restore()
        eager = _eager(before, roots, call)
        numerics = _numerics(step.options)
        tolerance, why = _tolerance(step, before, roots, call, numerics, eager, in_double)
        result = run_compiled(step, call)
        now = observe(roots, result, copy=False)
        found = findings(eager, now, tolerance)
        shared = {**before.reached.shared, **before.unsaved}
        compared = Compared(found, counts(now), numerics, why, shared, result)
        if compared.different:
            compared.findings = _without_unstable(before, roots, call, eager, compared, tolerance)
    except BaseException:
        before.restore()
        raise
    if compared.different:
        before.restore()
        try:
            if on_difference is not None:
                on_difference(compared)
        finally:
            before.restore()
    return compared


def _without_unstable(
    before: Snapshot, roots: Roots, call: StepCall, eager: Observation, compared: Compared, tolerance: Tolerance
) -> list[Finding]:
    """The findings again, where values that eager computes differently from run to run may differ as much.

    Kernels that add in the order of threads do that. The state is again the one that the compiled step left.
    """
    after = Snapshot([*roots, ("result", compared.result)])
    now = observe(roots, compared.result, copy=True)
    before.restore()
    again = observe(roots, run_eager(call), copy=True)
    unstable = {each.path for each in findings(eager, again, Tolerance("exact"))}
    after.restore()
    if not unstable:
        return compared.findings
    loose = Tolerance("reassociates", tolerance.eps, again)
    judged = {each.path: each for each in findings(eager, now, loose) if each.path in unstable}
    return [_as_unstable(judged.get(each.path, each)) if each.path in unstable else each for each in compared.findings]


def _as_unstable(finding: Finding) -> Finding:
    return replace(finding, text=f"{finding.text}; eager differs from itself from run to run")


def _eager(before: Snapshot, roots: Roots, call: StepCall) -> Observation:
    seen = observe(roots, run_eager(call), copy=True)
    advanced = before.advanced_iterators()
    if advanced:
        raise CheckError(
            f"the step takes items from {', '.join(advanced)}, which cannot be put back for a second run.",
            fix="take the items outside of the step, and pass them as arguments.",
        )
    before.restore()
    return seen


def run_compiled(step: Any, call: StepCall) -> Any:
    """The compiled step, with nothing left pending."""
    try:
        result = type(step)._run(step, call.fn, call.args, dict(call.kwargs))
        step.flush()
        return result
    except WholestepError:
        raise
    except Exception as error:
        raise CheckError(
            f"the compiled step raises {type(error).__name__}: {error}. Eager does not.",
            fix="ws.debug.bisect(step, args) finds the part of the way that raises.",
        ) from error


def run_eager(call: StepCall) -> Any:
    """The function itself, in a context of its own: what it sets in context variables does not stay."""
    with steps_as_functions():
        return contextvars.copy_context().run(call.fn, *call.args, **call.kwargs)


def _numerics(options: Any) -> Numerics:
    """What the way of the step promises."""
    promised = {bound.graph_pass.contract.numerics for bound in options.passes}
    if options.lower == "inductor":
        promised.add("reassociates")
    return "changes" if "changes" in promised else "reassociates" if "reassociates" in promised else "exact"


def _tolerance(
    step: Any, before: Snapshot, roots: Roots, call: StepCall, numerics: Numerics, eager: Observation, in_double: bool
) -> tuple[Tolerance, str]:
    if numerics == "exact":
        return Tolerance(numerics), ""
    nodes = [] if step.last is None else step.last.gm.graph.nodes
    values = (node.meta.get("val") for node in nodes)
    eps = max((eps_of(value) for value in values), default=0.0)
    move_by_rounding(before.reached)
    try:
        noise = observe(roots, run_eager(call), copy=True)
    except Exception:
        noise = None  # the step looks at its numbers, and refuses those next to them
    before.restore()
    reference, why = None, "not asked for"
    if in_double:
        try:
            reference = observe(roots, in_float64(before.reached, lambda: run_eager(call)), copy=True)
            why = usable_reference(eager, reference)
        except NoReference as error:
            why = str(error)
        before.restore()
    return Tolerance(numerics, eps, noise, None if why else reference), why
