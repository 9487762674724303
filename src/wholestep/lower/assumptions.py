"""What a compiled region takes for granted of its inputs, looked at before each call.

Inductor assumes that inputs look as they were traced, that what it writes into is not among the other inputs, and that
nobody wants gradients; it answers questions about sizes once. A call for which that is not so runs the region operator
by operator, as it would have without lowering.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import LowerWarning
from wholestep.lower.looks import Looks
from wholestep.lower.regions import Region, order_of
from wholestep.lower.sizes import SizeConditions
from wholestep.torch_private.fx_graphs import lazy_graph_module

log = logging.getLogger("wholestep.lower")


class Assumptions:
    """Decides whether a region's compiled form fits a call, and runs its operators where it does not."""

    def __init__(
        self,
        region: Region,
        owner: fx.GraphModule,
        written: Sequence[int],
        sizes: SizeConditions,
        packs: int,
        *,
        look: bool,
    ) -> None:
        """`written`: inputs that the region writes. `packs`: how many tensors of numbers follow its inputs. `look`:
        nobody else has looked at the inputs."""
        self._inputs = len(region.inputs)
        self._looks = Looks(region.inputs) if look else None
        self._packs = packs
        self._written = tuple(written)
        self._sizes = sizes
        self._operators = lazy_graph_module(owner, region_graph(region), f"Region{region.number}")
        self._told: set[str] = set()
        self._what = f"region {region.number}"
        self.added = sizes.inputs
        """Inputs of the graph that follow the arguments of the compiled region."""

    def take(self, arguments: list[Any]) -> list[Any]:
        """Remove the arguments that are only for us."""
        start = len(arguments) - len(self.added)
        taken = arguments[start:]
        del arguments[start:]
        return taken

    def hold(self, arguments: list[Any], added: Sequence[Any]) -> bool:
        """Whether the compiled form is right for these arguments."""
        if self._looks is not None and not self._look(self._looks, arguments[: self._inputs]):
            return False
        if self._sizes and not self._sizes.hold(added):
            self._tell("some sizes", f"its code is for {self._sizes}.")
            return False
        if self._written and _overlap(arguments[: self._inputs], self._written):
            log.info("%s runs operator by operator: it writes into an input that it got twice", self._what)
            return False
        return True

    def _look(self, looks: Looks, values: list[Any]) -> bool:
        difference = looks.difference(values)
        if difference:
            self._tell("some inputs", f"{difference}.")
            return False
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values):
            self._tell(
                "inputs that require gradients", "compiled code records none. Call the graph under torch.no_grad()."
            )
            return False
        return True

    def _tell(self, when: str, why: str) -> None:
        if when not in self._told:
            self._told.add(when)
            warnings.warn(LowerWarning(f"{self._what} runs operator by operator for {when}: {why}"), stacklevel=2)

    def run(self, arguments: list[Any]) -> tuple[Any, ...]:
        """The region, operator by operator."""
        given = arguments[: self._inputs]
        packs = arguments[self._inputs : self._inputs + self._packs]
        # The last pack is the most precise one that anything in the region computes with.
        numbers = packs[-1].tolist() if packs else []
        arguments.clear()
        found: tuple[Any, ...] = self._operators(*given, *numbers)
        return found


def region_graph(region: Region) -> fx.Graph:
    """The nodes of a region as a graph that takes its tensors, then its numbers."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in (*region.inputs, *region.numbers):
        env[node] = graph.placeholder(node.name)
    for node in order_of(region):
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in region.outputs))
    return graph


def _overlap(tensors: Sequence[Any], written: Sequence[int]) -> bool:
    """Whether one of the written tensors shares memory with another argument."""
    places: dict[int, int] = {}
    for value in tensors:
        if isinstance(value, Tensor):
            start = value.untyped_storage().data_ptr()
            places[start] = places.get(start, 0) + 1
    return any(places[tensors[i].untyped_storage().data_ptr()] > 1 for i in written)
