"""The rematerialisation problem of a graph: what the backward reads of the forward, and what each value costs.

A plan is a set of forward nodes that the backward recomputes. Everything else follows from it: a value is saved if the
backward, or a recomputed node, reads it and the plan does not have it. A node is recomputed right before its first
reader in the backward. Times are rough estimates: only the order of operators by time per byte matters.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import torch
from torch import fx

from wholestep.errors import MemoryPolicyWarning
from wholestep.ir.effects import (
    Storages,
    draws,
    find_storages,
    is_arithmetic,
    is_communication,
    is_custom_operator,
    is_data_dependent,
    is_unsafe_split,
    read_by,
    writes,
)
from wholestep.ir.graph_walks import epilogue, reachable, tensors_in
from wholestep.ir.meta import node_meta
from wholestep.remat.options import Policy, Rule, policy_of
from wholestep.simulate.cost_model import is_counted, work_of
from wholestep.simulate.machine import machine_of
from wholestep.torch_private.operators import OpOverload, packet_of

Plan = frozenset[int]
"""Positions of the nodes that are recomputed."""


def in_backward(node: fx.Node) -> bool:
    """True if a node of a step belongs to a backward."""
    return node_meta(node).phase == "backward"


def in_forward(node: fx.Node) -> bool:
    """True if a node of a step belongs to a forward."""
    return node.op == "call_function" and node_meta(node).phase == "forward"


@dataclass(eq=False)
class RematProblem:
    """The nodes of a graph, indexed by position."""

    nodes: list[fx.Node]
    inputs: list[tuple[int, ...]]
    pieces: Storages
    forward: list[bool]
    backward: list[bool]
    live_anyway: set[int]
    """Pieces of memory that stay alive without the backward: inputs, results, what other phases read."""
    policy: Policy
    fuses: bool
    workspace: Callable[[fx.Node], int]
    """Bytes that a node needs besides its results."""

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        *,
        policy: Policy | None = None,
        fuses: bool = False,
        device: torch.device | None = None,
        workspace: Callable[[fx.Node], int] = lambda node: 0,
        is_forward: Callable[[fx.Node], bool] = in_forward,
        is_backward: Callable[[fx.Node], bool] = in_backward,
    ) -> RematProblem:
        """Read a graph in normal form."""
        nodes = list(graph.nodes)
        position = {node: i for i, node in enumerate(nodes)}
        inputs = [tuple(position[source] for source in node.all_input_nodes) for node in nodes]
        forward = [node.op == "call_function" and is_forward(node) for node in nodes]
        backward = [node.op == "call_function" and is_backward(node) for node in nodes]
        for i in _inside_of_forward(inputs, forward, backward):
            forward[i], backward[i] = True, False
        pieces = _pieces_when_updated(graph, device)
        live: set[int] = set()
        for i, node in enumerate(nodes):
            if node.op in ("placeholder", "get_attr"):
                live.update(pieces.made_by.get(node, ()))
            elif not forward[i] and not backward[i]:
                for source in node.all_input_nodes:
                    live.update(pieces.seen_by.get(source, ()))
        return cls(nodes, inputs, pieces, forward, backward, live, policy or policy_of(None), fuses, workspace)

    @cached_property
    def needed(self) -> list[bool]:
        """Forward nodes that something in the backward is computed from."""
        found = [False] * len(self.nodes)
        for i in range(len(self.nodes) - 1, -1, -1):
            if self.backward[i] or found[i]:
                for source in self.inputs[i]:
                    found[source] = found[source] or self.forward[source]
        return found

    @cached_property
    def time(self) -> dict[int, float]:
        """Nanoseconds of the needed forward nodes; views cost nothing."""
        return {
            i: 0.0 if self.is_view(i) else time_of(self.nodes[i], fuses=self.fuses)
            for i, needed in enumerate(self.needed)
            if needed
        }

    def is_view(self, i: int) -> bool:
        """True if a node has no memory of its own: computing it costs nothing."""
        return not self.pieces.made_by.get(self.nodes[i])

    def is_list(self, i: int) -> bool:
        """True if the value of a node is a list, which is never saved as a whole."""
        return isinstance(self.nodes[i].meta.get("val"), list | tuple)

    def saved_bytes(self, i: int) -> int:
        """Bytes that stay allocated if the value of a node is saved."""
        seen = self.pieces.seen_by.get(self.nodes[i], ())
        return sum(self.pieces.size[p] for p in seen if p not in self.live_anyway)

    @cached_property
    def never(self) -> set[int]:
        """Nodes that may not be recomputed: random ops, side effects, communication, and what the user saves."""
        found = set()
        for i, needed in enumerate(self.needed):
            if needed and (self._has_effect(i) or self.asked.get(i) == "save"):
                found.add(i)
        return found

    @cached_property
    def asked(self) -> dict[int, str]:
        """The policy's answer for needed forward nodes, where it has one."""
        found = {}
        for i, needed in enumerate(self.needed):
            word = self.policy(self.nodes[i]) if needed else None
            if word is not None:
                found[i] = word
        return found

    @cached_property
    def always(self) -> set[int]:
        """Nodes that the user wants to be recomputed."""
        return {i for i, word in self.asked.items() if word == "recompute"} - self.never

    def _has_effect(self, i: int) -> bool:
        node = self.nodes[i]
        target = node.target
        if target is operator.getitem:
            return False
        if is_communication(target):
            return self.asked.get(i) != "recompute"
        if is_custom_operator(target):
            return self.asked.get(i) != "recompute"
        if not isinstance(target, OpOverload):
            return not is_arithmetic(target)  # an operator inside (`call_on_copies`) may be random
        if draws(node) or is_data_dependent(target) or is_unsafe_split(target):
            return True
        return writes(node) or node.is_impure()

    def cost(self, plan: Collection[int]) -> float:
        """Nanoseconds that a plan adds."""
        return sum(self.time.get(i, 0.0) for i in self.recomputed(plan))

    def recomputed(self, plan: Collection[int]) -> set[int]:
        """The nodes of a plan that the backward needs: what has no reader is not recomputed."""
        read = [s for i, back in enumerate(self.backward) if back for s in self.inputs[i] if s in plan]
        return set(reachable(read, lambda i: [s for s in self.inputs[i] if s in plan]))

    def saved(self, plan: Collection[int]) -> list[int]:
        """Positions of the forward values that live until the backward under a plan, without views."""
        again = self.recomputed(plan)
        readers = [i for i, back in enumerate(self.backward) if back]
        read = [s for i in (*readers, *again) for s in self.inputs[i] if s not in again and self.forward[s]]
        found = reachable(read, lambda i: [s for s in self.inputs[i] if self.forward[s]] if self.is_view(i) else [])
        return sorted(i for i in found if not self.is_view(i) or self.is_element(i))

    def is_element(self, i: int) -> bool:
        """True if a node takes one tensor out of a list that an operator made."""
        node = self.nodes[i]
        return node.target is operator.getitem and not self.is_list(i) and bool(self.pieces.seen_by.get(node))

    @cached_property
    def elements(self) -> dict[int, list[int]]:
        """For each list the positions of the nodes that take an element of it."""
        found: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.target is operator.getitem and len(self.inputs[i]) == 1 and self.is_list(self.inputs[i][0]):
                found.setdefault(self.inputs[i][0], []).append(i)
        return found

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """Positions of the values that each node needs in memory."""
        return [
            inputs if len(read_by(node)) == len(inputs) else ()
            for node, inputs in zip(self.nodes, self.inputs, strict=True)
        ]

    @cached_property
    def seen(self) -> list[tuple[int, ...]]:
        """For each node the pieces of memory that its value is in."""
        return [self.pieces.seen_by.get(node, ()) for node in self.nodes]

    @cached_property
    def besides(self) -> list[int]:
        """Bytes that each node needs besides its results."""
        return [self.workspace(node) for node in self.nodes]

    @cached_property
    def fused(self) -> list[bool]:
        """Nodes that Inductor fuses into the kernels that read them; views are fused into anything."""
        if not self.fuses:
            return [False] * len(self.nodes)
        return [
            is_fused(node.target) or ((self.forward[i] or self.backward[i]) and self.is_view(i))
            for i, node in enumerate(self.nodes)
        ]

    @cached_property
    def maker(self) -> list[int]:
        """For each piece of memory the position of the node that makes it."""
        position = {node: i for i, node in enumerate(self.nodes)}
        return [position[node] for node in self.pieces.maker]


