"""The module of one stage: a graph for each mode, and the state that they read under the model's names.

    inputs(i)      placeholders, one each
    state          get_attr nodes
    regions        modules that run their nodes under autocast, without gradients or checkpointed
    outputs(i)     a tuple, or the tensor itself if there is only one

Relayed values go through `aten.alias`, so that each output has its own grad_fn.

When a stage moves to another device, the constants of its graphs move too: `ones([4], device=cpu)`, captured on the
CPU, becomes `ones([4], device=cuda)`. Only the device of the stage itself is replaced; a tensor that the model creates
on another device stays there. `materialize` allocates the tensors of a stage whose model was cut on the meta device or
under a fake mode.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.errors import PipelineError, PipelineModeError
from wholestep.ir.meta import location_of_node
from wholestep.pipelining.build.context_regions import (
    ContextRegion,
    FunctionModule,
    RegionModule,
    marked_tensors,
    regions_of,
)
from wholestep.pipelining.build.model_state import StateEntry, attach
from wholestep.pipelining.build.routing import Routing
from wholestep.pipelining.build.staged_graph import StagedGraph
from wholestep.torch_private.fake_tensors import FakeTensor, fake_tensor


def change_device(module: torch.nn.Module, graph: fx.Graph, old: torch.device, new: torch.device) -> None:
    """Replace a device in the arguments of a graph, in its metadata and in the regions that it calls."""
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, lambda value: _moved(value, old, new))
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda value: _moved(value, old, new))
        if "val" in node.meta:
            node.meta["val"] = _value(node.meta["val"], old, new)
        if node.op == "call_module":
            block = module.get_submodule(str(node.target))
            if isinstance(block, RegionModule):
                block.region = block.region.on_device(old.type, new.type)
                change_device(block.body, block.body.graph, old, new)
                block.body.recompile()


def same_device(a: torch.device, b: torch.device) -> bool:
    """True if two devices are the same; `cuda` means `cuda:0`."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def _moved(value: Any, old: torch.device, new: torch.device) -> Any:
    return new if isinstance(value, torch.device) and same_device(value, old) else value


def _value(value: Any, old: torch.device, new: torch.device) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_value(item, old, new) for item in value)
    if not isinstance(value, FakeTensor) or not same_device(value.device, old) or value.layout is not torch.strided:
        return value
    return fake_tensor(value.fake_mode, value.shape, value.stride(), value.dtype, new)


@dataclass(frozen=True)
class StageCode:
    """The graph of a stage in one mode."""

    graph: fx.Graph
    blocks: Mapping[str, torch.nn.Module]
    """The modules of autocast, no_grad and checkpoint regions that the graph calls."""


@dataclass(frozen=True)
class StageAbout:
    """The index of a stage, and the names of its inputs and outputs."""

    index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    missing: Mapping[str, str]
    """Modes without a graph, and why."""


