"""Several calls of a step side by side: `ws.check`, and `ws.compile(check_first=N)`.

Calls run on the user's own objects, which `ws.check` restores at the end. Each call starts from the state that the
compiled call before it left, so that a difference is found in the call that produces it. `check_first` is a
step that does so for its first N calls (`CheckedStep`).

One call twice from the same state: eager, then compiled.

    save the state                  a graph is captured first, so that a refusal comes before anything runs
    eager, observed                 the reference
    restore
    (eager with inputs moved by rounding, and in float64; restore)      where the compiled step may round differently
    compiled, observed              its results stay if they agree
    different: restore

If anything raises on the way, the state is restored. The two extra runs of eager change the user's tensors in place
(`tensor.data = ...`), and the snapshot restores them. The float64 run needs nothing against autocast, which leaves
float64 alone; where the code asks for a dtype by name, it gets float64.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from wholestep.capture.trace import is_tracing, steps_as_functions
from wholestep.compiled_step import LAST, CompiledStep, P, R
from wholestep.debug.check.report import (
    CallCost,
    CheckReport,
    CheckRow,
    Finding,
    FirstDifference,
    Observation,
    Status,
    Tolerance,
    cost_of,
    counts,
    error_of,
    findings,
    locate,
    observe,
    worst_of,
)
from wholestep.debug.value_distance import eps_of
from wholestep.errors import CheckError, OptionError, WholestepError, invalid_value
from wholestep.ir.tensor_copies import has_plain_memory
from wholestep.ir.user_objects.reachable import Part, Reached, roots_of
from wholestep.ir.user_objects.snapshot import Roots, Snapshot, can_be_saved
from wholestep.options import Options
from wholestep.passes.engine.contract import Numerics, weakest
from wholestep.passes.engine.record import pass_records
from wholestep.passes.engine.replay import nudged
from wholestep.refused_steps import CannotCaptureError
from wholestep.torch_private.fake_tensors import DispatchMode, storage_key
from wholestep.torch_private.fx_graphs import pytree


@dataclass(frozen=True)
class CheckedCall:
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
    """The result of one call on both sides."""

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
        """Findings that rounding does not explain."""
        return [each for each in self.findings if each.status is Status.DIFFERENT]


def compare_call(
    step: Any,
    call: CheckedCall,
    *,
    in_double: bool = True,
    more_roots: Roots | None = None,
    on_difference: Callable[[Compared], None] | None = None,
) -> Compared:
    """Run a call in eager and compiled. If they differ, or anything raises, the state is as before the call.

    `on_difference` is called in that state.
    """
    roots = [*call.roots, *(more_roots or [])]
    step.flush()
    before = Snapshot(roots)
    try:
        step._prepare(call.fn, call.args, call.kwargs)
        before.restore()
        eager = _eager(before, roots, call)
        numerics = _numerics(step)
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
    before: Snapshot, roots: Roots, call: CheckedCall, eager: Observation, compared: Compared, tolerance: Tolerance
) -> list[Finding]:
    """The findings again, where values that eager computes differently from run to run may differ as much.

    Kernels that add with atomics do that. Afterwards the state is again the one that the compiled step left.
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


def _eager(before: Snapshot, roots: Roots, call: CheckedCall) -> Observation:
    seen = observe(roots, run_eager(call), copy=True)
    advanced = before.advanced_iterators()
    if advanced:
        raise CheckError(
            f"the step takes items from {', '.join(advanced)}, which cannot be rewound for a second run.",
            fix="take the items outside of the step, and pass them as arguments.",
        )
    before.restore()
    return seen


def run_compiled(step: Any, call: CheckedCall) -> Any:
    """Run the compiled step, and flush pending updates."""
    try:
        result = CompiledStep._run(step, call.fn, call.args, dict(call.kwargs))
        step.flush()
        return result
    except WholestepError:
        raise
    except Exception as error:
        raise CheckError(
            f"the compiled step raises {type(error).__name__}: {error}. Eager does not.",
            fix="ws.debug.bisect(step, args) finds the part of the way that raises.",
        ) from error


def run_eager(call: CheckedCall) -> Any:
    """Call the function in a copy of the context: context variables that it sets do not stay."""
    with steps_as_functions():
        return contextvars.copy_context().run(call.fn, *call.args, **call.kwargs)


