"""`GradScaler.step` without its branch: the optimizer runs, and every tensor it changed is chosen between old and new.

    eager                                    graph
    if not found_inf.item():                 p1 = add(p, ..)
        optimizer.step()                     p2 = where(found_inf, p, p1)

State that the optimizer creates in a skipped step must not exist afterwards: the change is conditional on the flag,
which becomes an output that the runtime reads (only in the graph that creates state).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from wholestep.capture.graph.recorder import Recorder
from wholestep.torch_private.dtensor import local_of

aten = torch.ops.aten


class AmpHost(Protocol):
    """What the patch asks of the capture."""

    recorder: Recorder

    def creation_skipped_if(self, optimizer: Optimizer, flag: fx.Node) -> None: ...


def select_instead_of_branch(
    host: AmpHost, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `GradScaler._maybe_opt_step` while tracing."""
    recorder = host.recorder
    found = list(optimizer_state["found_inf_per_device"].values())
    total = found[0]
    for other in found[1:]:
        total = total + other.to(total.device)
    flag_tensor = total != 0
    flag = recorder.node_of(flag_tensor)
    before = [(tensor, recorder.node_of(tensor)) for tensor in _reachable(optimizer)]
    result = optimizer.step(*args, **kwargs)
    flags: dict[torch.device, fx.Node] = {flag_tensor.device: flag}
    for tensor, old in before:
        new = recorder.node_of(tensor)
        if new is old:
            continue
        if tensor.device not in flags:
            flags[tensor.device] = recorder.emit(aten._to_copy.default, flag, device=tensor.device)
        recorder.values.write(tensor, recorder.emit(aten.where.self, flags[tensor.device], old, new))
    host.creation_skipped_if(optimizer, flag)
    return result


def _reachable(optimizer: Optimizer) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            found[id(param)] = param
            if param.grad is not None:
                found[id(param.grad)] = param.grad
    for entries in optimizer.state.values():
        for value in entries.values() if isinstance(entries, dict) else ():
            if isinstance(value, Tensor):
                found[id(value)] = value
    return [local_of(tensor) for tensor in found.values()]
