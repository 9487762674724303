"""Which Python numbers of a step are inputs of its graph, and the check that this does not change what the step does.

A number is at first a constant under a guard. One that changed between two calls is *lifted*: the next capture makes it
a symbolic scalar (`GraphInt` or `GraphFloat`), an input. Numbers that training always changes (learning rates, betas,
counts in optimizer state) are inputs from the start. A number that cannot be an input stays *pinned*: a constant under
a guard, captured once per value.

User code can tell a symbolic scalar from a plain number (`type(k) is int`, extensions in C). So a trace with lifted
numbers is accepted only if a trace of the same call with plain numbers recorded the same program: the same operators
on the same tensors, with the same values in the place of symbolic scalars. Otherwise the numbers that cause the
difference are pinned.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.capture.python_reads.clocks import ClockReading
from wholestep.errors import ClockError, ItemError, Location, UnsupportedError, WholestepError
from wholestep.ir.call_arguments import arguments_by_name
from wholestep.ir.captured_step import CapturedStep, Change
from wholestep.ir.deferred import FilledLeaf, FreshContainer, ReplayedCall
from wholestep.ir.effects import is_needed
from wholestep.ir.graph_functions import CHECKS, number_tensor
from wholestep.ir.graph_walks import ancestors
from wholestep.ir.meta import location_of_exception, node_meta
from wholestep.ir.signature import ChangeKind, OutputKind
from wholestep.torch_private.fake_tensors import without_modes
from wholestep.torch_private.operators import OpOverload, schema_of
from wholestep.torch_private.symbolic_shapes import size_at_capture

aten = torch.ops.aten


@dataclass(frozen=True)
class ScalarPolicy:
    """How a trace treats Python numbers, by path."""

    lifted: frozenset[str] = frozenset()
    """Numbers that changed between two calls."""
    pinned: frozenset[str] = frozenset()
    """Numbers that user code needs as plain ones."""
    plain: bool = False
    """All numbers are plain and nothing is guarded: only for a trace that another one is compared with."""
    clocks: tuple[tuple[ClockReading, ...], frozenset[int]] | None = None
    """The clock readings of an earlier trace, and which of them are later now: only for such a trace."""

    def lifts(self, path: str) -> bool:
        """Whether a number that is a constant at first is an input now."""
        return path in self.lifted and path not in self.pinned and not self.plain

    def lifts_in(self, path: str) -> bool:
        """Whether some number in a list or dict of this path changed between two calls."""
        return not self.plain and any(each.startswith(f"{path}[") for each in self.lifted)

    def with_changed(self, paths: Iterable[str]) -> ScalarPolicy:
        """The policy after these numbers changed."""
        return replace(self, lifted=self.lifted | frozenset(paths) - self.pinned)

    def without(self, paths: Iterable[str]) -> ScalarPolicy:
        """The policy after these numbers turned out to be needed as plain ones."""
        gone = frozenset(paths)
        return replace(self, lifted=self.lifted - gone, pinned=self.pinned | gone)


class MustBeInputs(BaseException):
    """Ends a trace: numbers that were constants must be inputs, because the step changes them in each call."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(paths)))
        self.paths = paths


Trace = Callable[[ScalarPolicy, set[str]], CapturedStep]
"""One capture under a policy; adds the paths of the numbers that user code got as symbolic scalars."""

_MOST_TRIES = 8


def trace_with_scalars(trace: Trace, policy: ScalarPolicy) -> tuple[CapturedStep, ScalarPolicy]:
    """A capture in which symbolic scalars behaved as plain numbers, and the policy that it was made with."""
    captured, accepted = _with_accepted_numbers(trace, policy)
    if captured.clock_readings:
        captured = _refuse_clocks(trace, accepted, captured)
    return captured, accepted


def _refuse_clocks(trace: Trace, policy: ScalarPolicy, captured: CapturedStep) -> CapturedStep:
    """Raise where a trace in which clocks are later records another program: one reading that makes a difference.

    What the step prints may show a clock: such a call is made after the first run only.
    """
    readings: tuple[ClockReading, ...] = captured.clock_readings
    difference, again = _with_later_clocks(trace, policy, captured, frozenset(range(len(readings))))
    if difference is None:
        assert again is not None
        return _showing_clocks_once(captured, again)
    alone = (i for i in range(min(len(readings), _MOST_TRIES)))
    guilty = next((i for i in alone if _with_later_clocks(trace, policy, captured, frozenset({i}))[0] is not None), 0)
    raise ClockError(
        f"what the step does depends on a clock that is read here ({difference} would differ at another time); a "
        "replay reads no clock, and would always use this time.",
        fix="read the clock outside of the step, and pass what follows from it as an argument.",
        location=readings[guilty].line,
    )


