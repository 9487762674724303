"""`Pipe.from_tracing`: with an example call as in torch, without one as in PiPPy, by symbolic tracing of `torch.fx`.

Without an example no shapes are known. Such a pipe runs in one process only, with its backward if it has a loss; for
ranks, pass an example call. It is split by moving nodes:

    traced                                      split
    mm(x, get_attr w), pipe_split, lin(...)     submod_0   mm(x, moved_w)
                                                submod_1   lin(...)
                                                parent     submod_1(submod_0(x))

Submodules are single nodes of the graph, and nothing has a shape. Values go directly from the stage that computes them
to those that use them. Submodules keep their paths inside a stage; tensors that the code reads itself are named
`moved_...`, as in PiPPy.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx

from wholestep.errors import PipelineError
from wholestep.pipelining.build.capture import attach_module
from wholestep.pipelining.build.loss_and_backward import (
    DetachExecutor,
    Result,
    default_spec,
    find_loss,
    insert_backward,
    run_by_pipe_only,
)
from wholestep.pipelining.build.model_state import MultiUseParameterConfig
from wholestep.pipelining.build.split_points import SPLIT, SplitPoint, pipe_split, split_points, stages_by_marks
from wholestep.pipelining.pipe import Pipe
from wholestep.pipelining.run.schedules import split_args_kwargs_into_chunks
from wholestep.torch_private.fx_graphs import pytree
from wholestep.torch_private.pipelining import RecordCalls, torchs_markers


class TracedPipe(Pipe):
    """A model cut by `Pipe.from_tracing` without an example call. Calling it runs all stages here.

    With a loss it runs the backward too: when the call returns, all parameters have gradients, also those that several
    stages use. Names inside it are PiPPy's (`submod_0.moved_weight`); those of `state_dict()` are the model's.
    """

    def __init__(self, cut: TracedCut, loss_spec: Any = None) -> None:
        torch.nn.Module.__init__(self)
        self.split_gm = cut.split_gm
        self.num_stages = cut.num_stages
        self.loss_spec = loss_spec
        self.has_loss_and_backward = loss_spec is not None
        self.new_to_old_qualname_mapping = cut.names
        for i, stage in enumerate(self.stages):
            _use_names_of_model(stage, _names_in(cut.names, f"submod_{i}."))
        self._not_saved = cut.not_saved
        self._restore()

    def _restore(self) -> None:
        """Restore what a GraphModule loses when it is built or copied."""
        self.split_gm.forward = run_by_pipe_only
        for stage, names in zip(self.stages, self._not_saved, strict=True):
            for name in names:
                stage.register_buffer(name, stage.get_buffer(name), persistent=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedPipe:
        new = TracedPipe.__new__(TracedPipe)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(vars(self), memo))
        new._restore()
        return new

    @property
    def has_loss_and_backwards(self) -> bool:
        """PiPPy's name for `has_loss_and_backward`."""
        return self.has_loss_and_backward

    @property
    def executor(self) -> DetachExecutor:
        """The interpreter that runs `split_gm`."""
        return DetachExecutor(self.split_gm)

    @property
    def stages(self) -> list[Any]:
        """The modules of all stages."""
        return [self.split_gm.get_submodule(f"submod_{i}") for i in range(self.num_stages)]

    @property
    def replicated_params(self) -> list[dict[str, str]]:
        """For each parameter that several stages hold, its name in each of them. Here it is one tensor."""
        users: dict[int, dict[str, str]] = {}
        for i, stage in enumerate(self.stages):
            for name, parameter in stage.named_parameters():
                users.setdefault(id(parameter), {})[f"submod_{i}"] = name
        return [names for names in users.values() if len(names) > 1]

    def remap_qualname(self, qualname: str) -> str:
        """The name in the model of a module or tensor of this pipe."""
        name = qualname.removeprefix("split_gm.")
        for end in [len(name), *(i for i in reversed(range(len(name))) if name[i] == ".")]:
            if name[:end] in self.new_to_old_qualname_mapping:
                return self.new_to_old_qualname_mapping[name[:end]] + name[end:]
        raise PipelineError(
            f"the pipe has no module or tensor named {qualname}.", fix="use a name of pipe.named_parameters()"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages here, and the backward of the loss if there is one."""
        inputs = [node for node in self.split_gm.graph.nodes if node.op == "placeholder"]
        bound = _signature(inputs).bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(zip(inputs, bound.arguments.values(), strict=True))
        if not self.has_loss_and_backward:
            return fx.Interpreter(self.split_gm).run(initial_env=values)
        result = self.executor.run(initial_env=values)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    def print_readable(self) -> str:
        """Print the stages as Python code, and return it."""
        text = "\n".join(stage.print_readable(print_output=False) for stage in self.stages)
        print(text)
        return text

    def build_stage(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: see `pipeline`."""
        raise _needs_example("a stage on a rank")

    def check(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: see `pipeline`."""
        raise _needs_example("simulating a schedule")

    def materialize_stage(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: see `pipeline`."""
        raise _needs_example("materializing a stage")

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> NoReturn:
        """Refused: see `pipeline`."""
        raise _needs_example("a flat list of inputs")

    def unflatten_outputs(self, flat: Sequence[Any]) -> NoReturn:
        """Refused: see `pipeline`."""
        raise _needs_example("a flat list of outputs")


def _needs_example(what: str) -> PipelineError:
    return PipelineError(
        f"{what} requires the shapes of values, and this pipe was traced without an example call.",
        fix="pipeline(module, mb_args) or Pipe.from_tracing(module, example_args=(...))",
    )


_KINDS = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)
"""By the number of stars before a name."""


def _signature(inputs: Sequence[fx.Node]) -> inspect.Signature:
    """The signature of the graph."""
    parameters = []
    for node in inputs:
        name = str(node.target)
        kind = _KINDS[len(name) - len(name.lstrip("*"))]
        default = node.args[0] if node.args else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name.lstrip("*"), kind, default=default))
    return inspect.Signature(parameters)


