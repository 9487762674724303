"""`pipeline`: one call from a model to a pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.errors import PipelineError
from wholestep.pipelining.build.assemble import ChooseStages, assemble
from wholestep.pipelining.build.calls import call_form
from wholestep.pipelining.build.capture import Program, capture
from wholestep.pipelining.build.cut import stages_by_marks
from wholestep.pipelining.build.markers import annotate_split_points, every_one_called
from wholestep.pipelining.build.modes import Modes, capture_modes
from wholestep.pipelining.build.pipe_loss import add_loss
from wholestep.pipelining.build.shared import MultiUseParamSpec
from wholestep.pipelining.build.state import ModelState, attach
from wholestep.pipelining.pipe import Pipe
from wholestep.pipelining.planning.balance import Balance, choose_stages

SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]


def pipeline(
    module: torch.nn.Module,
    mb_args: Sequence[Any],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, Any] | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    dynamic_shapes: Any = None,
    multi_use_params: MultiUseParamSpec = "replicate",
    loss: Any = None,
    stages: int | Balance | None = None,
) -> Pipe:
    """Cut a model into stages.

    `mb_args` and `mb_kwargs` are one microbatch, real, fake or on the meta device; nothing runs. Cuts come from
    `pipe_split()` in the code and from one of `split_spec` (`{"layers.2": SplitPoint.BEGINNING}`), `split_policy` (a
    function that puts `pipe_split` nodes into the graph) or `stages` (a number: balanced automatically).

    `multi_use_params` says what happens to parameters that several stages use: "replicate", "transmit", or a mapping
    from names. `dynamic_shapes` is that of `torch.export.export`; without it the batch dimension is open where the
    model allows it.

    `loss` says which result is the loss: True, a nested spec with one True, or a name. Then calling the pipe runs the
    backward too. See `loss.py`.

    The module is not changed. Its parameters are those of the stages.
    """
    _check_one_way(split_spec, split_policy, stages)
    _check_arguments(mb_args, stages)
    kwargs = dict(mb_kwargs or {})
    form = call_form(module, mb_args, kwargs)
    with annotate_split_points(module, split_spec or {}), every_one_called(module, split_spec or {}):
        modes = capture_modes(module, lambda: capture(module, form, mb_args, kwargs, dynamic_shapes))
    if split_policy is not None:
        modes = _apply_policy(module, modes, split_policy)
    main = modes.programs[modes.main]
    tensors = form.flatten(mb_args, kwargs)
    names = [node.name for node in main.graph.nodes if node.op == "placeholder"]
    inputs_require_grad = {name: tensor.requires_grad for name, tensor in zip(names, tensors, strict=True)}
    # Marks of a policy are in one graph only; the others follow it.
    choose: ChooseStages | None = _by_marks if split_policy is not None else None
    if stages is not None:
        state = ModelState(module, [main.constants])
        balance = stages if isinstance(stages, Balance) else Balance(stages)
        choose = partial(
            choose_stages,
            balance=balance,
            inputs=tensors,
            state=lambda name: state.entries[name].value,
            submodules=main.constants,
        )
    pipe = assemble(module, modes, form, inputs_require_grad, multi_use_params, choose)
    add_loss(pipe, module, loss)
    return pipe


def _by_marks(graph: fx.Graph, of_one_mode: Set[fx.Node]) -> Mapping[fx.Node, int]:
    return stages_by_marks(graph)


def _check_one_way(split_spec: object, split_policy: object, stages: object) -> None:
    given = {"split_spec": split_spec, "split_policy": split_policy, "stages": stages}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise PipelineError(
            f"Cannot specify both `{named[0]}` and `{named[1]}`. Please use only one of them.",
            fix="say in one way where to cut",
        )


def _check_arguments(mb_args: object, stages: object) -> None:
    if not isinstance(mb_args, tuple | list):
        raise PipelineError(
            f"mb_args is the tuple of a call's arguments, not a {type(mb_args).__name__}.", fix="write (x,) for one."
        )
    if stages is not None and not isinstance(stages, Balance) and (not isinstance(stages, int) or stages < 1):
        raise PipelineError(f"stages={stages!r} is no number of stages.", fix="give a number from 1 on, or a Balance.")


def _apply_policy(module: torch.nn.Module, modes: Modes, policy: SplitPolicy) -> Modes:
    main = modes.programs[modes.main]
    edited = policy(as_module(module, main))
    program = replace(main, graph=edited.graph)
    return replace(modes, programs={**modes.programs, modes.main: program})


def as_module(module: torch.nn.Module, program: Program) -> fx.GraphModule:
    """The flat graph with the state that it reads, for a split policy."""
    state = ModelState(module, [program.constants])
    root = torch.nn.Module()
    for name in dict.fromkeys(str(node.target) for node in program.graph.nodes if node.op == "get_attr"):
        attach(root, state.entries[name])
    return fx.GraphModule(root, program.graph)