class StageModule(fx.GraphModule):
    """A stage: takes the values `about.inputs`, returns a tuple of `about.outputs`, or the tensor if there is only one.

    `train()` and `eval()` switch the graph. The state is that of the model: the same tensors, the same names.
    """

    def __init__(
        self,
        about: StageAbout,
        codes: Mapping[str, StageCode],
        main: str,
        entries: Sequence[StateEntry],
        flags: Mapping[str, bool],
        device: torch.device,
    ) -> None:
        super().__init__(torch.nn.Module(), fx.Graph(), class_name=f"Stage{about.index}")
        self._about = about  # names of the model are attributes here too: ours begin with an underscore
        self._codes = dict(codes)
        self._mode = main
        self._device = device
        for entry in entries:
            attach(self, entry)
        for path, module in self.named_modules():
            module.training = flags.get(path, flags[""])
        self._use(main)

    def train(self, mode: bool = True) -> StageModule:
        """Switch to the graph of training, or with False to that of evaluation."""
        super().train(mode)
        wanted = "train" if mode else "eval"
        if wanted != self._mode:
            self._mode = wanted
            if wanted in self._codes:
                self._use(wanted)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> StageModule:
        """Implements `to()`, `cuda()` and `to_empty()`: constants of the graphs move with the state."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._follow(fn(torch.empty(0, device=self._device)).device)
        return self

    def _follow(self, device: torch.device) -> None:
        if same_device(device, self._device):
            return
        for code in self._codes.values():
            holder = torch.nn.Module()
            for name, block in code.blocks.items():
                holder.add_module(name, block)
            change_device(holder, code.graph, self._device, device)
        self._device = device
        self.recompile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._mode not in self._codes:
            shown = {"train": "training", "eval": "evaluation"}[self._mode]
            raise PipelineModeError(
                f"stage {self._about.index} has no graph for {shown}: {self._about.missing[self._mode]}.",
                fix=f"build another pipe with the model in {shown}; if that fails too, its error says why",
            )
        return super().__call__(*args, **kwargs)

    def _use(self, mode: str) -> None:
        for code in self._codes.values():
            for name in code.blocks:
                self._modules.pop(name, None)
        for name, block in self._codes[mode].blocks.items():
            self.add_module(name, block)
        self.graph = self._codes[mode].graph

    def __reduce__(self) -> Any:
        raise PipelineError(
            f"stage {self._about.index} cannot be pickled: unpickling would run code, and lose a mode.",
            fix="wholestep.pipelining.save_stage(stage, folder) writes JSON and tensors",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StageModule:
        new = StageModule.__new__(StageModule)
        memo[id(self)] = new
        own = {key: value for key, value in vars(self).items() if key not in ("_graph", "_code", "_codes", "_modules")}
        fx.GraphModule.__init__(new, torch.nn.Module(), fx.Graph(), class_name=type(self).__name__)
        blocks = {name for code in self._codes.values() for name in code.blocks}
        new.__dict__.update(copy.deepcopy(own, memo))
        new._modules = {
            name: copy.deepcopy(module, memo) for name, module in self._modules.items() if name not in blocks
        }
        new._codes = {
            mode: StageCode(copy.deepcopy(code.graph), copy.deepcopy(dict(code.blocks), memo))
            for mode, code in self._codes.items()
        }
        new._use(self._mode if self._mode in new._codes else next(iter(new._codes)))
        return new


def follow_device(stage: StageModule, device: torch.device | str) -> None:
    """Move the constants of a stage whose state is on the device already."""
    stage._follow(torch.device(device))


def codes_of(stage: StageModule) -> Mapping[str, StageCode]:
    """The graphs of a stage, by mode."""
    return stage._codes


def about(stage: StageModule) -> StageAbout:
    """The index and the inputs and outputs of a stage."""
    return stage._about


BuffersFrom = torch.nn.Module | Callable[[str], torch.Tensor]


def materialize(
    stage: torch.nn.Module,
    device: torch.device | str,
    state: Mapping[str, torch.Tensor],
    buffers_from: BuffersFrom | None = None,
) -> torch.nn.Module:
    """Allocate each meta or fake parameter and buffer of a stage with its value in `state`, and move the stage.

    `state` has the model's names; it may hold more than this stage needs. Buffers that are not in it, such as
    non-persistent ones, come from `buffers_from`: a module with buffers of these names, or a function of the name.
    """
    new: dict[int, torch.Tensor] = {}
    for module_path, module in stage.named_modules():
        prefix = f"{module_path}." if module_path else ""
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if not is_empty(tensor):
                continue
            if id(tensor) not in new:
                new[id(tensor)] = _filled(prefix + name, tensor, device, state, buffers_from)
            if isinstance(tensor, torch.nn.Parameter):
                module.register_parameter(name, new[id(tensor)])
            else:
                module._buffers[name] = new[id(tensor)]
    if isinstance(stage, StageModule):
        follow_device(stage, device)
    return stage.to(device)


def is_empty(tensor: torch.Tensor) -> bool:
    """True if a tensor is meta or fake."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _filled(
    name: str,
    tensor: torch.Tensor,
    device: torch.device | str,
    state: Mapping[str, torch.Tensor],
    buffers_from: BuffersFrom | None,
) -> torch.Tensor:
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    given = state.get(name)
    if given is None and not is_parameter:
        given = _buffer(name, buffers_from)
    if given is None or is_empty(given):
        raise PipelineError(
            f"the {'parameter' if is_parameter else 'buffer'} {name} has no data and no value was given for it.",
            fix="pass all parameters and buffers of the stage"
            if is_parameter
            else "put it into the state; or, if it is not persistent, pass materialize_stage(..., buffers_from=) a "
            "module that has it, such as the same model with fewer layers",
        )
    if given.shape != tensor.shape:
        raise PipelineError(
            f"{name} has the shape {list(tensor.shape)}; the given value has {list(given.shape)}.",
            fix="pass the state of the model that was cut",
        )
    with torch.no_grad():
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(given)
    return torch.nn.Parameter(value, tensor.requires_grad) if is_parameter else value


def _buffer(name: str, source: BuffersFrom | None) -> torch.Tensor | None:
    if isinstance(source, torch.nn.Module):
        return dict(source.named_buffers(remove_duplicate=False)).get(name)
    return None if source is None else source(name)


NodeMap = Callable[[fx.Node], fx.Node]


def build_stages(staged: StagedGraph, routing: Routing, mode: str) -> list[StageCode]:
    """The graphs of all stages in one mode."""
    nodes: list[list[fx.Node]] = [[] for _ in range(routing.stages)]
    for node in staged.graph.nodes:
        if node in staged.stage_of:
            nodes[staged.stage_of[node]].append(node)
    by_name = {name: node for node, name in staged.names.items()}
    return [
        _StageGraphBuilder(staged, routing, stage, nodes[stage], by_name, mode).build()
        for stage in range(routing.stages)
    ]


