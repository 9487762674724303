"""Grad mode and autocast, which a node switches for all that follow: each partition enters and exits what it needs.

    graph      a   enter    b    c    exit   d           cut between b and c
    child 0    a   enter    b   [exit]
    child 1   [enter]   c    exit   d

Nodes in brackets are added. A child starts in the modes of its caller. It enters the modes of its first node, follows
the graph from there, exits all autocasts at its end and restores the grad mode of its caller. Only the last child
leaves the grad mode in which the graph ends. Nodes of one child may come from different regions: the modes are switched
in between, so partition numbers need not increase along the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from wholestep.partition.assignment import CALLS, Assignment, error_at
from wholestep.torch_private.autograd import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED
from wholestep.torch_private.fx_graphs import GraphWriter, name_of_target


@dataclass(frozen=True, eq=False, slots=True)
class ActiveModes:
    """The `_enter_autocast` nodes that are open, outermost first, and the last `_set_grad_enabled` node."""

    autocasts: tuple[fx.Node, ...] = ()
    grad: fx.Node | None = None


@dataclass(frozen=True)
class ModeRegions:
    """The modes in which each node runs, and the exit of each autocast."""

    before: dict[fx.Node, ActiveModes] = field(default_factory=dict)
    exits: dict[fx.Node, fx.Node] = field(default_factory=dict)
    last_grad: fx.Node | None = None

    def grad_after(self, node: fx.Node) -> fx.Node | None:
        """The grad mode after a node."""
        return node if node.target is SET_GRAD_ENABLED else self.before[node].grad


def find_regions(nodes: Sequence[fx.Node]) -> ModeRegions:
    """Walk the graph; raises SplitError if autocasts are not entered and exited in pairs."""
    found = ModeRegions()
    modes = ActiveModes()
    for node in nodes:
        if node.op not in CALLS:
            continue
        found.before[node] = modes
        if node.target is SET_GRAD_ENABLED:
            modes = ActiveModes(modes.autocasts, node)
        elif node.target is ENTER_AUTOCAST:
            if node.all_input_nodes:
                raise error_at(node, f"{node.name} enters an autocast whose settings are values of the graph.")
            modes = ActiveModes((*modes.autocasts, node), modes.grad)
        elif node.target is EXIT_AUTOCAST:
            entered = node.args[0] if node.args else None
            if entered not in modes.autocasts:
                raise error_at(node, f"{node.name} exits an autocast that is not open.")
            assert isinstance(entered, fx.Node)
            found.exits[entered] = node
            modes = ActiveModes(tuple(open_ for open_ in modes.autocasts if open_ is not entered), modes.grad)
    if modes.autocasts:
        raise error_at(modes.autocasts[-1], f"autocast must exit: {modes.autocasts[-1].name} has no exit.")
    return ModeRegions(found.before, found.exits, modes.grad)


@dataclass(frozen=True)
class GradModeAtEnd:
    """What a child does with the grad mode at its end."""

    restore: bool = False
    """Restore the grad mode of the caller."""
    switch: fx.Node | None = None
    """Repeat this node of the graph."""


def plan_leaving(assignment: Assignment, regions: ModeRegions, order: Sequence[int]) -> dict[int, GradModeAtEnd]:
    """For the partitions that switch grad mode at their end. After the last one, the graph's final grad mode holds."""
    plan: dict[int, GradModeAtEnd] = {}
    if regions.last_grad is None:
        return plan
    all_set_their_own = True
    for position, place in enumerate(reversed(order)):
        nodes = assignment.partitions[place].nodes
        ends = regions.grad_after(nodes[-1])
        if position == 0:
            if ends is not regions.last_grad:
                plan[place] = GradModeAtEnd(switch=regions.last_grad)
        elif ends is not None and not (ends is regions.last_grad and all_set_their_own):
            plan[place] = GradModeAtEnd(restore=True)
        all_set_their_own = all_set_their_own and regions.grad_after(nodes[0]) is not None
    return plan


class ModeWriter:
    """Writes the mode switches into the graph of one child."""

    def __init__(
        self, regions: ModeRegions, leaving: GradModeAtEnd, writer: GraphWriter, env: dict[fx.Node, fx.Node]
    ) -> None:
        self._regions, self._leaving, self._writer, self._env = regions, leaving, writer, env
        self._open: tuple[fx.Node, ...] = ()
        self._grad: fx.Node | None = None
        self._at_entry: fx.Node | None = None

    def before(self, node: fx.Node) -> None:
        """Switch to the modes in which a node runs; called before it is copied."""
        needed = self._regions.before[node]
        if needed.autocasts is not self._open:
            self._open_autocasts(needed.autocasts)
        if node.target is SET_GRAD_ENABLED:
            self._remember()
            self._grad = node
        elif needed.grad is not self._grad and needed.grad is not None:
            self._switch(needed.grad)

    def after(self, node: fx.Node) -> None:
        """Track the modes after a node was copied."""
        if node.target is ENTER_AUTOCAST:
            self._open = (*self._open, node)
        elif node.target is EXIT_AUTOCAST:
            self._open = tuple(open_ for open_ in self._open if open_ is not node.args[0])

    def finish(self) -> None:
        """Exit open autocasts and set the grad mode at the end."""
        self._open_autocasts(())
        if self._leaving.switch is not None:
            self._switch(self._leaving.switch)
        elif self._at_entry is not None:
            self._add(SET_GRAD_ENABLED, (self._at_entry,), None)

    def _open_autocasts(self, needed: tuple[fx.Node, ...]) -> None:
        common = 0
        while common < min(len(needed), len(self._open)) and needed[common] is self._open[common]:
            common += 1
        for entered in reversed(self._open[common:]):
            left = self._regions.exits[entered]
            self._add(EXIT_AUTOCAST, (self._env[entered],), left)
        for entering in needed[common:]:
            self._env[entering] = self._add(ENTER_AUTOCAST, entering.args, entering)
        self._open = needed

    def _switch(self, grad: fx.Node) -> None:
        if grad.all_input_nodes:
            raise error_at(grad, f"{grad.name} sets grad mode from a value of the graph, and partitions repeat it.")
        self._remember()
        self._add(SET_GRAD_ENABLED, grad.args, grad)
        self._grad = grad

    def _remember(self) -> None:
        if self._leaving.restore and self._at_entry is None:
            self._at_entry = self._add(torch.is_grad_enabled, (), None)

    def _add(self, function: object, args: tuple[object, ...], like: fx.Node | None) -> fx.Node:
        meta = None if like is None else like.meta.copy()
        type_expr = None if like is None else like.type
        return self._writer.add("call_function", function, args, {}, name_of_target(function), type_expr, meta)
