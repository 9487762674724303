"""`step()` of optimizers, schedulers and gradient scalers while tracing: recorded, deferred until after the graph, or
refused.

`GradScaler.step` without its branch: the optimizer runs, and every tensor it changed is chosen between old and new.

    eager                                    graph
    if not found_inf.item():                 p1 = add(p, ..)
        optimizer.step()                     p2 = where(found_inf, p, p1)

State that the optimizer creates in a skipped step must not exist afterwards: the change is conditional on the flag,
which becomes an output that the runtime reads (only in the graph that creates state).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.graph.recorder import Recorder
from wholestep.capture.objects.discover import World
from wholestep.capture.python_reads.attribute_reads import Attributes
from wholestep.capture.results.accounting import Account, OptimizerCall
from wholestep.capture.scalars.symbolic_scalars import LastRateSlot, scalar_of
from wholestep.capture.scalars.traced_numbers import TracedScalars
from wholestep.errors import (
    ControlFlowError,
    ItemError,
    Location,
    OptimizerClosureError,
    SideEffectError,
    UnsupportedError,
)
from wholestep.ir.captured_step import HostCall
from wholestep.ir.deferred import HostLeaf
from wholestep.ir.meta import user_location
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import own_dict, same_plain
from wholestep.ir.user_objects.slots import ABSENT, HyperSlot, Slot
from wholestep.parallel.session import Session
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.modules_and_optimizers import SCALER_STEP, SCALER_UNSCALE

if TYPE_CHECKING:
    from wholestep.capture.scalars.scalar_policy import ScalarPolicy


class StateAtCalls:
    """What the user's state held when the step called a scheduler: the scheduler must find that after the graph ran.

    group["momentum"] = m     set before the call: bound before the scheduler runs
    scheduler.step()          note_option(m)
    group["lr"] = 0.1         set after it: bound when the scheduler ran
    """

    def __init__(self) -> None:
        self._options: dict[tuple[int, str], Any] = {}
        """By the identity of the group, which a wrapper may share with the optimizer inside of it."""
        self._attributes: dict[int, dict[str, Any]] | None = None
        self._variables: dict[int, Any] = {}

    def note_option(self, group: dict[str, Any], slot: HyperSlot, value: Any) -> None:
        """A scheduler is about to be called that may set this option of a param group."""
        scalar = scalar_of(value)
        if scalar is not None and isinstance(scalar.leaf, HostLeaf) and scalar.leaf.slot is not None:
            return  # as the scheduler before this one leaves it
        key = (id(group), slot.key)
        if key in self._options:
            raise SideEffectError(
                f"the step sets {slot.path} between two calls of schedulers, which a replay makes one after the other.",
                fix="set it before the first or after the last scheduler.step().",
                location=user_location(),
            )
        self._options[key] = value

    def note_python(self, world: World, snapshots: list[Attributes]) -> None:
        """The first scheduler is about to be called: what attributes and variables hold, that its lambdas may read."""
        self._attributes = {id(each.now): dict(each.now) for each in snapshots}
        self._variables = {id(slot): slot.get() for _, slot, _ in world.variables}

    def refuse_changed(self, world: World, snapshots: list[Attributes]) -> None:
        """Another scheduler is about to be called that may run code of the user's: a replay calls it with what the
        first one found."""
        paths = [
            f"{each.path}.{name}"
            for each in snapshots
            if not isinstance(each.obj, Optimizer | LRScheduler)
            for name, value in each.now.items()
            if not same_plain(value, self.attribute(each.now, name, value))
        ]
        paths += [
            name for name, slot, _ in world.variables if not same_plain(slot.get(), self.variable(slot, slot.get()))
        ]
        if paths:
            raise SideEffectError(
                f"the step changes {paths[0]} between two calls of schedulers, which a replay makes one after the "
                "other: the second may read it.",
                fix="change it before the first or after the last scheduler.step().",
                location=user_location(),
            )

    def option(self, group: dict[str, Any], key: str, otherwise: Any) -> Any:
        """What an option of a param group held."""
        return self._options.get((id(group), key), otherwise)

    def may_be_set(self, group: dict[str, Any], key: str) -> bool:
        """Whether a scheduler was called that may set the option."""
        return (id(group), key) in self._options

    def attribute(self, attributes: dict[str, Any], name: str, otherwise: Any) -> Any:
        """What an attribute held; `otherwise` where no scheduler was called."""
        if self._attributes is None or id(attributes) not in self._attributes:
            return otherwise
        return self._attributes[id(attributes)].get(name, ABSENT)

    def variable(self, slot: Slot, otherwise: Any) -> Any:
        """What a variable held; `otherwise` where no scheduler was called."""
        return self._variables.get(id(slot), otherwise)


class StepHost(Protocol):
    """What the replaced methods need from the capture."""

    phase: str
    world: World
    recorder: Recorder
    session: Session | None
    snapshots: list[Attributes]
    account: Account
    host_calls: list[HostCall]
    at_calls: StateAtCalls
    steps_seen: list[Optimizer]
    step_lines: dict[Optimizer, Location | None]
    running_step: Optimizer | None
    """The optimizer whose replaced `step` is running."""
    scalars: TracedScalars
    numbers: ScalarPolicy

    def creation_skipped_if(self, optimizer: Optimizer, flag: fx.Node) -> None: ...


def replace_optimizer_step(host: StepHost, optimizer: Optimizer) -> None:
    """Attribute the nodes of the step to the optimizer; those of a closure that it calls to the step."""
    original = optimizer.step

    def step(closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        _refuse_step(host, optimizer)
        if closure is not None and host.session is not None:
            raise OptimizerClosureError(
                "optimizer.step(closure) evaluates the model within the update of a sharded optimizer.",
                fix="compute the loss and call backward() before optimizer.step(), without a closure.",
                location=user_location(),
            )
        before, host.phase = host.phase, "optimizer"
        host.steps_seen.append(optimizer)
        host.step_lines[optimizer] = user_location()
        running, host.running_step = host.running_step, optimizer
        try:
            with host.account.step(optimizer) as call:
                if host.session is not None:
                    return host.session.optimizer_step(optimizer, lambda: original(*args, **kwargs))
                if closure is None:
                    return original(*args, **kwargs)
                evaluations = _Evaluations(host, closure, call, before)
                with evaluations.refusing_choices(optimizer):
                    return original(evaluations, *args, **kwargs)
        finally:
            host.phase, host.running_step = before, running

    vars(optimizer)["step"] = step


class _Evaluations:
    """A closure that an optimizer calls: as often as its Python says, if that depends on no value of a tensor."""

    def __init__(self, host: StepHost, closure: Callable[[], Any], call: OptimizerCall, phase: str) -> None:
        self._host = host
        self._closure = closure
        self._call = call
        self._phase = phase
        self._is_inside = False

    def __call__(self) -> Any:
        host = self._host
        phase, host.phase = host.phase, self._phase
        running, host.running_step = host.running_step, None
        self._is_inside = True
        loss = self._closure()
        self._is_inside = False
        host.phase, host.running_step = phase, running
        host.account.take_gradients(self._call)
        return loss

    @contextmanager
    def refusing_choices(self, optimizer: Optimizer) -> Iterator[None]:
        """Explain a refusal of the optimizer's own code: it decides by values what it evaluates next."""
        try:
            yield
        except (ControlFlowError, ItemError) as error:
            if self._is_inside:
                raise
            raise OptimizerClosureError(
                f"{type(optimizer).__name__}.step(closure) decides by values of tensors how often it evaluates the "
                f"closure, or what it does with the result: {error.what}",
                fix="compile the closure instead of the step, or use an optimizer that follows a fixed program.",
                location=user_location(),
            ) from error


