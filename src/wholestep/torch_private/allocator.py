"""Private torch names that planning memory needs: the CPU allocator's events, torch's way to cut a joint graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def cpu_bytes_at_most(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and how many bytes of CPU memory it had at most, above what was there before.

    Counts what the CPU allocator hands out (memory events of the legacy profiler; kineto has the same, and
    prints). 2.11, 2.13.
    """
    autograd: Any = torch.autograd
    details = torch._C._profiler._ExperimentalConfig()
    config = autograd.ProfilerConfig(autograd.ProfilerState.CPU, False, True, False, False, False, details)
    autograd._enable_profiler_legacy(config)
    try:
        result = function()
    finally:
        records: Any = autograd._disable_profiler_legacy()
    now = most = 0
    for thread in records:
        for event in thread:
            if event.kind() == "memory_alloc":
                now += event.cpu_memory_usage()
                most = max(most, now)
    return result, most


def extract_forward_backward(
    joint: fx.GraphModule, saved: list[fx.Node], forward_outputs: int, settings: dict[str, Any]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward that returns `saved` too, and the backward that computes all else again, right before it is read.

    torch's partitioner has both steps. `settings` are what `aot_function` gave the partition function. 2.11, 2.13.
    """
    from torch._functorch import partitioners

    known = inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    nodes = settings.get("static_lifetime_input_nodes")
    more: dict[str, Any] = {} if nodes is None else {"static_lifetime_input_nodes": nodes}
    inputs = joint.graph.find_nodes(op="placeholder")
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint,
        saved,
        saved_sym_nodes=[node for node in inputs if isinstance(node.meta.get("val"), torch.SymInt)],
        num_fwd_outputs=forward_outputs,
        **{name: value for name, value in more.items() if name in known},
    )
    return forward, partitioners.reordering_to_mimic_autograd_engine(backward)
