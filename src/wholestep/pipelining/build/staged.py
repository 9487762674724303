"""A flat graph whose nodes have their stages, and the edits that make each stage self-contained.

Between cutting and routing the graph is still one; these edits only move, copy or add nodes:

    picks      h = getitem(lstm, 0) behind a cut        moves to the stage of lstm: tuples do not cross
    sizes      view(h, [s0, 8]) in stage 2              s0 is read again from a tensor that stage 2 has (sizes.py)
    state      a tied weight that is transmitted        stage 0 returns it as a value (shared.py)
    writes     h.add_(1) in stage 1                     stage 1 works on its own copy of h (writes.py)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from wholestep.pipelining.build.capture import Program
from wholestep.pipelining.build.regions import KEY, regions_of
from wholestep.torch_private.fake_tensors import storage_key

NO_STAGE = ("placeholder", "get_attr", "output")


class Staged:
    """A program and the stage of each of its operators."""

    def __init__(self, program: Program, stage_of: Mapping[fx.Node, int], names: Mapping[fx.Node, str]) -> None:
        self.program = program
        self.graph = program.graph
        self.stage_of = dict(stage_of)
        self.names = dict(names)
        """What a value is called in the routing table: the same in every mode of the model."""
        self._keep_functions()
        self._keep_picks()
        left = {stage: i for i, stage in enumerate(sorted(set(self.stage_of.values())))}
        self.stage_of = {node: left[stage] for node, stage in self.stage_of.items()}
        self.count = max(len(left), 1)
        self._storage: dict[fx.Node, Any] = {}

    def made_at(self, node: fx.Node) -> int:
        """The first stage that can use a node."""
        return self.stage_of.get(node, 0)

    def nodes(self, stage: int) -> list[fx.Node]:
        """The nodes of a stage, in order."""
        return [node for node in self.graph.nodes if self.stage_of.get(node) == stage]

    def users(self, node: fx.Node) -> dict[int, list[fx.Node]]:
        """The users of a node by stage. What the model returns is used behind the last stage."""
        found: dict[int, list[fx.Node]] = {}
        for user in node.users:
            found.setdefault(self.stage_of.get(user, self.count), []).append(user)
        return found

    def storage(self, node: fx.Node) -> Any:
        """The memory of a node's tensor, equal for all its views; None if it is no tensor."""
        if node not in self._storage:
            value = node.meta.get("val")
            self._storage[node] = storage_of(value)
        return self._storage[node]

    def own_storage(self, node: fx.Node, key: Any) -> None:
        """Say that a node has memory of its own although its recorded value does not."""
        self._storage[node] = key

    def first(self, stage: int) -> fx.Node:
        """The first node of a stage."""
        found: fx.Node = next(node for node in self.graph.nodes if self.stage_of.get(node) == stage)
        return found

    def last(self, stage: int) -> fx.Node:
        """The last node of a stage."""
        found: fx.Node = next(node for node in reversed(self.graph.nodes) if self.stage_of.get(node) == stage)
        return found

    def add(
        self, stage: int, target: Any, args: tuple[Any, ...], name: str, like: fx.Node, *, at_end: bool = False
    ) -> fx.Node:
        """A new node at the start or the end of a stage, with the value of another, outside of all blocks."""
        graph = self.graph
        with graph.inserting_after(self.last(stage)) if at_end else graph.inserting_before(self.first(stage)):
            node = graph.call_function(target, args)
        node.meta["val"] = like.meta.get("val")
        self._adopt(node, stage, name)
        return node

    def copy_into(self, stage: int, node: fx.Node, argument: Callable[[fx.Node], fx.Node], name: str) -> fx.Node:
        """A copy of a node at the start of a stage. Its arguments must be there before it."""
        with self.graph.inserting_before(self.first_work(stage, [argument(arg) for arg in node.all_input_nodes])):
            copied = self.graph.node_copy(node, argument)
        copied.meta.pop(KEY, None)
        self._adopt(copied, stage, name)
        return copied

    def first_work(self, stage: int, after: list[fx.Node]) -> fx.Node:
        """The first node of a stage that does not come before any of some nodes."""
        waiting = {node for node in after if self.stage_of.get(node) == stage}
        found = None
        for node in self.graph.nodes:
            if self.stage_of.get(node) != stage:
                continue
            if node in waiting:
                waiting.discard(node)
                found = None
            elif not waiting and found is None:
                found = node
        return found or self.last(stage).next

    def use_instead(self, node: fx.Node, new: fx.Node, stages: range) -> None:
        """Let the users of a node in some stages use another; the stage `count` is what the model returns."""
        for stage, users in self.users(node).items():
            if stage in stages:
                for user in users:
                    if user is not new:
                        user.replace_input_with(node, new)

    def _adopt(self, node: fx.Node, stage: int, name: str) -> None:
        self.stage_of[node] = stage
        taken = set(self.names.values())
        while name in taken:
            name += "_"
        self.names[node] = name

    def _keep_functions(self) -> None:
        """A function with a backward of its own is not cut: all of it belongs to the stage of its end."""
        end: dict[int, int] = {}
        for node in reversed(self.graph.nodes):
            if node in self.stage_of:
                for region in regions_of(node):
                    if region.kind == "function":
                        stage = end.setdefault(region.number, self.stage_of[node])
                        self.stage_of[node] = max(self.stage_of[node], stage)

    def _keep_picks(self) -> None:
        """Tuples and lists do not cross: what picks from them belongs to the stage that makes them."""
        for node in list(self.graph.nodes):
            if node.target is not operator.getitem or node not in self.stage_of:
                continue
            source = node.args[0]
            is_tuple = source in self.stage_of and not isinstance(source.meta.get("val"), torch.Tensor)
            if is_tuple and self.stage_of[source] != self.stage_of[node]:
                self.stage_of[node] = self.stage_of[source]
                source.append(node)


def storage_of(value: Any) -> int | None:
    """The memory of a recorded tensor, which views share; None if it is no tensor, or none with such memory."""
    return storage_key(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def is_number(node: fx.Node) -> bool:
    """Whether a node computes a number: a size, or arithmetic with sizes."""
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
