"""`memory_efficient_fusion`: forward and backward compiled by Inductor, with few saved activations between them.

torch's min cut decides on the joint graph what the forward saves and what the backward recomputes; Inductor fuses the
recomputation into the kernels that need it, on CPU and CUDA. Random ops draw the numbers of eager. With a
`memory_budget`, `remat` decides instead; the peak is that of the two graphs with their inputs, estimated by simulating
them, without what Inductor fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.compilers.aot import aot
from wholestep.compilers.run_unchanged import Compiled, boxed
from wholestep.errors import OptionError
from wholestep.ir.graph_walks import copy_graph_module
from wholestep.remat.fit import partition_within
from wholestep.torch_private.aot import decompositions_of, inductor_decompositions, min_cut_partition
from wholestep.torch_private.inductor import compile_inductor

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