def _inside_of_forward(inputs: list[tuple[int, ...]], forward: list[bool], backward: list[bool]) -> list[int]:
    """Backward nodes that a forward is computed from, other than through an update: gradients that enter the loss."""
    found = []
    inside = list(forward)
    for i in range(len(inputs) - 1, -1, -1):
        if inside[i]:
            if backward[i]:
                found.append(i)
            for source in inputs[i]:
                inside[source] = inside[source] or backward[source]
    return found


def _pieces_when_updated(graph: fx.Graph, device: torch.device | None) -> Storages:
    """The memory of the values, with state updated in place, as in the executable form."""
    pieces = find_storages(graph, device)
    for node in epilogue(graph):
        for piece in pieces.seen_by.get(node.args[1], ()) if isinstance(node.args[1], fx.Node) else ():
            maker = pieces.maker[piece]
            if node_meta(maker).in_place is not None:
                for each in pieces.made_by.get(maker, ()):
                    pieces.size[each] = 0
    return pieces


_FUSED = 0.25
_NANO = 1e9


def time_of(node: fx.Node, *, fuses: bool) -> float:
    """Nanoseconds of a node, estimated.

    `fuses`: elementwise operators become a part of the kernels that read them. They cost a part of what they would
    alone: they read, and mostly write nothing.
    """
    first = next(tensors_in(node.meta.get("val")), None)
    if first is None:
        return 1.0
    machine, work = machine_of(first.device), work_of(node)
    time = _NANO * machine.seconds_in_turn(work)
    if fuses and not work.flops and is_elementwise(node.target):
        return 1.0 + _FUSED * time
    return _NANO * machine.launch + time


