"""`Session`: the part of a plan in one trace. Parameters are gathered when a module reads them, gradients are reduced
when they are read, and optimizers and clipping run on shards.

Optimizers under sharding: elementwise ones run on the shards, all others on gathered tensors.

| optimizer | runs on | because |
|---|---|---|
| SGD, Adam(W), NAdam, RAdam, Adagrad, Adadelta, Adamax, RMSprop, Rprop, ASGD | local shards | elementwise |
| Adafactor, Muon, any other | whole tensors, gathered for the step | the update may read a whole matrix |

Local tensors instead of DTensors give the same bits in a third of the tracing time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.errors import ShardedOptimizerError, UnsupportedError
from wholestep.ir.graph_functions import own_chunk
from wholestep.ir.meta import update_node_meta, user_location
from wholestep.ir.signature import InputKind
from wholestep.ir.trace_protocol import TracedTensor, TraceRecorder
from wholestep.ir.user_objects.wrapper_tensors import is_wrapper
from wholestep.parallel.collectives import Collectives
from wholestep.parallel.gathering import Gathering, Sharded
from wholestep.parallel.place_models import placement_of
from wholestep.parallel.plan import FullyShard, Plan, axes_of
from wholestep.parallel.reducing import Reducer, Whole
from wholestep.parallel.torch_wrappers import Wrappers
from wholestep.torch_private.distributed import dtensor_over, is_dtensor, local_of, respec, spec_of
from wholestep.torch_private.fx_graphs import pytree

if TYPE_CHECKING:
    from wholestep.ir.trace_protocol import FoundObjects, TracedState

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether each element of an update depends on the same element of parameter, gradient and state only."""
    if getattr(optimizer, "elementwise", False):
        return True  # declared by the author of a third-party optimizer
    return any(isinstance(optimizer, kind) and type(optimizer).step is kind.step for kind in _ELEMENTWISE)


def step_sharded(optimizer: Optimizer, step: Callable[[], Any]) -> Any:
    """`optimizer.step()` if some parameters are DTensors."""
    if not any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
        return step()
    if is_elementwise(optimizer):
        with on_shards(optimizer):
            return step()
    twice = any(_sharded_axes(p) > 1 for group in optimizer.param_groups for p in group["params"])
    if twice or isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ShardedOptimizerError(
            f"{type(optimizer).__name__} cannot update parameters that are sharded{' along two axes' * twice}.",
            fix="use ws.Replicate, or an elementwise optimizer such as AdamW.",
        )
    with _on_wholes(optimizer):
        return step()


@contextmanager
def on_shards(optimizer: Optimizer) -> Iterator[None]:
    """Context in which the optimizer has local tensors: parameters, gradients and state."""
    swap = _ParameterSwap(optimizer)
    for param in swap.sharded():
        local = local_of(param)
        local.grad = None if param.grad is None else local_of(param.grad)
        swap.replace(param, local, {key: local_of(value) for key, value in optimizer.state.get(param, {}).items()})
    swap.enter()
    try:
        yield
    finally:
        swap.leave(lambda param, value: value)
        for param in swap.sharded():
            local_of(param).grad = None


@contextmanager
def _on_wholes(optimizer: Optimizer) -> Iterator[None]:
    """Context in which the optimizer has whole tensors; the results are sharded again."""
    swap = _ParameterSwap(optimizer)
    wholes: list[tuple[Tensor, Tensor]] = []
    for param in swap.sharded():
        whole = _whole(param).clone()
        whole.grad = None if param.grad is None else _whole(param.grad).clone()
        wholes.append((param, whole))
        state = {}
        for key, value in optimizer.state.get(param, {}).items():
            state[key] = _whole(value).clone() if is_dtensor(value) else value
        swap.replace(param, whole, state)
    swap.enter()
    try:
        yield
    finally:
        swap.leave(_shard_like)
        with torch.no_grad():
            for param, whole in wholes:
                local_of(param).copy_(_shard_like(param, whole))