class BoundSteps:
    """Calls of `step` as a bound method that was taken before the trace: they do not see the replaced method."""

    def __init__(self, host: StepHost) -> None:
        self._host = host
        self._running: list[tuple[OptimizerCall, str]] = []

    def begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Torch is about to run the `step` of an optimizer."""
        host = self._host
        if host.running_step is optimizer:
            return
        _refuse_step(host, optimizer)
        if host.session is not None:
            raise UnsupportedError(
                "step() of a sharded optimizer is called as a bound method that was taken before the step.",
                fix="keep the optimizer and call optimizer.step().",
                location=user_location(),
            )
        host.steps_seen.append(optimizer)
        host.step_lines[optimizer] = user_location()
        self._running.append((host.account.begin_step(optimizer), host.phase))
        host.phase = "optimizer"

    def end(self, optimizer: Optimizer) -> None:
        """It has run."""
        if self._running and self._running[-1][0].optimizer is optimizer:
            call, self._host.phase = self._running.pop()
            self._host.account.end_step(call)


def _refuse_step(host: StepHost, optimizer: Optimizer) -> None:
    """Refuse the step of an optimizer whose options a scheduler has changed in the same call. Other optimizers may
    step: what the scheduler sets is not theirs."""
    for call in host.host_calls:
        if _options_of(call.scheduler.optimizer) & _options_of(optimizer):
            raise SideEffectError(
                f"{call.path}.step() comes before a step of its optimizer, which would see the new learning rate in "
                "this same call.",
                fix="call scheduler.step() after optimizer.step(), as torch asks for.",
                location=user_location(),
            )


def _options_of(optimizer: Optimizer) -> set[int]:
    """Identities of the param groups of an optimizer and of the tensors among their options: a wrapper may share the
    groups, two optimizers a learning rate."""
    groups = optimizer.param_groups
    values = (value for group in groups for key, value in group.items() if key != "params")
    options = (item for value in values for item in (value if isinstance(value, tuple | list) else (value,)))
    return {*map(id, groups), *(id(item) for item in options if isinstance(item, Tensor))}


def replace_scaler_steps(host: StepHost, scaler: Any) -> None:
    """Make the scaler select instead of branch, and unscale local shards."""
    vars(scaler)[SCALER_STEP] = functools.partial(select_instead_of_branch, host)
    vars(scaler)[SCALER_UNSCALE] = functools.partial(_unscale, host, getattr(scaler, SCALER_UNSCALE))


def _unscale(host: StepHost, original: Callable[..., Any], optimizer: Optimizer, *args: Any) -> Any:
    if host.session is None:
        return original(optimizer, *args)
    return host.session.unscale(optimizer, lambda: original(optimizer, *args))


def replace_scheduler_step(host: StepHost, scheduler: Any, path: str) -> None:
    """Defer the scheduler until after the graph; the learning rates that it will set are not known before."""

    def step(*args: Any, **kwargs: Any) -> None:
        if any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
            raise ItemError(
                f"{path}.step() takes the value of a tensor.",
                fix="return the tensor from the step and call the scheduler outside of it.",
                location=user_location(),
            )
        call = HostCall(scheduler, path, args, kwargs)
        if not host.host_calls:
            host.at_calls.note_python(host.world, host.snapshots)
        elif type(scheduler) not in _BY_FORMULA:
            host.at_calls.refuse_changed(host.world, host.snapshots)
        host.host_calls.append(call)
        _hide_hyper_parameters(host, call)
        own = own_dict(scheduler)
        for name in SCHEDULER_COUNTS & own.keys():
            own[name] = host.scalars.late(call, f"{path}.{name}", functools.partial(own.get, name))

    def get_last_lr() -> list[Any]:
        slots = [
            LastRateSlot(InputKind.HYPER_PARAMETER, f"{path}.get_last_lr()[{i}]", None, scheduler, i)
            for i in range(len(scheduler.optimizer.param_groups))
        ]
        last = next((call for call in reversed(host.host_calls) if call.scheduler is scheduler), None)
        if last is not None:
            return [host.scalars.late(last, slot.path, slot.get) for slot in slots]
        return [host.scalars.make(slot, slot.get()) for slot in slots]

    vars(scheduler)["step"] = step
    vars(scheduler)["get_last_lr"] = get_last_lr


_BY_FORMULA = frozenset(
    {
        lr_scheduler.StepLR,
        lr_scheduler.MultiStepLR,
        lr_scheduler.ConstantLR,
        lr_scheduler.LinearLR,
        lr_scheduler.ExponentialLR,
        lr_scheduler.PolynomialLR,
        lr_scheduler.CosineAnnealingLR,
        lr_scheduler.CosineAnnealingWarmRestarts,
        lr_scheduler.OneCycleLR,
    }
)
"""Schedulers that run no code of the user's."""


