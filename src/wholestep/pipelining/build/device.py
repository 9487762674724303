"""A stage that moves takes its constants along: devices that the trace wrote down follow the stage.

    captured on the CPU      ones([4], device=cpu)
    after .to("cuda")        ones([4], device=cuda)

Only the device of the stage itself is followed; a tensor that the model makes elsewhere stays there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.pipelining.build.regions import RegionModule
from wholestep.torch_private.fake_tensors import FakeTensor, fake_tensor


def change_device(module: torch.nn.Module, graph: fx.Graph, old: torch.device, new: torch.device) -> None:
    """Replace a device in the arguments of a graph, in the values recorded for it and in the blocks that it calls."""
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, lambda value: _moved(value, old, new))
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda value: _moved(value, old, new))
        if "val" in node.meta:
            node.meta["val"] = _value(node.meta["val"], old, new)
        if node.op == "call_module":
            block = module.get_submodule(str(node.target))
            if isinstance(block, RegionModule):
                block.region = block.region.on_device(old.type, new.type)
                change_device(block.body, block.body.graph, old, new)
                block.body.recompile()


def same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are one; `cuda` is the first of them."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def _moved(value: Any, old: torch.device, new: torch.device) -> Any:
    return new if isinstance(value, torch.device) and same_device(value, old) else value


def _value(value: Any, old: torch.device, new: torch.device) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_value(item, old, new) for item in value)
    if not isinstance(value, FakeTensor) or not same_device(value.device, old) or value.layout is not torch.strided:
        return value
    return fake_tensor(value.fake_mode, value.shape, value.stride(), value.dtype, new)
