"""Compile a region with Inductor, under its settings.

Equal regions (repeated layers) are compiled once per process; across processes Inductor's own cache on disk has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from wholestep.ir.graphs import tensors_in
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.lower.compiled_region import Compiled
from wholestep.lower.options import LowerOptions
from wholestep.lower.regions import Region
from wholestep.lower.retrace import Retraced, device_of
from wholestep.lower.supported_nodes import EXACT_SETTINGS
from wholestep.torch_private.inductor import compile_inductor, improve_joint, unknown_inductor_settings
from wholestep.torch_private.symbolic_shapes import shape_env_of, symbols_in

log = logging.getLogger("wholestep.lower")


CompileRegion = Callable[[Retraced, Mapping[str, Any]], Compiled]


def compile_whole(retraced: Retraced, config: Mapping[str, Any]) -> Compiled:
    """Compile a region as one call."""
    improved = improve_joint(retraced.gm, retraced.inputs, dict(config))
    return compile_inductor(improved, retraced.inputs, dict(config))


@dataclass
class RegionCache:
    """Compiled regions by what they compute."""

    _known: dict[Any, tuple[Compiled, list[Any]]] = field(default_factory=dict)
    """With the constants of each region: keys have their ids, so the objects must stay alive."""
    hits: int = 0
    conditions_before: dict[Any, int] = field(default_factory=dict)
    """By shape environment: how many guards on sizes there were before the first region was compiled."""

    def compile(self, retraced: Retraced, config: Mapping[str, Any], how: CompileRegion) -> Compiled:
        """The compiled form of a region, or of an equal one that was compiled the same way."""
        settings = tuple(sorted((name, repr(value)) for name, value in config.items()))
        key = (how, *region_key(retraced), settings)
        found = self._known.get(key)
        if found is not None:
            self.hits += 1
            return found[0]
        constants = [_attribute(retraced.gm, str(n.target)) for n in retraced.gm.graph.find_nodes(op="get_attr")]
        compiled = how(retraced, config)
        self._known[key] = (compiled, constants)
        return compiled


def region_key(retraced: Retraced) -> tuple[Any, ...]:
    """Equal for regions that compute the same from tensors of the same layout."""
    number: dict[fx.Node, int] = {}
    lines: list[Any] = [_layout(value) for value in retraced.inputs]
    # `s0` of another trace is another symbol, with another range.
    lines.append(next((shape_env_of(value) for value in retraced.inputs if symbols_in(value)), None))
    for node in retraced.gm.graph.nodes:
        number[node] = len(number)
        if node.op == "get_attr":
            lines.append(("get_attr", id(_attribute(retraced.gm, str(node.target)))))
            continue
        target = node.target if node.op == "call_function" else node.op
        lines.append((target, _form(node.args, number), _form(dict(node.kwargs), number)))
    return tuple(lines)


def _layout(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return (type(value), str(value))
    return (str(value.dtype), str(value.device), tuple(map(str, value.shape)), tuple(map(str, value.stride())))


def _form(value: Any, number: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("node", number[value])
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_form(item, number) for item in value))
    if isinstance(value, dict):
        return tuple((key, _form(item, number)) for key, item in value.items())
    return (type(value).__name__, repr(value))


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for name in path.split("."):
        found = getattr(found, name)
    return found


_SHORT = 32 * 2**20
"""Bytes of a tensor that a GPU reads in the time of some launches."""


def region_settings(options: LowerOptions, region: Region) -> dict[str, Any]:
    """Inductor settings for the trace and the compilation of a region: ours, then those of `exact`, then the user's."""
    # On the CPU random numbers are eager's own, in eager's order; on a GPU Inductor's generator is part of its kernels.
    found: dict[str, Any] = {"fallback_random": device_of(region).type == "cpu"}
    if device_of(region).type == "cuda" and _largest(region) <= _SHORT:
        # Fuses independent small kernels (bias gradients, norms of other layers): a recorded step takes as long as its
        # kernels and the gaps between them. H200, 6 layers: 1.09 ms instead of 1.27. With large tensors nothing is
        # gained, and gradients are allocated earlier: GPT-2 needs 0.15 GiB more.
        found["combo_kernels"] = True
    if options.exact:
        unknown = unknown_inductor_settings(EXACT_SETTINGS)
        found.update({name: value for name, value in EXACT_SETTINGS.items() if name not in unknown})
    return {**found, **options.config, **options.region_config.get(region.number, {})}


def _largest(region: Region) -> int:
    """Bytes of the largest tensor in a region."""
    values = (tensor for node in region.nodes for tensor in tensors_in(node.meta.get("val")))
    return max(map(tensor_bytes, values), default=0)
