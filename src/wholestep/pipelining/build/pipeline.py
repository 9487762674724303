"""`pipeline`: from a model to a `Pipe`: capture each mode, assign stages, edit, route, build modules, add the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from wholestep.errors import PipelineError, called
from wholestep.pipelining.build.call_form import CallForm, call_form
from wholestep.pipelining.build.capture import (
    CapturedModel,
    MismatchError,
    ModePrograms,
    capture,
    capture_modes,
    match_nodes,
    shared_names,
    stages_like,
)
from wholestep.pipelining.build.loss_and_backward import (
    LossWrapper,
    Result,
    bad_loss,
    default_spec,
    find_loss,
    insert_backward,
    run_by_pipe_only,
)
from wholestep.pipelining.build.model_state import (
    ModelState,
    MultiUseParamSpec,
    SharingRule,
    attach,
    place_state,
    settle_state,
)
from wholestep.pipelining.build.routing import Need, check_same_values, find_needs, merge_needs, routes
from wholestep.pipelining.build.split_points import annotate_split_points, every_one_called, stages_by_marks
from wholestep.pipelining.build.stage_module import StageAbout, StageModule, build_stages
from wholestep.pipelining.build.staged_graph import (
    StagedGraph,
    copy_before_writing,
    find_differentiable,
    localize_sizes,
)
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
    function that inserts `pipe_split` nodes into the graph) or `stages` (a number: balanced automatically).

    `multi_use_params` is the mode of parameters that several stages use: "replicate", "transmit", or a mapping from
    names. `dynamic_shapes` is that of `torch.export.export`; without it the batch dimension is dynamic if the model
    allows it.

    `loss` tells which result is the loss: True, a nested spec with one True, or a name. Then calling the pipe runs the
    backward too. See `loss_and_backward.py`.

    The module is not changed. The stages share its parameters.
    """
    _check_one_way(split_spec, split_policy, stages)
    _check_arguments(module, mb_args, stages)
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
    # Markers of a policy are in the main graph only; the other modes follow it.
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
            fix="choose one way to cut",
        )


def _check_arguments(module: object, mb_args: object, stages: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise PipelineError(f"pipeline got {called(module)}.", fix="give the nn.Module that is to be cut into stages.")
    if not isinstance(mb_args, tuple | list):
        raise PipelineError(
            f"mb_args is a tuple of arguments, not a {type(mb_args).__name__}.", fix="write (x,) for one argument."
        )
    if stages is not None and not isinstance(stages, Balance) and (not isinstance(stages, int) or stages < 1):
        raise PipelineError(
            f"stages={stages!r} is not a number of stages.", fix="pass an int of at least 1, or a Balance."
        )


def _apply_policy(module: torch.nn.Module, modes: ModePrograms, policy: SplitPolicy) -> ModePrograms:
    main = modes.programs[modes.main]
    edited = policy(as_module(module, main))
    program = replace(main, graph=edited.graph)
    return replace(modes, programs={**modes.programs, modes.main: program})


def as_module(module: torch.nn.Module, program: CapturedModel) -> fx.GraphModule:
    """The flat graph as a GraphModule with the state that it reads, for a split policy."""
    state = ModelState(module, [program.constants])
    root = torch.nn.Module()
    for name in dict.fromkeys(str(node.target) for node in program.graph.nodes if node.op == "get_attr"):
        attach(root, state.entries[name])
    return fx.GraphModule(root, program.graph)


ChooseStages = Callable[[fx.Graph, Set[fx.Node]], Mapping[fx.Node, int]]
"""Returns the stage of each operator; the second argument are nodes of one mode only, which should not cross a cut."""


def assemble(
    module: torch.nn.Module,
    modes: ModePrograms,
    form: CallForm,
    inputs_require_grad: Mapping[str, bool],
    multi_use_params: MultiUseParamSpec | None,
    choose: ChooseStages | None,
) -> Pipe:
    """Build the pipe of a model. `choose` returns the stage of each operator; without it the markers decide."""
    state = ModelState(module, [program.constants for program in modes.programs.values()])
    rule = SharingRule(multi_use_params, state)
    staged, missing = _stage_all(modes, choose)
    used, shared = settle_state(list(staged.values()), state, rule)
    for each in staged.values():
        copy_before_writing(each)
        own_outputs(each)
        localize_sizes(each)
    needs = {mode: _needs(each, state, inputs_require_grad) for mode, each in staged.items()}
    main = staged[modes.main]
    merged = needs[modes.main]
    for mode in list(staged):
        try:
            merged = merge_needs(merged, needs[mode], staged[mode])
            check_same_values(routes(main, merged), needs[mode])
        except MismatchError as reason:
            missing[mode] = str(reason)
            del staged[mode]
    routing = routes(main, merged)
    codes = {mode: build_stages(each, routing, mode) for mode, each in staged.items()}
    entries = place_state(state, used)
    flags = {path: submodule.training for path, submodule in module.named_modules(remove_duplicate=False)}
    device = _device(main)
    stages = [
        StageModule(
            StageAbout(i, routing.inputs[i], routing.outputs[i], missing),
            {mode: rows[i] for mode, rows in codes.items()},
            modes.main,
            entries[i] if i < len(entries) else (),
            flags,
            device,
        )
        for i in range(routing.stages)
    ]
    return Pipe(form, modes.programs[modes.main], routing, stages, shared)


def _stage_all(modes: ModePrograms, choose: ChooseStages | None) -> tuple[dict[str, StagedGraph], dict[str, str]]:
    """The staged graph of each mode, and the reasons for missing modes."""
    main = modes.programs[modes.main]
    others, missing = _match_all(modes)
    if choose is None:
        stage_of = stages_by_marks(main.graph)
    else:
        stage_of = dict(choose(main.graph, _of_one_mode(main.graph, others)))
    found = {modes.main: StagedGraph(main, stage_of, {node: node.name for node in main.graph.nodes})}
    for mode, matched in others.items():
        program = modes.programs[mode]
        try:
            other = stages_by_marks(program.graph) if choose is None else stages_like(stage_of, program, matched)
            if max(other.values(), default=0) != max(stage_of.values(), default=0):
                raise MismatchError("the model has a different number of cuts")
            found[mode] = StagedGraph(program, other, shared_names(main, program, matched))
        except MismatchError as reason:
            missing[mode] = str(reason)
    return found, missing


def _match_all(modes: ModePrograms) -> tuple[dict[str, dict[fx.Node, fx.Node]], dict[str, str]]:
    """For each other mode the map of its nodes to those of the main one, and the reasons for missing modes."""
    found: dict[str, dict[fx.Node, fx.Node]] = {}
    missing = dict(modes.missing)
    for mode, program in modes.programs.items():
        if mode != modes.main:
            try:
                found[mode] = match_nodes(modes.programs[modes.main], program)
            except MismatchError as reason:
                missing[mode] = str(reason)
    return found, missing


def _of_one_mode(graph: fx.Graph, others: Mapping[str, Mapping[fx.Node, fx.Node]]) -> set[fx.Node]:
    nodes = set(graph.nodes)
    return nodes - nodes.intersection(*(matched.values() for matched in others.values()))


def _device(staged: StagedGraph) -> torch.device:
    """The device on which the model was captured: that of its first parameter or input."""
    values = [node.meta.get("val") for node in staged.graph.nodes if node.op in ("get_attr", "placeholder")]
    return next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))