def _with_later_clocks(
    trace: Trace, policy: ScalarPolicy, captured: CapturedStep, later: frozenset[int]
) -> tuple[str | None, CapturedStep | None]:
    with quiet():
        again, error = _attempt(trace, replace(policy, clocks=(captured.clock_readings, later)), set())
    if again is None:
        return f"the course of the step ({error})", None
    if [call.text for call in captured.effects] != [call.text for call in again.effects]:
        return "what the step prints, logs or writes into lists and dicts", again
    return first_difference(captured, again, with_effects=False), again


def _showing_clocks_once(captured: CapturedStep, again: CapturedStep) -> CapturedStep:
    """The capture in which calls that show a clock are made once. `again`: the same step with later clocks."""
    now, later = (_Program(each, captured.items_taken.keys()).effects for each in (captured, again))
    calls = [
        call if one == other else replace(call, once=True)
        for call, one, other in zip(captured.effects, now, later, strict=True)
    ]
    return replace(captured, effects=tuple(calls))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what the step prints and logs in a trace that is only compared."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def _with_accepted_numbers(trace: Trace, policy: ScalarPolicy) -> tuple[CapturedStep, ScalarPolicy]:
    seen: set[str] = set()
    captured, error, policy = _with_inputs(trace, policy, seen)
    if captured is not None and not captured.compare_scalars:
        return captured, policy
    if isinstance(error, WholestepError) and not policy.lifted & seen:
        raise error
    with quiet():
        plain, own_error = _attempt(trace, replace(policy, plain=True), set())
    if plain is None:
        assert own_error is not None
        raise error if isinstance(error, WholestepError) else own_error
    if captured is not None and first_difference(captured, plain) is None:
        return captured, policy
    where = line_of_difference(captured, plain) if captured is not None else getattr(error, "location", None)
    return _pin(trace, policy, plain, seen, where)


def _pin(
    trace: Trace, policy: ScalarPolicy, plain: CapturedStep, seen: set[str], where: Location | None
) -> tuple[CapturedStep, ScalarPolicy]:
    """Pin the numbers that cause a difference: first all that were lifted, then all; those that can be stay inputs."""
    difference: str | None = None
    for pinned in (seen & policy.lifted, seen):
        captured, error, best = _with_inputs(trace, policy.without(pinned), set())
        if captured is None:
            if pinned == seen and error is not None:
                if isinstance(error, WholestepError):
                    raise error
                raise (
                    _needed_as_both(error, where) if isinstance(error, MustBeInputs) else _needed_plain(error)
                ) from error
            continue
        difference = first_difference(captured, plain)
        if difference is not None:
            where = line_of_difference(captured, plain)
            continue
        for path in sorted(pinned) if len(pinned) <= _MOST_TRIES else ():
            attempt = replace(best, lifted=best.lifted | (policy.lifted & {path}), pinned=best.pinned - {path})
            again, _ = _attempt(trace, attempt, set())
            if again is not None and first_difference(again, plain) is None:
                captured, best = again, attempt
        return captured, best
    if plain.items_taken:
        raise ItemError(
            f"the step does something else with a plain number than with the value of a tensor, which is known only "
            f"when the graph ran: {difference}.",
            fix="return the tensor from the step and read its value outside.",
            location=where,
        )
    raise UnsupportedError(
        f"two traces of the same call with the same numbers recorded different programs: {difference}.",
        fix="make the step's Python deterministic: the order of sets, id(), clocks and counters outside of the step "
        "must not decide what it computes.",
        location=where,
    )


def _with_inputs(
    trace: Trace, policy: ScalarPolicy, seen: set[str]
) -> tuple[CapturedStep | None, BaseException | None, ScalarPolicy]:
    """A trace; again for as long as it finds numbers that must be inputs and may be."""
    captured, error = _attempt(trace, policy, seen)
    while isinstance(error, MustBeInputs) and not error.paths <= policy.lifted | policy.pinned:
        policy = policy.with_changed(error.paths)
        captured, error = _attempt(trace, policy, seen)
    return captured, error, policy


def _needed_as_both(error: MustBeInputs, where: Location | None) -> ItemError:
    return ItemError(
        f"the step sets {error} in each call, from the value of a tensor, and its Python needs the number itself in "
        "the next one: it would be known only when the graph ran.",
        fix="keep a tensor instead of a number, and compute with tensors (torch.minimum instead of min).",
        location=where,
    )


