"""`Pipe.from_tracing`: with an example call as in torch, without one as in PiPPy, by symbolic tracing of `torch.fx`.

Without an example no shapes are known. Such a pipe runs here only, with its backward if it has a loss. For ranks, pass
an example call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from wholestep.errors import PipelineError
from wholestep.pipelining.build.loss_and_backward import Result, default_spec, find_loss, insert_backward
from wholestep.pipelining.build.model_state import MultiUseParameterConfig
from wholestep.pipelining.build.split_points import SPLIT, SplitPoint, pipe_split, split_points
from wholestep.pipelining.build.traced_pipe import TracedPipe, choose_homes, cut_traced, keep_unused, stages_of
from wholestep.pipelining.pipe import Pipe
from wholestep.pipelining.run.schedules import split_args_kwargs_into_chunks
from wholestep.torch_private.pipelining import RecordCalls, torchs_markers
from wholestep.torch_private.pytrees import pytree

SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]


class BufferTracer(fx.Tracer):
    """Traces operations on a buffer, such as `self.buffer[: x.shape[0]]`."""

    proxy_buffer_attributes = True


def from_tracing(mod: torch.nn.Module, *args: Any, **options: Any) -> Pipe:
    """Cut a model: with an example call as in torch (`example_args, example_kwargs, split_policy`), by `pipeline`;
    without one as in PiPPy, by `from_symbolic_tracing`.

    The last PiPPy had `num_chunks` before the example, which was a whole batch: it is split into that many chunks.
    """
    given = list(args)
    if given and isinstance(given[0], int):
        options["num_chunks"] = given.pop(0)
    if "example_args" in options or "example_kwargs" in options or (given and isinstance(given[0], tuple | list)):
        if given and isinstance(given[0], MultiUseParameterConfig | Mapping):
            options["multi_use_param_spec"] = given.pop(0)
        return _from_example(mod, *given, **options)
    return from_symbolic_tracing(mod, *given, **options)


def _from_example(
    mod: torch.nn.Module,
    example_args: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    num_chunks: int | None = None,
    output_loss_value_spec: Any = None,
    multi_use_param_spec: Any = "replicate",
    **options: Any,
) -> Pipe:
    from wholestep.pipelining.build.pipeline import pipeline

    call: tuple[Any, Any] = (example_args, example_kwargs)
    if num_chunks is not None:
        positional, named = split_args_kwargs_into_chunks(tuple(example_args), example_kwargs, num_chunks)
        call = positional[0], named[0]
    known = {"loss": output_loss_value_spec, "multi_use_params": multi_use_param_spec, **options}
    return pipeline(mod, *call, split_policy=split_policy, **known)


def from_symbolic_tracing(
    mod: torch.nn.Module,
    multi_use_param_spec: Any = None,
    tracer: fx.Tracer | None = None,
    output_loss_value_spec: Any = None,
    deep_copy_module: bool = False,
    split_policy: SplitPolicy | None = None,
    return_to_0: bool = False,
    loss_fn: Callable[..., Any] | None = None,
    **trace_options: Any,
) -> TracedPipe:
    """Trace a model by `torch.fx` and cut it at its markers, or where a policy inserts them.

    `multi_use_param_spec` is for parameters that the code of several stages reads: TRANSMIT (the default), REPLICATE,
    or a dictionary by name. Submodules called in several stages are in each of them. With
    `output_loss_value_spec`, a loss wrapper, a result named "loss" or `loss_fn(result, target)`, calling the pipe runs
    forward and backward. `trace_options` go to `tracer.trace`.
    """
    if return_to_0:
        raise PipelineError(
            "return_to_0 is not supported: results stay in the last stage.",
            fix="leave it out; torch.distributed.broadcast sends a result to other ranks",
        )
    _check_sharing(multi_use_param_spec)
    if deep_copy_module:
        mod = copy.deepcopy(mod)
    traced = trace(mod, tracer or BufferTracer(), trace_options)
    if split_policy is not None:
        traced = split_policy(traced)
    if loss_fn is not None:
        _append_loss(traced, loss_fn)
        output_loss_value_spec = True
    stage_of = stages_of(traced.graph)
    homes = choose_homes(traced.graph, stage_of, _sharing(traced.graph, multi_use_param_spec))
    found = cut_traced(traced, stage_of, homes, mod.state_dict().keys())
    keep_unused(found, mod)
    spec = _add_backward(mod, found.split_gm.graph, output_loss_value_spec)
    found.split_gm.recompile()
    return TracedPipe(found, spec)


def trace(mod: torch.nn.Module, tracer: fx.Tracer, options: Mapping[str, Any]) -> fx.GraphModule:
    """The model as a graph, with a node for every marker. The model is not changed."""
    before = set(vars(mod))
    marks = (SPLIT, *torchs_markers())
    with RecordCalls(marks, lambda: tracer.graph.call_function(pipe_split)):
        graph = tracer.trace(mod, **options)
    _mark_leaves(mod, graph)
    _open_named_tuples(graph)
    traced = fx.GraphModule(mod, graph)
    for name in set(vars(mod)) - before:  # tensor constants that the tracer added
        delattr(mod, name)
    return traced


def _mark_leaves(mod: torch.nn.Module, graph: fx.Graph) -> None:
    """Insert markers around modules that are single nodes, whose hooks were not traced."""
    for node in list(graph.nodes):
        if node.op != "call_module":
            continue
        points = split_points(mod.get_submodule(str(node.target)))
        if SplitPoint.BEGINNING in points:
            with graph.inserting_before(node):
                graph.call_function(pipe_split)
        if SplitPoint.END in points:
            with graph.inserting_after(node):
                graph.call_function(pipe_split)


def _open_named_tuples(graph: fx.Graph) -> None:
    """In the trace a returned named tuple is a call of its class; replace it by its fields in the output."""

    def opened(value: Any) -> Any:
        if isinstance(value, fx.Node) and isinstance(value.target, type) and hasattr(value.target, "_fields"):
            return value.target(*(opened(arg) for arg in value.args))
        return value

    output = graph.output_node()
    output.args = (pytree.tree_map_only(fx.Node, opened, output.args[0]),)
    graph.eliminate_dead_code(_has_effect)


def _has_effect(node: fx.Node) -> bool:
    """False for calls of named tuple classes, which may be removed."""
    return not (isinstance(node.target, type) and hasattr(node.target, "_fields"))


def _append_loss(traced: fx.GraphModule, loss_fn: Callable[..., Any]) -> None:
    """Make the graph return the loss of its result and of one more input, `target`."""
    graph = traced.graph
    output = graph.output_node()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes))):
        target = graph.placeholder("target")
    with graph.inserting_before(output):
        if isinstance(loss_fn, torch.nn.Module):
            traced.add_module("_loss", loss_fn)
            loss = graph.call_module("_loss", (output.args[0], target))
        else:
            loss = graph.call_function(loss_fn, (output.args[0], target))
    output.args = (loss,)


def _check_sharing(spec: Any) -> None:
    if spec is not None and not isinstance(spec, MultiUseParameterConfig | Mapping):
        raise PipelineError(
            f"multi_use_param_spec must be MultiUseParamSpec enum or dict, not {spec!r}.",
            fix="write MultiUseParameterConfig.REPLICATE or TRANSMIT, or a dictionary from names to one of them",
        )


def _sharing(graph: fx.Graph, spec: Any) -> dict[str, MultiUseParameterConfig]:
    """The mode of each tensor that the code reads."""
    found: dict[str, MultiUseParameterConfig] = {}
    for name in dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"):
        config = spec.get(name) if isinstance(spec, Mapping) else spec
        if config is not None and not isinstance(config, MultiUseParameterConfig):
            raise PipelineError(
                f"Unknown multi-use config value {config!r} specified for {name}.",
                fix="write MultiUseParameterConfig.REPLICATE or TRANSMIT",
            )
        found[name] = config or MultiUseParameterConfig.TRANSMIT
    return found


def _add_backward(mod: torch.nn.Module, graph: fx.Graph, spec: Any) -> Any:
    """Insert the backward of the loss into the graph; returns the spec of the loss, or None if there is none."""
    results = pytree.tree_map_only(fx.Node, Result, graph.output_node().args[0])
    if spec is None:
        spec = default_spec(mod, results)
    if spec is None or spec is False:
        return None
    insert_backward(graph, find_loss(results, spec))
    return spec
