"""`torch.distributed._spmd.api`: `compile` over a training step with one model and one optimizer.

    @compile(gm_transformation=GraphModuleTransformation(enable_graph_optimization=True))
    def train_step(model, optimizer, batch): ...

    train_step(model, optimizer, batch)                           captured, transformed and run
    train_step(model, optimizer, batch, last_train_step=True)     nothing is pending afterwards
    train_step._compiled_obj.gm                                   the transformed graph

It is `ws.compile` with a plan for the parallel mode, and a pass each for overrides, the mode and the transformation.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn

from wholestep.api import compile as compile_step
from wholestep.compat.spmd.parallel_mode import DTensorExpandMode, ParallelMode
from wholestep.compiled_step import CompiledStep
from wholestep.errors import OptionError
from wholestep.passes import graph_optimization_pass
from wholestep.torch_private.fx_graphs import pytree

COMPILED_OBJECT_KEY = "_compiled_obj"
"""Under this name a step keeps what was compiled, in its `__dict__`."""


class Override(ABC):
    """Replaces submodules before the step is traced, and rewrites what became of them in the graph.

    For parts of a model that cannot be traced, or should not be: the replacement calls an operator of its own, which
    `transform` finds in the graph.
    """

    @abstractmethod
    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        """What stands in the place of a submodule from now on; itself to leave it. `fqn` is its path in the model."""

    @abstractmethod
    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        """The graph after a rewrite. `flat_state`: the tensors of the graph's first placeholders, in order."""


@dataclass
class CompiledObject:
    """What a call of `compile` has made so far."""

    mod: nn.Module
    opt: torch.optim.Optimizer | None
    flat_state: list[Tensor] = field(default_factory=list)
    gm: Any = None
    """The graph that ran last: a GraphModule, or the IterGraphModule that a transformation returned."""
    step: CompiledStep[..., Any] | None = None
    """The compiled step itself."""


def compile(
    module_override: Sequence[Override] | None = None,
    gm_transformation: Callable[[fx.GraphModule], Any] | None = None,
    parallel_mode: ParallelMode | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a training step, which is called with its model and its optimizer, for all ranks of the process group.

    `module_override`: see `Override`. `gm_transformation` gets the graph once, and returns a graph module or an
    IterGraphModule. `parallel_mode`: `DTensorExpandMode()` by default, where gradients are summed over ranks.
    """

    def inner(func: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        @wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            made: CompiledObject | None = wrapper.__dict__.get(COMPILED_OBJECT_KEY)
            if made is None:
                mode = DTensorExpandMode() if parallel_mode is None else parallel_mode
                made = _compile(func, module_override or (), gm_transformation, mode, args, kwargs)
                wrapper.__dict__[COMPILED_OBJECT_KEY] = made
            assert made.step is not None
            calls += 1
            last = bool(kwargs.pop("last_train_step", False)) or calls == getattr(gm_transformation, "num_iters", -1)
            result = made.step(*args, **kwargs)
            if last:
                made.step.flush()
            if made.gm is None and made.step.last is not None:
                made.gm = made.step.last.gm
            return result

        return wrapper

    return inner


def _compile(
    func: Callable[..., Any],
    overrides: Sequence[Override],
    transformation: Callable[[fx.GraphModule], Any] | None,
    mode: ParallelMode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CompiledObject:
    leaves = pytree.tree_leaves((args, kwargs))
    model, optimizer = _only(nn.Module, leaves), _only(torch.optim.Optimizer, leaves)
    if model is None:
        raise OptionError(
            "Couldn't find nn.Module instances from the arguments.", fix="give the step its model as an argument."
        )
    _swap(model, "", model, overrides)
    made = CompiledObject(model, optimizer)

    @graph_optimization_pass(numerics="changes")
    def override_and_partition(gm: fx.GraphModule) -> fx.GraphModule:
        made.flat_state = _flat_state(gm, func, args, kwargs, model)
        for override in overrides:
            before = len(made.flat_state)
            gm = override.transform(gm, made.flat_state)
            if len(made.flat_state) != before:
                raise OptionError(
                    "Override.transform changed the number of states.",
                    fix="let the replacement of the module have the state; the graph gets it as an input then.",
                )
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        named = (
            {} if optimizer is None else {name: optimizer.state[p] for name, p in state.items() if p in optimizer.state}
        )
        return mode.partition(gm, model, optimizer, state, named, args, kwargs)

    @graph_optimization_pass(numerics="changes")
    def transform(gm: fx.GraphModule) -> Any:
        found = mode.transform_and_compile(gm)
        if transformation is not None:
            found = transformation(found)
        made.gm = found
        return found

    inductor = bool(getattr(transformation, "enable_inductor", False))
    made.step = compile_step(
        func,
        lower="inductor" if inductor else "eager",
        cuda_graph="auto" if getattr(transformation, "enable_cudagraphs", False) else False,
        parallel=mode.plan(model),
        passes=[override_and_partition, transform],
    )
    return made


def _only(kind: type[Any], leaves: Sequence[Any]) -> Any:
    found = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, kind)}.values())
    if len(found) > 1:
        raise OptionError(f"Only support single {kind.__name__} for now.", fix="use ws.compile, which takes several.")
    return found[0] if found else None


def _swap(model: nn.Module, prefix: str, module: nn.Module, overrides: Sequence[Override]) -> None:
    """Put replacements into a model; what is replaced is not searched further."""
    for override in overrides:
        for name, child in list(module.named_children()):
            fqn = f"{prefix}{name}"
            new = override.replacement(fqn, child)
            if new is child:
                _swap(model, f"{fqn}.", child, (override,))
            else:
                model.set_submodule(fqn, new)


def _flat_state(
    gm: fx.GraphModule, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module
) -> list[Tensor]:
    """The parameters and buffers that the first placeholders stand for, which are named by their path."""
    bound = signature(func).bind_partial(*args, **{k: v for k, v in kwargs.items() if k != "last_train_step"})
    called = next((name for name, value in bound.arguments.items() if value is model), "model")
    known: dict[str, Tensor] = {
        re.sub(r"\W", "_", f"{called}.{name}"): tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    found: list[Tensor] = []
    for node in gm.graph.nodes:
        if node.op != "placeholder" or node.name not in known:
            break
        found.append(known[node.name])
    return found