def _needed_plain(error: BaseException) -> ItemError:
    """For an error that the step does not raise with plain numbers."""
    said = str(error).strip().splitlines()[-1:] or [""]
    return ItemError(
        "code of torch needs a number itself that the step takes from a tensor or changes in each call "
        f"({type(error).__name__}: {said[0][:200]}).",
        fix="pass the number as an argument of the step, or keep it in a variable that the step does not set.",
        location=location_of_exception(error),
    )


def _attempt(trace: Trace, policy: ScalarPolicy, seen: set[str]) -> tuple[CapturedStep | None, BaseException | None]:
    try:
        return trace(policy, seen), None
    except (Exception, MustBeInputs) as error:
        return None, error


def first_difference(one: CapturedStep, other: CapturedStep, *, with_effects: bool = True) -> str | None:
    """Where two captures of one call differ, numbers compared by their value at that call; None if nowhere."""
    programs = _programs(one, other)
    for first, second in zip(programs[0].calls, programs[1].calls, strict=False):
        if first[0] != second[0]:
            return f"{first[1]} and {second[1]}"
    lengths = [len(program.calls) for program in programs]
    if lengths[0] != lengths[1]:
        longer = programs[0] if lengths[0] > lengths[1] else programs[1]
        return f"{longer.calls[min(lengths)][1]} is in one of them only"
    if programs[0].results != programs[1].results:
        return "the results of the step"
    if with_effects and programs[0].effects != programs[1].effects:
        return "what the step prints, logs or writes into lists and dicts"
    return _changed_state(*programs)


def line_of_difference(one: CapturedStep, other: CapturedStep) -> Location | None:
    """The user's line of the first operator that differs, or of the last before it that has one."""
    programs = _programs(one, other)
    pairs = zip(programs[0].calls, programs[1].calls, strict=False)
    at = next((i for i, (first, second) in enumerate(pairs) if first[0] != second[0]), None)
    if at is None:
        at = min(len(program.calls) for program in programs) - 1
    known = [line for line in programs[0].lines[: at + 1] if line is not None]
    return known[-1] if known else None


def _changed_state(one: _Program, other: _Program) -> str | None:
    for path in {**one.changes, **other.changes}:
        first, second = (program.changes.get(path, program.unchanged(path)) for program in (one, other))
        if first != second and None not in (first, second):
            return path
    return None


def _programs(one: CapturedStep, other: CapturedStep) -> tuple[_Program, _Program]:
    """Both programs, without nodes that only serve items which one of them does not return."""
    common = one.items_taken.keys() & other.items_taken.keys()
    return _Program(one, common), _Program(other, common)


