"""The settings of Inductor for a region: ours, then those that `exact` asks for, then the user's own."""

from __future__ import annotations

from typing import Any

from wholestep.ir.graphs import tensors_in
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.lower.exact import SETTINGS
from wholestep.lower.options import LowerOptions
from wholestep.lower.regions import Region
from wholestep.lower.retrace import device_of
from wholestep.torch_private.inductor import unknown_inductor_settings

_SHORT = 32 * 2**20
"""Bytes of a tensor that a GPU reads in the time of some launches."""


def region_settings(options: LowerOptions, region: Region) -> dict[str, Any]:
    """What the trace and the compilation of a region run under."""
    # On the CPU random numbers are eager's own, in eager's order; on a GPU Inductor's generator is part of its kernels.
    found: dict[str, Any] = {"fallback_random": device_of(region).type == "cpu"}
    if device_of(region).type == "cuda" and _largest(region) <= _SHORT:
        # Independent small kernels (bias gradients, norms of other layers) as one: a recorded step is as long as its
        # kernels and the gaps between them. H200, 6 layers: 1.09 ms instead of 1.27. With large tensors nothing is
        # gained, and gradients are allocated earlier: GPT-2 needs 0.15 GiB more.
        found["combo_kernels"] = True
    if options.exact:
        unknown = unknown_inductor_settings(SETTINGS)
        found.update({name: value for name, value in SETTINGS.items() if name not in unknown})
    return {**found, **options.config, **options.region_config.get(region.number, {})}


def _largest(region: Region) -> int:
    """Bytes of the largest tensor in a region."""
    values = (tensor for node in region.nodes for tensor in tensors_in(node.meta.get("val")))
    return max(map(tensor_bytes, values), default=0)
