"""Optimizers under sharding: elementwise ones run on the shards, all others on gathered tensors.

| optimizer | runs on | because |
|---|---|---|
| SGD, Adam(W), NAdam, RAdam, Adagrad, Adadelta, Adamax, RMSprop, Rprop, ASGD | local shards | elementwise |
| Adafactor, Muon, any other | whole tensors, gathered for the step | the update may look at a whole matrix |

Running on local tensors instead of DTensors gives the same bits, and a third of the tracing time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wholestep.errors import ShardedOptimizerError
from wholestep.torch_private.dtensor import dtensor_over, is_dtensor, local_of, respec, spec_of

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
        return True  # said by the author of a third-party optimizer
    return any(isinstance(optimizer, kind) and type(optimizer).step is kind.step for kind in _ELEMENTWISE)


def step_sharded(optimizer: Optimizer, step: Callable[[], Any]) -> Any:
    """`optimizer.step()` where some parameters are DTensors."""
    if not any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
        return step()
    if is_elementwise(optimizer):
        with on_shards(optimizer):
            return step()
    twice = any(_sharded_axes(p) > 1 for group in optimizer.param_groups for p in group["params"])
    if twice or isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ShardedOptimizerError(
            f"{type(optimizer).__name__} cannot work on parameters that are sharded{' along two axes' * twice}.",
            fix="use ws.Replicate, or an elementwise optimizer such as AdamW.",
        )
    with _on_wholes(optimizer):
        return step()


@contextmanager
def on_shards(optimizer: Optimizer) -> Iterator[None]:
    """The optimizer sees local tensors: parameters, gradients and state."""
    swap = _Swap(optimizer)
    for param in swap.sharded():
        local = local_of(param)
        local.grad = None if param.grad is None else local_of(param.grad)
        swap.stand_in(param, local, {key: local_of(value) for key, value in optimizer.state.get(param, {}).items()})
    swap.enter()
    try:
        yield
    finally:
        swap.leave(lambda param, value: value)
        for param in swap.sharded():
            local_of(param).grad = None


@contextmanager
def _on_wholes(optimizer: Optimizer) -> Iterator[None]:
    """The optimizer sees whole tensors; what it changed is cut into shards again."""
    swap = _Swap(optimizer)
    wholes: list[tuple[Tensor, Tensor]] = []
    for param in swap.sharded():
        whole = _whole(param).clone()
        whole.grad = None if param.grad is None else _whole(param.grad).clone()
        wholes.append((param, whole))
        state = {}
        for key, value in optimizer.state.get(param, {}).items():
            state[key] = _whole(value).clone() if is_dtensor(value) else value
        swap.stand_in(param, whole, state)
    swap.enter()
    try:
        yield
    finally:
        swap.leave(_shard_like)
        with torch.no_grad():
            for param, whole in wholes:
                local_of(param).copy_(_shard_like(param, whole))


class _Swap:
    """Other tensors in the place of parameters, in the groups and as keys of the state, for a while."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [group["params"] for group in optimizer.param_groups]
        self._before: dict[Any, dict[Any, Any]] = {}
        self._given: dict[Tensor, dict[Any, Any]] = {}
        self._stand_in: dict[Tensor, Tensor] = {}

    def sharded(self) -> list[Tensor]:
        """The parameters that are DTensors."""
        return [p for params in self._groups for p in params if is_dtensor(p)]

    def stand_in(self, param: Tensor, other: Tensor, state: dict[Any, Any]) -> None:
        self._stand_in[param] = other
        self._given[param] = state

    def enter(self) -> None:
        optimizer = self._optimizer
        self._before = dict(optimizer.state)
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [self._stand_in.get(p, p) for p in params]
        optimizer.state.clear()
        for owner, entries in self._before.items():
            if owner in self._stand_in:
                optimizer.state[self._stand_in[owner]] = dict(self._given[owner])
            else:
                optimizer.state[owner] = entries

    def leave(self, local: Callable[[Tensor, Tensor], Tensor]) -> None:
        """State back under the parameters; new tensors of a parameter's shape become DTensors placed like it."""
        optimizer = self._optimizer
        now = dict(optimizer.state)
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = params
        owners = {id(other): param for param, other in self._stand_in.items()}
        optimizer.state.clear()
        for other, entries in now.items():
            param = owners.get(id(other))
            if param is None:
                optimizer.state[other] = entries
                continue
            before, given = self._before.get(param, {}), self._given[param]
            placed: dict[Any, Any] = {}
            for key, value in entries.items():
                held, is_given = before.get(key), value is given.get(key)
                if not isinstance(value, Tensor):
                    placed[key] = value
                elif is_given and local_of(held) is value:
                    placed[key] = held
                elif is_given and is_dtensor(held):
                    with torch.no_grad():
                        local_of(held).copy_(local(param, value))
                    placed[key] = held
                elif value.dim() and value.shape == other.shape:
                    placed[key] = dtensor_over(local(param, value), spec_of(param))
                else:
                    placed[key] = value
            optimizer.state[param] = placed


def _sharded_axes(param: Tensor) -> int:
    """Along how many axes of its mesh a parameter is sharded."""
    return sum(not p.is_replicate() for p in spec_of(param).placements) if is_dtensor(param) else 0


def _whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, on every rank."""
    with torch.no_grad():
        found: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return found


def _shard_like(param: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, placed like a parameter."""
    from torch.distributed.tensor import Replicate

    spec = spec_of(param)
    everywhere = dtensor_over(whole, respec(spec, [Replicate()] * spec.mesh.ndim))
    placed: Any = everywhere.redistribute(placements=spec.placements)  # type: ignore[attr-defined]
    found: Tensor = local_of(placed)
    return found
