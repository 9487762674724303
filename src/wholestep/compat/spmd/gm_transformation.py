"""`torch.distributed._spmd.gm_transformation`: what `compile(gm_transformation=)` is usually given."""

from __future__ import annotations

from torch import fx

from wholestep.compat.spmd.iter_graph_module import InductorIterGraphModule
from wholestep.passes import (
    comm_fusion_with_concat,
    dump_graphs_to_files,
    enable_graph_optimization_dump,
    remove_copy_from_optimizer,
    schedule_comm_wait,
)

_BUCKET_MB = 100
"""The size of a bucket that the original used."""


class GraphModuleTransformation:
    """A graph module becomes an `IterGraphModule` of `num_iters` iterations, optimized and lowered as asked for."""

    def __init__(
        self,
        num_iters: int = -1,
        *,
        enable_graph_optimization: bool = False,
        enable_inductor: bool = False,
        enable_cudagraphs: bool = False,
        dump_graphs: bool = False,
    ) -> None:
        self.num_iters = num_iters
        self.enable_graph_optimization = enable_graph_optimization
        self.enable_inductor = enable_inductor
        self.enable_cudagraphs = enable_cudagraphs
        """Read by `compat.spmd.api.compile`: the whole step becomes one CUDA graph."""
        self.dump_graphs = dump_graphs

    def __call__(self, gm: fx.GraphModule) -> InductorIterGraphModule:
        """The module that runs. Inside of `compile` only its graph is used, and the step lowers that."""
        folder = ""
        if self.dump_graphs:
            folder = dump_graphs_to_files({"before_transformation_gm": gm.print_readable(False)})
            enable_graph_optimization_dump(folder)
        iterating = InductorIterGraphModule(gm, self.num_iters, self.enable_inductor)
        if self.enable_graph_optimization:
            comm_fusion_with_concat(iterating, _BUCKET_MB)
            schedule_comm_wait(iterating)
            remove_copy_from_optimizer(iterating)
        iterating.freeze_cross_iter_movement()
        if self.dump_graphs:
            versions = {"setup": iterating.setup_gm, "main": iterating.main_gm, "cleanup": iterating.cleanup_gm}
            texts = {f"iter_graph_{name}_gm": module.print_readable(False) for name, module in versions.items()}
            dump_graphs_to_files(texts, folder)
        return iterating