class _StageGraphBuilder:
    def __init__(
        self,
        staged: StagedGraph,
        routing: Routing,
        stage: int,
        nodes: Sequence[fx.Node],
        by_name: dict[str, fx.Node],
        mode: str,
    ) -> None:
        self._staged = staged
        self._routing = routing
        self._stage = stage
        self._nodes = nodes
        self._by_name = by_name
        self._mode = mode
        self._blocks: dict[str, torch.nn.Module] = {}
        self._results = {by_name[name] for name in routing.outputs[stage]}

    def build(self) -> StageCode:
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for name in self._routing.inputs[self._stage]:
            source = self._by_name[name]
            new[source] = graph.placeholder(name)
            new[source].meta = _plain_meta(source)

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in new:
                assert node.op == "get_attr", f"stage {self._stage} neither computes nor receives {node.format_node()}"
                new[node] = graph.create_node("get_attr", node.target, name=node.name)
                new[node].meta = dict(node.meta)
            return new[node]

        self._emit(graph, self._nodes, 0, new, copy_of)
        results: list[fx.Node] = []
        for name in self._routing.outputs[self._stage]:
            source = self._by_name[name]
            result = copy_of(source)
            if self._staged.stage_of.get(source) != self._stage:
                result = graph.call_function(torch.ops.aten.alias.default, (result,))
                result.meta = _plain_meta(source)
            results.append(result)
        graph.output(results[0] if len(results) == 1 else tuple(results))
        return StageCode(graph, self._blocks)

    def _emit(
        self, graph: fx.Graph, nodes: Sequence[fx.Node], depth: int, new: dict[fx.Node, fx.Node], copy_of: NodeMap
    ) -> None:
        """Copy nodes; consecutive nodes of one region at this depth become one call."""
        at = 0
        while at < len(nodes):
            region = _region(nodes[at], depth)
            if region is None:
                new[nodes[at]] = graph.node_copy(nodes[at], copy_of)
                at += 1
                continue
            end = at + 1
            while end < len(nodes) and _region(nodes[end], depth) == region:
                end += 1
            self._emit_block(graph, region, nodes[at:end], depth, new, copy_of)
            at = end

    def _emit_block(
        self,
        graph: fx.Graph,
        region: ContextRegion,
        nodes: Sequence[fx.Node],
        depth: int,
        new: dict[fx.Node, fx.Node],
        copy_of: NodeMap,
    ) -> None:
        if region.kind == "function":
            self._emit_function(graph, region, nodes, new, copy_of)
            return
        inside = set(nodes)
        needed = list(dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in inside))
        needed.sort(key=lambda node: node.op != "get_attr")
        results = [node for node in nodes if node in self._results or any(user not in inside for user in node.users)]
        results = [node for node in results if node in self._results or self._used_here(node, inside)]
        held = sum(node.op == "get_attr" for node in needed)
        body = fx.Graph()
        inner: dict[fx.Node, fx.Node] = {}
        for node in needed:
            inner[node] = body.placeholder(node.name)
            inner[node].meta = _plain_meta(node)
        holder = torch.nn.Module()
        outer_blocks, self._blocks = self._blocks, {}
        self._emit(body, nodes, depth + 1, inner, inner.__getitem__)
        for name, block in self._blocks.items():
            holder.add_module(name, block)
        body.output(tuple(inner[node] for node in results))
        module = RegionModule(region, fx.GraphModule(holder, body, class_name="Block"), held)
        self._blocks = outer_blocks
        name = f"_{self._mode}_{region.kind}_{len(self._blocks)}"
        self._blocks[name] = module
        call = graph.create_node("call_module", name, tuple(copy_of(node) for node in needed))
        call.meta["val"] = tuple(node.meta.get("val") for node in results)
        for place, node in enumerate(results):
            new[node] = graph.call_function(operator.getitem, (call, place))
            new[node].meta = _plain_meta(node)

    def _emit_function(
        self,
        graph: fx.Graph,
        region: ContextRegion,
        nodes: Sequence[fx.Node],
        new: dict[fx.Node, fx.Node],
        copy_of: NodeMap,
    ) -> None:
        """Call an autograd Function in place of the operators of its forward."""
        assert region.call is not None
        begin, end = nodes[0], nodes[-1]
        inside, results = set(nodes), marked_tensors(end)
        for node in nodes:
            if node not in results and (node in self._results or self._used_here(node, inside)):
                raise PipelineError(
                    f"{node.name} of the forward of {region.call.function.__name__} is used outside the function, and "
                    "is not a result of it.",
                    fix="return it from the function",
                    node=node.format_node() or node.name,
                    location=location_of_node(node, user_only=True),
                )
        name = f"_{self._mode}_function_{len(self._blocks)}"
        self._blocks[name] = FunctionModule(region.call)
        call = graph.create_node("call_module", name, tuple(copy_of(node) for node in marked_tensors(begin)))
        call.meta["val"] = tuple(node.meta.get("val") for node in results)
        for place, node in enumerate(results):
            new[node] = graph.call_function(operator.getitem, (call, place))
            new[node].meta = _plain_meta(node)

    def _used_here(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        return any(user not in inside and self._staged.stage_of.get(user) == self._stage for user in node.users)


def _region(node: fx.Node, depth: int) -> ContextRegion | None:
    regions = regions_of(node)
    return regions[depth] if len(regions) > depth else None


def _plain_meta(node: fx.Node) -> dict[str, object]:
    return {key: node.meta[key] for key in ("val", "stack_trace", "nn_module_stack") if key in node.meta}
