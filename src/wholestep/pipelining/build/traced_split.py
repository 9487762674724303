"""Cuts a symbolically traced graph, in which submodules are single nodes and nothing has a shape.

    traced                                      cut
    mm(x, get_attr w), pipe_split, lin(...)     submod_0   mm(x, moved_w)
                                                submod_1   lin(...)
                                                top        submod_1(submod_0(x))

Values go straight from the stage that makes them to those that use them. Submodules keep their paths inside a stage;
tensors that the code reads itself are called `moved_...`, as in PiPPy.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import fx

from wholestep.pipelining.build.cut import stages_by_marks
from wholestep.pipelining.build.shared import MultiUseParameterConfig

Key = fx.Node | str
"""A value of the traced graph; or the name of a tensor that is sent."""


@dataclass(frozen=True)
class Cut:
    """A graph of stages, and the names that its modules and tensors had in the model."""

    split_gm: fx.GraphModule
    num_stages: int
    names: dict[str, str]
    not_saved: tuple[tuple[str, ...], ...]
    """By stage, buffers that are not part of its state dict."""


@dataclass(frozen=True)
class Homes:
    """Where the state that the code reads itself lives."""

    stages: dict[str, tuple[int, ...]]
    """By name, the stages that hold a tensor."""
    sent: dict[str, int]
    """Those that one stage sends to others."""


def stages_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The stage of each node between two marks, in a graph that may call modules and methods."""
    return stages_by_marks(graph, lambda node: node.target is not operator.getitem)


def choose_homes(
    graph: fx.Graph, stage_of: Mapping[fx.Node, int], config_of: Mapping[str, MultiUseParameterConfig]
) -> Homes:
    """Say for each tensor that the code reads in which stages it is, and whether it is sent."""
    last = max(stage_of.values(), default=0)
    stages: dict[str, tuple[int, ...]] = {}
    sent: dict[str, int] = {}
    used: dict[str, set[int]] = {}
    returned: set[str] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            used.setdefault(node.target, set()).update(stage_of[user] for user in node.users if user in stage_of)
            if any(user.op == "output" for user in node.users):
                returned.add(node.target)
    for name, where in used.items():
        all_stages = tuple(sorted(where or {last}))
        transmit = config_of.get(name, MultiUseParameterConfig.TRANSMIT) is MultiUseParameterConfig.TRANSMIT
        if name in returned or (transmit and len(all_stages) > 1):
            sent[name] = all_stages[0]
        stages[name] = all_stages[:1] if transmit else all_stages
    return Homes(stages, sent)


def cut(traced: fx.GraphModule, stage_of: Mapping[fx.Node, int], homes: Homes, persistent: Set[str]) -> Cut:
    """Build the stages and the graph that calls them. `persistent` are the names in the model's state dict."""
    top = fx.Graph()
    root = torch.nn.Module()
    made: dict[Key, fx.Node] = {}
    names: dict[str, str] = {}
    stages: dict[str, fx.GraphModule] = {}
    not_saved: list[tuple[str, ...]] = []
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            made[node] = top.node_copy(node)
    count = max(stage_of.values(), default=-1) + 1
    for stage in range(count):
        builder = _StageBuilder(traced, stage, stage_of, homes, persistent)
        module = builder.build()
        name = f"submod_{stage}"
        stages[name] = module
        not_saved.append(tuple(builder.not_saved))
        root.add_module(name, torch.nn.Module())
        names |= {f"{name}.{inside}": old for inside, old in builder.names.items()}
        call = top.create_node("call_module", name, tuple(made[key] for key in builder.inputs))
        call.meta["stage_idx"] = stage
        if len(builder.outputs) == 1:
            made[builder.outputs[0]] = call
        else:
            made |= {key: top.call_function(operator.getitem, (call, i)) for i, key in enumerate(builder.outputs)}
    output = traced.graph.output_node()
    top.output(fx.node.map_arg(output.args[0], lambda node: made[str(node.target) if node.op == "get_attr" else node]))
    split_gm = fx.GraphModule(root, top)
    for name, module in stages.items():
        split_gm.add_module(name, module)
    return Cut(split_gm, count, names, tuple(not_saved))


def keep_unused(found: Cut, model: torch.nn.Module) -> None:
    """Let the first stage hold what the model saves and no stage uses, so that nothing is lost from the state."""
    if not found.num_stages:
        return
    used = {id(tensor) for tensor in (*found.split_gm.parameters(), *found.split_gm.buffers())}
    first = found.split_gm.get_submodule("submod_0")
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in used:
            used.add(id(tensor))
            inside = "moved_" + name.replace(".", "_")
            if isinstance(tensor, torch.nn.Parameter):
                first.register_parameter(inside, tensor)
            else:
                first.register_buffer(inside, tensor)
            found.names[f"submod_0.{inside}"] = name


class _StageBuilder:
    """Copies the nodes of one stage."""

    def __init__(
        self,
        traced: fx.GraphModule,
        stage: int,
        stage_of: Mapping[fx.Node, int],
        homes: Homes,
        persistent: Set[str],
    ) -> None:
        self._traced = traced
        self._persistent = persistent
        self._nodes = [node for node in traced.graph.nodes if stage_of.get(node) == stage]
        self._held = {name for name, stages in homes.stages.items() if stage in stages}
        needed = (value for node in self._nodes for value in node.all_input_nodes if stage_of.get(value) != stage)
        taken = {self._key(value): value for value in needed if not self._is_held(value)}
        leaving = [node for node in self._nodes if any(stage_of.get(user) != stage for user in node.users)]
        self.inputs: list[Key] = list(taken)
        self.outputs: list[Key] = [*leaving, *(name for name, home in homes.sent.items() if home == stage)]
        self.names: dict[str, str] = {}
        self.not_saved: list[str] = []
        self._root = torch.nn.Module()
        self._graph = fx.Graph()
        self._made: dict[Key, fx.Node] = {key: self._graph.placeholder(value.name) for key, value in taken.items()}
        self._moved_nodes: dict[str, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        for node in self._nodes:
            self._made[node] = self._graph.node_copy(node, self._look)
            if node.op == "call_module":
                _attach(self._root, str(node.target), self._traced.get_submodule(str(node.target)))
                self.names[str(node.target)] = str(node.target)
        results = [self._moved(key) if isinstance(key, str) else self._made[key] for key in self.outputs]
        self._graph.output(results[0] if len(results) == 1 else tuple(results))
        return fx.GraphModule(self._root, self._graph)

    def _key(self, value: fx.Node) -> Key:
        return str(value.target) if value.op == "get_attr" else value

    def _is_held(self, value: fx.Node) -> bool:
        return value.op == "get_attr" and value.target in self._held

    def _look(self, value: fx.Node) -> fx.Node:
        return self._moved(str(value.target)) if self._is_held(value) else self._made[self._key(value)]

    def _moved(self, name: str) -> fx.Node:
        if name not in self._moved_nodes:
            inside = "moved_" + name.replace(".", "_")
            value = operator.attrgetter(name)(self._traced)
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                self._root.register_buffer(inside, value)
                if name not in self._persistent:
                    self.not_saved.append(inside)
            else:
                setattr(self._root, inside, value)
            self.names[inside] = name
            self._moved_nodes[name] = self._graph.get_attr(inside)
        return self._moved_nodes[name]


def _attach(root: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(root, name):
            root.add_module(name, torch.nn.Module())
        root = root.get_submodule(name)
    root.add_module(last, module)
