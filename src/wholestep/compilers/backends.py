"""The compilers as `torch.compile` backends, found by the entry point `torch_dynamo_backends`.

    torch.compile(model, backend="ws_debug")
    torch.compile(model, backend="ws_fusion", options={"memory_budget": 0.3})
    torch.compile(model, backend=as_backend(draw_graph_compile("model")))

A backend gets dynamo's graph, lets AOTAutograd build forward and backward from it, and hands these to a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from wholestep.compilers.debug_interpreter import debug_nop
from wholestep.compilers.fusion import fusion_settings, with_budget
from wholestep.compilers.graph_dumper import FOLDER, debug_compile, graph_dumper_aot
from wholestep.compilers.run_unchanged import Compiler, draw_graph_compile, nop, print_compile
from wholestep.compilers.torchscript import simple_ts_compile, ts_compile
from wholestep.errors import OptionError
from wholestep.torch_private.aot import aot_backend

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def as_backend(fw_compiler: Compiler, bw_compiler: Compiler | None = None, **settings: Any) -> Backend:
    """A `torch.compile` backend from compilers for forward and backward; `settings` are those of `aot_function`."""
    both = {"fw_compiler": fw_compiler, "bw_compiler": bw_compiler or fw_compiler, **settings}

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # A new wrapper for each graph: torch's wraps its own settings again at each call.
        made: Callable[..., Any] = aot_backend(**both)(gm, example_inputs)
        return made

    backend.__name__ = getattr(fw_compiler, "__name__", "compiler")
    return backend


def fusion_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """`memory_efficient_fusion` as a backend; `options` of `torch.compile` may have `memory_budget` and `policy`."""
    unknown = sorted(set(options or {}) - {"memory_budget", "policy"})
    if unknown:
        raise OptionError(
            f"the backend ws_fusion has no option {unknown[0]!r}.", fix='ws_fusion has "memory_budget" and "policy".'
        )
    settings = {**fusion_settings(), **with_budget(options or {})}
    made: Callable[..., Any] = aot_backend(**settings)(gm, example_inputs)
    return made


def draw_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Draw forward and backward into the folder of dumps, and run them unchanged."""
    forward, backward = (draw_graph_compile(f"{FOLDER}/{part}_{id(gm):x}") for part in ("forward", "backward"))
    return as_backend(forward, backward)(gm, example_inputs)


def dump_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Dump joint, forward and backward graph, each into its own folder, and run them unchanged."""
    return graph_dumper_aot(f"graph_{id(gm):x}", FOLDER)(gm, example_inputs)


ws_nop = as_backend(nop)
ws_print = as_backend(print_compile)
ws_ts = as_backend(ts_compile)
ws_simple_ts = as_backend(simple_ts_compile)
ws_debug = as_backend(debug_nop)
ws_debug_compile = as_backend(debug_compile)
ws_draw = draw_backend
ws_dump = dump_backend
ws_fusion = fusion_backend
