"""What to do with a graph of AOTAutograd's: functorch's compilers, made to work and to be looked into.

Each takes a graph and its inputs and gives back a function: as `fw_compiler` and `bw_compiler` of torch's
`aot_function`, as a `torch.compile` backend (`backends`), or on a `StepGraph`.
"""

from typing import Any

from wholestep.compilers.aot import aot
from wholestep.compilers.backends import as_backend
from wholestep.compilers.boxed import boxed
from wholestep.compilers.debug import debug_nop
from wholestep.compilers.debug_compile import debug_compile
from wholestep.compilers.debug_interpreter import DebugInterpreter, Mismatch
from wholestep.compilers.draw import draw_graph, draw_graph_compile
from wholestep.compilers.dump import Dump, get_inputs, read_dump
from wholestep.compilers.fusion import memory_efficient_fusion
from wholestep.compilers.graph_dumper import GraphDumper, graph_dumper_aot, read_index
from wholestep.compilers.plain import nop, print_compile
from wholestep.compilers.torchscript import nnc_jit, simple_ts_compile, ts_compile

__all__ = [
    "DebugInterpreter",
    "Dump",
    "GraphDumper",
    "Mismatch",
    "aot",
    "as_backend",
    "boxed",
    "debug_compile",
    "debug_nop",
    "default_decompositions",
    "draw_graph",
    "draw_graph_compile",
    "get_inputs",
    "graph_dumper_aot",
    "memory_efficient_fusion",
    "nnc_jit",
    "nop",
    "print_compile",
    "read_dump",
    "read_index",
    "simple_ts_compile",
    "ts_compile",
]


def __getattr__(name: str) -> Any:
    # The table takes a second of importing torch's decompositions, which nobody should wait for who does not need it.
    if name == "default_decompositions":
        from wholestep.compilers import fusion

        table = globals()["default_decompositions"] = fusion.default_decompositions()
        return table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
