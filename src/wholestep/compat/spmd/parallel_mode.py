"""`torch.distributed._spmd.parallel_mode`: how `compile` makes a step distributed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wholestep.compat.spmd.data_parallel import DataParallelStyle
from wholestep.errors import OptionError
from wholestep.parallel.plan import Plan, Replicate

GraphPasses = Callable[[fx.GraphModule], Any]


class ParallelMode(ABC):
    """A way to make a graph of one device into one of many ranks. Subclass it to do that by hand.

    `partition` and `transform_and_compile` run once for each captured graph, in this order, on a graph in normal form
    (operators only, updates as `copy_` nodes at the end); what they return is verified.
    """

    def plan(self, model: nn.Module) -> Plan | None:
        """The plan under which the step is traced: then the graph that `partition` gets is distributed already."""
        return None

    @abstractmethod
    def partition(
        self,
        gm: fx.GraphModule,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        params_and_buffers: dict[str, Any],
        named_states: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> fx.GraphModule:
        """The graph with its communication."""

    @abstractmethod
    def transform_and_compile(self, gm: fx.GraphModule) -> Any:
        """The graph after the passes of this mode: a GraphModule or an IterGraphModule."""


class _PlannedMode(ParallelMode):
    """A mode whose communication is traced, not inserted."""

    def __init__(self, custom_passes: GraphPasses | None) -> None:
        self._gm_passes: GraphPasses = (lambda gm: gm) if custom_passes is None else custom_passes

    def partition(
        self,
        gm: fx.GraphModule,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        params_and_buffers: dict[str, Any],
        named_states: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> fx.GraphModule:
        """The graph as it is: it was traced under the plan of this mode."""
        return gm

    def transform_and_compile(self, gm: fx.GraphModule) -> Any:
        """What `custom_passes` makes of the graph."""
        return self._gm_passes(gm)


class DataParallel(_PlannedMode):
    """Data parallelism with averaged gradients: "replicate", "fully_shard" or "default" (`DataParallelStyle`).

    Every rank gives the step its own batch. `input_batch_dim`: which dimension that is makes no difference here.
    """

    def __init__(
        self,
        parallel_style: str = "replicate",
        *,
        input_batch_dim: int = 0,
        custom_passes: GraphPasses | None = None,
    ) -> None:
        if parallel_style.upper() not in DataParallelStyle.__members__:
            raise UnknownStyleError(
                f"Unknown parallel style: {parallel_style}", fix='use "replicate", "fully_shard" or "default".'
            )
        super().__init__(custom_passes)
        self.parallel_style = DataParallelStyle[parallel_style.upper()]
        self.input_batch_dim = input_batch_dim

    def plan(self, model: nn.Module) -> Plan:
        """`ws.Replicate` or `ws.FullyShard` over all ranks."""
        return self.parallel_style.plan(world_mesh(model))


class DTensorExpandMode(_PlannedMode):
    """Whole parameters on every rank and the sum of the gradients, not their average: the default of `compile`."""

    def __init__(self, custom_passes: GraphPasses | None = None) -> None:
        super().__init__(custom_passes)

    def plan(self, model: nn.Module) -> Plan:
        """`ws.Replicate` over all ranks, with sums."""
        return Replicate(world_mesh(model), reduce_op="sum")


class UnknownStyleError(OptionError, RuntimeError):
    """There is no such style of data parallelism."""


def world_mesh(model: nn.Module) -> DeviceMesh:
    """All ranks, on the kind of device that a model is on."""
    if not dist.is_initialized():
        raise OptionError(
            "a parallel mode without a process group.", fix="call torch.distributed.init_process_group() first."
        )
    tensor = next((each for each in (*model.parameters(), *model.buffers())), None)
    return init_device_mesh("cpu" if tensor is None else tensor.device.type, (dist.get_world_size(),))
