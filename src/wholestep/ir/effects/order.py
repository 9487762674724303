"""Which nodes must keep their order although no value flows between them.

    drawn = rand(3);  again = rand(3)          random draws, in the order in which the generator is asked
    all_reduce(a);  all_reduce(b)              collectives, in the order that all ranks agree on
    y = x + 1;  x.add_(2);  z = x * 3          a write and every read of the same memory, through any view
    print(a);  print(b)                        other side effects, among themselves
    _set_grad_enabled(False);  ...             a switch of grad mode or autocast, and everything before and after it
    norm(x);  mean = norm.running_mean * 2     a module that updates its state, and reads of that state

Nodes without such effects have no edges, and a graph without any costs one walk.

Which nodes of a graph may share memory, and which writes reach what.

v = view(g, [-1])                  one memory class: g, v, m
m = mul_(v, 0.5)                   writes g, an input
a = all_reduce(g, 'sum', '0')      may start anywhere between the two writes
zero_(g)
"""

from __future__ import annotations

import math
import operator
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import torch
from torch import Tensor, fx, nn

from wholestep.ir.effects.nodes import (
    RANDOM,
    aliased_inputs,
    module_writes,
    order_kind,
    reads_contents,
    shared_inputs,
    stored_in,
    writes,
    written_inputs,
)
from wholestep.ir.effects.targets import is_arithmetic, is_fence, may_draw, may_write
from wholestep.ir.graph_walks import reachable, tensors_in
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.torch_private.autograd import MODE_SWITCHES
from wholestep.torch_private.fake_tensors import storage_key
from wholestep.torch_private.operators import HigherOrderOperator, OpOverload

Sources = Callable[[fx.Node], Iterable[fx.Node]]
_NO_CALL = frozenset({"placeholder", "get_attr", "output"})


class MemoryClasses:
    """Nodes whose results may share memory (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        """The node that stands for the class of a node."""
        root = node
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        while node is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def join(self, node: fx.Node, other: fx.Node) -> None:
        """Make one class of two."""
        node, other = self.find(node), self.find(other)
        if node is not other:
            self._parent[node] = other


def alias_roots(
    nodes: Iterable[fx.Node], roots: Iterable[fx.Node], sources: Sources = shared_inputs
) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node that may share memory with some of `roots`, those; each root shares its own. `nodes`: in order."""
    found = {root: frozenset({root}) for root in roots}
    for node in nodes:
        if node in found:
            continue
        shared = [found[source] for source in sources(node) if source in found]
        if shared:
            found[node] = shared[0] if len(shared) == 1 else frozenset().union(*shared)
    return found


def written_roots(nodes: Sequence[fx.Node], roots: Sequence[fx.Node], sources: Sources = shared_inputs) -> list[int]:
    """Positions of those of `roots` that nodes write into, directly or through aliases."""
    found = alias_roots(nodes, roots, sources)
    written = {root for node in nodes for value in written_inputs(node) for root in found.get(value, ())}
    return [i for i, root in enumerate(roots) if root in written]


def sharing_with_outputs(graph: fx.Graph) -> set[fx.Node]:
    """The values that leave a graph, and everything that they are views of."""
    return set(reachable(graph.output_node().all_input_nodes, shared_inputs))


class WriteWindows:
    """The writes of a graph by the memory that they go to: between which of them a collective may read its operand.

    A StepGraph has no such writes, and costs one look at each node. Other graphs (`make_fx` of a step with in-place
    operators, a graph by hand) are taken as they are.
    """

    def __init__(self, nodes: Sequence[fx.Node], end: int) -> None:
        """`end`: position of the first write-back; writes from there on do not count."""
        self._classes = MemoryClasses()
        self._writes: dict[fx.Node, list[int]] = {}
        targets = list(map(attrgetter("target"), nodes[:end]))
        by_id = dict(zip(map(id, targets), targets, strict=True))
        pure = {key for key, target in by_id.items() if _cannot_write(target)}
        suspects = compress(range(end), map(not_, map(pure.__contains__, map(id, targets))))  # no Python code per node
        writers = [i for i in suspects if nodes[i].op not in _NO_CALL and writes(nodes[i])]
        if not writers:
            return
        for node in nodes:
            for source in aliased_inputs(node):
                self._classes.join(node, source)
        for i in writers:
            for root in set(map(self._classes.find, written_inputs(nodes[i]))):
                self._writes.setdefault(root, []).append(i)

    @property
    def any(self) -> bool:
        """Whether the graph writes at all."""
        return bool(self._writes)

    def around(self, sources: Iterable[fx.Node], place: int) -> tuple[int, float]:
        """The last write before a place, and the first one after it, to what some nodes hold."""
        last, following = -1, math.inf
        for source in sources if self._writes else ():
            found = self._writes.get(self._classes.find(source), [])
            i = bisect(found, place)
            last = max(last, found[i - 1]) if i else last
            following = min(following, found[i]) if i < len(found) else following
        return last, following


