"""AOTAutograd, functorch, Dynamo and TorchScript, all imported at first use. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx

from wholestep.torch_private.inductor import _random_ops_not_merged, _warnings_of_torch_ignored
from wholestep.torch_private.operators import OpOverload


def mark_boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell AOTAutograd that a compiled function takes one list (`_boxed_call`). 2.11, 2.13."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def aot_function(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """torch's `aot_function`: trace forward and backward once, at the first call. 2.11, 2.13."""
    with _warnings_of_torch_ignored():
        from torch._functorch.aot_autograd import aot_function as torchs

        found: Callable[..., Any] = torchs(function, **settings)
    return found


def aot_backend(**settings: Any) -> Callable[..., Any]:
    """A `torch.compile` backend that calls compilers for forward and backward (`aot_autograd`). 2.11, 2.13."""
    with _warnings_of_torch_ignored():
        from torch._dynamo.backends.common import aot_autograd

    backend: Callable[..., Any] = aot_autograd(**settings)
    return backend


def default_partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph as eager does: every forward value that the backward reads is saved. 2.11, 2.13."""
    from torch._functorch.partitioners import default_partition as torchs

    forward, backward = torchs(joint, inputs, **settings)
    return forward, backward


def min_cut_partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph so that few values are saved and cheap ones are recomputed in the backward. 2.11, 2.13."""
    with _warnings_of_torch_ignored():
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        with _random_ops_not_merged(joint):
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **settings)
    return forward, backward


def extract_forward_backward(
    joint: fx.GraphModule, saved: list[fx.Node], forward_outputs: int, settings: dict[str, Any]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph: the forward also returns `saved`; the backward recomputes other values right before use.

    torch's partitioner has both steps. `settings`: the keywords with which `aot_function` called the partition
    function. 2.11, 2.13.
    """
    from torch._functorch import partitioners

    known = inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    nodes = settings.get("static_lifetime_input_nodes")
    more: dict[str, Any] = {} if nodes is None else {"static_lifetime_input_nodes": nodes}
    inputs = joint.graph.find_nodes(op="placeholder")
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint,
        saved,
        saved_sym_nodes=[node for node in inputs if isinstance(node.meta.get("val"), torch.SymInt)],
        num_fwd_outputs=forward_outputs,
        **{name: value for name, value in more.items() if name in known},
    )
    return forward, partitioners.reordering_to_mimic_autograd_engine(backward)


def decompositions_of(operators: Iterable[Any]) -> dict[OpOverload, Callable[..., Any]]:
    """torch's decompositions of some operators (`torch._decomp.get_decompositions`). 2.11, 2.13."""
    from torch._decomp import get_decompositions

    found: Any = get_decompositions(list(operators))
    return dict(found)


def inductor_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Inductor's decomposition table, with random ops undecomposed so that they draw as in eager. 2.11, 2.13."""
    with _warnings_of_torch_ignored():
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table

        with config.patch(fallback_random=True):
            return dict(select_decomp_table())


@contextmanager
def jit_without_autocast() -> Iterator[None]:
    """Context for scripting a graph that has its casts as nodes: TorchScript adds none. 2.11, 2.13."""
    before = torch._C._jit_set_autocast_mode(False)
    try:
        with _warnings_of_torch_ignored():
            yield
    finally:
        torch._C._jit_set_autocast_mode(before)


def jit_remove_mutation(graph: Any) -> None:
    """Let TorchScript functionalize writes where it can (`_jit_pass_remove_mutation`). 2.11, 2.13."""
    torch._C._jit_pass_remove_mutation(graph)


def graph_being_compiled() -> str:
    """AOTAutograd's name of the graph that it is compiling; "" outside of a compilation (`get_aot_graph_name`).
    2.11, 2.13."""
    from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name, graph_being_compiled

    return str(get_aot_graph_name()) if graph_being_compiled else ""


def aot_simplified(gm: Any, inputs: list[Any], **settings: Any) -> Callable[..., Any]:
    """AOTAutograd for a graph of dynamo's (`aot_module_simplified`). 2.11, 2.13."""
    with _warnings_of_torch_ignored():
        from torch._functorch.aot_autograd import aot_module_simplified

        found: Callable[..., Any] = aot_module_simplified(gm, inputs, **settings)
    return found


is_dynamo_tracing = torch.compiler.is_dynamo_compiling
"""Whether Dynamo is tracing this code, because a caller is under torch.compile. 2.11, 2.13."""


@torch._disable_dynamo  # type: ignore[attr-defined]
def call_untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that Dynamo must not trace (`torch._disable_dynamo` imports Dynamo late). 2.11, 2.13."""
    return function(*args)


_DYNAMO = str(Path(torch.__file__).parent / "_dynamo") + "/"
_EARLY_WRAPPERS = torch._compile.__file__


def behind_dynamo(function: FunctionType) -> FunctionType:
    """A function of torch without the wrappers that Dynamo gives it. 2.11, 2.13.

    torch/_compile.py                  functions that it must not trace, where somebody imported `torch._dynamo` early
    torch/_dynamo/eval_frame.py        methods of optimizers and more, from the first use of `torch.compile` on
    torch/_dynamo/mutation_guard.py    `nn.Module.__init__` and `__setstate__`, likewise
    """
    while True:
        file, cells = function.__code__.co_filename, function.__closure__ or ()
        if file == _EARLY_WRAPPERS and "__wrapped__" in vars(function):
            function = vars(function)["__wrapped__"]
        elif file.startswith(_DYNAMO) and "_torchdynamo_orig_callable" in vars(function):
            function = vars(function)["_torchdynamo_orig_callable"]
        elif file == f"{_DYNAMO}mutation_guard.py" and len(cells) == 1:
            function = cells[0].cell_contents
        else:
            return function


def trace_log_is_written() -> bool:
    """Whether torch writes a structured log (`TORCH_TRACE=folder`), which tlparse reads. Handlers that write to no
    folder do not count: pytest adds its own to every logger. 2.11, 2.13."""
    from torch._logging._internal import trace_log

    return any(getattr(handler, "root_dir", None) is not None for handler in trace_log.handlers)


def write_artefact(frame: int, compilation: int, name: str, text: str, encoding: str) -> None:
    """Write a text into that log, as an artefact of the compilation [frame/compilation]. `encoding`: string or json.
    2.11, 2.13."""
    from torch._guards import CompileContext, CompileId, compile_context
    from torch._logging._internal import trace_structured

    with compile_context(CompileContext(CompileId(frame_id=frame, frame_compile_id=compilation))):
        trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: text)
