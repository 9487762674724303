"""Compile a region with a forward and a backward as two calls, with few values saved in between.

    one call      forward, backward: whatever the backward reads lives until then
    two calls     forward -> saved values -> backward, which recomputes what is cheap (torch's min cut chooses)

The region is cut where the gradient of the loss begins: `ones_like(loss)` becomes an input of the second call. A pass
may compute a later gradient with the forward (`NodeMeta.starts_backward`): then the cut is there, and the first call
returns that gradient with what it saves. Regions with several backwards stay whole: their forwards would all have to
come first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import draws, shared_inputs
from wholestep.ir.graph_walks import reachable
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.ir.meta import node_meta
from wholestep.lower.compiled_region import Compiled, settings_key
from wholestep.lower.regions import Region, is_ordered
from wholestep.lower.retrace import Retraced
from wholestep.lower.shared_bodies import BodyCache, SharedBodies, compile_shared
from wholestep.remat.pointwise_recompute import RegionCut, owning, shed, sheddable
from wholestep.torch_private.inductor import compile_inductor, improve_joint, min_cut

log = logging.getLogger("wholestep.lower")

aten = torch.ops.aten
_SEEDS = (aten.ones_like.default,)


def find_seed(region: Region) -> fx.Node | None:
    """The node where the only backward of a region begins; None if there is none, or several."""
    found = [node for node in region.nodes if node_meta(node).starts_backward or _is_gradient_of_loss(node)]
    if len(found) != 1 or not found[0].users or found[0] in region.outputs:
        return None
    return found[0] if _keeps_order(region, found[0]) else None


def _is_gradient_of_loss(node: fx.Node) -> bool:
    return node.target in _SEEDS and _begins_backward(node)


def _keeps_order(region: Region, seed: fx.Node) -> bool:
    """True if random ops keep their order when all nodes that do not depend on the seed come first."""
    late = {seed}
    ordered_late = False
    for node in region.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            ordered_late = ordered_late or is_ordered(node)
        elif ordered_late and is_ordered(node):
            return False
    return True


def _begins_backward(node: fx.Node) -> bool:
    source = node.all_input_nodes[0]
    if node_meta(source).phase != "forward" or not node.users:
        return False
    return all(node_meta(user).phase == "backward" for user in node.users)


@dataclass(frozen=True)
class CompileInTwo:
    """Compile a region whose last input is the seed of its backward."""

    shed: int = 0
    """Bytes to save fewer than torch's cut does, by recomputing pointwise values."""

    def __call__(self, retraced: Retraced, config: Mapping[str, Any]) -> Compiled:
        return _Cut(retraced).compile(config, self.shed, retraced.bodies)


class _Cut:
    def __init__(self, retraced: Retraced) -> None:
        self._inputs = retraced.inputs
        self._computes_seed = retraced.computes_seed
        self._gm = retraced.gm
        self._graph = retraced.gm.graph
        self._positions: list[fx.Node] = list(self._graph.find_nodes(op="placeholder"))
        self._rename()
        self._copies = self._take_copies()
        self._backward = self._depending_on(self._positions[-1])

    def compile(self, config: Mapping[str, Any], less: int, bodies: BodyCache | None) -> Compiled:
        output = self._graph.output_node()
        results = list(output.args[0])  # type: ignore[arg-type]
        seeds = [results.pop()] if self._computes_seed else []
        first = [i for i, value in enumerate(results) if value not in self._backward]
        second = [i for i, value in enumerate(results) if value in self._backward]
        early = [(position, value) for position, value in self._copies if value not in self._backward]
        late = [(position, value) for position, value in self._copies if value in self._backward]
        ordered = [results[i] for i in first] + [value for _, value in early]
        early_results = len(ordered) + len(seeds)
        outputs = [*ordered, *seeds, *(results[i] for i in second), *(value for _, value in late)]
        output.args = (tuple(outputs),)
        self._gm.recompile()
        joint = improve_joint(self._gm, self._inputs, dict(config))
        forward, backward = min_cut(joint, early_results, len(self._positions) - 1)
        _remove_random_copies(forward, backward)
        could = sheddable(forward, early_results)
        if less:
            log.info("%d bytes are recomputed by pointwise operators", shed(forward, backward, early_results, less))
        saved = _results(forward)[len(ordered) :]
        sizes = {value.name: tensor_bytes(value.meta["val"]) for value in saved if _is_tensor(value)}
        cut = RegionCut(sizes, _recomputed(forward, backward), could)
        names = [node.name for node in backward.graph.find_nodes(op="placeholder")]
        sources = [_source(name, saved, self._positions, computes_seed=self._computes_seed) for name in names]
        own = owning(_results(forward), len(ordered))
        given_away = [i for i, (kind, position) in enumerate(sources) if kind == "saved" and own[position]]
        sources += _write_at_end(backward, [position for position, _ in late], self._inputs, len(second))
        writes = _write_early(forward, backward, [position for position, _ in early], self._inputs, len(first))

        def compile_part(part: str, gm: fx.GraphModule, examples: list[Any], away: Sequence[int]) -> Compiled:
            def compile_body(gm: fx.GraphModule, inputs: list[Any], away: Sequence[int]) -> Compiled:
                return compile_inductor(gm, inputs, dict(config), part, away)

            how = (part, settings_key(config))
            return compile_shared(gm, examples, compile_body, bodies, how=how, given_away=away)

        run_forward = compile_part("forward", forward, self._inputs[:-1], ())
        run_backward = compile_part("backward", backward, _examples(backward), given_away)
        made = ForwardBackward(run_forward, run_backward, sources, first, second, writes, cut)
        made.computes_seed = self._computes_seed
        return made

    def _rename(self) -> None:
        """Give inputs the names by which torch's partitioner tells them from gradients."""
        for i, node in enumerate(self._positions):
            name = "tangents_1" if i == len(self._positions) - 1 else f"primals_{i + 1}"
            node.name = node.target = name

    def _take_copies(self) -> list[tuple[int, fx.Node]]:
        """Remove the writes into inputs: (input, value)."""
        position = {node: i for i, node in enumerate(self._positions)}
        found = []
        for node in list(self._graph.find_nodes(op="call_function", target=aten.copy_.default)):
            target, value = node.args[0], node.args[1]
            if isinstance(target, fx.Node) and target in position and isinstance(value, fx.Node) and not node.users:
                found.append((position[target], value))
                self._graph.erase_node(node)
        return found

    def _depending_on(self, seed: fx.Node) -> set[fx.Node]:
        found = {seed}
        for node in self._graph.nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found


