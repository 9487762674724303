"""A model becomes one flat graph: `torch.export`, with state under the names that the user gave it.

    exported                                  flat
    p_fc_weight, p_fc_bias, b_scale, x        x
                                              get_attr fc.weight, get_attr fc.bias, get_attr scale
    linear(x, p_fc_weight, p_fc_bias)         linear(x, fc.weight, fc.bias)

Export traces on fake tensors: no memory is taken, and a model on the meta device or under a fake mode can be cut. The
module is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.pipelining.calls import CallForm, call_form, export_call


@dataclass(frozen=True)
class Captured:
    """A model as a flat graph."""

    graph: fx.Graph
    """Placeholders are the tensors of the call; a get_attr node names a parameter, buffer or constant."""
    form: CallForm
    out_spec: Any
    constants: Mapping[str, Any]
    """Tensors that the graph reads and that are not in the module's state under that name."""


def capture(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None
) -> Captured:
    """Export a module on an example call."""
    form = call_form(module, args, kwargs)
    positional, named = export_call(form, args, kwargs)
    exported = torch.export.export(module, positional, named, dynamic_shapes=dynamic_shapes, strict=False)
    graph = flatten(exported)
    return Captured(graph, form, exported.call_spec.out_spec, dict(exported.constants))


def flatten(exported: torch.export.ExportedProgram) -> fx.Graph:
    """The graph with its state as get_attr nodes and without placeholders for constants."""
    state = {
        spec.arg.name: spec.target
        for spec in exported.graph_signature.input_specs
        if spec.target is not None and hasattr(spec.arg, "name")
    }
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    look: Callable[[fx.Node], fx.Node] = new.__getitem__
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            if node.name in state:
                new[node] = graph.create_node("get_attr", state[node.name], name=node.name)
            elif isinstance(node.meta.get("val"), torch.Tensor):
                new[node] = graph.placeholder(node.name)
            else:
                continue  # a constant of the call
            new[node].meta = dict(node.meta)
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], look))
        elif node.target is torch.ops.aten._assert_tensor_metadata.default:
            continue
        else:
            new[node] = graph.node_copy(node, look)
    return graph
