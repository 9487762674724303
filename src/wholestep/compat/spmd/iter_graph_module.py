"""`torch.distributed._spmd.iter_graph_module`: graphs of which some nodes run in the next iteration."""

from __future__ import annotations

from typing import Any

from torch import fx

from wholestep.ir.iter.graph import IterGraph as IterGraph
from wholestep.ir.iter.graph_module import IterGraphModule as PlainIterGraphModule
from wholestep.lower import partial_lower


class InductorIterGraphModule(PlainIterGraphModule):
    """`IterGraphModule` that may hand its graphs to Inductor before they first run."""

    def __init__(
        self, main_gm: fx.GraphModule, max_iters: int = -1, enable_inductor: bool = False, **options: Any
    ) -> None:
        if enable_inductor:
            options.setdefault("lower", partial_lower)
        super().__init__(main_gm, max_iters, enable_inductor, **options)


IterGraphModule = InductorIterGraphModule
