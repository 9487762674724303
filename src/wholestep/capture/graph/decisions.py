"""Branches of user code on values that the graph computes: which branch the graph takes, and what guards or checks it.

    if labels.max() >= vocab: raise ..     follows from the batch by a few cheap operators: they run before each call,
                                           and the answer is a guard
    if not torch.isfinite(loss): raise ..  needs the step itself. With assume=True the trace is run on the real inputs
                                           up to here, the graph goes the way of this call, and a node of it checks
                                           the answer in every run, before anything is written:

        isfinite = isfinite(loss)
        check_assumed(isfinite, True, "train.py:12 if not torch.isfinite(loss): raise ..", loss)

    for expert in hit.nonzero(): ..        the same: the graph is for as many rows as this call has

Both runs are on the real tensors, so the answer is that of eager. Nothing of the user's changes: recorded operators
write to no input, and random generators are put back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from wholestep.ir.early_values import KNOWN_KINDS, KnownValues
from wholestep.ir.effects import calls_custom_operator, communicates, draws, is_collective, is_wait, may_share
from wholestep.ir.graph_functions import check_assumed, get_rng_state, manual_seed, set_rng_state
from wholestep.ir.graph_walks import ancestors
from wholestep.ir.meta import user_location
from wholestep.ir.signature import InputKind
from wholestep.torch_private.autograd import below_autograd
from wholestep.torch_private.fake_tensors import without_functions_and_modes
from wholestep.torch_private.operators import OpOverload, plain_name

_MOST_CHEAP = 32
_CHEAP = frozenset(
    "all any max min amax amin aminmax sum mean count_nonzero nonzero cumsum diff argmax argmin sort bincount index "
    "isin _unique2 unique_dim unique_consecutive masked_select embedding lift_fresh_copy _local_scalar_dense "
    "sym_size".split()
)
"""Operators, besides elementwise ones and views, that cost little next to a step."""
_OPERANDS = 2
"""How many operands of a comparison an error shows."""


class DecisionHost(Protocol):
    """What decisions ask of the capture."""

    @property
    def recorder(self) -> Any: ...
    @property
    def inputs(self) -> Any: ...
    @property
    def graph(self) -> fx.Graph: ...
    @property
    def numbers(self) -> Any: ...
    @property
    def options(self) -> Any: ...

    def real_value(self, placeholder: fx.Node) -> Any | None: ...


class Decisions:
    """Decides branches of user code on values of one trace."""

    def __init__(self, host: DecisionHost, guard: Callable[[fx.Node, Any], Any]) -> None:
        """`guard`: fixes the value of a node, which a call has before it runs."""
        self._host = host
        self._guard = guard
        self._before_run = KnownValues(self._known_placeholder, single=False)
        self._run = RealRun(host)
        self._numbers: dict[fx.Node, int] = {}
        """Sizes that the graph is specialised to."""

    def value_before_run(self, node: fx.Node) -> Any | None:
        """The value of a node in this call, if it follows from the batch and from state by a few cheap operators."""
        return self._before_run.of(node) if _is_cheap(node) else None

    def value_of(self, node: fx.Node) -> Any | None:
        """The value of a node in this call, if a branch on it may be decided."""
        value = self.value_before_run(node)
        return self._run.value(node) if value is None and self._host.options.assume else value

    def decide(self, node: fx.Node) -> bool | None:
        """Which way a branch on the value of a node goes; None if that is refused."""
        value = self.value_before_run(node)
        if value is not None:
            answer = _truth(value)
            return answer if self._host.numbers.plain else bool(self._guard(node, answer))
        value = self._run.value(node) if self._host.options.assume else None
        if value is None:
            return None
        answer = _truth(value)
        self._check(node, answer, _operands(node))
        return answer

    def number(self, node: fx.Node) -> int | None:
        """The value of a node as a plain number, which each run checks; None if that is refused."""
        if not self._host.options.assume:
            return None
        if node not in self._numbers:
            value = self._run.value(node)
            if value is None:
                return None
            self._numbers[node] = int(value)
            equal = self._host.recorder.emit_function(operator.eq, (node, int(value)), None)
            self._check(equal, True, [node], f"a number is {int(value)}: ")
        return self._numbers[node]

    def _check(self, condition: fx.Node, answer: bool, operands: list[fx.Node], what: str = "") -> None:
        where = user_location()
        text = what + ("" if where is None else f"{where.file}:{where.line}, {where.text}")
        self._host.recorder.emit_function(check_assumed, (condition, answer, text, *operands), None)

    def release(self) -> None:
        """Drop the real values."""
        self._before_run, self._run = KnownValues(self._known_placeholder), RealRun(self._host)
        self._numbers = {}

    def _known_placeholder(self, node: fx.Node) -> Any | None:
        kind = self._host.inputs.slot_of[node].kind
        return self._host.real_value(node) if kind in KNOWN_KINDS or kind is InputKind.BATCH else None


class RealRun:
    """Runs recorded operators on the real inputs of the call, once each, with the random numbers that a run draws."""

    def __init__(self, host: DecisionHost) -> None:
        self._host = host
        self._values: dict[fx.Node, Any] = {}
        self._states: dict[str, Tensor] = {}
        """The states of the default generators after the draws so far."""

    def value(self, node: fx.Node) -> Any | None:
        """The value of a node; None if what it is computed from cannot be run twice."""
        drawing = [each for each in self._host.graph.nodes if draws(each)]
        needed = ancestors([node, *drawing])
        todo = [each for each in self._host.graph.nodes if each in needed and each not in self._values]
        if any(map(_runs_once, todo)):
            return None
        with self._random_numbers(), without_functions_and_modes(), below_autograd(), _without_autocast():
            for each in todo:
                found = self._computed(each)
                if found is None and each.op == "placeholder":
                    return None
                self._values[each] = found
        return self._values[node]

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            real = self._host.real_value(node)
            return real.detach() if isinstance(real, Tensor) else real
        if node.op == "get_attr":
            return node.meta["constant"]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        return _call(node.target, args, kwargs)

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Draw what the run will draw, and put the generators back."""
        generators = _default_generators()
        before = [each.get_state() for each in generators.values()]
        for device, state in self._states.items():
            generators[device].set_state(state)
        try:
            yield
            self._states = {device: each.get_state() for device, each in generators.items()}
        finally:
            for each, state in zip(generators.values(), before, strict=True):
                each.set_state(state)