class _Program:
    """What a capture does, in a form in which captures can be compared."""

    def __init__(self, captured: CapturedStep, items: Set[int]) -> None:
        """`items`: the indices of the items that count."""
        self._inputs = {node: slot.path for node, slot in captured.guards.placeholder_slots.items()}
        needed = _needed(captured, items) if captured.items_taken.keys() - items else None
        self._places: dict[fx.Node, int] = {}
        self._sizes = sizes_at_capture(captured.step_graph.gm.graph)
        self.calls: list[tuple[Any, str]] = []
        """Each operator that is not scalar arithmetic, and its name for messages."""
        self.lines: list[Location | None] = []
        """The user's line of each."""
        outputs: Any = ()
        for node in captured.step_graph.gm.graph.nodes:
            if node.op == "output":
                outputs = node.args[0]
            elif node in self._sizes:
                continue
            elif node.op == "call_function" and not _is_arithmetic(node) and (needed is None or node in needed):
                self._places[node] = len(self.calls)
                self.calls.append((self._call(node), f"{node.name} ({node.target})"))
                self.lines.append(node_meta(node).location)
        self.results = [self._result(kind, value, outputs) for kind, value in captured.result_leaves]
        self.effects = [self._effect(call, outputs) for call in captured.effects]
        self.changes = {change.slot.path: self._changed(change, outputs) for change in captured.changes}
        self._slots = {change.slot.path: change.slot for change in captured.changes}

    def _call(self, node: fx.Node) -> Any:
        if node.target is aten.lift_fresh_copy.default and (source := node.args[0]).op == "get_attr":  # type: ignore[union-attr]
            constant: Tensor = source.meta["constant"]  # type: ignore[union-attr]
            return "a tensor of numbers", constant.dtype, self._form(constant.tolist())
        if node.target is number_tensor or (node.target is aten.full.default and node.args[0] == []):
            numbers = node.args[0] if node.target is number_tensor else node.args[1]
            dtype = node.meta["val"].dtype
            return "a tensor of numbers", dtype, self._form(_as_dtype(numbers, dtype))
        if not isinstance(node.target, OpOverload):
            return node.target, self._form(node.args), self._form(node.kwargs)
        arguments = schema_of(node.target).arguments  # arguments that have their default are left out by dispatch
        given = arguments_by_name(node)
        return node.target, tuple(self._form(given.get(a.name, a.default_value)) for a in arguments)

    def _changed(self, change: Change, outputs: Any) -> Any:
        if change.output is not None:
            return self._form(outputs[change.output])
        if change.deferred is not None:
            return self._form(change.deferred.trial)
        return ("removed",) if change.kind is ChangeKind.REMOVED else self._form(change.constant)

    def _effect(self, call: ReplayedCall, outputs: Any) -> Any:
        args = [self._template(arg, outputs) for arg in call.args]
        return call.text, args, {name: self._template(arg, outputs) for name, arg in call.kwargs.items()}

    def _template(self, template: Any, outputs: Any) -> Any:
        if isinstance(template, FilledLeaf):
            known = template.kind in ("shown", "deferred")
            return self._form(template.trial) if known else self._result(template.kind, template.value, outputs)
        if isinstance(template, FreshContainer):
            keys = None if template.keys is None else list(map(self._form, template.keys))
            return type(template.empty), keys, [self._template(item, outputs) for item in template.items]
        return self._form(template) if isinstance(template, int | float | str) else type(template)

    def unchanged(self, path: str) -> Any:
        """The value of a place that this capture does not change; None if it is not a plain value."""
        slot = self._slots.get(path)
        value = None if slot is None else slot.get()
        return self._form(value) if isinstance(value, int | float | str) else None

    def _result(self, kind: str, value: Any, outputs: Any) -> Any:
        if kind in ("output", "attached", "detached"):
            return self._form(outputs[value])
        if kind == "sharded":
            return self._form(outputs[value[0]])
        value = value.trial if kind == "deferred" else value
        return self._form(value) if isinstance(value, int | float | complex | str | bytes) else type(value)

    def _form(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._node(value)
        if isinstance(value, list | tuple):
            return tuple(self._form(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, self._form(item)) for key, item in value.items())
        if isinstance(value, float):
            return float, struct.pack("d", value)
        if isinstance(value, slice):
            return slice, self._form((value.start, value.stop, value.step))
        return type(value), value

    def _node(self, node: fx.Node) -> Any:
        val = node.meta.get("val")
        if node in self._sizes:
            return self._form(self._sizes[node])
        if node in self._places:
            return "call", self._places[node]
        if isinstance(val, int | float):
            return self._form(val)
        if node.op == "placeholder":
            return "input", self._inputs[node]
        if node.op == "get_attr":
            constant: Tensor = node.meta["constant"]
            return "constant", constant.dtype, tuple(constant.shape), constant.tolist()
        return node.target, self._form(node.args)


def sizes_at_capture(graph: fx.Graph) -> dict[fx.Node, Any]:
    """The values that sizes had at capture, and what is computed from sizes alone, by node."""
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.sym_size.int:
            tensor, dim = node.args
            size = size_at_capture(tensor.meta["val"].shape[dim])
            if size is not None:
                found[node] = size
        elif not isinstance(node.target, OpOverload) and node.args and not node.kwargs:
            sources = node.all_input_nodes
            if sources and all(source in found for source in sources):
                found[node] = node.target(*fx.map_arg(node.args, found.__getitem__))
    return found


def _needed(captured: CapturedStep, items: Set[int]) -> set[fx.Node]:
    """The nodes that are needed if only some of the items are read."""
    graph, outputs = captured.step_graph.gm.graph, captured.step_graph.signature.outputs
    results: Any = graph.output_node().args[0]
    kept = [value for value, spec in zip(results, outputs, strict=True) if spec.kind is not OutputKind.LOGGED]
    kept += [captured.items_taken[number] for number in items]
    kept += [node for node in graph.nodes if node.op != "output" and is_needed(node)]
    return set(ancestors([node for node in kept if isinstance(node, fx.Node)]))


def _as_dtype(numbers: Any, dtype: torch.dtype) -> Any:
    """The numbers that a tensor of a dtype holds, if they are known."""
    if isinstance(numbers, list | tuple):
        return [_as_dtype(item, dtype) for item in numbers]
    value = numbers.meta.get("val") if isinstance(numbers, fx.Node) else numbers
    with without_modes():
        return torch.tensor(value, dtype=dtype).item() if isinstance(value, int | float) else numbers


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether a node computes a Python number, or only checks."""
    if node.target in CHECKS:
        return True
    if isinstance(node.target, OpOverload):
        return node.target is torch.ops.aten._local_scalar_dense.default
    return getattr(node.target, "__module__", None) in ("_operator", "math", "builtins") and (
        node.target is not operator.getitem
    )
