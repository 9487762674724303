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

A graph with its inputs, and the edits that make it smaller; every edit is data that can be sent and stored.

    outputs    other nodes are the results           suffix: what comes after them is dead
    given      nodes become inputs, with their values     prefix and nodes: what they were computed from is dead
    dropped    effects without users are removed
    shorter    a list argument loses items           cat([a, b, c, d]) -> cat([a, b])
    size       a dimension becomes smaller, in all inputs that have it (and in constants of the graph)

Nodes keep their names through all edits: edits refer to nodes by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import is_needed
from wholestep.ir.graph_walks import reachable
from wholestep.ir.propagate_metadata import fill_values
from wholestep.torch_private.fake_tensors import FakeTensorMode
from wholestep.torch_private.fx_graphs import lazy_graph_module

_VALUES = ("val", "tensor_meta", "example_value")


@dataclass(frozen=True)
class Edit:
    """One way to make a case smaller; empty: only dead code is removed."""

    outputs: tuple[str, ...] | None = None
    given: tuple[str, ...] = ()
    before: str | None = None
    """Values of `given` are those right before this node runs; None: right after each was computed."""
    dropped: tuple[str, ...] = ()
    shorter: tuple[str, int, int] | None = None
    """A node, and the range of items that stays in its lists."""
    size: tuple[int, int, bool] | None = None
    """Old size, new size, and whether constants of the graph follow."""

    @property
    def digest(self) -> str:
        """The same for the same edit, in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Case:
    """A graph module that takes its inputs one by one."""

    gm: fx.GraphModule
    inputs: tuple[Any, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes in order."""
        return list(self.gm.graph.nodes)

    @cached_property
    def effects(self) -> tuple[fx.Node, ...]:
        """Nodes that are live for their effects, with or without users."""
        return tuple(effects_of(self.nodes))

    @property
    def size(self) -> tuple[int, int]:
        """What is minimised: nodes, then elements of the inputs."""
        elements = sum(value.numel() for value in self.inputs if isinstance(value, Tensor))
        return len(self.gm.graph.nodes), elements


def results_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the output names, each once."""
    found: dict[fx.Node, None] = {}
    fx.map_arg(graph.output_node().args, lambda node: found.setdefault(node))
    return list(found)


def effects_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes that are live for their effects, with or without users."""
    return [n for n in nodes if n.op not in ("placeholder", "output") and is_needed(n)]


def apply_edit(case: Case, edit: Edit, values: Mapping[str, Any]) -> Case:
    """The smaller case. `values`: of the nodes that become inputs; one that is missing stays as it is."""
    nodes = case.nodes
    given = {name for name in edit.given if name in values}
    ends = _ends(case, edit)
    live = _live(case.effects, ends, given, set(edit.dropped))
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs: list[Any] = []
    known = dict(zip((n for n in nodes if n.op == "placeholder"), case.inputs, strict=True))
    for node in nodes:
        if node in live and (node.op == "placeholder" or node.name in given):
            env[node] = graph.create_node("placeholder", node.name, name=node.name, type_expr=node.type)
            inputs.append(values[node.name] if node.name in given else known[node])
    for node in nodes:
        if node in live and node not in env and node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    _write_output(graph, case.gm.graph.output_node(), edit, [env[node] for node in ends], env)
    for old, new in env.items():
        new.name, new.meta = old.name, dict(old.meta)
    if edit.shorter is not None:
        _shorten(graph, *edit.shorter)
    if edit.size is not None:
        inputs = _resize(graph, inputs, *edit.size)
    gm = lazy_graph_module(case.gm, graph, "Case")
    if edit.size is not None:
        _refresh_values(gm, inputs)
    return Case(gm, tuple(inputs))


def _ends(case: Case, edit: Edit) -> list[fx.Node]:
    if edit.outputs is None:
        return results_of(case.gm.graph)
    by_name = {node.name: node for node in case.gm.graph.nodes}
    return [by_name[name] for name in edit.outputs]


def _live(effects: Sequence[fx.Node], ends: list[fx.Node], given: set[str], dropped: set[str]) -> set[fx.Node]:
    effects = [node for node in effects if node.name not in dropped]
    return set(reachable([*ends, *effects], lambda node: () if node.name in given else node.all_input_nodes))


def _write_output(
    graph: fx.Graph, old: fx.Node, edit: Edit, ends: list[fx.Node], env: Mapping[fx.Node, fx.Node]
) -> None:
    [results] = old.args
    if edit.outputs is None:
        graph.output(fx.map_arg(results, env.__getitem__))
    elif isinstance(results, fx.Node) and len(ends) == 1:
        graph.output(ends[0])
    else:
        graph.output(list(ends) if isinstance(results, list) else tuple(ends))


def _shorten(graph: fx.Graph, name: str, start: int, stop: int) -> None:
    node = next(node for node in graph.nodes if node.name == name)
    size = longest_list(node)

    def keep(arg: Any) -> Any:
        return arg[start:stop] if isinstance(arg, list | tuple) and len(arg) == size else arg

    node.args = tuple(keep(arg) for arg in node.args)
    node.kwargs = {key: keep(arg) for key, arg in node.kwargs.items()}
    used = {source for each in graph.nodes for source in each.all_input_nodes}
    for each in reversed(graph.nodes):
        if each.op != "placeholder" and each not in used and not each.users and each.op != "output":
            graph.erase_node(each)


def longest_list(node: fx.Node) -> int:
    """The length of the longest list of nodes among the arguments."""
    lists = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, list | tuple)]
    return max((len(arg) for arg in lists if any(isinstance(item, fx.Node) for item in arg)), default=0)


def _resize(graph: fx.Graph, inputs: list[Any], old: int, new: int, constants: bool) -> list[Any]:
    if constants:
        for node in graph.nodes:
            if node.op not in ("placeholder", "output"):
                node.args, node.kwargs = _replaced(node.args, old, new), _replaced(node.kwargs, old, new)
    return [_smaller(value, old, new) for value in inputs]


def _replaced(value: Any, old: int, new: int) -> Any:
    if type(value) is int:
        return new if value == old else value
    if isinstance(value, list | tuple):
        items = [_replaced(item, old, new) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    return value


def _smaller(value: Any, old: int, new: int) -> Any:
    if type(value) is int:
        return new if value == old else value
    if not isinstance(value, Tensor) or old not in value.shape:
        return value
    part = value.detach()[tuple(slice(0, new) if size == old else slice(None) for size in value.shape)]
    return part.clone(memory_format=torch.preserve_format).requires_grad_(value.requires_grad)


def _refresh_values(gm: fx.GraphModule, inputs: list[Any]) -> None:
    """Metadata of a graph whose sizes have changed, where it had any."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    places = gm.graph.find_nodes(op="placeholder")
    had = [bool(node.meta.get("val") is not None) for node in places]
    for node in gm.graph.nodes:
        for key in _VALUES:
            node.meta.pop(key, None)
    if all(had):
        for node, value in zip(places, inputs, strict=True):
            node.meta["val"] = mode.from_tensor(value) if isinstance(value, Tensor) else value
        fill_values(gm)


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
