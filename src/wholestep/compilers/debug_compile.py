"""`debug_compile`: write each graph to a folder of its own as a program that runs by itself, then run the graph.

Inputs have no data while AOTAutograd compiles, so values, ranges of integers and states of random generators are added
at the first run, before the graph runs: a graph that crashes has left all that is needed to crash again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from wholestep.compilers.boxed import Compiled, Compiler, boxed, graph_module
from wholestep.compilers.dump import GraphDump, new_folder
from wholestep.compilers.run_unchanged import nop
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.aot import graph_being_compiled

log = logging.getLogger("wholestep.compilers")

FOLDER = "wholestep_dumps"


def debug_compile(
    fx_g: fx.GraphModule | StepGraph,
    inps: Sequence[Any] = (),
    *,
    folder: str | Path = FOLDER,
    name: str = "",
    compiler: Compiler = nop,
) -> Compiled:
    """Dump the graph into a new folder under `folder`, say where, and run what `compiler` makes of it.

    `name` starts the folder's name; by default it is AOTAutograd's name of the graph (`model__0_forward_1`).
    """
    gm = graph_module(fx_g)
    title = name or graph_being_compiled() or "graph"
    names = {spec.name: spec.path for spec in fx_g.signature.inputs} if isinstance(fx_g, StepGraph) else {}
    dump = GraphDump(new_folder(Path(folder), title), gm, inps, title, names)
    print(f"wholestep: {title} is in {dump.folder}; run it with: python {dump.folder / 'repro.py'}")
    compiled = compiler(gm, inps)

    def run(*args: Any) -> Any:
        if not dump.complete:
            dump.add_values(args)
        return compiled(list(args))

    return boxed(run)