def _cannot_write(target: Any) -> bool:
    """Operators by their schema; of Python's own functions those on scalars, which are many in an optimizer."""
    return not may_write(target) if isinstance(target, OpOverload) else is_arithmetic(target)


@dataclass
class Storages:
    """The storages of a graph's values, by number."""

    size: list[int] = field(default_factory=list)
    """Bytes of each storage."""
    maker: list[fx.Node] = field(default_factory=list)
    """The node that allocates each storage."""
    seen_by: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """The storages that the value of a node lies in."""
    made_by: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """The storages that a node allocates; those of a list, one for each element."""


def find_storages(graph: fx.Graph, device: torch.device | None = None) -> Storages:
    """All storages of a graph; inputs and constants have their own. Those on another device count 0 bytes."""
    found = Storages()
    forms: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        source = node.args[0] if node.target is operator.getitem else None
        form = forms.get(source) if isinstance(source, fx.Node) else None
        if isinstance(form, list) and isinstance(node.args[1], int):
            forms[node] = form[node.args[1]]
            found.seen_by[node] = tuple(_flat(forms[node]))
        elif shared := stored_in(node):
            found.seen_by[node] = tuple(dict.fromkeys(p for s in shared for p in found.seen_by.get(s, ())))
        else:
            forms[node] = _make(found, node, node.meta.get("val"), device)
            found.seen_by[node] = found.made_by[node] = tuple(_flat(forms[node]))
    return found


def _make(storages: Storages, node: fx.Node, value: Any, device: torch.device | None) -> Any:
    """New storages for a value: a number, or a list of the form of the value; None where there is no tensor."""
    if isinstance(value, list | tuple):
        return [_make(storages, node, item, device) for item in value]
    if not isinstance(value, Tensor):
        return None
    storages.size.append(tensor_bytes(value) if device is None or value.device == device else 0)
    storages.maker.append(node)
    return len(storages.size) - 1


def _flat(form: Any) -> Iterator[int]:
    if isinstance(form, list):
        for item in form:
            yield from _flat(item)
    elif form is not None:
        yield form