def _names_in(names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The names of one stage that differ from those in the model."""
    inside = {new.removeprefix(prefix): old for new, old in names.items() if new.startswith(prefix)}
    return {new: old for new, old in inside.items() if new != old}


def _use_names_of_model(stage: torch.nn.Module, names: Mapping[str, str]) -> None:
    stage.register_state_dict_post_hook(partial(_to_model, names))  # type: ignore[no-untyped-call]
    stage.register_load_state_dict_pre_hook(partial(_from_model, names))  # type: ignore[no-untyped-call]


def _to_model(
    names: Mapping[str, str], module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for new, old in names.items():
        if prefix + new in state:
            state[prefix + old] = state.pop(prefix + new)


def _from_model(
    names: Mapping[str, str], module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    for new, old in names.items():
        if prefix + old in state:
            state[prefix + new] = state.pop(prefix + old)


Key = fx.Node | str
"""A value of the traced graph, or the name of a parameter or buffer that is sent."""


@dataclass(frozen=True)
class TracedCut:
    """A graph of stages, and the names of its modules and tensors in the model."""

    split_gm: fx.GraphModule
    num_stages: int
    names: dict[str, str]
    not_saved: tuple[tuple[str, ...], ...]
    """By stage, its non-persistent buffers."""


@dataclass(frozen=True)
class StateHomes:
    """The stages that hold the state that the code reads itself."""

    stages: dict[str, tuple[int, ...]]
    """By name, the stages that hold a tensor."""
    sent: dict[str, int]
    """By name, the stage that sends a tensor to others."""


def stages_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The stage of each node, in a graph that may call modules and methods."""
    return stages_by_marks(graph, lambda node: node.target is not operator.getitem)


def choose_homes(
    graph: fx.Graph, stage_of: Mapping[fx.Node, int], config_of: Mapping[str, MultiUseParameterConfig]
) -> StateHomes:
    """The stages that hold each tensor that the code reads, and the tensors that are sent."""
    last = max(stage_of.values(), default=0)
    stages: dict[str, tuple[int, ...]] = {}
    sent: dict[str, int] = {}
    used: dict[str, set[int]] = {}
    returned: set[str] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            used.setdefault(node.target, set()).update(stage_of[user] for user in node.users if user in stage_of)
            if any(user.op == "output" for user in node.users):
                returned.add(node.target)
    for name, where in used.items():
        all_stages = tuple(sorted(where or {last}))
        transmit = config_of.get(name, MultiUseParameterConfig.TRANSMIT) is MultiUseParameterConfig.TRANSMIT
        if name in returned or (transmit and len(all_stages) > 1):
            sent[name] = all_stages[0]
        stages[name] = all_stages[:1] if transmit else all_stages
    return StateHomes(stages, sent)


def cut_traced(
    traced: fx.GraphModule, stage_of: Mapping[fx.Node, int], homes: StateHomes, persistent: Set[str]
) -> TracedCut:
    """Build the stages and the graph that calls them. `persistent` are the names in the model's state dict."""
    top = fx.Graph()
    root = torch.nn.Module()
    made: dict[Key, fx.Node] = {}
    names: dict[str, str] = {}
    stages: dict[str, fx.GraphModule] = {}
    not_saved: list[tuple[str, ...]] = []
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            made[node] = top.node_copy(node)
    count = max(stage_of.values(), default=-1) + 1
    for stage in range(count):
        builder = _StageBuilder(traced, stage, stage_of, homes, persistent)
        module = builder.build()
        name = f"submod_{stage}"
        stages[name] = module
        not_saved.append(tuple(builder.not_saved))
        root.add_module(name, torch.nn.Module())
        names |= {f"{name}.{inside}": old for inside, old in builder.names.items()}
        call = top.create_node("call_module", name, tuple(made[key] for key in builder.inputs))
        call.meta["stage_idx"] = stage
        if len(builder.outputs) == 1:
            made[builder.outputs[0]] = call
        else:
            made |= {key: top.call_function(operator.getitem, (call, i)) for i, key in enumerate(builder.outputs)}
    output = traced.graph.output_node()
    top.output(fx.node.map_arg(output.args[0], lambda node: made[str(node.target) if node.op == "get_attr" else node]))
    split_gm = fx.GraphModule(root, top)
    for name, module in stages.items():
        split_gm.add_module(name, module)
    return TracedCut(split_gm, count, names, tuple(not_saved))


def keep_unused(found: TracedCut, model: torch.nn.Module) -> None:
    """Let the first stage hold persistent state that no stage uses, so that the state dict is complete."""
    if not found.num_stages:
        return
    used = {id(tensor) for tensor in (*found.split_gm.parameters(), *found.split_gm.buffers())}
    first = found.split_gm.get_submodule("submod_0")
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in used:
            used.add(id(tensor))
            inside = "moved_" + name.replace(".", "_")
            if isinstance(tensor, torch.nn.Parameter):
                first.register_parameter(inside, tensor)
            else:
                first.register_buffer(inside, tensor)
            found.names[f"submod_0.{inside}"] = name


class _StageBuilder:
    """Copies the nodes of one stage."""

    def __init__(
        self,
        traced: fx.GraphModule,
        stage: int,
        stage_of: Mapping[fx.Node, int],
        homes: StateHomes,
        persistent: Set[str],
    ) -> None:
        self._traced = traced
        self._persistent = persistent
        self._nodes = [node for node in traced.graph.nodes if stage_of.get(node) == stage]
        self._held = {name for name, stages in homes.stages.items() if stage in stages}
        needed = (value for node in self._nodes for value in node.all_input_nodes if stage_of.get(value) != stage)
        taken = {self._key(value): value for value in needed if not self._is_held(value)}
        leaving = [node for node in self._nodes if any(stage_of.get(user) != stage for user in node.users)]
        self.inputs: list[Key] = list(taken)
        self.outputs: list[Key] = [*leaving, *(name for name, home in homes.sent.items() if home == stage)]
        self.names: dict[str, str] = {}
        self.not_saved: list[str] = []
        self._root = torch.nn.Module()
        self._graph = fx.Graph()
        self._made: dict[Key, fx.Node] = {key: self._graph.placeholder(value.name) for key, value in taken.items()}
        self._moved_nodes: dict[str, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        for node in self._nodes:
            self._made[node] = self._graph.node_copy(node, self._copy_of)
            if node.op == "call_module":
                attach_module(self._root, str(node.target), self._traced.get_submodule(str(node.target)))
                self.names[str(node.target)] = str(node.target)
        results = [self._moved(key) if isinstance(key, str) else self._made[key] for key in self.outputs]
        self._graph.output(results[0] if len(results) == 1 else tuple(results))
        return fx.GraphModule(self._root, self._graph)

    def _key(self, value: fx.Node) -> Key:
        return str(value.target) if value.op == "get_attr" else value

    def _is_held(self, value: fx.Node) -> bool:
        return value.op == "get_attr" and value.target in self._held

    def _copy_of(self, value: fx.Node) -> fx.Node:
        return self._moved(str(value.target)) if self._is_held(value) else self._made[self._key(value)]

    def _moved(self, name: str) -> fx.Node:
        if name not in self._moved_nodes:
            inside = "moved_" + name.replace(".", "_")
            value = operator.attrgetter(name)(self._traced)
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                self._root.register_buffer(inside, value)
                if name not in self._persistent:
                    self.not_saved.append(inside)
            else:
                setattr(self._root, inside, value)
            self.names[inside] = name
            self._moved_nodes[name] = self._graph.get_attr(inside)
        return self._moved_nodes[name]


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