def own_outputs(staged: StagedGraph) -> None:
    """Make the last stage compute the state that the model returns, as a value like any other."""
    for leaf in dict.fromkeys(staged.program.outputs):
        if isinstance(leaf, fx.Node) and leaf.op == "get_attr":
            last = staged.count - 1
            op: Any = torch.ops.aten.alias.default
            value = staged.add(last, op, (leaf,), f"{staged.names[leaf]}_returned", leaf, at_end=True)
            staged.use_instead(leaf, value, range(staged.count, staged.count + 1))


def _needs(staged: StagedGraph, state: ModelState, inputs_require_grad: Mapping[str, bool]) -> dict[str, Need]:
    def requires_grad(node: fx.Node) -> bool:
        if node.op == "placeholder":
            return inputs_require_grad.get(node.name, False)
        value = state.entries[str(node.target)].value
        return isinstance(value, torch.Tensor) and value.requires_grad

    differentiable = find_differentiable(staged.graph, requires_grad, staged.program.constants)
    return find_needs(staged, differentiable)


def add_loss(pipe: Pipe, module: torch.nn.Module, spec: Any) -> None:
    """Put the backward of the loss into `pipe.split_gm`.

    Without a spec, a result named "loss" is used if it can be a loss. Calling the pipe runs the backward only if the
    caller gave a spec, or the model is a `LossWrapper`; a `DetachExecutor` always does.
    """
    names = pipe.routing.outputs[-1]
    results = pipe.unflatten_outputs([Result(name) for name in names])
    found = default_spec(module, results) if spec is None else spec
    if found is None or found is False:
        return
    name = find_loss(results, found)
    why = _why_not(pipe, name)
    if why and spec is None:
        return
    if why:
        raise bad_loss(name, why, results)
    graph = pipe.split_gm.graph
    output = graph.output_node().args[0]
    assert isinstance(output, tuple)
    loss = output[names.index(name)]
    assert isinstance(loss, fx.Node)
    insert_backward(graph, loss)
    pipe.split_gm.recompile()
    pipe.split_gm.forward = run_by_pipe_only
    pipe.loss_spec = found
    pipe.has_loss_and_backward = True
    pipe.call_runs_backward = spec is not None or isinstance(module, LossWrapper)


def _why_not(pipe: Pipe, name: str) -> str:
    """The reason why a backward cannot start at a value; empty if it can."""
    value = pipe.routing.values[name]
    if not value.differentiable:
        return "it does not depend on a parameter that requires a gradient"
    if value.meta is not None and value.meta.numel() != 1:
        return f"it has the shape {list(value.meta.shape)}"
    return ""