class _ParameterSwap:
    """Temporarily replaces parameters by other tensors in the groups of an optimizer and as keys of its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [group["params"] for group in optimizer.param_groups]
        self._before: dict[Any, dict[Any, Any]] = {}
        self._state: dict[Tensor, dict[Any, Any]] = {}
        self._replacement: dict[Tensor, Tensor] = {}

    def sharded(self) -> list[Tensor]:
        """The parameters that are DTensors."""
        return [p for params in self._groups for p in params if is_dtensor(p)]

    def replace(self, param: Tensor, other: Tensor, state: dict[Any, Any]) -> None:
        """Set the tensor that replaces a parameter, and its state."""
        self._replacement[param] = other
        self._state[param] = state

    def enter(self) -> None:
        """Replace the parameters."""
        optimizer = self._optimizer
        self._before = dict(optimizer.state)
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [self._replacement.get(p, p) for p in params]
        optimizer.state.clear()
        for owner, entries in self._before.items():
            if owner in self._replacement:
                optimizer.state[self._replacement[owner]] = dict(self._state[owner])
            else:
                optimizer.state[owner] = entries

    def leave(self, local: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Restore the parameters and their state; new state with a parameter's shape becomes a DTensor placed like
        it."""
        optimizer = self._optimizer
        now = dict(optimizer.state)
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = params
        owners = {id(other): param for param, other in self._replacement.items()}
        optimizer.state.clear()
        for other, entries in now.items():
            param = owners.get(id(other))
            if param is None:
                optimizer.state[other] = entries
                continue
            before, initial = self._before.get(param, {}), self._state[param]
            placed: dict[Any, Any] = {}
            for key, value in entries.items():
                held, is_same = before.get(key), value is initial.get(key)
                if is_wrapper(value):
                    raise UnsupportedError(
                        f"state of {type(optimizer).__name__} is a {type(value).__name__}, which cannot be sharded "
                        "with its parameter.",
                        fix="use Replicate(mesh), or an optimizer whose state is plain tensors.",
                        location=user_location(),
                    )
                if not isinstance(value, Tensor):
                    placed[key] = value
                elif is_same and local_of(held) is value:
                    placed[key] = held
                elif is_same and is_dtensor(held):
                    with torch.no_grad():
                        local_of(held).copy_(local(param, value))
                    placed[key] = held
                elif value.dim() and value.shape == other.shape:
                    placed[key] = dtensor_over(local(param, value), spec_of(param))
                else:
                    placed[key] = value
            optimizer.state[param] = placed


def _sharded_axes(param: Tensor) -> int:
    """The number of mesh axes along which a parameter is sharded."""
    return sum(not p.is_replicate() for p in spec_of(param).placements) if is_dtensor(param) else 0


def _whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, on every rank."""
    with torch.no_grad():
        found: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return found


def _shard_like(param: Tensor, whole: Tensor) -> Tensor:
    """This rank's shard of a whole tensor that is placed like a parameter."""
    from torch.distributed.tensor import Replicate

    spec = spec_of(param)
    everywhere = dtensor_over(whole, respec(spec, [Replicate()] * spec.mesh.ndim))
    placed: Any = everywhere.redistribute(placements=spec.placements)  # type: ignore[attr-defined]
    found: Tensor = local_of(placed)
    return found


