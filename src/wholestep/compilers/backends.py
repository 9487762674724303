"""Compilers that generate code (Inductor, TorchScript), and all compilers as `torch.compile` backends.

`memory_efficient_fusion`: forward and backward compiled by Inductor, with few saved activations between them.

torch's min cut decides on the joint graph what the forward saves and what the backward recomputes; Inductor fuses the
recomputation into the kernels that need it, on CPU and CUDA. Random ops draw the numbers of eager. With a
`memory_budget`, `remat` decides instead; the peak is that of the two graphs with their inputs, estimated by simulating
them, without what Inductor fuses.

TorchScript as the compiler of a graph: `ts_compile` with its optimizations, `simple_ts_compile` without, `nnc_jit`.

TorchScript resolves overloads itself and knows types only from annotations, so a copy of the graph is prepared for it:
overloads are removed, scalar inputs are annotated, devices become strings. The given graph is not changed.

The entry point `torch_dynamo_backends` finds the backends:

    torch.compile(model, backend="ws_debug")
    torch.compile(model, backend="ws_fusion", options={"memory_budget": 0.3})
    torch.compile(model, backend=as_backend(draw_graph_compile("model")))

A backend gets dynamo's graph, lets AOTAutograd build forward and backward from it, and hands these to a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen

from wholestep.compilers.aot import aot
from wholestep.compilers.debug_interpreter import debug_nop
from wholestep.compilers.graph_dumper import FOLDER, debug_compile, graph_dumper_aot
from wholestep.compilers.run_unchanged import (
    Compiled,
    Compiler,
    boxed,
    draw_graph_compile,
    graph_module,
    nop,
    print_compile,
)
from wholestep.errors import LowerError, OptionError
from wholestep.ir.graph_walks import copy_graph_module
from wholestep.ir.step_graph import StepGraph
from wholestep.remat.fit import partition_within
from wholestep.torch_private.aot import (
    aot_backend,
    decompositions_of,
    inductor_decompositions,
    jit_remove_mutation,
    jit_without_autocast,
    min_cut_partition,
)
from wholestep.torch_private.fake_tensors import without_modes
from wholestep.torch_private.inductor import compile_inductor
from wholestep.torch_private.operators import OpOverload, op_name, packet_of

_SETTINGS = {"fallback_random": True}
_DEFAULT = (
    "detach gelu_backward leaky_relu_backward sigmoid_backward threshold_backward hardtanh_backward "
    "hardsigmoid_backward hardswish_backward tanh_backward silu_backward elu_backward cudnn_batch_norm "
    "cudnn_batch_norm_backward elu leaky_relu hardtanh hardswish hardsigmoid conj_physical is_same_size"
)


def default_decompositions() -> dict[Any, Callable[..., Any]]:
    """functorch's table: backwards of activations and a few others decomposed into simpler operators."""
    aten = torch.ops.aten
    operators = [getattr(aten, name) for name in _DEFAULT.split()]
    return decompositions_of([*operators, aten.masked_fill.Scalar, aten.masked_fill.Tensor])


