"""Several calls of a step side by side: `ws.check`, and `ws.compile(check_first=N)`.

Calls run on the user's own objects, which `ws.check` restores at the end. Each call starts from the state that the
compiled call before it left, so that a difference is found in the call that produces it. `check_first` replaces the
step's method that runs a call, and removes itself after N calls: later calls pay nothing for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch

from wholestep.capture.trace import is_tracing
from wholestep.debug.check.findings import Finding, Status, worst_of
from wholestep.debug.check.first_difference import FirstDifference, locate
from wholestep.debug.check.reachable import Part
from wholestep.debug.check.report import CallCost, CheckReport, CheckRow, cost_of, error_of
from wholestep.debug.check.side_by_side import CheckedCall, Compared, compare_call, run_compiled, run_eager
from wholestep.debug.check.snapshot import Snapshot
from wholestep.errors import OptionError, invalid_value

Between = Callable[[], Any]


def check_calls(step: Any, calls: list[CheckedCall], between: Between | None = None) -> CheckReport:
    """Compare calls one after the other, up to the first that is different. The user's objects are restored."""
    more = [] if between is None else [("", between)]
    start = Snapshot([*(root for call in calls for root in call.roots), *more])
    seen: list[Compared] = []
    found: list[FirstDifference] = []
    costs: tuple[CallCost, CallCost] | None = None
    try:
        for i, call in enumerate(calls):

            def search(compared: Compared, call: CheckedCall = call) -> None:
                found.append(locate(step, call.args, call.kwargs, first_of(compared.different)))

            seen.append(compare_call(step, call, more_roots=more, on_difference=search))
            seen[-1].result = None
            if seen[-1].different:
                break
            if between is not None and i + 1 < len(calls):
                between()
        else:
            device = start.on_cuda or torch.device("cpu")
            costs = (
                cost_of(lambda: run_compiled(step, calls[-1]), device),
                cost_of(lambda: run_eager(calls[-1]), device),
            )
    finally:
        step.flush()
        start.restore()
    return report_of(step, seen, len(calls), found[0] if found else None, costs)


def first_of(different: list[Finding]) -> Finding:
    """The difference that others follow from: parts are ordered as a step computes them."""
    order = list(Part)
    return min(different, key=lambda each: order.index(each.part))


def report_of(
    step: Any,
    seen: list[Compared],
    asked: int,
    first: FirstDifference | None,
    costs: tuple[CallCost, CallCost] | None = None,
) -> CheckReport:
    """The report of some calls. `costs`: of the compiled step and of eager."""
    last = seen[-1]
    return CheckReport(
        name=step._name,
        lower=step.options.lower,
        steps=len(seen),
        asked=asked,
        numerics=last.numerics,
        rows=tuple(_row(part, seen) for part in Part if any(each.counts.get(part) for each in seen)),
        first_difference=first,
        reference=next((each.reference for each in seen if each.reference), ""),
        graphs=len(step.graphs),
        recompiles=tuple(str(reason) for reason in step.recompiles),
        lowering=step.lowering,
        capture_seconds=step.capture_seconds,
        compiled=None if costs is None else costs[0],
        eager=None if costs is None else costs[1],
        shared=last.shared,
    )


def _row(part: Part, seen: list[Compared]) -> CheckRow:
    compared = max(each.counts.get(part, 0) for each in seen)
    worst, at = None, 0
    for i, each in enumerate(seen):
        found = worst_of({part: [f for f in each.findings if f.part is part]}, part)
        if found is not None and (worst is None or (found.status, found.relative) > (worst.status, worst.relative)):
            worst, at = found, i + 1
    return CheckRow(part, Status.EQUAL if worst is None else worst.status, compared, worst, at)


def calls_of(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int, batches: Iterable[Any] | None
) -> list[CheckedCall]:
    """The arguments of each call. With `batches`, each gets one more: as one argument, or as several if that fits."""
    if type(steps) is not int or steps < 1:
        raise invalid_value("steps", steps, "use a whole number, 1 or more.")
    if batches is None:
        return [CheckedCall(fn, args, dict(kwargs)) for _ in range(steps)]
    taken = list(islice(batches, steps))
    if len(taken) < steps:
        raise OptionError(f"{len(taken)} batches for steps={steps}.", fix="give as many batches as steps.")
    return [_with_batch(fn, args, dict(kwargs), batch) for batch in taken]


def _with_batch(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> CheckedCall:
    try:
        bind = inspect.signature(fn).bind
    except (TypeError, ValueError):
        return CheckedCall(fn, (*args, batch), kwargs)
    ways = [((*args, batch), kwargs)]
    if isinstance(batch, tuple | list):
        ways.append(((*args, *batch), kwargs))
    if isinstance(batch, Mapping):
        ways.append((args, {**kwargs, **batch}))
    for some, named in ways:
        try:
            bind(*some, **named)
        except TypeError:
            continue
        return CheckedCall(fn, some, named)
    return CheckedCall(fn, *ways[0])


_LAST = "last_train_step"
_METHOD = "_run"


class FirstCalls:
    """Replaces `CompiledStep._run` until enough calls were equal."""

    def __init__(self, step: Any, count: int) -> None:
        self._step = step
        self._left = count

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = self._step
        if is_tracing():
            return fn(*args, **kwargs)  # a compiled step inside of another one is part of its graph
        last = not step._has_own_last and kwargs.get(_LAST)
        named = kwargs if step._has_own_last else {key: value for key, value in kwargs.items() if key != _LAST}

        def refuse(compared: Compared) -> None:
            first = locate(step, args, named, first_of(compared.different))
            raise error_of(report_of(step, [compared], 1, first))

        compared = compare_call(step, CheckedCall(fn, args, named), in_double=False, on_difference=refuse)
        self._left -= 1
        if self._left == 0:
            vars(step).pop(_METHOD, None)
        if last:
            step.flush()
        return compared.result

    @classmethod
    def stand_in(cls, step: Any, count: int) -> None:
        """Replace a step's method by a check."""
        vars(step)[_METHOD] = cls(step, count)
