"""Nodes of the graph under construction, each with its value's metadata and where it comes from.

A backward node is traced back to the forward line by autograd's sequence numbers: the operator that made autograd node
number n is the one whose line the backward of n gets.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import fx

from wholestep.errors import Location
from wholestep.ir.meta import KEY, NodeMeta
from wholestep.ir.user_location import location_of, user_frame
from wholestep.torch_private.autograd import autograd_sequence_number, current_autograd_node, node_sequence_number
from wholestep.torch_private.operators import OpOverload


class Place(Protocol):
    """Where the step is while it is traced."""

    phase: str
    module_path: str

    def in_recompute(self) -> bool: ...


class Nodes:
    """Creates nodes at the end of one graph."""

    def __init__(self, graph: fx.Graph, place: Place) -> None:
        self.graph = graph
        self._place = place
        self._after_backward = False
        self._forward_of: dict[int, tuple[str, Location | None]] = {}

    def create(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any, in_place: OpOverload | None = None
    ) -> fx.Node:
        """A call of `target` whose result looks like `val`; `in_place` is the operator that eager ran here."""
        node = self.graph.create_node("call_function", target, args, kwargs)
        node.meta["val"] = val
        node.meta[KEY] = self._meta(in_place)
        return node

    def last(self) -> fx.Node | None:
        """The newest node."""
        return next(iter(reversed(self.graph.nodes)), None)

    def since(self, before: fx.Node | None) -> list[fx.Node]:
        """The nodes made after that one, in order."""
        made: list[fx.Node] = []
        for node in reversed(self.graph.nodes):
            if node is before:
                break
            made.append(node)
        return made[::-1]

    def _meta(self, in_place: OpOverload | None) -> NodeMeta:
        place = self._place
        running = current_autograd_node()
        if running is None:
            where = location_of(user_frame(3))
            phase = place.phase
            if phase == "forward":
                if self._after_backward and not place.module_path and not torch.is_grad_enabled():
                    phase = "update"
                # An operator without a node of autograd's (batch norm counts its calls) finds the last one's number.
                self._forward_of.setdefault(autograd_sequence_number() - 1, (place.module_path, where))
            return NodeMeta(place.module_path, where, phase, in_place)
        self._after_backward = True
        path, forward = self._forward_of.get(node_sequence_number(running), (place.module_path, None))
        if place.in_recompute():
            return NodeMeta(
                place.module_path or path, location_of(user_frame(3)) or forward, "backward", in_place, recompute=True
            )
        return NodeMeta(path, forward or location_of(user_frame(3)), "backward", in_place)