SCHEDULER_COUNTS = frozenset({"last_epoch", "_step_count", "num_bad_epochs", "best", "cooldown_counter"})
"""Attributes of schedulers that their `step()` counts up: known only after the graph ran."""


def _hide_hyper_parameters(host: StepHost, call: HostCall) -> None:
    """From here on the learning rates of this optimizer are those that the scheduler will set."""
    optimizer = call.scheduler.optimizer
    path = host.world.optimizers.get(optimizer, type(optimizer).__name__)
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if scalar_of(value) is not None or type(value) in (int, float):
                where = f"{path}.param_groups[{g}].{key}"
                slot = HyperSlot(InputKind.HYPER_PARAMETER, where, None, optimizer, g, key, None)
                if not host.numbers.plain:
                    host.at_calls.note_option(group, slot, value)
                group[key] = host.scalars.late(call, where, slot.get, slot)


aten = torch.ops.aten


class AmpHost(Protocol):
    """What the patch needs from the capture."""

    recorder: Recorder

    def creation_skipped_if(self, optimizer: Optimizer, flag: fx.Node) -> None: ...


def select_instead_of_branch(
    host: AmpHost, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `GradScaler._maybe_opt_step` while tracing."""
    recorder = host.recorder
    found = list(optimizer_state["found_inf_per_device"].values())
    total = found[0]
    for other in found[1:]:
        total = total + other.to(total.device)
    flag_tensor = total != 0
    flag = recorder.node_of(flag_tensor)
    before = [(tensor, recorder.node_of(tensor)) for tensor in _reachable(optimizer)]
    result = optimizer.step(*args, **kwargs)
    flags: dict[torch.device, fx.Node] = {flag_tensor.device: flag}
    for tensor, old in before:
        new = recorder.node_of(tensor)
        if new is old:
            continue
        if tensor.device not in flags:
            flags[tensor.device] = recorder.emit(aten._to_copy.default, flag, device=tensor.device)
        recorder.values.write(tensor, recorder.emit(aten.where.self, flags[tensor.device], old, new))
    host.creation_skipped_if(optimizer, flag)
    return result


def _reachable(optimizer: Optimizer) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            found[id(param)] = param
            if param.grad is not None:
                found[id(param.grad)] = param.grad
    for entries in optimizer.state.values():
        for value in entries.values() if isinstance(entries, dict) else ():
            if isinstance(value, Tensor):
                found[id(value)] = value
    return [local_of(tensor) for tensor in found.values()]