class Session:
    """One trace under a plan."""

    def __init__(self, plan: Plan, world: FoundObjects, table: TracedState, recorder: TraceRecorder) -> None:
        self._plan = plan
        self._depth = 0
        self.collectives = Collectives(recorder)
        placements = [p for module in world.modules if (p := placement_of(module)) is not None]
        self._units = {module for placement in placements for module in placement.units}
        self._sharded: dict[int, Sharded] = {}
        wholes: list[Whole] = []
        forms = {m: f for placement in placements for m, f in placement.layouts.items()}
        for slot, tracked in table.module_slots:
            form = forms.get(slot.module, {}).get(slot.key)
            if form is not None and is_dtensor(tracked.fake):
                self._sharded[id(tracked.fake)] = Sharded(tracked.fake, tracked.slot.path, form)
        self.wrappers = Wrappers(world, table) if plan.wrapped else None
        for tracked in table.parameters:
            if id(tracked.fake) not in self._sharded and (self.wrappers is None or self.wrappers.reduces(tracked.fake)):
                wholes.append(Whole(tracked.fake, tracked.slot.path))
        self._recorder = recorder
        self._paths = {id(t.fake): t.slot.path for t in table.parameters}
        self._buffers = [tracked for slot, tracked in table.module_slots if slot.kind is InputKind.BUFFER]
        self._sent: dict[int, TracedTensor] = {}
        """Buffers that a `DistributedDataParallel` broadcasts from rank 0 before the step has written to them."""
        self._reducer = Reducer(plan, recorder, wholes, self.wrappers)
        self._gathering = Gathering(plan, recorder, self._reducer) if isinstance(plan, FullyShard) else None

    def axis_names(self) -> dict[str, str]:
        """Names of axes by the groups of this rank."""
        return {axis.group: axis.name for axis in self._plan.all_axes}

    def attribute(self, value: Any) -> Any:
        """The value of a module's attribute for code inside of a forward: a sharded parameter is gathered."""
        if self._depth == 0 or not isinstance(value, Tensor):
            return value
        param = self._sharded.get(id(value))
        if param is None or self._gathering is None:
            return value
        return self._gathering.read(param)

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module: casts of the mixed-precision policy, and gathered parameters inside."""
        policy = self._plan.policy if isinstance(self._plan, FullyShard) and module in self._units else None
        if policy is not None and policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        self._depth += 1
        try:
            with self._whole_lists(module):
                result = original(module, *args, **kwargs)
        finally:
            self._depth -= 1
            if self._depth == 0 and self._gathering is not None:
                self._gathering.end_forward()
        if policy is not None and policy.output_dtype is not None:
            result = _cast(result, policy.output_dtype)
        return result

    @contextmanager
    def _whole_lists(self, module: nn.Module) -> Iterator[None]:
        """Gather the weights in the list that an RNN has of them."""
        held = vars(module).get("_flat_weights") if isinstance(module, nn.RNNBase) else None
        if held is None or not any(id(w) in self._sharded for w in held):
            yield
            return
        vars(module)["_flat_weights"] = [self.attribute(w) for w in held]
        try:
            yield
        finally:
            vars(module)["_flat_weights"] = held

    def saved_tensors(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._gathering is None else self._gathering.hooks()

    def own_chunk(
        self, original: Callable[..., Tensor], shard: Any, tensor: Tensor, mesh: Any, dim: int, *rest: Any
    ) -> Tensor:
        """DTensor's slice of this rank's shard, as a node that does not contain the rank."""
        values = self._recorder.values
        if values.paused or not values.knows(tensor):
            return original(shard, tensor, mesh, dim, *rest)
        values.paused = True
        try:
            chunk = original(shard, tensor, mesh, dim, *rest)
        finally:
            values.paused = False
        axis = axes_of(mesh)[dim]
        arguments = (self._recorder.node_of(tensor), shard.dim, axis.size, axis.group)
        values.register_result(chunk, self._recorder.emit_function(own_chunk, arguments, chunk))
        return chunk

    def before_reading_grad(self, tensor: Any) -> None:
        if self._reducer.is_concerned(tensor):
            self._reducer.flush()

    def after_setting_grad(self, tensor: Any) -> None:
        self._reducer.replaced(tensor)

    def after_backward(self) -> None:
        """A call of `backward()` returned."""
        self._reducer.after_backward()

    def wrapped_forward(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`DistributedDataParallel.forward`."""
        if self.wrappers is None or not self.wrappers.knows(module):
            return original(module, *args, **kwargs)
        return self.wrappers.forward(module, self._send, args, kwargs)

    def _send(self, module: nn.Module, names: Sequence[str]) -> None:
        """Broadcast buffers of a module from rank 0: here if the step has written to them, else at its start."""
        sent = {id(module.get_buffer(name)) for name in names}
        for tracked in self._buffers:
            if id(tracked.fake) not in sent:
                continue
            if not self._recorder.values.is_written(tracked.input):
                self._sent[id(tracked)] = tracked
                continue
            value = self._recorder.node_of(tracked.fake)
            for axis in reversed(self._plan.axes):
                value = self.collectives.broadcast(value, axis)
            self._recorder.values.write(tracked.fake, value)

    def refuse_gradients(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse `torch.autograd.grad` of parameters, whose result would not be reduced."""
        for tensor in [inputs] if isinstance(inputs, Tensor) else inputs:
            path = self._paths.get(id(tensor))
            if path is not None:
                raise UnsupportedError(
                    f"torch.autograd.grad takes the gradient of {path}, which would not be reduced over ranks.",
                    fix="use loss.backward() and read .grad, which is reduced over all ranks.",
                    location=user_location(),
                )

    def finish(self) -> None:
        """End of the step's code: reduce the remaining gradients and place the reductions."""
        self._reducer.flush()
        if self._gathering is not None:
            self._gathering.check_unwritten()
        self._reducer.schedule()
        if self._plan.ranks > 1:
            everywhere = self._plan.buffers == "broadcast"
            self._take_from_first_rank(self._buffers if everywhere else list(self._sent.values()))
        if self.wrappers is not None:
            self.wrappers.leave()

    def release(self) -> None:
        """Drop all fakes after the trace."""
        self._reducer.release()
        self._sharded.clear()
        self._buffers.clear()
        self._sent.clear()
        if self._gathering is not None:
            self._gathering.release()

    def _take_from_first_rank(self, buffers: Sequence[TracedTensor]) -> None:
        """Broadcast the buffers that the step writes from rank 0, at the start of the graph."""
        nodes = self._recorder.nodes
        inputs = [node for node in nodes.graph.nodes if node.op == "placeholder"]
        holding = {id(node.meta.get("val")): node for node in inputs}
        place = inputs[-1]
        for tracked in buffers:
            if not self._recorder.values.is_written(tracked.input):
                continue
            source, before = holding[id(tracked.input)], nodes.last()
            users = list(source.users)
            value = source
            for axis in reversed(self._plan.axes):
                value = self.collectives.broadcast(value, axis)
            for user in users:
                user.replace_input_with(source, value)
            for node in nodes.since(before):
                update_node_meta(node, parameter=tracked.slot.path, phase="forward", module_path="")
                place.append(node)
                place = node

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        self._reducer.flush()
        return step_sharded(optimizer, step)

    def unscale(self, optimizer: Optimizer, unscale: Callable[[], dict[Any, Tensor]]) -> dict[Any, Tensor]:
        """Unscale the shards of this rank; the inf flag is reduced, so all ranks skip the step together."""
        self._reducer.flush()
        if not any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
            return unscale()
        with on_shards(optimizer):
            found = unscale()
        for device, flag in found.items():
            for axis in self._plan.all_axes:
                flag = self.collectives.all_reduce(flag, axis, "max")
            found[device] = flag
        return found


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype
        return leaf.to(dtype) if is_float else leaf

    return pytree.tree_map(cast, tree)
