"""`partial_lower`: runs of nodes become compiled calls, the rest of the graph stays as it is.

    before   mm, add, relu, .., all_reduce, mm, .., wait_tensor, add_, ..
    after    subgraph_0(..), all_reduce, subgraph_1(..), wait_tensor, subgraph_2(..)

Legal: groups respect data flow, random ops and side effects keep their order, collectives keep their place, and only
whole tensors cross the boundary of a region. Cost: planning is linear in the graph; compile time is Inductor's.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from wholestep.errors import LowerError, LowerWarning, called
from wholestep.ir.effects import returned_position, written_roots
from wholestep.ir.graph_walks import postorder
from wholestep.ir.meta import node_meta, set_node_meta
from wholestep.lower.compiled_region import Assumptions, CompiledRegion, RegionCache, compile_whole, region_settings
from wholestep.lower.forward_backward import CompileInTwo, find_seed
from wholestep.lower.options import LowerOptions
from wholestep.lower.regions import Region, RegionPlan, is_free, order_of, plan_regions
from wholestep.lower.report import Lowering, RegionReport, found_lowering, note_lowering, target_text
from wholestep.lower.retrace import Retraced, retrace
from wholestep.lower.scalar_inputs import SizeConditions, WatchedSizes, pack_scalars, set_symbolic_sizes, symbols_of
from wholestep.lower.shared_bodies import SharedBodies
from wholestep.lower.supported_nodes import (
    NodePredicate,
    SubgraphPredicate,
    any_node,
    any_subgraph,
    check_callable,
    is_generator,
    why_not_write,
)
from wholestep.torch_private.fx_graphs import copy_codegen
from wholestep.torch_private.operators import OpOverload

log = logging.getLogger("wholestep.lower")

aten = torch.ops.aten

Dumper = Callable[[str], str]
_Compiled = tuple[CompiledRegion, Retraced] | str


def partial_lower(
    gm: fx.GraphModule,
    node_predicate: NodePredicate = any_node,
    subgraph_predicate: SubgraphPredicate = any_subgraph,
    dumper: Dumper | None = None,
    *,
    options: LowerOptions | Mapping[str, Any] | None = None,
    cache: RegionCache | None = None,
    may_alias: bool = True,
) -> fx.GraphModule:
    """Replace runs of nodes of a graph by calls that Inductor compiles; returns the same graph module.

    `node_predicate` and `subgraph_predicate` refuse nodes and regions by returning False; elements of a tuple go with
    the node that computes it. `dumper` gets the text of a region and returns its tag: the keyword of its call, which
    profilers show. `options`: a `LowerOptions`, or a dict of its fields. A graph may be lowered again: compiled regions
    stay. `cache`: regions that were compiled for other graphs. `may_alias`: no guard checks the inputs of a call; two
    may share memory, or may have another layout than at trace time. Then regions check them at run time, and run
    operator by operator where they must.
    """
    options = LowerOptions.of(options, "options")
    check_callable(node_predicate=node_predicate, subgraph_predicate=subgraph_predicate)
    check_callable(**({} if dumper is None else {"dumper": dumper}))
    _check_graph(gm)
    read_written_tensors(gm.graph)
    set_symbolic_sizes(gm.graph)
    plan = plan_regions(
        gm.graph, node_predicate, subgraph_predicate, options.min_aten_ops, may_alias=may_alias, exact=options.exact
    )
    _log_breaks(plan)
    rewriter = _RegionRewriter(gm, plan, options, dumper, cache or RegionCache(), may_alias)
    before = found_lowering(gm)
    lowering = rewriter.run()
    if before is not None:
        lowering.add_earlier(before, gm.graph)
    note_lowering(gm, lowering)
    return gm


def read_written_tensors(graph: fx.Graph) -> None:
    """Let readers of the result of an in-place operator read the tensor that it wrote into.

        add_ = aten.add_(x, 1); y = aten.mul(add_, 2)     ->     aten.add_(x, 1); y = aten.mul(x, 2)

    The two are the same tensor. Written so, it is not a view to recompute, and an output of a region is a tensor that
    it computed or the caller's own.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or not node.users:
            continue
        position = returned_position(node.target)
        written = node.args[position] if position is not None and position < len(node.args) else None
        if isinstance(written, fx.Node) and why_not_write(node.target) == "":
            node.replace_all_uses_with(written)


