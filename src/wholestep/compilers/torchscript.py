"""TorchScript as the compiler of a graph: `ts_compile` with its optimizations, `simple_ts_compile` without, `nnc_jit`.

TorchScript resolves overloads itself and knows types only from annotations, so a copy of the graph is prepared for it:
overloads are removed, scalar inputs are annotated, devices become strings. The given graph is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen

from wholestep.compilers.aot import aot
from wholestep.compilers.run_unchanged import Compiled, boxed, graph_module
from wholestep.errors import LowerError
from wholestep.ir.graph_walks import copy_graph_module
from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.aot import jit_remove_mutation, jit_without_autocast
from wholestep.torch_private.fake_tensors import without_modes
from wholestep.torch_private.operators import OpOverload, op_name, packet_of

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
