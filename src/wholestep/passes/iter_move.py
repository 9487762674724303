"""Let updates of parameters wait for the next iteration, so that communication hides behind more than a backward.

    before                                     what runs at iteration k + 1
    h = addmm(b, x, t(p))                      done = wait_tensor(started of k)
    ...                                        p1 = sub(p, done, alpha=lr of k); copy_(p, p1)
    started = all_reduce(g, 'avg', '0')        h = addmm(b, x, t(p))
    done = wait_tensor(started)                ...
    p1 = sub(p, done, alpha=lr)                started = all_reduce(g, 'avg', '0')   in flight until k + 2
    copy_(p, p1); output(loss)                 output(loss)

Needs: remove_copy_from_optimizer (the first of both); both come after schedule_comm_wait where that is used.
Numerics: exact.  Legal where nothing else needs the new value in its own iteration (`crossing.py`).  The collective
always stays in its own iteration: completing what is pending needs no other rank.

A StepGraph stays in its normal form: the nodes are only marked (`NodeMeta.move`), and the runtime makes the graphs of
first and other iterations from the marks.  In an IterGraphModule the nodes move at once.  Optimizers that update many
parameters in one operator are split by bucket first.  Cost: a few walks over the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from wholestep.errors import IterMoveError
from wholestep.ir.collectives import comm_block
from wholestep.ir.effects import is_collective, is_wait
from wholestep.ir.iter.graph import IterGraph
from wholestep.ir.iter.moves import (
    CREATES,
    DESTINATIONS,
    deadline,
    first_readers,
    gm_meta,
    late_outputs,
    marked_moves,
    move_of,
    plan_moves,
)
from wholestep.ir.meta import update_node_meta
from wholestep.passes.crossing import name_of, plan_crossing, waits_behind
from wholestep.passes.engine.contract import graph_optimization_pass
from wholestep.passes.functionalize_optimizer import functionalized
from wholestep.passes.optimizer_blocks import all_blocks
from wholestep.passes.remove_copy_from_optimizer import apply_removal, plan_orphans
from wholestep.passes.split_optimizer import split_optimizer

log = logging.getLogger("wholestep.passes")

_COPY = torch.ops.aten.copy_.default

STAYS = "wholestep_stays"
"""In the `meta` of a graph module: name of a wait that did not cross, to the reason."""


@graph_optimization_pass(
    prerequisites=["remove_copy_from_optimizer"], apply_after=["schedule_comm_wait"], numerics="exact", allow_rerun=True
)
def iter_move_grads_and_optimizers(gm: Any, target_comm_node: str, target_dest_node: str) -> None:
    """Run the wait of one collective, and the optimizer of what it reduces, in the next iteration before a node."""
    graph: fx.Graph = gm.graph
    if gm_meta(gm).get(CREATES, False):
        log.info("%s: all updates of a step that creates optimizer state stay in it", target_comm_node)
        return
    by_name = {node.name: node for node in graph.nodes}
    started, target = by_name.get(target_comm_node), by_name.get(target_dest_node)
    if started is None or not is_collective(started.target):
        found = [node.name for node in graph.nodes if is_collective(node.target)]
        raise IterMoveError(
            f"Cannot find {target_comm_node} among the collectives of the graph.",
            fix=f"name one of {', '.join(found[:20])}." if found else "this graph has no collective.",
        )
    if target is None:
        raise IterMoveError(f"Cannot find the destination {target_dest_node}.", fix="name a node of the graph.")
    waits = list(comm_block(started).waits)
    _prepare(gm)
    _split_optimizers(gm, waits)
    crossing = plan_crossing(graph, waits, late_outputs(gm))
    for wait, why in crossing.stays.items():
        raise IterMoveError(
            f"{target_comm_node} cannot be completed in the next iteration: {why}.",
            fix="name a collective whose result only updates state; overlap_optimizer_with_next_forward finds those.",
            node=wait.name,
        )
    if not all(move_of(group, set()).state for group in crossing.groups):
        raise IterMoveError(
            f"{target_comm_node} is not used by any fused optimizer, nor by another one.",
            fix="name a collective whose result is written back into an input by a `copy_` at the end of the graph.",
        )
    _move(gm, [(group, target) for group in crossing.groups])


@graph_optimization_pass(apply_after=["comm_fusion_with_concat", "schedule_comm_wait"], numerics="exact")
def overlap_optimizer_with_next_forward(gm: Any) -> None:
    """Let every update that can cross run in the next iteration, right before the first use of what it writes."""
    graph: fx.Graph = gm.graph
    _prepare(gm)
    crossing = plan_crossing(graph, late_outputs=late_outputs(gm))
    if crossing.groups:
        _split_optimizers(gm, [node for group in crossing.groups for node in group if is_wait(node.target)])
        crossing = plan_crossing(graph, late_outputs=late_outputs(gm))
    gm_meta(gm)[STAYS] = {wait.name: why for wait, why in crossing.stays.items()}
    for wait, why in crossing.stays.items():
        log.info("%s stays in its own iteration: %s", name_of(wait), why)
    moved = {node: None for group in crossing.groups for node in group}
    readers = first_readers(graph, moved)
    place = {node: i for i, node in enumerate(graph.nodes)}
    _move(gm, [(group, deadline(group, readers, place, graph)) for group in crossing.groups])


def _prepare(gm: Any) -> None:
    """Graphs of others have optimizers that write in place, and copies of results that nobody reads."""
    graph = gm.graph
    functionalized(graph)
    if any(node.target is _COPY and _is_made_here(node.args[0]) for node in graph.nodes):
        apply_removal(graph, plan_orphans(graph))


def _is_made_here(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op != "placeholder"


def _split_optimizers(gm: Any, waits: Sequence[fx.Node]) -> None:
    """Optimizers of many parameters become one per wait, and one for the parameters of other waits."""
    for block in all_blocks(gm.graph):
        behind = waits_behind(block.grads, waits)
        parts: dict[frozenset[fx.Node], list[fx.Node]] = {}
        for grad in block.grads:
            parts.setdefault(behind.get(grad, frozenset()), []).append(grad)
        rest = parts.pop(frozenset(), None)
        chosen = list(parts.values())
        if rest is None:
            chosen = chosen[:-1]
        if chosen:
            split_optimizer(gm, block, chosen)


def _move(gm: Any, moves: Sequence[tuple[Sequence[fx.Node], fx.Node]]) -> None:
    if not moves:
        return
    graph = gm.graph
    if isinstance(graph, IterGraph):
        graph.move_all_to_next_iter(moves)
        return
    marked = marked_moves(graph)
    earlier = [move_of(nodes, set()) for nodes in marked.values()]
    plan_moves(graph, moves, earlier, late_outputs(gm))  # raises where one is not legal
    destinations = dict(gm.meta.get(DESTINATIONS, {}))
    for number, (nodes, target) in enumerate(moves, max(marked, default=0) + 1):
        for node in nodes:
            update_node_meta(node, move=number)
        destinations[number] = target.name
        names = [name_of(node) for node in nodes if is_wait(node.target)]
        log.info("%d nodes run in the next iteration before %s: %s", len(nodes), target.name, ", ".join(names)[:200])
    gm.meta[DESTINATIONS] = destinations
