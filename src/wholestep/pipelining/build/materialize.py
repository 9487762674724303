"""Memory for one stage of a model that was cut without any: on the meta device, or under a fake mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from wholestep.errors import PipelineError
from wholestep.pipelining.build.stage_module import StageModule, follow_device
from wholestep.torch_private.fake_tensors import FakeTensor

BuffersFrom = torch.nn.Module | Callable[[str], torch.Tensor]


def materialize(
    stage: torch.nn.Module,
    device: torch.device | str,
    state: Mapping[str, torch.Tensor],
    buffers_from: BuffersFrom | None = None,
) -> torch.nn.Module:
    """Give each parameter and buffer of a stage that has no memory a tensor of `state`, and move the stage.

    `state` holds the model's names; more than this stage needs is no error. Buffers that are not in it, such as those
    that the model does not save, come from `buffers_from`: a module with buffers of these names, or a function of the
    name.
    """
    new: dict[int, torch.Tensor] = {}
    for module_path, module in stage.named_modules():
        prefix = f"{module_path}." if module_path else ""
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if not is_empty(tensor):
                continue
            if id(tensor) not in new:
                new[id(tensor)] = _filled(prefix + name, tensor, device, state, buffers_from)
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
    name: str,
    tensor: torch.Tensor,
    device: torch.device | str,
    state: Mapping[str, torch.Tensor],
    buffers_from: BuffersFrom | None,
) -> torch.Tensor:
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    given = state.get(name)
    if given is None and not is_parameter:
        given = _buffer(name, buffers_from)
    if given is None or is_empty(given):
        raise PipelineError(
            f"the {'parameter' if is_parameter else 'buffer'} {name} has no memory and no value was given for it.",
            fix="give all parameters and buffers of the stage"
            if is_parameter
            else "put it into the state; or, if the model computes it and does not save it, give "
            "materialize_stage(..., buffers_from=) a module that has it, such as the same model with fewer layers",
        )
    if given.shape != tensor.shape:
        raise PipelineError(
            f"{name} has the shape {list(tensor.shape)}; the value that was given has {list(given.shape)}.",
            fix="give the state of the model that was cut",
        )
    with torch.no_grad():
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(given)
    return torch.nn.Parameter(value, tensor.requires_grad) if is_parameter else value


def _buffer(name: str, source: BuffersFrom | None) -> torch.Tensor | None:
    if isinstance(source, torch.nn.Module):
        return dict(source.named_buffers(remove_duplicate=False)).get(name)
    return None if source is None else source(name)