def _check_graph(gm: fx.GraphModule) -> None:
    if not isinstance(gm, fx.GraphModule):
        raise LowerError(
            f"{called(gm)} is not a torch.fx.GraphModule.",
            fix="trace it: make_fx(f, tracing_mode='fake')(*inputs).",
        )
    try:
        gm.graph.lint()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise LowerError(
            f"the graph is not valid: {error}", fix="call gm.graph.lint() after the rewrite that made it."
        ) from error
    for node in gm.graph.nodes:
        computes = any(user.op != "output" for user in node.users)
        if node.op == "placeholder" and computes and "val" not in node.meta and not is_generator(node):
            raise LowerError(
                f"{node.name} has no `val` in its metadata, so its shape is not known.",
                fix="trace with make_fx(..., tracing_mode='fake'), or put fake tensors into node.meta['val'].",
                node=node.format_node() or node.name,
            )


def _log_breaks(plan: RegionPlan) -> None:
    for group in plan.groups:
        if not isinstance(group, Region):
            for node in group.nodes:
                log.info("%s stays outside: %s", node.name, plan.reasons.get(node, ""))


def _placement(like: torch.Tensor) -> dict[str, Any]:
    return {"dtype": like.dtype, "device": like.device}


class _RegionRewriter:
    def __init__(
        self,
        gm: fx.GraphModule,
        plan: RegionPlan,
        options: LowerOptions,
        dumper: Dumper | None,
        cache: RegionCache,
        may_alias: bool,
    ) -> None:
        self._gm = gm
        self._plan = plan
        self._options = options
        self._dumper = dumper
        self._cache = cache
        self._may_alias = may_alias
        self._graph = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self._reasons: dict[fx.Node, str] = {}
        self._report = Lowering()

    def run(self) -> Lowering:
        sizes = WatchedSizes(self._gm.graph, self._cache.conditions_before)
        compiled = self._compile_regions()
        conditions = sizes.conditions()
        for node in self._gm.graph.find_nodes(op="placeholder"):
            self._copy(node)
        attached: dict[str, CompiledRegion] = {}
        for group in self._plan.groups:
            if not isinstance(group, Region):
                for node in group.nodes:
                    self._outside(node, self._plan.reasons.get(node, ""))
                continue
            found = self._checkable(group, compiled[group.number], conditions)
            if isinstance(found, str):
                for node in group.nodes:
                    self._outside(node, found)
            else:
                module, retraced = found
                self._assume(group, module, len(retraced.packs), conditions)
                name = self._free_name(f"subgraph_{group.number}", attached)
                attached[name] = module
                self._call(group, name, module, retraced)
        for node in self._plan.tail:
            self._outside(node, "writes back a value from outside, or one whose old contents are read later")
        self._copy(next(iter(reversed(self._gm.graph.nodes))))
        for name, module in attached.items():
            self._gm.add_submodule(name, module)
        copy_codegen(self._gm.graph, self._graph)
        self._drop_unused()
        self._note_outside()
        self._graph.lint()
        self._gm.graph = self._graph
        return self._report

    def _compile_regions(self) -> list[_Compiled]:
        found: list[_Compiled] = []
        regions, before = self._plan.regions, 0
        total = sum(region.operators for region in regions)
        for number, region in enumerate(regions, 1):
            with self._cache.progress.region(number, len(regions), region.operators, before, total):
                found.append(self._compile(region))
            before += region.operators
        return found

    def _compile(self, region: Region) -> _Compiled:
        """The compiled region, or why there is none."""
        tag = self._tag(region)
        try:
            seed = find_seed(region) if self._options.remat else None
            config = region_settings(self._options, region)
            bodies = self._cache.bodies_for(self._options.repeat)
            retraced = replace(retrace(region, config, seed=seed), bodies=bodies)
            how = compile_whole if seed is None else CompileInTwo(self._options.shed)
            compiled = self._cache.compile(retraced, config, how)
        except Exception as error:
            return self._failed(region, error)
        return CompiledRegion(compiled, tag, region.operators), retraced

    def _checkable(self, region: Region, found: _Compiled, conditions: SizeConditions) -> _Compiled:
        if isinstance(found, str) or conditions.can_be_checked or not symbols_of([*region.inputs, *region.nodes]):
            return found
        return self._failed(region, ValueError(f"no input has the sizes to check {conditions} at run time"))

    def _assume(self, region: Region, module: CompiledRegion, packs: int, conditions: SizeConditions) -> None:
        written = written_roots(order_of(region), region.inputs) if self._may_alias else []
        if not symbols_of([*region.inputs, *region.nodes]):
            conditions = SizeConditions([], {})
        if self._may_alias or conditions:
            module.assume(Assumptions(region, self._gm, written, conditions, packs, check_layouts=self._may_alias))

    def _failed(self, region: Region, error: Exception) -> str:
        first, last = region.nodes[0], region.nodes[-1]
        where = node_meta(first).location
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        names = f"{first.name} to {last.name}, {region.operators} operators"
        what = f"region {region.number} ({names}) does not compile: {text}"
        if self._options.strict:
            raise LowerError(
                what,
                fix="drop strict=True to run it operator by operator, or refuse the node with node_predicate.",
                node=first.format_node() or first.name,
                location=where,
            ) from error
        warnings.warn(
            LowerWarning(f"{what}\nIt runs operator by operator" + (f" ({where})." if where else ".")), stacklevel=2
        )
        log.debug("region %d", region.number, exc_info=error)
        return f"region {region.number} did not compile: {text}"

    def _tag(self, region: Region) -> str:
        if self._dumper is None:
            return f"wholestep region {region.number}"
        text = "\n".join(str(node.format_node()) for node in region.nodes)
        try:
            tag = self._dumper(text)
        except Exception as error:
            raise LowerError(
                f"dumper raised {type(error).__name__} for region {region.number}: {error}",
                fix="let it return a name or a path for the text that it gets.",
                node=str(region.nodes[0].format_node()),
            ) from error
        if tag is None:
            raise LowerError(
                f"dumper returned None for region {region.number}.",
                fix="let it return a name or a path for the text that it gets.",
                node=str(region.nodes[0].format_node()),
            )
        return str(tag)

    def _free_name(self, name: str, attached: Mapping[str, Any]) -> str:
        while hasattr(self._gm, name) or name in attached:
            name += "_"
        return name

    def _outside(self, node: fx.Node, reason: str) -> None:
        if node not in self._env:
            self._copy(node)
        self._reasons[self._env[node]] = reason

    def _copy(self, node: fx.Node) -> fx.Node:
        new = self._graph.node_copy(node, self._value)
        new.meta = dict(node.meta)
        self._env[node] = new
        return new

    def _note_outside(self) -> None:
        for node in self._graph.nodes:
            if node in self._reasons:
                self._report.outside.append((node.name, target_text(node), self._reasons[node]))

    def _value(self, node: fx.Node) -> fx.Node:
        """The node of the new graph for one of the old graph; views and sizes are recomputed where they are used."""

        def missing(each: fx.Node) -> list[fx.Node]:
            return [source for source in each.all_input_nodes if source not in self._env]

        if node not in self._env:
            for each in postorder([node], missing):
                assert is_free(each), f"{each.name} is an output of its region"
                self._outside(each, "a view or a size: recomputed where it is used")
        return self._env[node]

    def _call(self, region: Region, name: str, module: CompiledRegion, retraced: Retraced) -> None:
        arguments = [self._value(node) for node in region.inputs]
        scalars = [self._value(node) for node in region.scalars]
        for dtype in retraced.packs:
            pack = self._graph.call_function(pack_scalars, (scalars, dtype, retraced.device))
            arguments.append(pack)
        if retraced.seed is not None and not retraced.computes_seed:
            like = retraced.seed.meta["val"]
            ones = self._graph.call_function(aten.ones.default, (list(like.shape),), _placement(like))
            ones.meta["val"] = like
            arguments.append(ones)
        arguments += [self._value(node) for node in module.added]
        call = self._graph.create_node("call_module", name, tuple(arguments), {"tag": module.tag})
        call.meta["val"] = tuple(node.meta.get("val") for node in region.outputs)
        set_node_meta(call, replace(node_meta(region.nodes[0]), in_place=None))
        for i, node in enumerate(region.outputs):
            part = self._graph.create_node("call_function", operator.getitem, (call, i), name=node.name)
            part.meta = {**node.meta}
            set_node_meta(part, replace(node_meta(node), in_place=None))
            self._env[node] = part
        phases = [node_meta(node).phase for node in region.nodes]
        self._report.regions.append(
            RegionReport(
                region.number,
                name,
                module.tag,
                region.operators,
                len(arguments),
                len(region.outputs),
                len(written_roots(order_of(region), region.inputs)),
                tuple(dict.fromkeys(phases)),
                tuple(node.name for node in region.nodes),
                getattr(module.compiled, "shared", SharedBodies()),
            )
        )

    def _drop_unused(self) -> None:
        for node in reversed(self._graph.nodes):
            if not node.users and node.op == "call_function" and (node.target is operator.getitem or is_free(node)):
                self._graph.erase_node(node)
