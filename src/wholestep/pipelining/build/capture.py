"""A model becomes a program: `torch.export`, then one flat graph with state under the names that the user gave it.

Export traces on fake tensors: no memory is taken, and a model on the meta device or under a fake mode can be cut. The
module is not changed. Sizes of the batch (dimension 0) stay open where the model allows it, so that a smaller last
microbatch runs through the same graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.ir.known_draws import KnownDraws
from wholestep.pipelining.build.calls import Call, CallForm, export_call
from wholestep.pipelining.build.failures import capture_error
from wholestep.pipelining.build.flatten import Flattener
from wholestep.pipelining.build.regions import RegionMarks
from wholestep.torch_private.pipelining import quiet_torch
from wholestep.torch_private.pytrees import pytree


@dataclass(frozen=True)
class Program:
    """A model in one mode as a flat graph."""

    graph: fx.Graph
    """Placeholders are the tensors of the call; a get_attr node names a parameter, buffer, constant or submodule."""
    out_spec: Any
    constants: Mapping[str, Any]
    """Tensors and submodules that the graph reads and that the module does not have under that name."""

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What the model returns, flat: nodes and constants."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]


def capture(
    module: torch.nn.Module, form: CallForm, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None
) -> Program:
    """Export a module, in the mode it is in, on an example call."""
    marks = RegionMarks()
    call = export_call(form, args, kwargs)
    try:
        if dynamic_shapes is not None:
            exported = _export(module, call, dynamic_shapes, marks)
        else:
            exported = _export_open(module, call, _open_batch(form, args, kwargs), marks)
    except Exception as error:
        raise capture_error(module, call, error) from error
    flattener = Flattener(exported, marks.regions)
    graph = flattener.flatten()
    return Program(graph, exported.call_spec.out_spec, {**exported.constants, **flattener.submodules})


def _export(module: torch.nn.Module, call: Call, shapes: Any, marks: RegionMarks) -> torch.export.ExportedProgram:
    marks.regions.clear()
    args, kwargs = pytree.tree_map_only(torch.Tensor, _marked_apart, call)
    with quiet_torch(), marks.recording(), KnownDraws():
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)


def _marked_apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another object: export marks open dimensions on the tensors it is given."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _export_open(module: torch.nn.Module, call: Call, shapes: Any, marks: RegionMarks) -> torch.export.ExportedProgram:
    """Export with the batch open; where that fails, as the example is."""
    if shapes is None:
        return _export(module, call, None, marks)
    try:
        return _export(module, call, shapes, marks)
    except Exception as about_symbols:
        try:
            return _export(module, call, None, marks)
        except Exception as error:
            raise error from about_symbols


def _open_batch(form: CallForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Dimension 0 of every tensor open, if the model takes it; None if no tensor has a batch."""
    found = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] < 2:
            return None
        found.append(value)
        return {0: torch.export.Dim.AUTO}

    shapes = pytree.tree_map(leaf, dict(form.signature.bind(*args, **kwargs).arguments))
    return shapes if found else None
