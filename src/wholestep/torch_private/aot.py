"""AOTAutograd, functorch, Dynamo and TorchScript. Imported when asked for. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as _pytree

from wholestep.torch_private.inductor import _draws_kept_apart, _torchs_own_warnings_ignored
from wholestep.torch_private.operators import OpOverload


def mark_boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell AOTAutograd that a compiled function takes one list (`_boxed_call`). 2.11, 2.13."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def aot_function(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """torch's `aot_function`: trace forward and backward at the first call, and never again. 2.11, 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._functorch.aot_autograd import aot_function as torchs

        found: Callable[..., Any] = torchs(function, **settings)
    return found


def aot_backend(**settings: Any) -> Callable[..., Any]:
    """A `torch.compile` backend that hands forward and backward to compilers (`aot_autograd`). 2.11, 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._dynamo.backends.common import aot_autograd

    backend: Callable[..., Any] = aot_autograd(**settings)
    return backend


def default_partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph where eager would: all that the forward made and the backward reads is kept. 2.11, 2.13."""
    from torch._functorch.partitioners import default_partition as torchs

    forward, backward = torchs(joint, inputs, **settings)
    return forward, backward


def min_cut_partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph so that little is kept and cheap work is done again in the backward. 2.11, 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        with _draws_kept_apart(joint):
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **settings)
    return forward, backward


def decompositions_of(operators: Iterable[Any]) -> dict[OpOverload, Callable[..., Any]]:
    """torch's decompositions of some operators (`torch._decomp.get_decompositions`). 2.11, 2.13."""
    from torch._decomp import get_decompositions

    found: Any = get_decompositions(list(operators))
    return dict(found)


def inductor_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """What Inductor wants decomposed, with random numbers left as eager draws them. 2.11, 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table

        with config.patch(fallback_random=True):
            return dict(select_decomp_table())


@contextmanager
def jit_without_autocast() -> Iterator[None]:
    """Script a graph that has its casts as nodes: TorchScript must add none of its own. 2.11, 2.13."""
    before = torch._C._jit_set_autocast_mode(False)
    try:
        with _torchs_own_warnings_ignored():
            yield
    finally:
        torch._C._jit_set_autocast_mode(before)


def jit_remove_mutation(graph: Any) -> None:
    """Let TorchScript turn writes into values where it can (`_jit_pass_remove_mutation`). 2.11, 2.13."""
    torch._C._jit_pass_remove_mutation(graph)


def graph_being_compiled() -> str:
    """AOTAutograd's name of the graph that it is compiling, "" outside of it (`get_aot_graph_name`). 2.11, 2.13."""
    from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name, graph_being_compiled

    return str(get_aot_graph_name()) if graph_being_compiled else ""


def aot_simplified(gm: Any, inputs: list[Any], **settings: Any) -> Callable[..., Any]:
    """AOTAutograd for a graph of dynamo's (`aot_module_simplified`). 2.11, 2.13."""
    with _torchs_own_warnings_ignored():
        from torch._functorch.aot_autograd import aot_module_simplified

        found: Callable[..., Any] = aot_module_simplified(gm, inputs, **settings)
    return found


is_dynamo_tracing = torch.compiler.is_dynamo_compiling
"""Whether this code is not running: Dynamo reads it, because a caller is under torch.compile. 2.11, 2.13."""


@torch._disable_dynamo  # type: ignore[attr-defined]
def call_untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that Dynamo must not look into (`torch._disable_dynamo` imports Dynamo late). 2.11, 2.13."""
    return function(*args)
