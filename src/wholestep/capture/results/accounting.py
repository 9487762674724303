"""Before a graph is accepted, what the trace observed is compared with what the graph does.

| observed while tracing | must be in the graph |
|---|---|
| `optimizer.step()` with gradients | a write to its parameters |
| a write to a tensor of the step's state (the version counter of its fake) | a write-back |
| a call of a custom operator | a node |
| `backward()` that leads to parameters | a change of their gradients |

and nothing of the user's may have been written for real: version counters and gradients of the real tensors are as they
were. A difference means that a replay would not do what eager does, so it is an error, whatever the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from wholestep.capture.objects.swapped_state import Tracked
from wholestep.errors import Location, LostError
from wholestep.ir.effects import calls_custom_operator
from wholestep.ir.graph_functions import call_on_copies
from wholestep.ir.meta import user_location
from wholestep.ir.user_objects.plain_contents import PLAIN
from wholestep.torch_private.autograd import gradient_leaves
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.fake_tensors import FakeTensor, version_of
from wholestep.torch_private.operators import OpOverload

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture


@dataclass(eq=False)
class OptimizerCall:
    """One call of `optimizer.step()`."""

    optimizer: Optimizer
    path: str
    location: Location | None
    parameters: list[tuple[Tensor, tuple[int, int]]]
    """Those with a gradient, and the number of writes to each before the call."""
    numbers: list[Any]
    """Plain values of the optimizer and its groups before the call."""
    unwritten: list[Tensor] = field(default_factory=list)
    is_idle: bool = False
    """The call changed nothing."""


class Account:
    """What one trace observed."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._steps: list[OptimizerCall] = []
        self._calls: list[tuple[OpOverload, Location | None]] = []
        self._real: list[tuple[Tracked, int | None, Tensor | None]] = []
        self._fakes: dict[int, int] = {}
        self.went_back = False
        """Whether the step computed gradients."""

    def begin(self) -> None:
        """Record the state before the step is traced."""
        for tracked in self._capture.table.tracked.values():
            self._real.append((tracked, version_of(local_of(tracked.real)), tracked.real.grad))
            self._fakes[id(tracked)] = version_of(tracked.input)

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[OptimizerCall]:
        """Around a call of `optimizer.step()`."""
        call = self.begin_step(optimizer)
        yield call
        self.end_step(call)

    def begin_step(self, optimizer: Optimizer) -> OptimizerCall:
        path = self._capture.world.optimizers.get(optimizer)
        if path is None and any(not isinstance(local_of(p), FakeTensor) for p in _parameters(optimizer)):
            raise LostError(
                f"the step calls step() of a {type(optimizer).__name__} that the capture does not know.",
                fix="pass the optimizer as an argument of the step; and report this, with the class that holds it.",
                location=user_location(),
            )
        location = user_location()
        call = OptimizerCall(optimizer, path or type(optimizer).__name__, location, [], _numbers(optimizer))
        self.take_gradients(call)
        return call

    def take_gradients(self, call: OptimizerCall) -> None:
        """Note the parameters that have a gradient now: those that the optimizer is to write."""
        found = [p for p in _parameters(call.optimizer) if p.grad is not None]
        call.parameters = [(p, self._writes_to(p)) for p in found if isinstance(local_of(p), FakeTensor)]

    def end_step(self, call: OptimizerCall) -> None:
        call.unwritten = [p for p, before in call.parameters if self._writes_to(p) == before]
        call.is_idle = _numbers(call.optimizer) == call.numbers
        self._steps.append(call)

    def custom_call(self, op: OpOverload) -> None:
        """A custom operator is called."""
        self._calls.append((op, user_location()))

    @contextmanager
    def backward(self, roots: Any) -> Iterator[None]:
        """Around a call of `backward()`."""
        self.went_back = True
        before, last = self._gradients(), self._capture.recorder.nodes.last()
        roots = [roots] if isinstance(roots, Tensor) else list(roots)
        # Read before the backward: it releases the functions of autograd.
        functions = [root.grad_fn for root in roots if isinstance(root, Tensor)]
        location = user_location()
        yield
        if self._capture.session is None and self._gradients() == before:
            is_recorded = self._capture.recorder.nodes.last() is not last
            self._refuse_lost_gradients(functions, location, is_recorded=is_recorded)

    def _refuse_lost_gradients(self, functions: list[Any], location: Location | None, *, is_recorded: bool) -> None:
        """No gradient changed: legal if the leaves are the step's own, or if hooks took the gradients; else refuse."""
        for leaf in gradient_leaves(functions):
            if not is_recorded or not isinstance(local_of(leaf), FakeTensor):
                raise LostError(
                    f"backward() leads to a tensor of shape {tuple(leaf.shape)}, whose gradient did not arrive.",
                    fix="report this, with the step.",
                    location=location,
                )

    def _gradients(self) -> list[tuple[int, int]]:
        grads = [tracked.fake.grad for tracked in self._capture.table.tracked.values()]
        return [(id(grad), version_of(local_of(grad))) for grad in grads if grad is not None]

    def _writes_to(self, tensor: Tensor) -> tuple[int, int]:
        return self._capture.recorder.values.writes_to(local_of(tensor))

    def check(self, graph: fx.Graph) -> None:
        """Raise LostError where something that tracing saw is not in the graph."""
        copies = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
        places = {id(node.meta.get("val")): node for node in self._capture.inputs.slot_of}
        for call in self._steps:
            self._check_step(call)
        for tracked in self._capture.table.tracked.values():
            self._check_written(tracked, places.get(id(self._capture.recorder.as_input(tracked.input))), copies)
        self._check_calls(graph)
        self._check_real()

    def _check_step(self, call: OptimizerCall) -> None:
        """Optimizers of torch write to each parameter with a gradient. Others may only count calls."""
        missing = call.unwritten
        own = type(call.optimizer).step.__module__.startswith("torch.")
        if missing and (own or (len(missing) == len(call.parameters) and call.is_idle)):
            raise LostError(
                f"{call.path}.step() was called, and the graph writes to {len(call.parameters) - len(missing)} of its "
                f"{len(call.parameters)} parameters that have a gradient.",
                fix="report this, with the step; until then pass the optimizer itself as an argument of the step.",
                location=call.location,
            )

    def _check_written(self, tracked: Tracked, place: fx.Node | None, copies: set[Any]) -> None:
        recorder, fake = self._capture.recorder, tracked.input
        if recorder.values.is_written(fake):
            is_lost = recorder.node_of(recorder.as_input(fake)) is not place and place not in copies
        elif id(fake) in recorder.reshaped:  # which raises the version, too
            is_lost = False
        else:
            is_lost = version_of(fake) != self._fakes.get(id(tracked), version_of(fake))
        if is_lost:
            raise LostError(
                f"the step writes to {tracked.slot.path}, and the graph does not.",
                fix="report this, with the step.",
            )

    def _check_calls(self, graph: fx.Graph) -> None:
        nodes = [node for node in graph.nodes if calls_custom_operator(node)]
        kept = Counter(node.args[0] if node.target is call_on_copies else node.target for node in nodes)
        for op, location in self._calls:
            kept[op] -= 1
            if kept[op] < 0:
                raise LostError(f"the step calls {op}, and the graph does not.", location=location, fix="report this.")

    def _check_real(self) -> None:
        capture = self._capture
        for tracked, version, grad in self._real:
            held_by_user = capture.inputs.is_lifted(tracked.real) and capture.recorder.values.is_written(tracked.input)
            written = version_of(local_of(tracked.real)) != version and not held_by_user
            if written or tracked.real.grad is not grad:
                what = "the gradient of " if tracked.real.grad is not grad else ""
                raise LostError(
                    f"while the step was captured {what}{tracked.slot.path} was written for real, not in the graph.",
                    fix="report this, with the step: something calls operators that bypass the dispatch modes.",
                )

    def restore(self) -> None:
        """Restore gradients that autograd left on real tensors."""
        for tracked, _, grad in self._real:
            if tracked.real.grad is not grad:
                tracked.real.grad = grad
        self._real.clear()  # a graph keeps no batch


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _numbers(optimizer: Optimizer) -> list[Any]:
    """The plain values that a `step` which only counts calls changes."""
    places = [vars(optimizer), *optimizer.param_groups, *optimizer.state.values()]
    found: list[Any] = [len(optimizer.state)]
    for place in places:
        if isinstance(place, dict):
            found += [value if isinstance(value, PLAIN) else _contents(value) for value in place.values()]
    return found


def _contents(value: Any) -> Any:
    if isinstance(local_of(value), FakeTensor):
        return id(value), version_of(local_of(value))
    return (id(value), len(value)) if isinstance(value, list | dict | set) else id(value)
