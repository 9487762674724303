"""How much memory a graph needs while it runs, node after node.

A value is let go after its last use, as the runtime does; a piece of memory when the last value in it is. What the
caller holds (inputs, constants) is there all the time, what leaves the graph from its making on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from wholestep.ir.effects import find_storages, read_by

ExtraBytes = Callable[[fx.Node], int | None]


@dataclass(frozen=True)
class Timeline:
    """What a run needs."""

    held: int
    """Bytes of inputs and constants."""
    peak: int
    """The most bytes at any moment, with `held`."""
    peak_at: str
    """The node that runs then."""


def timeline(
    graph: fx.Graph,
    extra: ExtraBytes = lambda node: None,
    device: torch.device | None = None,
    early: Iterable[fx.Node] = (),
) -> Timeline:
    """Play a graph; count what is on `device`. `extra` tells of a call the most bytes above those before it.

    `early`: results that are there from the beginning, as if they were inputs.
    """
    pieces = find_storages(graph, device)
    held_early = 0
    for piece in {piece for node in early for piece in pieces.seen_by.get(node, ())}:
        maker = pieces.maker[piece]
        if maker.op == "call_function":
            held_early += pieces.size[piece]
            pieces.size[piece] = 0
    nodes = list(graph.nodes)
    dies_at = _last_moments(nodes, pieces.seen_by)
    held = sum(pieces.size[p] for n in nodes if n.op in ("placeholder", "get_attr") for p in pieces.made_by.get(n, ()))
    frees: dict[int, int] = {}
    for piece, moment in dies_at.items():
        if pieces.maker[piece].op not in ("placeholder", "get_attr"):
            frees[moment] = frees.get(moment, 0) + pieces.size[piece]
    held += held_early
    live, peak, at = held, held, nodes[0].name if nodes else ""
    for i, node in enumerate(nodes):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        before = live
        live += sum(pieces.size[p] for p in pieces.made_by.get(node, ()))
        more = extra(node)
        now = live if more is None else max(before + more, 0)
        if now > peak:
            peak, at = now, node.name
        live -= frees.get(i, 0)
    return Timeline(held, peak, at)


def _last_moments(nodes: list[fx.Node], seen_by: dict[fx.Node, tuple[int, ...]]) -> dict[int, int]:
    """For each piece the place of the last node that needs it; what leaves the graph is never let go."""
    found: dict[int, int] = {}
    for i, node in enumerate(nodes):
        moment = len(nodes) if node.op == "output" else i
        for source in (node, *read_by(node)):
            for piece in seen_by.get(source, ()):
                found[piece] = moment
    return found