def is_elementwise(target: Any) -> bool:
    """True if an operator computes each element by itself, so that it is fused with its readers."""
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or str(target) in _ALSO_ELEMENTWISE)


def is_fused(target: Any) -> bool:
    """True if Inductor generates loops for an operator, which it fuses with those around."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims") or is_counted(target):
        return False
    return packet_of(target) not in _CALLED


_CALLED = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "sort topk cumsum cumprod index_put _unsafe_index_put scatter scatter_add scatter_reduce "
        "embedding_dense_backward native_batch_norm_backward bernoulli nonzero unique histc bincount"
    ).split()
    if hasattr(torch.ops.aten, name)
)
"""Operators for which Inductor calls a kernel: their inputs and results are materialised."""

_ALSO_ELEMENTWISE = frozenset(
    {"aten._to_copy.default", "prims.convert_element_type.default", "aten.gelu.default", "aten.silu.default"}
)


_FAR = 0.4


def check_policy(problem: RematProblem) -> None:
    """Warn about rules of a policy that have no effect. A graph without a backward has nothing to decide."""
    if not any(problem.needed):
        return
    forward = [node for i, node in enumerate(problem.nodes) if problem.forward[i]]
    for rule in problem.policy.rules:
        if rule.is_pattern and not any(map(rule.fits, forward)):
            warnings.warn(MemoryPolicyWarning(_names_nothing(rule, forward)), stacklevel=2)
    for shown, refused in _refused(problem):
        node = problem.nodes[refused[0]]
        warnings.warn(
            MemoryPolicyWarning(
                f'policy= {shown} says "recompute", which is done nowhere: {node.name} ({node.target}) and '
                f"{len(refused) - 1} other nodes would have another result or effect the second time (random numbers, "
                "writes, sizes that depend on data, calls that cannot be looked into)."
            ),
            stacklevel=2,
        )


def _names_nothing(rule: Rule, forward: list[fx.Node]) -> str:
    near = get_close_matches(rule.shown.strip("'\""), sorted(_known(forward)), 3, _FAR)
    hint = f" Near to it: {', '.join(map(repr, near))}." if near else ""
    return f"policy= {rule.shown} names no module and no operator of the forward.{hint}"


def _known(forward: Iterable[fx.Node]) -> set[str]:
    """Module paths, with their prefixes, and operators."""
    found: set[str] = set()
    for node in forward:
        parts = node_meta(node).module_path.split(".")
        found.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
        if isinstance(node.target, OpOverload):
            found.add(str(node.target).rsplit(".", 1)[0])
    return found - {""}


def _refused(problem: RematProblem) -> Iterable[tuple[str, list[int]]]:
    """Rules (or the function) that ask for recomputation of nodes none of which may be recomputed, with the nodes."""
    wishes: dict[str, list[int]] = {}
    for i, word in problem.asked.items():
        if word == "recompute":
            rule = problem.policy.rule_for(problem.nodes[i])
            wishes.setdefault("function" if rule is None else rule.shown, []).append(i)
    for shown, places in wishes.items():
        real = [i for i in places if not (problem.is_view(i) and not problem.is_element(i))] or places
        if problem.never.issuperset(real):
            yield shown, real
