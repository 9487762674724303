"""Which nodes must keep their order although no value flows between them.

    drawn = rand(3);  again = rand(3)          random draws, in the order in which the generator is asked
    all_reduce(a);  all_reduce(b)              collectives, in the order that all ranks agree on
    y = x + 1;  x.add_(2);  z = x * 3          a write and every read of the same memory, through any view
    print(a);  print(b)                        other side effects, among themselves
    _set_grad_enabled(False);  ...             a switch of grad mode or autocast, and everything before and after it
    norm(x);  mean = norm.running_mean * 2     a module that updates its state, and reads of that state

Nodes without such effects have no edges, and a graph without any costs one walk.
"""

from __future__ import annotations

import operator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from wholestep.ir.effects.aliases import MemoryClasses
from wholestep.ir.effects.nodes import (
    RANDOM,
    aliased_inputs,
    module_writes,
    order_kind,
    reads_contents,
    written_inputs,
)
from wholestep.ir.effects.targets import is_fence, may_draw, may_write
from wholestep.torch_private.autograd import MODE_SWITCHES
from wholestep.torch_private.fake_tensors import storage_of
from wholestep.torch_private.operators import HigherOrderOperator, OpOverload

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
    return storage_of(tensor) if tensor.layout is torch.strided else id(tensor)


def _module_draws(module: nn.Module) -> bool:
    if "Dropout" in type(module).__name__ or isinstance(module, nn.RReLU):
        return bool(getattr(module, "p", 1.0))
    dropout = getattr(module, "dropout", 0.0)  # attention and recurrent networks
    return isinstance(dropout, float) and bool(dropout > 0.0)