def _numerics(step: Any) -> Numerics:
    """The contract of the step: the least strict one of its lowering and of the passes that changed its graph."""
    options, records = step.options, () if step.last is None else pass_records(step.last.gm)
    unchanged = {record.name for record in records} - {record.name for record in records if record.changed}
    promised = [bound.graph_pass.contract.numerics for bound in options.passes if bound.name not in unchanged]
    if options.lower == "inductor":
        promised.append("reassociates")
    return weakest(promised)


def _tolerance(
    step: Any,
    before: Snapshot,
    roots: Roots,
    call: CheckedCall,
    numerics: Numerics,
    eager: Observation,
    in_double: bool,
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
        noise = None  # the step branches on values, and raises for those one rounding error away
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


_WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64} | {
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_SANE = 1e-2
"""How far eager may be from float64, relative to the largest element, for the two to be the same computation."""


class NoReference(Exception):  # noqa: N818 (it says why there is none)
    """No float64 run of this step can be made."""


def move_by_rounding(reached: Reached) -> None:
    """Change every float that the step reads by a rounding error; not counters and loss scales."""
    for seen in reached.tensors:
        tensor = seen.obj
        counts = seen.part is Part.SCHEDULE or (seen.part is Part.OPTIMIZER and tensor.dim() == 0)
        if counts or not has_plain_memory(tensor) or not _is_rounded(tensor) or _overlaps(tensor):
            continue
        [moved] = nudged([tensor.detach().cpu()])
        tensor.data.copy_(moved)


def in_float64(reached: Reached, call: Callable[[], Any]) -> Any:
    """Run a call with every float tensor that it reads in float64. Raises NoReference where that is not possible."""
    storages: set[int] = set()
    tensors = [seen.obj for seen in reached.tensors if can_be_saved(seen.obj) and seen.obj.dtype in _WIDE]
    for tensor in tensors:
        key = storage_key(tensor)
        if key in storages and tensor.numel():
            raise NoReference("tensors share memory")
        storages.add(key)
    grads = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    for tensor, _ in grads:
        tensor.grad = None
    for tensor in tensors:
        tensor.data = tensor.data.to(_WIDE[tensor.dtype])
    for tensor, grad in grads:
        tensor.grad = grad
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():
            return call()
    except NoReference:
        raise
    except Exception as error:
        raise NoReference(f"in float64 the step raises {type(error).__name__}") from error


def usable_reference(eager: Observation, wide: Observation) -> str:
    """Why a float64 run is not the same computation as eager's; "" if it is."""
    for path, (part, value) in eager.values.items():
        other = wide.at(path)
        if part is Part.RNG and isinstance(value, Tensor) and not torch.equal(value, other):
            return "in float64 the step makes other RNG calls"
        if part is Part.RESULT and isinstance(value, Tensor) and value.is_floating_point():
            if not isinstance(other, Tensor) or other.shape != value.shape:
                return "in float64 the step returns something else"
            largest = max(float(value.abs().max()) if value.numel() else 0.0, 1e-30)
            apart = (value.double() - other.to(value.device).double()).abs()
            if value.numel() and float(apart.nan_to_num(0.0).max()) > _SANE * largest:
                return "in float64 the step computes something else"
    return ""


class _InFloat64(DispatchMode):
    """Replaces dtype arguments of operators, and refuses results that are still narrower."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_widened, (args, kwargs or {}))
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype in _WIDE:
                raise NoReference(f"the step computes in {str(leaf.dtype).removeprefix('torch.')}")
        return result


def _widened(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


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
        raise OptionError(f"there are {len(taken)} batches for steps={steps}.", fix="give as many batches as steps.")
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


class CheckedStep(CompiledStep[P, R]):
    """A compiled step whose first calls are compared with eager: `ws.compile(check_first=N)`."""

    def __init__(self, fn: Callable[P, R], options: Options) -> None:
        super().__init__(fn, options)
        self._to_check = self.options.check_first

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._to_check or is_tracing():
            return super()._run(fn, args, kwargs)
        last = not self._has_own_last and kwargs.get(LAST)
        named = kwargs if self._has_own_last else {key: value for key, value in kwargs.items() if key != LAST}

        def refuse(compared: Compared) -> None:
            first = locate(self, args, named, first_of(compared.different))
            raise error_of(report_of(self, [compared], 1, first))

        try:
            compared = compare_call(self, CheckedCall(fn, args, named), in_double=False, on_difference=refuse)
        except CannotCaptureError:
            return super()._run(fn, args, kwargs)  # in eager: there is nothing to compare
        self._to_check -= 1
        if last:
            self.flush()
        return compared.result
