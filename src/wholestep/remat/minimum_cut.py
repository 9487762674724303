"""The cheapest choice of what to keep and what to compute again, as a minimum cut.

    source --price x time--> v.in --bytes--> v.out --oo--> w.in      (w reads v, both in the forward)
                                             v.out --oo--> sink      (the backward reads v)

On the sink's side of the cut: computed again (if `v.in` is), or available (if only `v.out` is: the value is kept).
At price 0 the fewest bytes are kept, with a higher price less is computed again; plans of growing prices are nested.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import numpy as np
from scipy.sparse import csr_matrix  # type: ignore[import-untyped]
from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

from wholestep.remat.outline import Outline, Plan

_ENDLESS = 2**31 - 1
_MOST = 2**29  # all finite capacities together: flows stay far from the limit of the solver's integers


class PricedCut:
    """The cuts of one outline at several prices."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline

    def plan(self, price: float, anchors: Collection[int] = ()) -> Plan:
        """What to compute again if a nanosecond costs `price` bytes. `anchors` are not computed again."""
        outline, places = self._outline, self._places
        if not places:
            return frozenset()
        finite = np.concatenate([self._bytes, price * self._times])
        total = finite[np.isfinite(finite)].sum()
        scale = min(_MOST / total, 1e6) if total else 1.0
        keep = _scaled(self._bytes, scale)
        again = _scaled(price * self._times, scale)
        fixed = outline.never.union(anchors) - outline.always
        for number, i in enumerate(places):
            if i in fixed:
                again[number] = _ENDLESS
        size = 2 * len(places) + 2
        rows, columns = self._edges
        capacities = np.concatenate([again, keep, np.full(len(rows) - 2 * len(places), _ENDLESS)])
        graph = csr_matrix((capacities.astype(np.int32), (rows, columns)), shape=(size, size))
        flow = maximum_flow(graph, size - 2, size - 1).flow
        rest = graph - flow
        rest.eliminate_zeros()
        reached = np.zeros(size, dtype=bool)
        reached[breadth_first_order(rest, size - 2, return_predecessors=False)] = True
        return frozenset(i for number, i in enumerate(places) if not reached[2 * number])

    @cached_property
    def _places(self) -> list[int]:
        return [i for i, needed in enumerate(self._outline.needed) if needed]

    @cached_property
    def _bytes(self) -> np.ndarray:
        outline = self._outline
        found = []
        for i in self._places:
            value = float(outline.keeping(i))
            # A view is kept by keeping what it is a view of, a list by keeping its elements.
            free = outline.is_view(i) and not outline.is_element(i)
            found.append(np.inf if free or outline.is_list(i) or i in outline.always else value)
        return np.array(found)

    @cached_property
    def _times(self) -> np.ndarray:
        return np.array([self._outline.time[i] for i in self._places])

    @cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns: all edges from the source, all v.in to v.out, then the endless ones."""
        outline = self._outline
        number = {i: n for n, i in enumerate(self._places)}
        source, sink = 2 * len(number), 2 * len(number) + 1
        numbers = np.arange(len(number))
        endless: list[tuple[int, int]] = []
        read: set[int] = set()
        for i in range(len(outline.nodes)):
            if i in number:
                endless += [(2 * number[s] + 1, 2 * number[i]) for s in outline.inputs[i] if s in number]
            elif outline.backward[i]:
                read.update(number[s] for s in outline.inputs[i] if s in number)
        endless += [(2 * n + 1, sink) for n in sorted(read)]
        pairs = np.array(endless, dtype=np.int64).reshape(-1, 2)
        rows = np.concatenate([np.full(len(number), source), 2 * numbers, pairs[:, 0]])
        columns = np.concatenate([2 * numbers, 2 * numbers + 1, pairs[:, 1]])
        return rows, columns


def _scaled(values: np.ndarray, scale: float) -> np.ndarray:
    limited = np.where(np.isfinite(values), np.ceil(values * scale), _ENDLESS)
    return np.minimum(limited, _ENDLESS).astype(np.int64)
