"""Memory for one stage of a model that was cut without any: on the meta device, or under a fake mode."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from wholestep._torch_compat import FakeTensor
from wholestep.errors import PipelineError
from wholestep.pipelining.stage_module import StageModule, follow_device


def materialize(
    stage: torch.nn.Module, device: torch.device | str, state: Mapping[str, torch.Tensor]
) -> torch.nn.Module:
    """Give each parameter and buffer of a stage that has no memory a tensor of `state`, and move the stage.

    `state` holds the model's names; more than this stage needs is no error. Buffers that the model does not save must
    be in it too.
    """
    new: dict[int, torch.Tensor] = {}
    for module_path, module in stage.named_modules():
        prefix = f"{module_path}." if module_path else ""
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if not is_empty(tensor):
                continue
            if id(tensor) not in new:
                new[id(tensor)] = _filled(prefix + name, tensor, device, state)
            if isinstance(tensor, torch.nn.Parameter):
                module.register_parameter(name, new[id(tensor)])
            else:
                module._buffers[name] = new[id(tensor)]
    if isinstance(stage, StageModule):
        follow_device(stage, device)
    return stage.to(device)


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no memory."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _filled(
    name: str, tensor: torch.Tensor, device: torch.device | str, state: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if name not in state:
        raise PipelineError(
            f"{name} has no memory and no value was given for it.",
            fix="give all parameters and buffers of the stage, also buffers that the state dict leaves out",
        )
    with torch.no_grad():
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(state[name])
    return torch.nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else value
