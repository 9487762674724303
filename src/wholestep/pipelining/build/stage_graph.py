"""The graph of one stage, cut out of the flat one.

    inputs(i)      placeholders, one each
    state          get_attr nodes
    blocks         modules that run their nodes in autocast, without gradients or checkpointed
    outputs(i)     a tuple, or the tensor itself if it is only one

Values that are passed on go through `aten.alias`, so that each output has a gradient function of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from wholestep.errors import PipelineError
from wholestep.ir.origin import location_of_node
from wholestep.pipelining.build.functions import FunctionModule, marked
from wholestep.pipelining.build.regions import Region, RegionModule, regions_of
from wholestep.pipelining.build.routing import Routing
from wholestep.pipelining.build.stage_module import StageCode
from wholestep.pipelining.build.staged import Staged

Look = Callable[[fx.Node], fx.Node]


def build_stages(staged: Staged, routing: Routing, mode: str) -> list[StageCode]:
    """The graphs of all stages in one mode."""
    nodes: list[list[fx.Node]] = [[] for _ in range(routing.stages)]
    for node in staged.graph.nodes:
        if node in staged.stage_of:
            nodes[staged.stage_of[node]].append(node)
    by_name = {name: node for node, name in staged.names.items()}
    return [_Builder(staged, routing, stage, nodes[stage], by_name, mode).build() for stage in range(routing.stages)]


class _Builder:
    def __init__(
        self,
        staged: Staged,
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

        def look(node: fx.Node) -> fx.Node:
            if node not in new:
                assert node.op == "get_attr", f"stage {self._stage} neither makes nor receives {node.format_node()}"
                new[node] = graph.create_node("get_attr", node.target, name=node.name)
                new[node].meta = dict(node.meta)
            return new[node]

        self._emit(graph, self._nodes, 0, new, look)
        results: list[fx.Node] = []
        for name in self._routing.outputs[self._stage]:
            source = self._by_name[name]
            result = look(source)
            if self._staged.stage_of.get(source) != self._stage:
                result = graph.call_function(torch.ops.aten.alias.default, (result,))
                result.meta = _plain_meta(source)
            results.append(result)
        graph.output(results[0] if len(results) == 1 else tuple(results))
        return StageCode(graph, self._blocks)

    def _emit(
        self, graph: fx.Graph, nodes: Sequence[fx.Node], depth: int, new: dict[fx.Node, fx.Node], look: Look
    ) -> None:
        """Copy nodes; runs of them that share the block at this depth become one call."""
        at = 0
        while at < len(nodes):
            region = _region(nodes[at], depth)
            if region is None:
                new[nodes[at]] = graph.node_copy(nodes[at], look)
                at += 1
                continue
            end = at + 1
            while end < len(nodes) and _region(nodes[end], depth) == region:
                end += 1
            self._emit_block(graph, region, nodes[at:end], depth, new, look)
            at = end

    def _emit_block(
        self,
        graph: fx.Graph,
        region: Region,
        nodes: Sequence[fx.Node],
        depth: int,
        new: dict[fx.Node, fx.Node],
        look: Look,
    ) -> None:
        if region.kind == "function":
            self._emit_function(graph, region, nodes, new, look)
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
        call = graph.create_node("call_module", name, tuple(look(node) for node in needed))
        call.meta["val"] = tuple(node.meta.get("val") for node in results)
        for place, node in enumerate(results):
            new[node] = graph.call_function(operator.getitem, (call, place))
            new[node].meta = _plain_meta(node)

    def _emit_function(
        self, graph: fx.Graph, region: Region, nodes: Sequence[fx.Node], new: dict[fx.Node, fx.Node], look: Look
    ) -> None:
        """Call a function itself in the place of the operators of its forward."""
        assert region.call is not None
        begin, end = nodes[0], nodes[-1]
        inside, results = set(nodes), marked(end)
        for node in nodes:
            if node not in results and (node in self._results or self._used_here(node, inside)):
                raise PipelineError(
                    f"{region.call.function.__name__} lets {node.name} out of its forward beside its results.",
                    fix="return it from the function",
                    node=node.format_node() or node.name,
                    location=location_of_node(node, user_only=True),
                )
        name = f"_{self._mode}_function_{len(self._blocks)}"
        self._blocks[name] = FunctionModule(region.call)
        call = graph.create_node("call_module", name, tuple(look(node) for node in marked(begin)))
        call.meta["val"] = tuple(node.meta.get("val") for node in results)
        for place, node in enumerate(results):
            new[node] = graph.call_function(operator.getitem, (call, place))
            new[node].meta = _plain_meta(node)

    def _used_here(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        return any(user not in inside and self._staged.stage_of.get(user) == self._stage for user in node.users)


def _region(node: fx.Node, depth: int) -> Region | None:
    regions = regions_of(node)
    return regions[depth] if len(regions) > depth else None


def _plain_meta(node: fx.Node) -> dict[str, object]:
    return {key: node.meta[key] for key in ("val", "stack_trace", "nn_module_stack") if key in node.meta}