def _default_generators() -> dict[str, torch.Generator]:
    """The default generators by device. (`torch.get_rng_state` is recorded while a step is traced.)"""
    found = {"cpu": torch.default_generator}
    return found | {f"cuda:{i}": each for i, each in enumerate(torch.cuda.default_generators)}


def _call(target: Any, args: Any, kwargs: Any) -> Any:
    if target is get_rng_state:
        return _default_generators()[args[0]].get_state()
    if target is set_rng_state:
        return _default_generators()[args[1]].set_state(args[0])
    if target is manual_seed:
        return [each.manual_seed(args[0]) for each in _default_generators().values()]
    return target(*args, **kwargs)


@contextmanager
def _without_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _runs_once(node: fx.Node) -> bool:
    """Whether running a node again does more than compute its value."""
    return is_collective(node.target) or is_wait(node.target) or communicates(node) or calls_custom_operator(node)


def _is_cheap(node: fx.Node) -> bool:
    calls = [each for each in ancestors([node]) if each.op == "call_function"]
    return len(calls) <= _MOST_CHEAP and all(map(_costs_little, calls))


def _costs_little(node: fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return True
    return torch.Tag.pointwise in target.tags or plain_name(target) in _CHEAP or may_share(target)


def _truth(value: Any) -> bool:
    with without_functions_and_modes():
        return bool(value)


def _operands(node: fx.Node) -> list[fx.Node]:
    """The single numbers that a condition is about, for the error."""
    found: dict[fx.Node, None] = {}
    queue = [node]
    for each in queue:
        for source in each.all_input_nodes:
            if _is_number(source.meta.get("val")) and source.target is not torch.ops.aten.abs.default:
                found[source] = None
            elif len(queue) < _MOST_CHEAP:
                queue.append(source)
    return list(found)[:_OPERANDS]


def _is_number(val: Any) -> bool:
    if isinstance(val, Tensor):
        return val.dim() == 0 and val.dtype is not torch.bool
    return isinstance(val, int | float | torch.SymInt) and not isinstance(val, bool)
