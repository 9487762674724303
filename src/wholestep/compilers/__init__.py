"""What to do with a graph of AOTAutograd: functorch's compilers, working and inspectable.

Each takes a graph and its inputs and gives back a function: as `fw_compiler` and `bw_compiler` of torch's
`aot_function`, as a `torch.compile` backend (`backends`), or on a `StepGraph`.
Every name of `functorch.compile` is here.
"""

import importlib
from typing import Any

from wholestep.compilers.aot import TORCHS, aot, aot_function, aot_module
from wholestep.compilers.backends import as_backend, memory_efficient_fusion, nnc_jit, simple_ts_compile, ts_compile
from wholestep.compilers.debug_interpreter import DebugInterpreter, Mismatch, debug_nop
from wholestep.compilers.graph_dumper import GraphDumper, debug_compile, graph_dumper_aot, read_index
from wholestep.compilers.run_unchanged import boxed, draw_graph, draw_graph_compile, nop, print_compile
from wholestep.ir.io.dump import Dump, get_inputs, read_dump

__all__ = [
    "DebugInterpreter",
    "Dump",
    "GraphDumper",
    "Mismatch",
    "aot",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "as_backend",
    "boxed",
    "compiled_function",
    "compiled_module",
    "config",
    "debug_compile",
    "debug_nop",
    "default_decompositions",
    "default_partition",
    "draw_graph",
    "draw_graph_compile",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "get_inputs",
    "graph_dumper_aot",
    "make_boxed_compiler",
    "make_boxed_func",
    "memory_efficient_fusion",
    "min_cut_rematerialization_partition",
    "minifier",
    "nnc_jit",
    "nop",
    "print_compile",
    "pythonkey_decompose",
    "read_dump",
    "read_index",
    "simple_ts_compile",
    "ts_compile",
]


compiled_function = aot_function
compiled_module = aot_module


def __getattr__(name: str) -> Any:
    # `functorch.compile` takes a second to import: only on first use.
    if name in TORCHS:
        return getattr(importlib.import_module("functorch.compile"), name)
    if name == "minifier":
        # `debug` is built on `compilers`, not the other way round: only the name is here.
        return importlib.import_module("wholestep.debug").minifier
    if name == "default_decompositions":
        from wholestep.compilers import backends

        table = globals()["default_decompositions"] = backends.default_decompositions()
        return table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
