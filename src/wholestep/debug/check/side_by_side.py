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
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep.debug.check.findings import Finding, Status, Tolerance, counts, findings
from wholestep.debug.check.observation import Observation, observe
from wholestep.debug.check.reachable import Part, roots_of
from wholestep.debug.check.reference import NoReference, in_float64, move_by_rounding, usable_reference
from wholestep.debug.check.snapshot import Roots, Snapshot
from wholestep.debug.numbers import eps_of
from wholestep.errors import CheckError, WholestepError
from wholestep.memory.measure import bytes_at_most
from wholestep.passes.contract import Numerics


@dataclass(frozen=True)
class Call:
    """The function of a step and the arguments of one call."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def roots(self) -> Roots:
        """Where a walk over its state starts."""
        return roots_of(self.fn, self.args, self.kwargs)


@dataclass
class Cost:
    """Seconds of a call, and the most bytes it had above what was there before."""

    seconds: float = 0.0
    peak: int | None = None


@dataclass
class Compared:
    """What one call came to."""

    findings: list[Finding]
    counts: dict[Part, int]
    numerics: Numerics
    reference: str
    """Why there is no float64 reference; "" where there is one, or none is needed."""
    shared: dict[str, str]
    eager: Cost = field(default_factory=Cost)
    compiled: Cost = field(default_factory=Cost)
    result: Any = None
    """What the compiled step returned."""

    @property
    def different(self) -> list[Finding]:
        """What is not explained by rounding."""
        return [each for each in self.findings if each.status is Status.DIFFERENT]


def compare_call(
    step: Any,
    call: Call,
    *,
    in_double: bool = True,
    measure: bool = False,
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
        eager, cost = _eager(before, roots, call, measure)
        numerics = _numerics(step.options)
        tolerance, why = _tolerance(step, before, roots, call, numerics, eager, in_double)
        result, compiled_cost = _compiled(step, before, call, measure)
        now = observe(roots, result, copy=False)
        found = findings(eager, now, tolerance)
        shared = {**before.reached.shared, **before.unsaved}
        compared = Compared(found, counts(now), numerics, why, shared, cost, compiled_cost, result)
    except BaseException:
        before.restore()
        raise
    if compared.different:
        before.restore()
        if on_difference is not None:
            on_difference(compared)
    return compared


def _eager(before: Snapshot, roots: Roots, call: Call, measure: bool) -> tuple[Observation, Cost]:
    result, cost = _timed(before, _alone(call), measure)
    seen = observe(roots, result, copy=True)
    del result
    advanced = before.advanced_iterators()
    if advanced:
        raise CheckError(
            f"the step takes items from {', '.join(advanced)}, which cannot be put back for a second run.",
            fix="take the items outside of the step, and pass them as arguments.",
        )
    before.restore()
    return seen, cost


def _compiled(step: Any, before: Snapshot, call: Call, measure: bool) -> tuple[Any, Cost]:
    def run() -> Any:
        found = type(step)._run(step, call.fn, call.args, dict(call.kwargs))
        step.flush()
        return found

    try:
        return _timed(before, run, measure)
    except WholestepError:
        raise
    except Exception as error:
        raise CheckError(
            f"the compiled step raises {type(error).__name__}: {error}. Eager does not.",
            fix="ws.debug.bisect(step, args) finds the part of the way that raises.",
        ) from error


def _alone(call: Call) -> Callable[[], Any]:
    """The function itself, in a context of its own: what it sets in context variables does not stay."""
    return lambda: contextvars.copy_context().run(call.fn, *call.args, **call.kwargs)


def _timed(before: Snapshot, run: Callable[[], Any], measure: bool) -> tuple[Any, Cost]:
    device = before.on_cuda
    peak: int | None = None
    if device is not None:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    if measure:
        result, peak = bytes_at_most(run, device or torch.device("cpu"))
    else:
        result = run()
    if device is not None:
        torch.cuda.synchronize(device)
    return result, Cost(time.perf_counter() - start, peak)


def _numerics(options: Any) -> Numerics:
    """What the way of the step promises."""
    promised = {bound.graph_pass.contract.numerics for bound in options.passes}
    if options.lower == "inductor":
        promised.add("reassociates")
    return "changes" if "changes" in promised else "reassociates" if "reassociates" in promised else "exact"


def _tolerance(
    step: Any, before: Snapshot, roots: Roots, call: Call, numerics: Numerics, eager: Observation, in_double: bool
) -> tuple[Tolerance, str]:
    if numerics == "exact":
        return Tolerance(numerics), ""
    nodes = [] if step.last is None else step.last.gm.graph.nodes
    values = (node.meta.get("val") for node in nodes)
    eps = max((eps_of(value) for value in values), default=0.0)
    move_by_rounding(before.reached)
    noise = observe(roots, _alone(call)(), copy=True)
    before.restore()
    reference, why = None, "not asked for"
    if in_double:
        try:
            reference = observe(roots, in_float64(before.reached, _alone(call)), copy=True)
            why = usable_reference(eager, reference)
        except NoReference as error:
            why = str(error)
        before.restore()
    return Tolerance(numerics, eps, noise, None if why else reference), why
