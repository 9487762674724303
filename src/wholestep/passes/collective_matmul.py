"""Compute a product while its operand is gathered, or its result scattered: both in parts of the rows.

    before                                   after, in two parts
    g = all_gather(x, 8)                     a = all_gather(x[:512], 8);  b = all_gather(x[512:], 8)
    y = mm(wait(g), w)                       p = mm(wait(a), w)           while b is gathered
    z = relu(y)                              q = mm(wait(b), w)           while r is scattered
    r = reduce_scatter(mm(z, v), 8)          r = reduce_scatter(mm(relu(p), v), 8);  s = ..
    out = wait(r)                            out = cat([wait(r), wait(s)])

Needs: static sizes; `overlap_communication` behind it, which orders the parts.  Numerics: reassociates: each element is
the same sum of the same products, but a kernel may add them in another order for fewer rows.  Legal where all that is
computed between (views, pointwise operators, casts) treats rows alone (`overlap/chunks.py`); where a whole value is
needed besides, its parts are put together.  Chosen by simulation: the parts are kept if the step, scheduled with them,
is faster than without.  No name of a node is looked at.  Cost: a few runs of the scheduler on copies of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from wholestep.errors import invalid_value
from wholestep.ir.effects import is_wait, may_write
from wholestep.ir.graph_walks import copy_graph, epilogue, postorder, reachable
from wholestep.ir.propagate_metadata import fill_values
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.engine.manager import drop_dead_code
from wholestep.passes.overlap.chunks import Chunked, follow, shape_of, whole_operands, with_sizes
from wholestep.passes.overlap_communication import GivenCosts, plan_of, reorder
from wholestep.simulate.exposed_collectives import stalls
from wholestep.simulate.machine import Machine
from wholestep.simulate.step_index import alive_at, index_step, makers, memory_of
from wholestep.simulate.step_replay import replay
from wholestep.simulate.step_timeline import machine_for, stream_rules
from wholestep.torch_private.fx_graphs import lazy_graph_module

aten = torch.ops.aten
comm = torch.ops._c10d_functional
_FASTER = 0.997
_MOST_NODES = 256
_MOST_TRIALS = 3
_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
_SPREADS = frozenset({comm.all_gather_into_tensor.default, comm.all_to_all_single.default})
_COLLECTS = frozenset({comm.reduce_scatter_tensor.default, comm.all_to_all_single.default, comm.all_reduce.default})


@dataclass(frozen=True)
class ChunkedSegment:
    """Nodes that are computed in parts, from one value on."""

    start: fx.Node
    chunk: Chunked
    """How the start is cut."""
    nodes: dict[fx.Node, Chunked]
    """In the order of the graph."""

    @property
    def collectives(self) -> list[fx.Node]:
        """Those among the nodes."""
        return [node for node in self.nodes if node.target in _SPREADS or node.target in _COLLECTS]


def _check(
    *,
    machine: Machine | None = None,
    cost: Callable[[fx.Node], float] | None = None,
    parts: int | Literal["auto"] = "auto",
    peak_bytes: int | None = None,
) -> None:
    if parts != "auto" and not (type(parts) is int and parts > 1):
        raise invalid_value("parts", parts, 'use "auto", or a number of parts from 2 on.')
    if cost is not None and not callable(cost):
        raise invalid_value("cost", cost, "give a function from a node to microseconds.")
    if machine is not None and not isinstance(machine, Machine):
        raise invalid_value("machine", machine, "give a wholestep.simulate.Machine, or None for that of the graph.")
    if peak_bytes is not None and not (type(peak_bytes) is int and peak_bytes > 0):
        raise invalid_value("peak_bytes", peak_bytes, "give a number of bytes, or None for 1.05 times the peak.")


@graph_optimization_pass(numerics="reassociates", check=_check, apply_after=())
def collective_matmul(
    gm: fx.GraphModule,
    *,
    machine: Machine | None = None,
    cost: Callable[[fx.Node], float] | None = None,
    parts: int | Literal["auto"] = "auto",
    peak_bytes: int | None = None,
) -> None:
    """Cut collectives, and the products beside them, into parts that overlap.

    `machine`, `cost`, `peak_bytes`: as of `overlap_communication`. `parts`: how many; "auto": 2 or 4, where the
    simulated step is faster; a number: wherever it is possible.
    """
    index = index_step(gm)
    if not index.collectives or _writes_before_the_end(gm.graph):
        return
    given = GivenCosts(machine or (None if cost is not None else machine_for(gm.graph)), cost)
    if parts != "auto":
        cut(gm, segments(gm.graph, parts), parts)
        return
    before = plan_of(index, given, peak_bytes, quickly=True)
    found = replay(index, before.times, before.found.order, stream_rules(index, given.machine))
    exposed = {index.nodes[each.collective].name for each in stalls(index, found) if each.us > 0.0}
    best: CutTrial | None = None
    for number in (2, 4):
        trial = _trial(gm, number, exposed, given, max(before.limit, before.found.peak))
        if trial is not None and trial.time < _FASTER * (before.found.time if best is None else best.time):
            best = trial
    if best is not None:
        found_now = segments(gm.graph, best.parts)
        cut(gm, [found_now[k] for k in best.segments], best.parts)


@dataclass(frozen=True)
class CutTrial:
    parts: int
    segments: list[int]
    time: float


def _trial(gm: fx.GraphModule, parts: int, exposed: set[str], given: GivenCosts, limit: int) -> CutTrial | None:
    """What cutting gives on a copy of the graph; segments that take too much memory stay whole."""
    chosen: list[int] | None = None
    for _ in range(_MOST_TRIALS):
        copied = lazy_graph_module(gm, copy_graph(gm.graph))
        found = segments(copied.graph, parts)
        if chosen is None:
            chosen = [k for k, each in enumerate(found) if any(node.name in exposed for node in each.collectives)]
        made = cut(copied, [found[k] for k in chosen], parts)
        if not made:
            return None
        index = index_step(copied)
        plan = plan_of(index, given, limit, quickly=True)
        if plan.found.peak <= limit:
            return CutTrial(parts, chosen, plan.found.time)
        live, _ = memory_of(index, plan.found.order)
        maker = makers(index)
        at_peak: dict[int, int] = {}
        for storage in alive_at(index, int(live.argmax()), plan.found.order):
            name = index.nodes[maker[storage]].name
            for k, names in zip(chosen, made, strict=True):
                if name in names:
                    at_peak[k] = at_peak.get(k, 0) + int(index.sizes[storage])
        if not at_peak:
            return None
        most = max(at_peak, key=at_peak.__getitem__)
        chosen = [k for k in chosen if k != most]
    return None


def _writes_before_the_end(graph: fx.Graph) -> bool:
    """Whether something is overwritten while the step runs: parts of it could be read too late."""
    end = set(epilogue(graph))
    return any(node.op == "call_function" and node not in end and may_write(node.target) for node in graph.nodes)


def segments(graph: fx.Graph, parts: int) -> list[ChunkedSegment]:
    """What can be computed in parts, in the order of the graph; no node is in two segments."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    taken = set[fx.Node]()
    found: list[ChunkedSegment] = []
    for node in graph.nodes:
        if node in taken:
            continue
        best: ChunkedSegment | None = None
        if node.target in _SPREADS:
            best = _best(node.args[0], [node], _cuts_of(node), parts, place, taken)
        if best is None and node.target in _COLLECTS:
            product = _product_behind(node)
            if product is not None and product not in taken:
                left = product.args[1 if product.target is aten.addmm.default else 0]
                best = _best(left, [product], _row_cuts(left, node), parts, place, taken, must=node)
        if best is not None:
            found.append(best)
            taken.update(best.nodes)
    return found