def read_by(node: fx.Node) -> list[fx.Node]:
    """The values that must be in memory while a node runs: of a list whose element it takes, only that element."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and isinstance(source.meta.get("val"), list | tuple):
        return []
    return node.all_input_nodes


def main_device(graph: fx.Graph) -> torch.device:
    """The device that most bytes of a graph are on; a GPU before the CPU."""
    found: dict[torch.device, list[Tensor]] = {}
    for node in graph.nodes:
        for tensor in tensors_in(node.meta.get("val")):
            found.setdefault(tensor.device, []).append(tensor)
    if len(found) < 2:
        return next(iter(found), torch.device("cpu"))
    return max(found, key=lambda device: (device.type != "cpu", sum(map(tensor_bytes, found[device]))))


OrderEdges = dict[fx.Node, list[fx.Node]]

_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten)


class GraphEffects:
    """The effects of all nodes of a graph, with those of the modules that it calls, read once."""

    def __init__(self, nodes: list[fx.Node], root: nn.Module | None = None) -> None:
        self.tokens: dict[fx.Node, tuple[str, ...]] = {}
        """What a node takes part in: nodes with a common token keep their order."""
        self.written: dict[fx.Node, list[fx.Node]] = {}
        """The inputs whose contents a node changes, and attributes that a module changes."""
        self.switches: set[fx.Node] = set()
        """Nodes that turn grad mode or autocast on or off for all that follow."""
        self.fences: set[fx.Node] = set()
        """Nodes that switch something else (inference mode, `vmap`): nothing passes them."""
        self.same: dict[fx.Node, fx.Node] = {}
        """For each attribute that is a tensor, the first one of the same memory."""
        self.held: dict[fx.Node, list[fx.Node]] = {}
        """Attributes whose memory lies in the module that a node calls."""
        self._pure = set[int]()
        self._root = root if root is not None or not nodes else nodes[0].graph.owning_module
        self._modules: dict[str, ModuleEffects] = {}
        for node in nodes:
            if node.op == "call_module":
                self._read_module(node)
            elif node.op in ("call_function", "call_method"):
                self._read_call(node)
        if self.written or self._modules:
            self._read_attributes(nodes)

    def aliases(self, node: fx.Node) -> list[fx.Node]:
        """The inputs whose memory the result of a node may share."""
        if node.op == "call_module":
            return node.all_input_nodes if self._module(str(node.target)).may_alias else []
        return aliased_inputs(node)

    def _read_call(self, node: fx.Node) -> None:
        target: Any = node.target
        if id(target) in self._pure:
            return
        if target in MODE_SWITCHES:
            self.switches.add(node)
            return
        kind, written = order_kind(node), written_inputs(node)
        if kind:
            self.tokens[node] = (kind,)
        if written:
            self.written[node] = written
        if isinstance(target, HigherOrderOperator):
            self._read_bodies(node)
        elif isinstance(target, OpOverload) or target is operator.getitem:
            if not kind and not may_write(target) and not may_draw(target):
                self._pure.add(id(target))
        elif node.op == "call_function" and is_fence(target):
            self.fences.add(node)

    def _read_module(self, node: fx.Node) -> None:
        effects = self._module(str(node.target))
        if effects.tokens:
            self.tokens[node] = effects.tokens
        if effects.writes and node.all_input_nodes:
            self.written[node] = list(node.all_input_nodes)

    def _read_attributes(self, nodes: list[fx.Node]) -> None:
        """Tensors that the graph gets may be another one under another name, or lie in a module that it calls."""
        first: dict[int, fx.Node] = {}
        for node in nodes:
            value = self._lookup(str(node.target)) if node.op == "get_attr" else None
            if isinstance(value, Tensor):
                self.same[node] = first.setdefault(_storage(value), node)
        for node in nodes if first else ():
            if node.op == "call_module":
                effects = self._module(str(node.target))
                self.held[node] = [first[each] for each in effects.holds if each in first]
                if updated := [first[each] for each in effects.updates if each in first]:
                    self.written[node] = [*self.written.get(node, ()), *updated]

    def _read_bodies(self, node: fx.Node) -> None:
        """`cond` and other higher-order operators do what the graphs do that they are given."""
        bodies = [self._module(str(arg.target)) for arg in node.all_input_nodes if arg.op == "get_attr"]
        tokens = dict.fromkeys(token for body in bodies for token in body.tokens)
        if tokens:
            self.tokens[node] = tuple(tokens)
        if any(body.writes for body in bodies):
            self.written[node] = [arg for arg in node.all_input_nodes if arg.op != "get_attr"]

    def _module(self, target: str) -> ModuleEffects:
        found = self._modules.get(target)
        if found is None:
            value = self._lookup(target)
            module = value if isinstance(value, nn.Module) else None  # get_attr may name a tensor
            found = self._modules[target] = ModuleEffects(module)
        return found

    def _lookup(self, target: str) -> Any:
        value: Any = self._root
        for atom in target.split("."):
            value = getattr(value, atom, None)
        return value


class ModuleEffects:
    """What calling a module does; of modules that are not torch's own, what their children are known to do."""

    def __init__(self, module: nn.Module | None) -> None:
        tokens: dict[str, None] = {}
        self.updates: list[int] = []
        """The storages of buffers that it may change."""
        self._module = module
        self.writes = module_writes(module)
        """Whether it may change the contents of its arguments."""
        self.may_alias = module is None or self.writes
        """Whether its result may share memory with its arguments."""
        for part in module.modules() if module is not None else ():
            if not type(part).__module__.startswith("torch.nn.") or isinstance(part, _VIEW_MODULES):
                self.may_alias = True
            if "Dropout" in type(part).__name__:
                self.may_alias = True  # in eval mode, the argument itself
            if part.training and _module_draws(part):
                tokens[RANDOM] = None
            if updates := _updated(part):
                self.updates += map(_storage, updates)
                tokens[f"buffers of {id(part)}"] = None
            if isinstance(part, fx.GraphModule):
                inner = GraphEffects(list(part.graph.nodes), part)
                tokens.update(dict.fromkeys(token for each in inner.tokens.values() for token in each))
                self.writes = self.writes or bool(inner.written)
        self.tokens = tuple(tokens)

    @cached_property
    def holds(self) -> list[int]:
        """The storages of its parameters and buffers."""
        if self._module is None:
            return []
        return [*map(_storage, self._module.parameters()), *map(_storage, self._module.buffers())]


