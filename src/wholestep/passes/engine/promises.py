"""What a pass that promises its numerics cannot have done, seen from the graph alone, without running anything.

    collectives      a reduce op, root or group is what it was; groups exist
    write-backs      no input is written that was not, none gets what another one should get
    edges            two nodes do not read what the other one read (numerics="exact")

A pass that only moves, merges and splits leaves these alone, so nothing here objects to a correct one: what was made
new is not judged, and what is the same expression may stand for each other. Values are level 3's concern (`replay`).
Cost: the nodes that changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import fx

from wholestep.errors import VerifyError
from wholestep.ir.collectives import comm_block
from wholestep.ir.effects import is_collective, is_wait
from wholestep.ir.graph_walks import epilogue
from wholestep.ir.meta import node_meta
from wholestep.ir.readable import format_node
from wholestep.ir.signature import Signature
from wholestep.passes.engine.contract import Numerics
from wholestep.passes.plain_collectives import arguments_by_position
from wholestep.torch_private.distributed import process_group_size
from wholestep.torch_private.fx_graphs import NODE_SOURCES, NodeParts, NodeTable, call_targets
from wholestep.torch_private.operators import OpOverload, argument_names, op_name

_COPY = torch.ops.aten.copy_.default
_MANY = 10_000

Key = tuple[str, ...]
Turned = dict[fx.Node, tuple[fx.Node, fx.Node]]


class Promises:
    """A graph before a pass, as nodes and what they were."""

    def __init__(self, graph: fx.Graph, table: NodeTable, signature: Signature | None) -> None:
        self._table, self._signature = table, signature
        self._before = _collectives(graph)

    def check(self, gm: fx.GraphModule, numerics: Numerics, rewired: Iterable[fx.Node]) -> None:
        """Raise VerifyError about the first thing that no such pass does. `rewired`: nodes with other arguments."""
        found = _collectives(gm.graph)
        self._groups_exist(found)
        self._writes_are_known(gm.graph)
        if numerics == "changes":
            return
        self._collectives_are_the_same(found)
        changed = [node for node in rewired if not is_collective(node.target)]
        if not changed:
            return
        stay = set(gm.graph.nodes)
        turned = _turned(changed, self._table, stay)
        self._waits_are_read(turned)
        self._write_backs_stay(changed)
        if numerics == "exact":
            self._edges_are_not_swapped(turned)

    # Collectives.

    def _groups_exist(self, found: dict[fx.Node, Key]) -> None:
        known = {key[2] for key in self._before.values()}
        known.update(spec.name for spec in (self._signature.groups if self._signature is not None else ()))
        for node, (_, _, group, _) in found.items():
            if group not in known and not process_group_size(group):
                _fail(node, f"{node.name} communicates in the group {group!r}, which does not exist.")

    def _collectives_are_the_same(self, found: dict[fx.Node, Key]) -> None:
        for node, key in found.items():
            before = self._before.get(node, key)
            if before != key and not (_is_average(before, key) and self._rescaled(node)):
                _fail(node, f"{node.name} was {_said(before)} before the pass and is {_said(key)} now.")
        was, now = Counter(self._before.values()), Counter(found.values())
        for key in now - was:
            # More of one and fewer of another one that differs in what is done to the numbers only.
            lost = [k for k in was - now if (k[0], k[2]) == (key[0], key[2]) and not _is_average(k, key)]
            new = [node for node, its in found.items() if its == key and node not in self._before]
            if lost and new:
                _fail(new[0], f"{new[0].name} is {_said(key)}; the pass has removed {_said(lost[0])}.")

    def _rescaled(self, node: fx.Node) -> bool:
        """Whether something new stands before or behind a collective: a sum may be divided there."""
        users = [user for wait in comm_block(node).waits for user in wait.users]
        return any(near not in self._table.place for near in (*node.all_input_nodes, *users))

    # Edges.

    def _writes_are_known(self, graph: fx.Graph) -> None:
        if self._signature is None:
            return
        known = {write.target for write in self._signature.write_backs}
        for node in epilogue(graph):
            if str(node.args[0]) not in known:
                _fail(node, f"{node.args[0]} is written now, and the step does not write it.")

    def _waits_are_read(self, turned: Turned) -> None:
        for node, (old, new) in turned.items():
            if is_wait(old.target) and is_wait(new.target) and not self._same_expression(old, new):
                _fail(node, f"{node.name} reads {new.name} instead of {old.name}, the result of another collective.")

    def _write_backs_stay(self, changed: Iterable[fx.Node]) -> None:
        copies = [node for node in changed if node.target is _COPY and len(node.args) > 1]
        if not copies:
            return
        values = {
            parts.args[1]: parts.name
            for parts in self._table
            if parts.target is _COPY and len(parts.args) > 1 and isinstance(parts.args[1], fx.Node)
        }
        for node in copies:
            new, old = node.args[1], self._table.parts(node).args[1]
            if not isinstance(new, fx.Node) or not isinstance(old, fx.Node):
                continue
            others = values.get(new, node.name) != node.name
            if others and not self._same_expression(old, new) and not self._made_from(old, new):
                _fail(node, f"{node.args[0]} gets {new.name}, which {values[new]} writes, instead of {old.name}.")

    def _edges_are_not_swapped(self, turned: Turned) -> None:
        by_pair = {pair: node for node, pair in turned.items()}
        for (old, new), node in by_pair.items():
            other = by_pair.get((new, old))
            if other is None or {node, other} & {*node.all_input_nodes, *other.all_input_nodes}:
                continue  # in a chain: the same terms in another order
            if not self._same_expression(old, new):
                _fail(
                    node, f"{node.name} reads {new.name} instead of {old.name}, and {other.name} the other way round."
                )

    def _made_from(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether a node was nothing but another one in another form, or the other way round."""
        return other in self._alone(one) or one in self._alone(other)

    def _alone(self, node: fx.Node) -> list[fx.Node]:
        """The inputs of a node that has one, the input of that, and so on."""
        found: list[fx.Node] = []
        table = self._table
        while node in table.place and len(sources := _sources(table.parts(node))) == 1 and len(found) < _MANY:
            node = next(iter(sources))
            found.append(node)
        return found

    def _same_expression(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes of the graph before were the same operators on the same inputs."""
        stack, seen = [(one, other)], set[tuple[fx.Node, fx.Node]]()
        while stack:
            pair = stack.pop()
            if pair in seen or pair[0] is pair[1]:
                continue
            seen.add(pair)
            if len(seen) > _MANY:
                return True  # nobody knows: then nobody complains
            if not all(map(self._table.place.__contains__, pair)):
                return False
            left, right = map(self._table.parts, pair)
            if left.op in ("placeholder", "get_attr") or left[:2] != right[:2]:
                return False
            mine, theirs = list(_sources(left)), list(_sources(right))
            if len(mine) != len(theirs) or _form(left) != _form(right):
                return False
            stack += zip(mine, theirs, strict=True)
        return True


def _turned(changed: Iterable[fx.Node], was: NodeTable, stay: set[fx.Node]) -> Turned:
    """Nodes that read one other node of before instead of one that is still there."""
    found = {}
    for node in changed:
        new = NODE_SOURCES(node)
        if not all(map(was.place.__contains__, new)):
            continue  # it reads something that the pass has made
        old = _sources(was.parts(node))
        gone, come = [n for n in old if n not in new], [n for n in new if n not in old]
        if len(gone) == len(come) == 1 and gone[0] in stay:
            found[node] = (gone[0], come[0])
    return found


def _sources(parts: NodeParts) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    fx.map_arg((parts.args, parts.kwargs), lambda node: found.setdefault(node))
    return found


def _form(parts: NodeParts) -> str:
    """Arguments with nodes left out."""
    return str(fx.map_arg((parts.args, parts.kwargs), lambda node: None))


def _collectives(graph: fx.Graph) -> dict[fx.Node, Key]:
    """For each collective: operator, first scalar, group, and its other scalars. Other nodes cost nothing."""
    found: dict[fx.Node, Key] = {}
    for target in filter(is_collective, call_targets(graph)):
        known: dict[Any, Key] = {}
        for node in graph.find_nodes(op="call_function", target=target, sort=False):
            args, kwargs = node.args, node.kwargs
            same = args[1:] if not kwargs and not any(isinstance(arg, list) for arg in args[1:]) else node
            if same not in known:
                known[same] = _key(target, args, dict(kwargs))
            if known[same][2]:
                found[node] = known[same]
    return found


def _key(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    given = dict(zip(argument_names(op), arguments_by_position(op, args, kwargs), strict=False))
    group = given.pop("group_name", "")
    scalars = [str(value) for value in given.values() if isinstance(value, str | int)]
    named = group if isinstance(group, str) else str(getattr(group, "group_name", ""))
    return op_name(op), scalars[0] if scalars else "", named, " ".join(scalars[1:])


def _is_average(one: Key, other: Key) -> bool:
    """Whether two collectives are the same but for the division by the number of ranks."""
    return {one[1], other[1]} == {"sum", "avg"} and (one[0], *one[2:]) == (other[0], *other[2:])


def _said(key: Key) -> str:
    return f"{key[0].split('::')[-1]}({', '.join(filter(None, (key[1], key[3], f'group {key[2]}')))})"


def _fail(node: fx.Node, what: str) -> NoReturn:
    raise VerifyError(what, node=format_node(node), location=node_meta(node).location)
