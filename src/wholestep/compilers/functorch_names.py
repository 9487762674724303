"""The rest of `functorch.compile`, so that code moves over by changing an import.

`aot_function` and `aot_module` are `aot` with the arguments of torch's. What torch's own functions do well is not made
again: partitioners, boxing and the names of graphs are passed on. `minifier` is `ws.debug.minifier`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from wholestep.compilers.aot import AOTFunction, AOTModule
from wholestep.compilers.boxed import Compiler

TORCHS = (
    "aot_module_simplified",
    "config",
    "default_partition",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "make_boxed_compiler",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "pythonkey_decompose",
)
"""Names of `functorch.compile` that are torch's own here too."""


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., Any] | None = None,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
    **settings: Any,
) -> AOTFunction:
    """`fn` with its forward and backward compiled, once for each kind of call.

    `partition_fn` None is torch's `default_partition`. `dynamic`: sizes are symbols. `settings`: those of torch's
    `aot_function` that are for experts (`enable_log`, `disable_functionalization`).
    """
    given: dict[str, Any] = {
        "fw_compiler": fw_compiler,
        "bw_compiler": bw_compiler,
        "decompositions": decompositions,
        "keep_inference_input_mutations": keep_inference_input_mutations,
        "inference_compiler": inference_compiler,
        "dynamic": dynamic,
    }
    if num_params_buffers:
        given["num_params_buffers"] = num_params_buffers
    if partition_fn is not None:
        given["partition_fn"] = partition_fn
    return AOTFunction(fn, {**given, **settings})


def aot_module(mod: nn.Module, *args: Any, **kwargs: Any) -> AOTModule:
    """A module with its forward and backward compiled; the other arguments are those of `aot_function`."""
    return AOTModule(mod, aot_function(mod, *args, **kwargs).settings)
