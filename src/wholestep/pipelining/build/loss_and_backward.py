"""The loss of a pipe, and its backward as nodes of the graph of stages.

    loss=True                              the model returns the loss
    loss=(False, True)                     it returns two values; the second is the loss
    loss={"loss": True, "logits": False}   it returns a dictionary
    loss="loss"                            the result of that name

    before                                    after
    a = submod_0(x)                           a = submod_0(x)
    loss = submod_1(a)                        loss = submod_1(a)
    return loss                               seed = ones_like(loss)
                                              g1 = stage_backward((loss,), (seed,), [a], [0])
                                              g0 = stage_backward((a,), (g1[0],), [x], [0])
                                              pass_to_inputs([x], [g0[0]])
                                              return loss

A value that several stages use gets the sum of their gradients. The graph runs in a `DetachExecutor`: it detaches the
inputs of each stage, as on separate ranks, so that each `stage_backward` ends where its stage begins.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import fx
from torch.autograd.graph import GradientEdge

from wholestep.errors import PipelineLossError
from wholestep.ir.graph_walks import ancestors
from wholestep.torch_private.fx_graphs import pytree, pytree_children


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: Sequence[int] | None = None,
    stage_info: str | None = None,
) -> tuple[Any, ...]:
    """Run the backward of one stage: accumulates the gradients of parameters, returns those of the inputs.

    Outputs and inputs may be nested. Outputs without a gradient are ignored; if none has one, each is a loss.
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = None if output_grads is None else [output_grads[i] for i in outputs_with_grads_idxs]
    pairs = _with_gradients(stage_output, output_grads)
    if any(gradient is not None for _, gradient in pairs):
        pairs = [(output, gradient) for output, gradient in pairs if gradient is not None]
    if pairs:
        try:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        except RuntimeError as error:
            error.add_note(f"in the backward of {stage_info or 'a stage'}")
            raise
    return tuple(pytree.tree_map(_take_gradient, value) for value in input_values)


def null_coalesce_accumulate(lhs: Any, rhs: Any) -> Any:
    """The sum of two gradients, either of which may be None. Nested ones are summed leaf by leaf."""
    if lhs is None:
        return rhs
    if rhs is None:
        return lhs
    if isinstance(lhs, torch.Tensor):
        return torch.add(lhs, rhs)
    leaves, spec = pytree.tree_flatten(lhs)
    others = pytree.tree_flatten(rhs)[0]
    return pytree.tree_unflatten([null_coalesce_accumulate(a, b) for a, b in zip(leaves, others, strict=True)], spec)


_null_coalesce_accumulate = null_coalesce_accumulate  # PiPPy's name


def pass_to_inputs(input_values: Sequence[Any], grads: Sequence[Any]) -> None:
    """Continue the backward into the arguments of the pipe: leaves accumulate their gradients."""
    pairs = [pair for value, grad in zip(input_values, grads, strict=True) for pair in _with_gradients(value, grad)]
    pairs = [(value, gradient) for value, gradient in pairs if gradient is not None]
    if pairs:
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])


for _function in (stage_backward, pass_to_inputs):
    fx.node.has_side_effect(_function)


def insert_backward(graph: fx.Graph, loss: fx.Node) -> None:
    """Insert the backward of `loss` into a graph of stages: placeholders, calls of modules and `getitem`."""
    live = ancestors([loss])
    results = _results(graph)
    stages = [node for node in graph.nodes if node.op == "call_module" and node in live]
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node in live]
    gradients: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(graph.output_node()):
        gradients[loss] = graph.call_function(torch.ones_like, (loss,))
        for stage in reversed(stages):
            outputs = results.get(stage, (stage,))
            found = tuple(gradients.get(output) if output is not None else None for output in outputs)
            arguments: dict[str, Any] = {
                "stage_output": outputs,
                "output_grads": found,
                "input_values": list(stage.all_input_nodes),
                "outputs_with_grads_idxs": [i for i, gradient in enumerate(found) if gradient is not None],
                "stage_info": str(stage.target),
            }
            call = graph.call_function(stage_backward, kwargs=arguments)
            for place, value in enumerate(stage.all_input_nodes):
                gradient = graph.call_function(operator.getitem, (call, place))
                if value in gradients:
                    gradient = graph.call_function(null_coalesce_accumulate, (gradients[value], gradient))
                gradients[value] = gradient
        graph.call_function(pass_to_inputs, (inputs, [gradients[value] for value in inputs]))


