"""Delta debugging of a graph: which edits to try, in an order that makes big graphs small in few trials.

    suffix     results earlier and earlier            binary search, the graph ends right after what matters
    prefix     inputs later and later                 binary search, the graph begins right before what matters
    results    fewer of them
    nodes      halves, quarters, ... become inputs    only what matters is computed
    effects    writes and random ops that do not matter are removed
    ends       what a last node reads is returned instead of its result
    lists      cat and foreach of fewer tensors
    shapes     dimensions become 1, 2 or half

Repeated until no edit succeeds. A search only proposes edits (`try_edit`): it runs nothing, and it is deterministic
given the results, so that an interrupted search is resumed by replaying the trial log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.debug.minifier.graph_edits import Case, Edit, effects_of, longest_list, results_of
from wholestep.ir.graph_walks import reachable

_ROUNDS = 8
_MOST_PEELED = 100
"""The size up to which last nodes are removed one by one."""
_NOT_MADE = ("placeholder", "get_attr", "output")


class Search:
    """Minimises a case by proposing edits. `current` returns the case as it is now."""

    def __init__(
        self,
        current: Callable[[], Case],
        try_edit: Callable[[str, Edit], bool],
        shapes: bool,
        longest_run: int | None = None,
    ) -> None:
        self._current = current
        self._try = try_edit
        self._shapes = shapes
        self._longest_run = longest_run

    def run(self) -> None:
        """Propose edits until none succeeds."""
        self._try("dead code", Edit())
        for _ in range(_ROUNDS):
            before = self._current().size
            self._suffix()
            self._prefix()
            self._results()
            self._effects()
            self._nodes()
            self._peel()
            self._lists()
            if self._shapes:
                self._sizes()
            if self._current().size == before:
                return

    def _body(self) -> list[fx.Node]:
        return [node for node in self._current().nodes if node.op not in ("placeholder", "output", "get_attr")]

    def _suffix(self) -> None:
        """The shortest graph that fails, if longer ones fail too."""
        body = self._body()
        low, high = 0, len(body)
        names = [node.name for node in body]
        while high - low > 1:
            middle = (low + high) // 2
            if any(self._try("suffix", edit) for edit in self._ending_at(names[:middle])):
                high = middle
            else:
                low = middle

    def _ending_at(self, kept: Sequence[str]) -> list[Edit]:
        """The graph with the first nodes only: with all results that later nodes would read, or just the last."""
        case = self._current()
        inside = set(kept)
        body = [node for node in case.nodes if node.name in inside]
        later = tuple(node.name for node in case.effects if node.name not in inside)
        ends = {*results_of(case.gm.graph)}
        read = [n.name for n in body if n in ends or any(user.name not in inside for user in n.users)]
        if not body:
            return []
        edits = [Edit(outputs=tuple(read or [body[-1].name]), dropped=later)]
        if len(read) > 1 and isinstance(case.gm.graph.output_node().args[0], fx.Node):
            edits.append(Edit(outputs=(body[-1].name,), dropped=later))
        return edits

    def _prefix(self) -> None:
        """The graph that begins as late as possible."""
        low, high = 0, len(self._body())
        names = [node.name for node in self._body()]
        while high - low > 1:
            middle = (low + high) // 2
            if self._try("prefix", self._beginning_at(names[:middle], names[middle])):
                low = middle
            else:
                high = middle

    def _beginning_at(self, gone: Sequence[str], first: str) -> Edit:
        case = self._current()
        away = set(gone)
        ends = set(results_of(case.gm.graph))

        def behind(node: fx.Node) -> list[fx.Node]:
            # A tuple cannot be an input: then its producers have to be.
            return [source for source in node.all_input_nodes if source.name in away] if _has_parts(node) else []

        read = [n for n in case.nodes if n.name in away and (n in ends or any(u.name not in away for u in n.users))]
        crossing = {node.name for node in reachable(read, behind)}
        dropped = tuple(node.name for node in case.effects if node.name in away)
        given = tuple(node.name for node in case.nodes if node.name in crossing)
        return Edit(given=given, before=first, dropped=dropped)

    def _results(self) -> None:
        names = [node.name for node in results_of(self._current().gm.graph)]
        self._fewer("results", names, lambda kept: Edit(outputs=tuple(kept)))

    def _effects(self) -> None:
        names = [node.name for node in self._current().effects]
        everything = list(names)

        def without(kept: Sequence[str]) -> Edit:
            staying = set(kept)
            return Edit(dropped=tuple(name for name in everything if name not in staying))

        if names and not self._try("effects", without(())):
            self._fewer("effects", names, without)

    def _fewer(self, stage: str, names: list[str], edit: Callable[[Sequence[str]], Edit]) -> None:
        """Keep as few of the names as possible, at least one."""
        pieces = 2
        while len(names) > 1:
            width = max(1, -(-len(names) // pieces))
            for start in range(0, len(names), width):
                rest = names[:start] + names[start + width :]
                if rest and self._try(stage, edit(rest)):
                    names = rest
                    break
            else:
                if width == 1:
                    return
                pieces *= 2

    def _nodes(self) -> None:
        """Runs of nodes become inputs, from halves down to single ones."""
        width = max(1, len(self._body()) // 2)
        if self._longest_run is not None:
            width = min(width, self._longest_run)
        while True:
            start = 0
            while start < len(body := [node for node in self._body() if node.op != "placeholder"]):
                chunk = body[start : start + width]
                names = {node.name for node in chunk}
                effects = tuple(node.name for node in effects_of(chunk))
                given = tuple(n.name for n in chunk if any(u.name not in names for u in n.users))
                edit = Edit(given=given, dropped=effects)
                if (not given and not effects) or not self._try("nodes", edit):
                    start += width
                elif len(self._body()) >= len(body):
                    start += width  # still fails, and nothing became smaller
            if width == 1:
                return
            width = max(1, width // 2)

    def _peel(self) -> None:
        """Remove last nodes one by one and return their inputs instead: the failure may be on branches."""
        if len(self._body()) > _MOST_PEELED:
            return
        done: set[str] = set()
        while True:
            case = self._current()
            results = results_of(case.gm.graph)
            ends = [n for n in (*results, *case.effects) if n.op not in _NOT_MADE and n.name not in done]
            last = next((n for n in reversed(ends) if all(user.op == "output" for user in n.users)), None)
            if last is None:
                return
            done.add(last.name)
            read = [n for n in last.all_input_nodes if n.op not in _NOT_MADE and not _has_parts(n)]
            names = dict.fromkeys(n.name for n in (*results, *read) if n is not last)
            if names:
                self._try("ends", Edit(outputs=tuple(names), dropped=(last.name,)))

    def _lists(self) -> None:
        for name in [node.name for node in self._body()]:
            while True:
                node = next((n for n in self._body() if n.name == name), None)
                length = 0 if node is None else longest_list(node)
                half = length // 2
                if half < 1 or not (
                    self._try("lists", Edit(shorter=(name, 0, half)))
                    or self._try("lists", Edit(shorter=(name, half, length)))
                ):
                    break

    def _sizes(self) -> None:
        for old in _sizes_of(self._current().inputs):
            size = old
            while True:
                smaller = [new for new in dict.fromkeys((1, 2, size // 2)) if 0 < new < size]
                edits = [Edit(size=(size, new, constants)) for new in smaller for constants in (False, True)]
                taken = next((edit for edit in edits if self._try("shapes", edit)), None)
                if taken is None or taken.size is None:
                    break
                size = taken.size[1]


def _has_parts(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return not isinstance(val, Tensor | torch.SymInt | torch.SymFloat | int | float)


def _sizes_of(inputs: Sequence[Any]) -> list[int]:
    found = {int(size) for value in inputs if isinstance(value, Tensor) for size in value.shape}
    return sorted(found - {0, 1}, reverse=True)