def inductor_forward(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Compiled:
    """Inductor as `fw_compiler`; the graph must be in the operators that Inductor takes."""
    return _inductor(fx_g, inps, "forward")


def inductor_backward(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Compiled:
    """Inductor as `bw_compiler`."""
    return _inductor(fx_g, inps, "backward")


def inductor_inference(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Compiled:
    """Inductor as `inference_compiler`."""
    return _inductor(fx_g, inps, "")


def fusion_settings() -> dict[str, Any]:
    """The settings of `aot_function` behind `memory_efficient_fusion`."""
    return {
        "fw_compiler": inductor_forward,
        "bw_compiler": inductor_backward,
        "inference_compiler": inductor_inference,
        "partition_fn": min_cut_partition,
        "decompositions": inductor_decompositions(),
    }


def with_budget(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `aot_function` in which `memory_budget` and `policy` became a `partition_fn`."""
    rest = dict(settings)
    budget, policy = rest.pop("memory_budget", None), rest.pop("policy", None)
    if budget is not None:
        return {"partition_fn": partition_within(budget, policy), **rest}
    if policy is not None:
        raise OptionError(
            "policy= is given without memory_budget=.", fix="give a budget too; memory_budget=1.0 is the largest."
        )
    return rest


def memory_efficient_fusion(fn: Callable[..., Any], **kwargs: Any) -> Any:
    """A function or module whose forward and backward are compiled with few saved activations between them.

    `kwargs` replace single settings of `aot_function`: fw_compiler, bw_compiler, inference_compiler, partition_fn,
    decompositions. With `memory_budget` and `policy`, those of `ws.compile`, `remat` decides what is saved.
    """
    kwargs = with_budget(kwargs)
    settings = {**fusion_settings(), **kwargs}
    if "fw_compiler" in kwargs:
        # As in torch, a given compiler replaces all of Inductor, with its decompositions.
        settings["bw_compiler"] = kwargs.get("bw_compiler", kwargs["fw_compiler"])
        settings["inference_compiler"] = kwargs.get("inference_compiler", kwargs["fw_compiler"])
        settings["decompositions"] = kwargs.get("decompositions", default_decompositions())
    return aot(fn, **settings)


def _inductor(gm: fx.GraphModule, inputs: Sequence[Any], part: str) -> Compiled:
    # Inductor mutates the graph that it is given.
    compiled = compile_inductor(copy_graph_module(gm), list(inputs), _SETTINGS, part)
    return boxed(lambda *args: compiled(list(args)))


aten = torch.ops.aten
_KINDS = ((bool | torch.SymBool, bool), (int | torch.SymInt, int), (float | torch.SymFloat, float))
_LIKE_EAGER = {
    aten.sym_size.int: aten.size,
    aten.sym_stride.int: aten.stride,
    aten.sym_numel.default: aten.numel,
    aten.sym_storage_offset.default: aten.storage_offset,
}
"""Operators that return symbolic scalars; TorchScript has only plain ones."""


def ts_compile(fx_g: fx.GraphModule | StepGraph, inps: Sequence[Any] = ()) -> Compiled:
    """Script the graph, freeze it and let TorchScript optimize it."""
    gm = graph_module(fx_g)
    with jit_without_autocast():
        scripted = _scripted(gm, inps)
        with without_modes():
            jit_remove_mutation(scripted.graph)
            frozen = torch.jit.optimize_for_inference(torch.jit.freeze(scripted.eval()))
    return boxed(_plain_call(frozen))


def simple_ts_compile(fx_g: fx.GraphModule | StepGraph, inps: Sequence[Any] = ()) -> Compiled:
    """Script the graph and freeze it, without further optimization."""
    with jit_without_autocast(), without_modes():
        frozen = torch.jit.freeze(_scripted(graph_module(fx_g), inps).eval())
    return boxed(_plain_call(frozen))


def nnc_jit(f: Callable[..., Any]) -> Any:
    """A function or module whose forward and backward run as TorchScript; a module comes back as a module."""
    return aot(f, fw_compiler=simple_ts_compile)


def _plain_call(scripted: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with jit_without_autocast():
            return scripted(*args)

    return run


def _scripted(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    ready = _prepared(gm, inputs)
    try:
        # AOTAutograd compiles inside of a fake mode, and TorchScript reads real constants.
        with without_modes():
            return torch.jit.script(ready)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise LowerError(
            f"TorchScript does not take this graph: {str(error).strip().splitlines()[0][:300]}",
            fix="use nop, or memory_efficient_fusion, which compiles with Inductor; TorchScript is frozen.",
        ) from error


def _prepared(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    ready = copy_graph_module(gm)
    ready.graph.set_codegen(CodeGen())
    number = 0
    for node in ready.graph.nodes:
        node.type = None  # the user's annotation, perhaps a string; TorchScript would resolve it
        if node.op == "placeholder":
            value = inputs[number] if number < len(inputs) else node.meta.get("val")
            node.type = _annotation(value, node.meta.get("val"))
            number += 1
        elif node.op == "call_function":
            _prepare_call(node)
        elif node.op == "output" and isinstance(node.args[0], list):
            node.args = (tuple(node.args[0]),)
    ready.recompile()
    return ready


def _prepare_call(node: fx.Node) -> None:
    node.kwargs = {key: str(arg) if isinstance(arg, torch.device) else arg for key, arg in node.kwargs.items()}
    target = node.target
    if target in _LIKE_EAGER:
        node.target = _LIKE_EAGER[target]
    elif isinstance(target, OpOverload):
        # `_to_copy` with a dtype alone is `to`, which TorchScript's fusers know.
        is_cast = op_name(target) == "aten::_to_copy" and len(node.args) == 1 and set(node.kwargs) == {"dtype"}
        node.target = aten.to if is_cast else packet_of(target)


def _annotation(value: Any, wanted: Any) -> Any:
    for each in (value, wanted):
        if isinstance(each, Tensor):
            return None
        for kinds, annotation in _KINDS:
            if isinstance(each, kinds):
                return annotation
    return None


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
