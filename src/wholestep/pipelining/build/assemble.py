"""From captured programs to a pipe: cut, edit, route, build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import fx

from wholestep.pipelining.build.calls import CallForm
from wholestep.pipelining.build.cut import stages_by_marks
from wholestep.pipelining.build.differentiable import find_differentiable
from wholestep.pipelining.build.modes import MismatchError, Modes, match, shared_names, stages_like
from wholestep.pipelining.build.routing import Need
from wholestep.pipelining.build.shared import MultiUseParamSpec, SharingRule, settle_state
from wholestep.pipelining.build.sizes import localize_sizes
from wholestep.pipelining.build.stage_graph import build_stages
from wholestep.pipelining.build.stage_module import StageAbout, StageModule
from wholestep.pipelining.build.staged import Staged
from wholestep.pipelining.build.state import ModelState, place
from wholestep.pipelining.build.table import check_same_values, find_needs, merge_needs, routes
from wholestep.pipelining.build.writes import copy_before_writing
from wholestep.pipelining.pipe import Pipe

ChooseStages = Callable[[fx.Graph, Set[fx.Node]], Mapping[fx.Node, int]]
"""Gives the stage of each operator; the second argument are nodes of one mode only, which should not cross a cut."""


def assemble(
    module: torch.nn.Module,
    modes: Modes,
    form: CallForm,
    inputs_require_grad: Mapping[str, bool],
    multi_use_params: MultiUseParamSpec | None,
    choose: ChooseStages | None,
) -> Pipe:
    """The pipe of a model. `choose` gives the stage of each operator; without it the marks in the graph do."""
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
    entries = place(state, used)
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


def _stage_all(modes: Modes, choose: ChooseStages | None) -> tuple[dict[str, Staged], dict[str, str]]:
    """Every mode with its stages; and why some are missing."""
    main = modes.programs[modes.main]
    others, missing = _match_all(modes)
    if choose is None:
        stage_of = stages_by_marks(main.graph)
    else:
        stage_of = dict(choose(main.graph, _of_one_mode(main.graph, others)))
    found = {modes.main: Staged(main, stage_of, {node: node.name for node in main.graph.nodes})}
    for mode, matched in others.items():
        program = modes.programs[mode]
        try:
            other = stages_by_marks(program.graph) if choose is None else stages_like(stage_of, program, matched)
            if max(other.values(), default=0) != max(stage_of.values(), default=0):
                raise MismatchError("the model has another number of cuts")
            found[mode] = Staged(program, other, shared_names(main, program, matched))
        except MismatchError as reason:
            missing[mode] = str(reason)
    return found, missing


def _match_all(modes: Modes) -> tuple[dict[str, dict[fx.Node, fx.Node]], dict[str, str]]:
    """For each other mode its nodes with those of the main one; and why some modes are missing."""
    found: dict[str, dict[fx.Node, fx.Node]] = {}
    missing = dict(modes.missing)
    for mode, program in modes.programs.items():
        if mode != modes.main:
            try:
                found[mode] = match(modes.programs[modes.main], program)
            except MismatchError as reason:
                missing[mode] = str(reason)
    return found, missing


def _of_one_mode(graph: fx.Graph, others: Mapping[str, Mapping[fx.Node, fx.Node]]) -> set[fx.Node]:
    nodes = set(graph.nodes)
    return nodes - nodes.intersection(*(matched.values() for matched in others.values()))


def _device(staged: Staged) -> torch.device:
    """Where the model was captured: the device of its first parameter or input."""
    values = [node.meta.get("val") for node in staged.graph.nodes if node.op in ("get_attr", "placeholder")]
    return next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))


def own_outputs(staged: Staged) -> None:
    """Let the last stage compute what the model returns of its state: a value like any other."""
    for leaf in dict.fromkeys(staged.program.outputs):
        if isinstance(leaf, fx.Node) and leaf.op == "get_attr":
            last = staged.count - 1
            op: Any = torch.ops.aten.alias.default
            value = staged.add(last, op, (leaf,), f"{staged.names[leaf]}_returned", leaf, at_end=True)
            staged.use_instead(leaf, value, range(staged.count, staged.count + 1))


def _needs(staged: Staged, state: ModelState, inputs_require_grad: Mapping[str, bool]) -> dict[str, Need]:
    def requires_grad(node: fx.Node) -> bool:
        if node.op == "placeholder":
            return inputs_require_grad.get(node.name, False)
        value = state.entries[str(node.target)].value
        return isinstance(value, torch.Tensor) and value.requires_grad

    differentiable = find_differentiable(staged.graph, requires_grad, staged.program.constants)
    return find_needs(staged, differentiable)