def _results(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node | None, ...]]:
    """For each stage that returns a tuple, its `getitem` nodes in order; None for elements without one."""
    picked: dict[fx.Node, dict[int, fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is operator.getitem:
            picked.setdefault(node.args[0], {})[node.args[1]] = node
    return {stage: tuple(of.get(i) for i in range(max(of) + 1)) for stage, of in picked.items()}


def _with_gradients(values: Any, gradients: Any) -> list[tuple[Any, Any]]:
    """The tensors (or gradient edges) of a nested value that require a gradient, each with its gradient or None."""
    if isinstance(values, GradientEdge):
        return [(values, gradients)]
    if isinstance(values, torch.Tensor):
        return [(values, gradients)] if values.requires_grad else []
    children = pytree_children(values) or []
    given = [None] * len(children) if gradients is None else pytree_children(gradients)
    assert given is not None, f"{gradients!r} is not a gradient of {type(values).__name__}"
    return [pair for value, gradient in zip(children, given, strict=True) for pair in _with_gradients(value, gradient)]


def _take_gradient(value: Any) -> Any:
    """The gradient that a stage's backward accumulated at an input; it is removed there."""
    if not isinstance(value, torch.Tensor) or not (value.is_leaf or value.retains_grad):
        return None
    gradient, value.grad = value.grad, None
    return gradient


def run_by_pipe_only(*args: Any, **kwargs: Any) -> NoReturn:
    """The forward of a graph of stages with a backward, which is valid only in a `DetachExecutor`."""
    raise RuntimeError("To run pipeline locally, invoke the Pipe object directly, not `split_gm`")


class DetachExecutor(fx.Interpreter):
    """Runs `pipe.split_gm` with the inputs of each stage detached: autograd ends at the stage.

    Gradients flow back only through the `stage_backward` nodes that `loss=` of `pipeline` inserts.
    """

    def __init__(self, module: fx.GraphModule, garbage_collect_values: bool = True) -> None:
        super().__init__(module, garbage_collect_values)
        self.value_remap: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id: a value, and its detached alias. Holding the value keeps its id unique."""

    def run(self, *args: Any, initial_env: dict[fx.Node, Any] | None = None, **options: Any) -> Any:
        """Run the graph with these arguments."""
        self.value_remap = {}
        try:
            return super().run(*args, initial_env=initial_env, **options)
        finally:
            self.value_remap = {}

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a stage on detached values."""
        args, kwargs = pytree.tree_map(self._detached, (args, kwargs))
        try:
            return super().call_module(target, args, kwargs)
        except RuntimeError as error:
            if "in-place" in str(error):
                error.add_note(f"{target} must not write its inputs; stages of pipeline() write copies of them")
            raise

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run another node; the backward of a stage is with respect to its detached inputs."""
        if target is stage_backward:
            inputs = pytree.tree_map(self._alias_of, list(kwargs["input_values"]))
            if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(kwargs["output_grads"])):
                return tuple(None for _ in inputs)  # no output of this stage has a gradient
            kwargs = {**kwargs, "input_values": inputs}
        return super().call_function(target, args, kwargs)

    def _detached(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        if id(value) not in self.value_remap:
            self.value_remap[id(value)] = (value, value.detach().requires_grad_(True))
        return self.value_remap[id(value)][1]

    def _alias_of(self, value: Any) -> Any:
        return self.value_remap[id(value)][1] if id(value) in self.value_remap else value


NAME = "loss"
"""The name of the result that is the loss by default."""


class LossWrapper(torch.nn.Module):
    """A model with its loss function. Subclasses connect them in `forward`:

    >>> class MyModelWrapper(LossWrapper):
    >>>     def forward(self, x, targets):
    >>>         return self.loss_fn(self.module(x), targets)
    """

    def __init__(self, module: torch.nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """To be overridden by a subclass."""
        raise NotImplementedError(
            "This instance of LossWrapper does not have an overridden forward(). Please implement forward() to "
            "specify the arguments, connection between the module and loss, and loss output value."
        )


class TrivialLossWrapper(LossWrapper):
    """A model with one input; returns the loss of its result and the targets."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """The loss."""
        return self.loss_fn(self.module(x), targets)


@dataclass(frozen=True)
class Result:
    """A leaf of the results that the model computes."""

    value: Any


def default_spec(module: torch.nn.Module, results: Any) -> Any:
    """The default spec of the loss: the only result of a loss wrapper, or a result named "loss"."""
    if isinstance(module, LossWrapper) and isinstance(results, Result):
        return True
    if NAME in named_parts(results) and isinstance(named_parts(results)[NAME], Result):
        return NAME
    return None


def find_loss(results: Any, spec: Any) -> Any:
    """The value of the one result that a spec marks. `results` has a `Result` for each value."""
    if isinstance(spec, str):
        spec = _spec_of_name(results, spec)
    found = _marked(results, spec, results, spec, "")
    if len(found) != 1:
        said = "marks nothing" if not found else f"marks {len(found)} values"
        raise _error(f"the loss spec {spec!r} {said} instead of one", results)
    return found[0].value


def named_parts(results: Any) -> dict[str, Any]:
    """The results that have a name: keys of a dictionary, fields of a named tuple or dataclass."""
    if isinstance(results, Mapping):
        return {key: value for key, value in results.items() if isinstance(key, str)}
    if hasattr(results, "_fields"):
        return {name: getattr(results, name) for name in results._fields}
    if is_dataclass(results) and not isinstance(results, Result | type):
        return {field.name: getattr(results, field.name) for field in fields(results)}
    return {}


def _spec_of_name(results: Any, name: str) -> Any:
    parts = named_parts(results)
    if name not in parts:
        named = f"the names are {', '.join(map(repr, parts))}" if parts else "they have no names"
        raise _error(f"no result is named {name!r}: {named}", results)
    return {key: key == name for key in parts}


def _marked(part: Any, spec: Any, results: Any, whole: Any, at: str) -> list[Result]:
    """The results that a spec marks. `results` and `whole` are for the message."""
    where = f"result{at}"
    if spec is False or spec is None:
        return []
    if spec is True:
        if not isinstance(part, Result):
            kind = "several values" if isinstance(part, Mapping | tuple | list) or named_parts(part) else repr(part)
            raise _error(f"the loss spec {whole!r} marks {where}, which is {kind} and not a single value", results)
        return [part]
    if isinstance(spec, Mapping):
        parts = named_parts(part)
        if set(parts) != set(spec):
            raise _error(f"the keys of the loss spec {whole!r} are not those of {where}", results)
        return [each for key in spec for each in _marked(parts[key], spec[key], results, whole, f"{at}[{key!r}]")]
    if isinstance(spec, Sequence):
        if not isinstance(part, tuple | list):
            raise _error(f"the loss spec {whole!r} has a {type(spec).__name__} where {where} is not one", results)
        if len(part) != len(spec):
            raise _error(f"the loss spec {whole!r} has {len(spec)} elements and {where} has {len(part)}", results)
        pairs = enumerate(zip(part, spec, strict=True))
        return [each for i, (p, s) in pairs for each in _marked(p, s, results, whole, f"{at}[{i}]")]
    raise _error(f"{spec!r} is not a loss spec", results)


def bad_loss(name: str, why: str, results: Any) -> PipelineLossError:
    """The error for a value at which no backward can start."""
    return PipelineLossError(
        f"{name} is marked as the loss, and {why}", fix=f"mark a scalar that requires a gradient: {_shown(results)}"
    )


def _error(what: str, results: Any) -> PipelineLossError:
    return PipelineLossError(
        f"{what}.", fix=f"write a spec with the structure of the results and True at the loss: {_shown(results)}"
    )


def _shown(results: Any) -> str:
    """A valid spec for these results, with True at the one named "loss" or at the first."""
    wanted = named_parts(results).get(NAME)
    return repr(_example(results, wanted if isinstance(wanted, Result) else _first(results)))


def _example(part: Any, wanted: Result | None) -> Any:
    parts = named_parts(part)
    if parts:
        return {key: _example(value, wanted) for key, value in parts.items()}
    if isinstance(part, tuple | list):
        return type(part)(_example(value, wanted) for value in part)
    return part is wanted


def _first(part: Any) -> Result | None:
    """The first value that the model computes."""
    if isinstance(part, Result):
        return part
    parts = list(named_parts(part).values()) or (part if isinstance(part, tuple | list) else ())
    return next((found for found in map(_first, parts) if found is not None), None)
