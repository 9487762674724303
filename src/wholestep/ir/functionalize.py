"""Replace in-place optimizer operators by functional ones, and a `copy_` for each new value.

    before                                       after
    _foreach_add_([s0, s1], 1)                   s = _foreach_add([s0, s1], 1)
    _fused_adam_([p0, p1], [g0, g1], ..)         new = _fused_adam([p0, p1], [g0, g1], .., [s[0], s[1]])
    copy_(view, p0)                              copy_(s0, s[0]); copy_(p0, new[0][0]); ..
                                                 copy_(view, new[0][0])

This is how `make_fx` traces an optimizer, and the form in which data flow alone gives all dependencies.
Numerics: exact.  Legal everywhere: each value is written where it was written before. What reads a written tensor later
reads the new value itself where no view of the tensor is read any more and the dtype is the same, else the `copy_`.
Only writes after all communication are rewritten: no input of a collective depends on them, so that in-place operators
of forward and backward stay.  Cost: two walks over the graph, and the memory of the new values.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, fx

from wholestep.ir.call_arguments import argument_at, nodes_in
from wholestep.ir.effects import (
    changes_layout,
    functional_variant,
    is_collective,
    is_new_element,
    shared_inputs,
    writes,
    written_inputs,
    written_positions,
)
from wholestep.ir.meta import KEY, update_node_meta
from wholestep.torch_private.operators import OpOverload, overload_name, plain_name, schema_of

_COPY = torch.ops.aten.copy_.default
_NOTHING: frozenset[fx.Node] = frozenset()


def functionalize(graph: fx.Graph, besides: Collection[fx.Node] = ()) -> int:
    """Rewrite the in-place updates after all communication, except `besides`; returns the number of operators."""
    if not any(map(writes_in_place, graph.nodes)):
        return 0
    chosen = {node: variant for node, variant in plan_updates(graph).items() if node not in besides}
    if chosen:
        _Functionalize(graph, chosen).run()
    return len(chosen)


def writes_in_place(node: fx.Node) -> bool:
    """True if `functionalize` can rewrite a node."""
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and node.target is not _COPY
        and _variant(node.target) is not None
    )


def plan_updates(graph: fx.Graph) -> dict[fx.Node, OpOverload]:
    """The in-place operators that no collective depends on, with their functional variants."""
    sent: set[fx.Node] = set()
    """Values that a later collective depends on."""
    found: dict[fx.Node, OpOverload] = {}
    for node in reversed(graph.nodes):
        written = written_inputs(node)
        if is_collective(node.target) or node in sent or any(value in sent for value in written):
            sent.update(node.all_input_nodes)
        elif writes_in_place(node) and isinstance(node.target, OpOverload) and not _is_ambiguous(node, written):
            variant = _variant(node.target)
            assert variant is not None
            found[node] = variant
    return dict(reversed(found.items()))


def _is_ambiguous(node: fx.Node, written: list[fx.Node]) -> bool:
    """True if one operator writes a tensor twice, or its results are not the written tensors: it is not rewritten."""
    assert isinstance(node.target, OpOverload)
    several = len(schema_of(node.target).returns) > 1
    return len(set(written)) != len(written) or several or (bool(node.users) and not schema_of(node.target).returns)


def _written_lists(node: fx.Node) -> list[list[fx.Node]]:
    """For each argument that is written: its tensors."""
    assert isinstance(node.target, OpOverload)
    return [nodes_in(argument_at(node, position)) for position in written_positions(node.target)]


@lru_cache(maxsize=1024)
def _variant(op: OpOverload) -> OpOverload | None:
    """`_fused_adam` for `_fused_adam_`: the overload that returns one value for each written argument, and no other."""
    if not plain_name(op).endswith("_") or changes_layout(op):
        return None
    found = functional_variant(op)
    if found is None or overload_name(found) != overload_name(op):
        return None
    return found if len(schema_of(found).returns) == len(written_positions(op)) else None


@dataclass(frozen=True)
class _New:
    """The current contents of a written tensor."""

    value: fx.Node
    """What later nodes read."""
    copy: fx.Node | None
    """The write, if it can be dropped when a later one overwrites all of it."""


class _Functionalize:
    def __init__(self, graph: fx.Graph, chosen: dict[fx.Node, OpOverload]) -> None:
        self._graph = graph
        self._chosen = chosen
        self._output = next(iter(reversed(graph.nodes)))
        self._new: dict[fx.Node, _New] = {}
        """By the tensor that was written."""
        self._origin: dict[fx.Node, fx.Node] = {}
        """For a node that is the written tensor itself, or its new value: the node that made the tensor."""
        self._alone = _without_aliases(graph, chosen)
        self._parts: list[fx.Node] = []

    def run(self) -> None:
        for node in list(self._graph.nodes):
            self._read_new_values(node)
            if node in self._chosen:
                self._rewrite(node, self._chosen[node])
        for part in reversed(self._parts):
            if not part.users:
                self._graph.erase_node(part)

    def _read_new_values(self, node: fx.Node) -> None:
        """Read the current contents of written tensors. The output returns inputs themselves, not their values."""

        def now(source: fx.Node) -> fx.Node:
            new = self._new.get(source)
            if new is None:
                return source
            if node is self._output and new.copy is not None:
                return source if source.op == "placeholder" else new.copy
            return new.value

        if any(source in self._new for source in node.all_input_nodes):
            node.args = fx.map_arg(node.args, now)
            node.kwargs = fx.map_arg(node.kwargs, now)

    def _rewrite(self, node: fx.Node, variant: OpOverload) -> None:
        lists = _written_lists(node)
        is_list = "List[Tensor]" in str(schema_of(variant).returns[0].type)
        with self._graph.inserting_before(node):
            new = self._graph.call_function(variant, node.args, node.kwargs)
            new.meta = {key: value for key, value in node.meta.items() if key != "val"}
            update_node_meta(new, in_place=node.target)
            several = len(lists) > 1
            for which, values in enumerate(lists):
                if not values:
                    continue
                head = self._part(new, which) if several else new
                for i, value in enumerate(values):
                    made = self._part(head, i) if is_list else head
                    self._write(node, value, made)
        if node.users:  # it returns what it wrote: later nodes read its current contents
            written = lists[0][0]
            node.replace_all_uses_with(self._origin.get(written, written))
        self._graph.erase_node(node)

    def _part(self, source: fx.Node, index: int) -> fx.Node:
        made: fx.Node = self._graph.call_function(operator.getitem, (source, index))
        made.meta = {key: value for key, value in source.meta.items() if key != "val"}
        update_node_meta(made, in_place=None)
        self._parts.append(made)
        return made

    def _write(self, node: fx.Node, value: fx.Node, made: fx.Node) -> None:
        first = self._origin.get(value, value)
        if "val" in first.meta:
            made.meta.setdefault("val", first.meta["val"])
        before = self._new.get(first)
        by_value = first in self._alone and _keeps_dtype(node, first)
        if by_value and first.op != "placeholder":
            self._new[first] = _New(made, None)  # it has no aliases: there is nothing to write into
        else:
            copy = self._graph.call_function(_COPY, (first, made))
            copy.meta = dict(first.meta)
            copy.meta.pop(KEY, None)
            if before is not None and before.copy is not None and before.value is not before.copy:
                self._drop(before.copy, copy)
            self._new[first] = _New(made if by_value else copy, copy)
            self._origin[copy] = first
        self._origin[made] = first

    def _drop(self, copy: fx.Node, by: fx.Node) -> None:
        """Remove a write that another one overwrites, with no read of the memory in between."""
        copy.replace_all_uses_with(by)
        self._graph.erase_node(copy)


def _without_aliases(graph: fx.Graph, chosen: dict[fx.Node, OpOverload]) -> set[fx.Node]:
    """Tensors that are not read through views after they were written."""
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    written: set[fx.Node] = set()
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or (node.op == "call_function" and not _may_share(node)):
            found.add(node)
            roots[node] = frozenset({node})
        elif node.op != "output":
            roots[node] = frozenset().union(*(roots.get(source, _NOTHING) for source in node.all_input_nodes))
        for source in node.all_input_nodes:
            if source not in chosen and source not in found:
                found -= roots.get(source, _NOTHING) & written  # read through a view
        if node in chosen:
            roots[node] = roots.get(written_inputs(node)[0], _NOTHING) if len(written_inputs(node)) == 1 else _NOTHING
            for value in written_inputs(node):
                written |= roots.get(value, _NOTHING)
                if value not in found and value not in chosen:
                    found -= roots.get(value, _NOTHING)  # written through a view
        else:
            for value in written_inputs(node):
                found -= roots.get(value, _NOTHING)
    return found


def _may_share(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return not is_new_element(node)
    return not isinstance(node.target, OpOverload) or bool(shared_inputs(node)) or writes(node)


def _keeps_dtype(node: fx.Node, written: fx.Node) -> bool:
    """True if an operator computes in the dtype that it writes; otherwise the new value has a higher precision."""
    own = written.meta.get("val")
    values = [source.meta.get("val") for source in node.all_input_nodes]
    if not isinstance(own, Tensor) or any(value is None for value in values):
        return False
    return all(not isinstance(v, Tensor) or v.dtype == own.dtype or (v.dim() == 0 < own.dim()) for v in values)
