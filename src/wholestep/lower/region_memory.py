"""How much memory a compiled call needs: measured, by calling it once with tensors that mean nothing.

What Inductor fuses, reuses and reorders is its own; so is the scratch memory of the libraries that it calls. Integers
that another call made are those that it made when it was measured: they may be an order, for which zeros will not do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.io.node_values import tensor_bytes
from wholestep.lower.compiled import CompiledRegion
from wholestep.lower.scalars import pack_numbers
from wholestep.remat.measure import bytes_at_most
from wholestep.remat.stand_in import stand_in
from wholestep.remat.workspace import OperatorMemory
from wholestep.torch_private.autograd import below_autograd


class RegionMemory:
    """What regions need, each measured once."""

    def __init__(self, operators: OperatorMemory) -> None:
        self._operators = operators
        self._known: dict[Any, int] = {}
        self._alive: list[Any] = []
        """What `_known` has the ids of."""
        self._integers: dict[tuple[int, int], Tensor] = {}
        """Of a compiled call and the place of a result: the integers that it gave."""

    def of(self, gm: fx.GraphModule, device: torch.device) -> Callable[[fx.Node], int | None]:
        """For calls of compiled regions, and of operators: the bytes that they have at most, above those before."""
        last = _last_users(gm.graph)

        def extra(node: fx.Node) -> int | None:
            if node.op != "call_module":
                return self._operators.extra(node)
            module = gm.get_submodule(str(node.target))
            if not isinstance(module, CompiledRegion):
                return None
            given = [last.get(source) is node for source in node.args]  # type: ignore[arg-type]
            key = (id(module.compiled), tuple(given))
            if key not in self._known:
                self._alive.append(module.compiled)
                self._known[key] = self._measure(gm, module, node, given, device)
            return self._known[key]

        return extra

    def _measure(
        self, gm: fx.GraphModule, module: CompiledRegion, node: fx.Node, given: list[bool], device: torch.device
    ) -> int:
        """Inputs that die in the call are given away, and made while it is counted: the CPU's count knows no others."""
        arguments = list(node.args)
        held = [None if gives else self._argument(gm, source) for source, gives in zip(arguments, given, strict=True)]

        def call() -> Any:
            made = [self._argument(gm, arguments[i]) if gives else held[i] for i, gives in enumerate(given)]
            return module.call_boxed(made)

        with below_autograd(), torch.random.fork_rng():
            self._keep_integers(module, call())  # loads and tunes kernels
            _, most = bytes_at_most(call, device)
        if most is None:
            return 0
        given_away = (source.meta.get("val") for source, gives in zip(arguments, given, strict=True) if gives)  # type: ignore[union-attr]
        return most - sum(tensor_bytes(t) for t in given_away if isinstance(t, Tensor) and t.device == device)

    def _keep_integers(self, module: CompiledRegion, results: Sequence[Any]) -> None:
        for place, value in enumerate(results):
            if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32):
                self._integers[id(module.compiled), place] = value.clone()

    def _argument(self, gm: fx.GraphModule, source: Any) -> Any:
        """What stands for an argument; numbers that are packed for a region have no metadata."""
        if not isinstance(source, fx.Node):
            return stand_in(source)
        if source.target is pack_numbers:
            numbers, dtype, device = source.args
            return pack_numbers([0.0] * len(numbers), dtype, device)  # type: ignore[arg-type]
        if source.target is operator.getitem and source.args[0].op == "call_module":  # type: ignore[union-attr]
            module = gm.get_submodule(str(source.args[0].target))  # type: ignore[union-attr]
            known = self._integers.get((id(getattr(module, "compiled", None)), source.args[1]))  # type: ignore[arg-type]
            if known is not None:
                return known.clone()
        return stand_in(source)


def _last_users(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each value that is made in the graph the node that uses it last."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source.op not in ("placeholder", "get_attr"):
                found[source] = node
    return found
