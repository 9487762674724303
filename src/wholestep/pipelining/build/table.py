"""The routing table of staged graphs: one table for all modes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from wholestep.pipelining.build.example_values import example_value
from wholestep.pipelining.build.modes import MismatchError
from wholestep.pipelining.build.routing import Need, Routing, plan_routes
from wholestep.pipelining.build.staged import Staged
from wholestep.torch_private.fake_tensors import new_fake_mode


def find_needs(staged: Staged, differentiable: set[fx.Node]) -> dict[str, Need]:
    """What is known of every tensor that a graph computes or is given, in order."""
    mode = new_fake_mode(None)
    found: dict[str, Need] = {}
    for node in staged.graph.nodes:
        value = node.meta.get("val")
        is_value = node.op == "placeholder" or node in staged.stage_of
        if not is_value or not (isinstance(value, torch.Tensor) or staged.count in staged.users(node)):
            continue
        stages = staged.users(node)
        consumers = tuple(sorted(stage for stage in stages if stage < staged.count))
        crosses = max(stages, default=0) > staged.made_at(node) or node.op == "placeholder"
        meta = example_value(value, mode) if crosses and isinstance(value, torch.Tensor) else None
        producer = staged.stage_of.get(node, "input")
        found[staged.names[node]] = Need(staged.names[node], producer, consumers, meta, node in differentiable)  # type: ignore[arg-type]
    return found


def routes(staged: Staged, needs: Mapping[str, Need]) -> Routing:
    """The table of one mode, or of several whose needs were merged."""
    inputs = [staged.names[node] for node in staged.graph.nodes if node.op == "placeholder"]
    outputs = [staged.names[leaf] for leaf in staged.program.outputs if isinstance(leaf, fx.Node)]
    return plan_routes(staged.count, list(needs.values()), inputs, outputs)


def merge_needs(main: Mapping[str, Need], other: Mapping[str, Need], staged: Staged) -> dict[str, Need]:
    """The needs of two modes together. Raises MismatchError if a value of only one has to cross."""
    merged = dict(main)
    for name, need in other.items():
        ours = main.get(name)
        late = [stage for stage in need.consumers if stage > (need.producer if need.producer != "input" else 0)]
        if ours is None:
            if late:
                raise MismatchError(f"{name} crosses a cut and is not computed in the other mode")
            continue
        if ours.producer != need.producer:
            raise MismatchError(f"{name} is computed in another stage")
        merged[name] = replace(
            ours,
            consumers=tuple(sorted({*ours.consumers, *need.consumers})),
            meta=ours.meta if ours.meta is not None else need.meta,
            differentiable=ours.differentiable or need.differentiable,
        )
    return merged


def check_same_values(routing: Routing, other: Mapping[str, Need]) -> None:
    """Raise MismatchError if a mode does not compute a value that crosses."""
    for row in (*routing.inputs, *routing.outputs):
        for name in row:
            if name not in other:
                raise MismatchError(f"{name} crosses a cut and is not computed in this mode")