def _cuts_of(node: fx.Node) -> list[Chunked]:
    """How the operand of a gather or an exchange may be cut."""
    shape = shape_of(node.args[0])
    if shape is None:
        return []
    cuts = [Chunked(dim, 1, size) for dim, size in enumerate(shape[:-1])]
    if node.target is comm.all_to_all_single.default:
        pieces = node.args[1]
        ranks = len(pieces) if isinstance(pieces, list | tuple) else 0
        return [Chunked(0, ranks, shape[0] // ranks)] if ranks and shape[0] % ranks == 0 else []
    return cuts


def _row_cuts(left: Any, end: fx.Node) -> list[Chunked]:
    """How the rows of a product may be cut: in blocks that are a dimension of what the collective gives."""
    shape, given = shape_of(left), shape_of(end)
    if shape is None or given is None:
        return []
    sizes = [size for size in dict.fromkeys(given[:-1]) if size and shape[0] % size == 0]
    first = [Chunked(0, 1, size, shape[0] // size) for size in sizes[:1]]  # whole blocks, which need no copy
    return first + [Chunked(0, shape[0] // size, size) for size in sizes]


def _product_behind(node: fx.Node) -> fx.Node | None:
    """The product that a collective sends, through views and copies of it."""
    seen = 0
    stack: list[Any] = [node.args[0]]
    while stack and seen < _MOST_NODES:
        seen += 1
        source = stack.pop()
        if not isinstance(source, fx.Node) or source.op != "call_function":
            return None
        if source.target in _PRODUCTS:
            return source
        stack = list(source.all_input_nodes[:1])
    return None


def _best(
    start: Any,
    first: Sequence[fx.Node],
    cuts: Iterable[Chunked],
    parts: int,
    place: dict[fx.Node, int],
    taken: set[fx.Node],
    must: fx.Node | None = None,
) -> ChunkedSegment | None:
    """The segment with the most products, among the cuts of a value."""
    if start in taken or shape_of(start) is None or not start.meta["val"].is_contiguous():
        return None
    found = [_segment(start, first, chunk, place, taken) for chunk in cuts if chunk.size % parts == 0]
    good = [each for each in found if each is not None and (must is None or must in each.nodes)]
    return max(good, key=lambda e: (sum(n.target in _PRODUCTS for n in e.nodes), -e.chunk.outer), default=None)


def _segment(
    start: fx.Node, first: Sequence[fx.Node], chunk: Chunked, place: dict[fx.Node, int], taken: set[fx.Node]
) -> ChunkedSegment | None:
    """All that can be computed in parts from `first` on, as far as a product or a collective is at the end of it."""
    reached: dict[fx.Node, Chunked] = {start: chunk}
    begin = place[first[0]]
    todo = {node: place[node] for node in first}
    while todo and len(reached) <= _MOST_NODES:
        node = min(todo, key=todo.__getitem__)
        del todo[node]
        its = None if node in taken else follow(node, reached)
        if its is None or any(place[whole] > begin for whole in whole_operands(node, its, reached)):
            continue  # what is computed from the segment itself would be needed whole
        reached[node] = its
        todo.update((user, place[user]) for user in node.users if user not in reached)
    ends = [n for n in reached if n is not start and (n.target in _PRODUCTS or is_wait(n.target))]
    inner = reached.keys() - {start}
    kept = reachable(ends, lambda node: [source for source in node.all_input_nodes if source in inner])
    if not any(node.target in _PRODUCTS for node in kept) or not any(n.target in _COLLECTS | _SPREADS for n in kept):
        return None
    nodes = {node: reached[node] for node in sorted(kept, key=place.__getitem__)}
    for node in nodes:
        outside = [user for user in node.users if user not in kept]
        value = node.meta.get("val")
        is_sent = node.target in _COLLECTS or node.target in _SPREADS
        if is_sent and not any(is_wait(user.target) and user in kept for user in node.users):
            return None
        if outside and not (isinstance(value, Tensor) and value.is_contiguous()):
            return None
    return ChunkedSegment(start, chunk, nodes)


def cut(gm: fx.GraphModule, found: Sequence[ChunkedSegment], parts: int) -> list[set[str]]:
    """Compute segments in parts. The names of the new nodes of each."""
    if not found:
        return []
    stages: list[list[fx.Node]] = []
    made: list[set[str]] = []
    for segment in found:
        of_one, wholes = _cut_one(gm.graph, segment, parts)
        stages += of_one
        made.append({node.name for stage in (*of_one, wholes) for node in stage})
    _stage_by_stage(gm.graph, stages)
    drop_dead_code(gm.graph)
    fill_values(gm)
    return made


def _cut_one(graph: fx.Graph, segment: ChunkedSegment, parts: int) -> tuple[list[list[fx.Node]], list[fx.Node]]:
    """The new nodes by stages, which end where a collective begins: in a stage one part follows the other. And those
    that put parts together."""
    nodes = list(segment.nodes)
    stages: list[list[list[fx.Node]]] = [[[] for _ in range(parts)]]
    wholes: list[fx.Node] = []
    reached = {segment.start: segment.chunk, **segment.nodes}
    before = nodes[0].prev
    with graph.inserting_before(nodes[0]):
        made = {segment.start: [_part(graph, segment.start, segment.chunk, i, parts) for i in range(parts)]}
    stages[0][0] += _since(before, nodes[0])
    for node in nodes:
        chunk = segment.nodes[node]
        for i in range(parts):
            before = node.prev
            with graph.inserting_before(node):
                made.setdefault(node, []).append(_copied(graph, node, chunk, made, reached, i, parts))
            stages[-1][i] += _since(before, node)
        is_sent = node.target in _COLLECTS or node.target in _SPREADS
        # Whoever reads a collective itself, without its wait, gets what the wait gives: the same memory.
        read = [] if is_sent else [node, *(source for source in node.all_input_nodes if is_wait(node.target))]
        outside = [(user, each) for each in read for user in each.users if user not in segment.nodes]
        if outside:
            with graph.inserting_before(node):
                before = node.prev
                whole = _together(graph, made[node], chunk, node, parts)
                wholes += _since(before, node)
                whole.meta["val"] = node.meta["val"]
            for user, each in outside:
                user.replace_input_with(each, whole)
        if node.target in _SPREADS or node.target in _COLLECTS:
            stages.append([[] for _ in range(parts)])
    for node in reversed(nodes):
        graph.erase_node(node)
    return [[node for part in stage for node in part] for stage in stages], wholes


def _since(before: fx.Node, end: fx.Node) -> list[fx.Node]:
    """The nodes between two nodes."""
    found, node = [], before.next
    while node is not end:
        found.append(node)
        node = node.next
    return found


def _stage_by_stage(graph: fx.Graph, stages: Sequence[Sequence[fx.Node]]) -> None:
    """Put the new nodes of each stage where the last of them stands, or before the first other node that needs them."""
    order: list[fx.Node] = list(graph.nodes)
    place = {node: i for i, node in enumerate(order)}
    moved = {node for stage in stages for node in stage}
    at_end = {max(stage, key=place.__getitem__): stage for stage in stages if stage}
    wanted = [each for node in order for each in ((node,) if node not in moved else ()) + tuple(at_end.get(node, ()))]
    reorder(graph, postorder(wanted, lambda node: node.all_input_nodes))


def _copied(
    graph: fx.Graph,
    node: fx.Node,
    chunk: Chunked,
    made: dict[fx.Node, list[fx.Node]],
    found: dict[fx.Node, Chunked],
    i: int,
    parts: int,
) -> fx.Node:
    parts_of: dict[fx.Node, fx.Node] = {}
    length = chunk.size // parts * chunk.inner
    for whole, dim in whole_operands(node, chunk, found).items():
        bounds = (dim, i * length, (i + 1) * length)
        parts_of[whole] = graph.call_function(aten.slice.Tensor, (whole, *bounds))
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: made[n][i] if n in made else parts_of.get(n, n))
    copied = graph.call_function(node.target, with_sizes(node, chunk, parts, tuple(args)), kwargs)  # type: ignore[arg-type]
    copied.meta.update({key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")})
    return copied


def _part(graph: fx.Graph, value: fx.Node, chunk: Chunked, i: int, parts: int) -> fx.Node:
    """One part of a whole value, as memory of its own."""
    shape = shape_of(value)
    assert shape is not None
    length = chunk.size // parts * chunk.inner
    if chunk.outer == 1:
        cut_out = graph.call_function(aten.slice.Tensor, (value, chunk.dim, i * length, (i + 1) * length))
        return graph.call_function(aten.clone.default, (cut_out,), {"memory_format": torch.contiguous_format})
    before, behind = shape[: chunk.dim], shape[chunk.dim + 1 :]
    blocks = graph.call_function(aten.view.default, (value, [*before, chunk.outer, length * parts, *behind]))
    cut_out = graph.call_function(aten.slice.Tensor, (blocks, chunk.dim + 1, i * length, (i + 1) * length))
    copied = graph.call_function(aten.clone.default, (cut_out,), {"memory_format": torch.contiguous_format})
    return graph.call_function(aten.view.default, (copied, [*before, chunk.outer * length, *behind]))


def _together(graph: fx.Graph, pieces: Sequence[fx.Node], chunk: Chunked, whole: fx.Node, parts: int) -> fx.Node:
    """A whole value from its parts."""
    if chunk.outer == 1:
        return graph.call_function(aten.cat.default, (list(pieces), chunk.dim))
    shape = shape_of(whole)
    assert shape is not None
    before, behind = shape[: chunk.dim], shape[chunk.dim + 1 :]
    length = chunk.size // parts * chunk.inner
    blocks = [
        graph.call_function(aten.view.default, (piece, [*before, chunk.outer, length, *behind])) for piece in pieces
    ]
    joined = graph.call_function(aten.cat.default, (blocks, chunk.dim + 1))
    return graph.call_function(aten.view.default, (joined, list(shape)))