def _remove_random_copies(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Remove the random ops of the forward from the backward. Nothing reads them there, because the cut saves their
    results; but torch's partitioner copies them, and removes no random op."""
    random = {node.name for node in forward.graph.nodes if draws(node)}
    for node in [node for node in backward.graph.nodes if node.name in random and draws(node)]:
        if node.users:
            raise AssertionError(f"{node.name} would run twice")
        backward.graph.erase_node(node)


def _recomputed(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[str, ...]:
    made = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    return tuple(node.name for node in backward.graph.nodes if node.op == "call_function" and node.name in made)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)


def _results(gm: fx.GraphModule) -> list[Any]:
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def _source(name: str, saved: Sequence[Any], positions: Sequence[fx.Node], *, computes_seed: bool) -> tuple[str, int]:
    """Where the second call gets an input from: ("saved", i), ("input", i) or ("seed", 0)."""
    if name.startswith("tangents"):
        return ("saved", 0) if computes_seed else ("seed", 0)
    inputs = {node.name: i for i, node in enumerate(positions)}
    if name in inputs:
        return ("input", inputs[name])
    return ("saved", next(i for i, value in enumerate(saved) if isinstance(value, fx.Node) and value.name == name))


def _write_at_end(gm: fx.GraphModule, positions: list[int], inputs: Sequence[Any], start: int) -> list[tuple[str, int]]:
    """Turn the outputs from `start` on, one per position, into writes into inputs; returns the inputs that were
    added."""
    graph = gm.graph
    output = graph.output_node()
    results = _results(gm)
    stop = start + len(positions)
    known = {node.name: node for node in graph.find_nodes(op="placeholder")}
    added: list[tuple[str, int]] = []
    for position, value in zip(positions, results[start:stop], strict=True):
        name = f"primals_{position + 1}"
        if name not in known:
            with graph.inserting_after(list(known.values())[-1]):
                known[name] = graph.placeholder(name)
            known[name].meta["val"] = inputs[position]
            added.append(("input", position))
        with graph.inserting_before(output):
            graph.call_function(aten.copy_.default, (known[name], value)).meta["val"] = value.meta["val"]
    output.args = (tuple(results[:start] + results[stop:]),)
    gm.recompile()
    return added


def _write_early(
    forward: fx.GraphModule, backward: fx.GraphModule, positions: list[int], inputs: Sequence[Any], start: int
) -> list[tuple[int, int]]:
    """Turn outputs of the forward from `start` on into writes into inputs, unless the backward reads their old
    contents. Such a value is saved and written at the end: (input, index among the saved values)."""
    results = _results(forward)
    stop = start + len(positions)
    values = dict(zip(positions, results[start:stop], strict=True))
    saved = results[stop:]
    read = _shared_with([*backward.graph.find_nodes(op="placeholder"), *saved])
    later = [position for position in positions if f"primals_{position + 1}" in read]
    now = [position for position in positions if position not in later]
    ordered = [*(values[position] for position in now), *saved, *(values[position] for position in later)]
    forward.graph.output_node().args = ((*results[:start], *ordered),)
    _write_at_end(forward, now, inputs, start)
    return [(position, len(saved) + i) for i, position in enumerate(later)]


def _shared_with(values: Sequence[Any]) -> set[str]:
    """Names of the inputs that values are views of."""
    behind = reachable((value for value in values if isinstance(value, fx.Node)), shared_inputs)
    return {node.name for node in behind if node.op == "placeholder"}


def _examples(gm: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


class ForwardBackward:
    """Two compiled calls in a row. Takes one list, which it empties."""

    def __init__(
        self,
        forward: Compiled,
        backward: Compiled,
        sources: list[tuple[str, int]],
        first: list[int],
        second: list[int],
        writes: list[tuple[int, int]],
        cut: RegionCut,
    ) -> None:
        self.cut = cut
        self.shared = SharedBodies.of(forward, backward)
        self.computes_seed = False
        """Whether the first call returns the gradient that the second one starts from."""
        self._forward = forward
        self._backward = backward
        self._sources = sources
        self._first = first
        self._second = second
        self._writes = writes

    def __call__(self, tensors: list[Any]) -> tuple[Any, ...]:
        seed = None if self.computes_seed else tensors.pop()
        later = [tensors[position] if kind == "input" else None for kind, position in self._sources]
        targets = [tensors[position] for position, _ in self._writes]
        made = list(self._forward(tensors))
        results: list[Any] = [None] * (len(self._first) + len(self._second))
        saved = made[len(self._first) :]
        for position, value in zip(self._first, made, strict=False):
            results[position] = value
        for i, (kind, position) in enumerate(self._sources):
            if kind != "input":
                later[i] = seed if kind == "seed" else saved[position]
        values = [saved[i] for _, i in self._writes]
        del made, saved, seed
        for position, value in zip(self._second, self._backward(later), strict=True):
            results[position] = value
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
        return tuple(results)