def order_edges(nodes: list[fx.Node], around_switches: bool = True, effects: GraphEffects | None = None) -> OrderEdges:
    """For each node, the earlier ones (besides its arguments) after which it must come. `nodes`: all of a graph.

    Without `around_switches` nothing is said of grad mode and autocast, for callers who repeat them where needed.
    """
    effects = GraphEffects(nodes) if effects is None else effects
    before: OrderEdges = {}
    _chain(nodes, effects, before)
    if effects.written:
        _around_writes(nodes, effects, before)
    fences = effects.fences | effects.switches if around_switches else effects.fences
    if fences:
        _around_fences(nodes, fences, before)
    return before


def _chain(nodes: list[fx.Node], effects: GraphEffects, before: OrderEdges) -> None:
    last: dict[str, fx.Node] = {}
    for node in nodes:
        for token in effects.tokens.get(node, ()):
            if token in last:
                before.setdefault(node, []).append(last[token])
            last[token] = node


def _around_writes(nodes: list[fx.Node], effects: GraphEffects, before: OrderEdges) -> None:
    """Reads since the last write come before the next one, and reads after a write after it."""
    memory = MemoryClasses()
    same: dict[str, fx.Node] = {}
    for node in nodes:
        if node.op == "get_attr":
            memory.join(node, same.setdefault(str(node.target), node))
            memory.join(node, effects.same.get(node, node))
        for source in effects.aliases(node):
            memory.join(node, source)
    written = {memory.find(value) for values in effects.written.values() for value in values}
    last_write: dict[fx.Node, fx.Node] = {}
    reads: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node.op in ("placeholder", "get_attr", "output") or not reads_contents(node):
            continue
        writes_to = {memory.find(value) for value in effects.written.get(node, ())}
        touched = dict.fromkeys(map(memory.find, (*node.all_input_nodes, *effects.held.get(node, ()))))
        for place in touched:
            if place not in written:
                continue
            if place in last_write:
                before.setdefault(node, []).append(last_write[place])
            if place in writes_to:
                before.setdefault(node, []).extend(reads.pop(place, ()))
                last_write[place] = node
            else:
                reads.setdefault(place, []).append(node)


def _around_fences(nodes: list[fx.Node], fences: set[fx.Node], before: OrderEdges) -> None:
    last: fx.Node | None = None
    since: list[fx.Node] = []
    for node in nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if last is not None:
            before.setdefault(node, []).append(last)
        if node in fences:
            before.setdefault(node, []).extend(since)
            last, since = node, []
        else:
            since.append(node)


def _updated(module: nn.Module) -> list[Tensor]:
    """What a module of torch, or one that is not known, may change of its own state."""
    if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return [module.weight]
    return list(module.buffers(recurse=False)) if module.training else []


def _storage(tensor: Tensor) -> int:
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


def _module_draws(module: nn.Module) -> bool:
    if "Dropout" in type(module).__name__ or isinstance(module, nn.RReLU):
        return bool(getattr(module, "p", 1.0))
    dropout = getattr(module, "dropout", 0.0)  # attention and recurrent networks
    return isinstance(dropout, float) and bool(dropout > 0.0)
