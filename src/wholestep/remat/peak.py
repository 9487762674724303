"""The peak memory of a graph: `timeline` of a graph as it is, `peak_of` of a graph under a plan, without rewriting it.

A value is freed after its last use, as the runtime does; a piece of memory when the last value in it is. What the
caller holds (inputs, constants) is live all the time, an output from where it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from wholestep.ir.effects import find_storages, read_by
from wholestep.remat.problem import RematProblem

ExtraBytes = Callable[[fx.Node], int | None]


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes that a run of a graph needs."""

    held: int
    """Bytes of inputs and constants."""
    peak: int
    """The most bytes at any moment, with `held`."""
    peak_at: str
    """The node that runs at the peak."""


def timeline(
    graph: fx.Graph,
    extra: ExtraBytes = lambda node: None,
    device: torch.device | None = None,
    early: Iterable[fx.Node] = (),
) -> MemoryTimeline:
    """Simulate a run of a graph, counting bytes on `device`.

    `extra`: the most bytes of a call above those before it; None: its results. `early`: results that are live from the
    start, as if they were inputs.
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
    return MemoryTimeline(held, peak, at)


def _last_moments(nodes: list[fx.Node], seen_by: dict[fx.Node, tuple[int, ...]]) -> dict[int, int]:
    """For each piece of memory the position of the last node that needs it; outputs are never freed."""
    found: dict[int, int] = {}
    for i, node in enumerate(nodes):
        moment = len(nodes) if node.op == "output" else i
        for source in (node, *read_by(node)):
            for piece in seen_by.get(source, ()):
                found[piece] = moment
    return found


def peak_of(problem: RematProblem, plan: Collection[int]) -> int:
    """The most bytes of a step under a plan at any moment, estimated, with inputs and constants."""
    return _Simulation(problem, problem.recomputed(plan)).peak()


class _Simulation:
    """Moments are entries of `order`: `i` is a node, `~i` its recomputation, which has pieces of memory of its own."""

    def __init__(self, problem: RematProblem, again: set[int]) -> None:
        self._problem = problem
        self._again = again
        self._count = len(problem.pieces.size)
        self._order = order_of(problem, again)

    def peak(self) -> int:
        problem, size, count = self._problem, self._problem.pieces.size, self._count
        last, skipped = self._last_moments()
        held = 0
        frees = [0] * (len(self._order) + 1)
        for piece, moment in last.items():
            number = piece % count
            if problem.nodes[problem.maker[number]].op != "call_function":
                held += size[number]
            elif piece not in skipped:
                frees[moment] += size[number]
        live = peak = held
        for moment, entry in enumerate(self._order):
            i, shift = (~entry, count) if entry < 0 else (entry, 0)
            if problem.nodes[i].op == "call_function":
                for piece in problem.pieces.made_by.get(problem.nodes[i], ()):
                    if piece + shift not in skipped:
                        live += size[piece]
                peak = max(peak, live + problem.besides[i])
            live -= frees[moment]
        return peak

    def _last_moments(self) -> tuple[dict[int, int], set[int]]:
        """When each piece is needed last, and the pieces that are never allocated: values inside of fused kernels."""
        problem, count = self._problem, self._count
        seen, fused = problem.seen, problem.fused
        last: dict[int, int] = {}
        made: set[int] = set()  # read by something that is not fused with their maker
        end = len(self._order)
        for moment, entry in enumerate(self._order):
            i = ~entry if entry < 0 else entry
            in_backward = entry < 0 or problem.backward[i]
            for piece in self._own(entry):
                last[piece] = moment
            for source in problem.reads[i]:
                second = in_backward and source in self._again
                joined = fused[i] and in_backward == (second or problem.backward[source])
                for piece in seen[source]:
                    key = piece + (count if second and problem.maker[piece] in self._again else 0)
                    last[key] = end if problem.nodes[i].op == "output" else moment
                    if not joined:
                        made.add(key)
        skipped = {p for p in last if fused[problem.maker[p % count]] and p not in made}
        self._extend_sources(last, skipped)
        return last, skipped

    def _extend_sources(self, last: dict[int, int], skipped: set[int]) -> None:
        """Let the sources of a value that is never allocated live until that value is read."""
        if not skipped:
            return
        problem, count = self._problem, self._count
        for entry in reversed(self._order):
            own = self._own(entry)
            if not own or not skipped.issuperset(own):
                continue
            i = ~entry if entry < 0 else entry
            late = max(last[piece] for piece in own)
            for source in problem.reads[i]:
                second = (entry < 0 or problem.backward[i]) and source in self._again
                for piece in problem.seen[source]:
                    key = piece + (count if second and problem.maker[piece] in self._again else 0)
                    last[key] = max(last[key], late)

    def _own(self, entry: int) -> list[int]:
        """The pieces that the value of a moment is in."""
        problem = self._problem
        if entry >= 0:
            return list(problem.seen[entry])
        return [p + (self._count if problem.maker[p] in self._again else 0) for p in problem.seen[~entry]]


def order_of(problem: RematProblem, again: Collection[int]) -> list[int]:
    """All nodes in the order in which they run: `i`, or `~i` for a recomputation."""
    order: list[int] = []
    done: set[int] = set()
    for i in range(len(problem.nodes)):
        if problem.backward[i]:
            stack = [s for s in problem.inputs[i] if s in again and s not in done]
            while stack:
                each = stack[-1]
                missing = [s for s in problem.inputs[each] if s in again and s not in done]
                if missing:
                    stack += missing
                    continue
                stack.pop()
                # Elements are taken out of a list at once: the list would keep all of them alive.
                for made in (each, *(e for e in problem.elements.get(each, ()) if e in again)):
                    if made not in done:
                        done.add(made)
                        order.append(~made)
        order.append(i)
    return order
