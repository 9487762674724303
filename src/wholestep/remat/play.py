"""Play a step under a plan, without rewriting its graph: the most bytes at any moment."""

from __future__ import annotations

from collections.abc import Collection

from wholestep.remat.outline import Outline


def peak_of(outline: Outline, plan: Collection[int]) -> int:
    """The most bytes that a step has at any moment, estimated, with inputs and constants."""
    return _Play(outline, outline.run_again(plan)).peak()


class _Play:
    """Moments are entries of `order`: `i` is a node, `~i` its second computation, with pieces of its own."""

    def __init__(self, outline: Outline, again: set[int]) -> None:
        self._outline = outline
        self._again = again
        self._count = len(outline.pieces.size)
        self._order = order_of(outline, again)

    def peak(self) -> int:
        outline, size, count = self._outline, self._outline.pieces.size, self._count
        last, skipped = self._last_moments()
        held = 0
        frees = [0] * (len(self._order) + 1)
        for piece, moment in last.items():
            number = piece % count
            if outline.nodes[outline.maker[number]].op != "call_function":
                held += size[number]
            elif piece not in skipped:
                frees[moment] += size[number]
        live = peak = held
        for moment, entry in enumerate(self._order):
            i, shift = (~entry, count) if entry < 0 else (entry, 0)
            if outline.nodes[i].op == "call_function":
                for piece in outline.pieces.made_by.get(outline.nodes[i], ()):
                    if piece + shift not in skipped:
                        live += size[piece]
                peak = max(peak, live + outline.besides[i])
            live -= frees[moment]
        return peak

    def _last_moments(self) -> tuple[dict[int, int], set[int]]:
        """When each piece is needed last, and the pieces that are never made: values inside of fused kernels."""
        outline, count = self._outline, self._count
        seen, fused = outline.seen, outline.fused
        last: dict[int, int] = {}
        made: set[int] = set()  # read by something that is not fused with their maker
        end = len(self._order)
        for moment, entry in enumerate(self._order):
            i = ~entry if entry < 0 else entry
            in_backward = entry < 0 or outline.backward[i]
            for piece in self._own(entry):
                last[piece] = moment
            for source in outline.reads[i]:
                second = in_backward and source in self._again
                joined = fused[i] and in_backward == (second or outline.backward[source])
                for piece in seen[source]:
                    key = piece + (count if second and outline.maker[piece] in self._again else 0)
                    last[key] = end if outline.nodes[i].op == "output" else moment
                    if not joined:
                        made.add(key)
        skipped = {p for p in last if fused[outline.maker[p % count]] and p not in made}
        self._keep_what_is_read_late(last, skipped)
        return last, skipped

    def _keep_what_is_read_late(self, last: dict[int, int], skipped: set[int]) -> None:
        """What a value that is never made is computed from is read where that value is."""
        if not skipped:
            return
        outline, count = self._outline, self._count
        for entry in reversed(self._order):
            own = self._own(entry)
            if not own or not skipped.issuperset(own):
                continue
            i = ~entry if entry < 0 else entry
            late = max(last[piece] for piece in own)
            for source in outline.reads[i]:
                second = (entry < 0 or outline.backward[i]) and source in self._again
                for piece in outline.seen[source]:
                    key = piece + (count if second and outline.maker[piece] in self._again else 0)
                    last[key] = max(last[key], late)

    def _own(self, entry: int) -> list[int]:
        """The pieces that the value of a moment is in."""
        outline = self._outline
        if entry >= 0:
            return list(outline.seen[entry])
        return [p + (self._count if outline.maker[p] in self._again else 0) for p in outline.seen[~entry]]


def order_of(outline: Outline, again: Collection[int]) -> list[int]:
    """All nodes as they run: `i`, or `~i` for a second computation."""
    order: list[int] = []
    done: set[int] = set()
    for i in range(len(outline.nodes)):
        if outline.backward[i]:
            stack = [s for s in outline.inputs[i] if s in again and s not in done]
            while stack:
                each = stack[-1]
                missing = [s for s in outline.inputs[each] if s in again and s not in done]
                if missing:
                    stack += missing
                    continue
                stack.pop()
                # What a list has is taken out at once: the list would keep all of it.
                for made in (each, *(e for e in outline.elements.get(each, ()) if e in again)):
                    if made not in done:
                        done.add(made)
                        order.append(~made)
        order.append(i)
    return order
