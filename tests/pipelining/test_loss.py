"""A pipe with a loss runs its own backward: gradients are those of autograd over the whole model."""

from __future__ import annotations

import copy
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pipelining.models import CASES, make
from wholestep.errors import PipelineLossError
from wholestep.pipelining import (
    DetachExecutor,
    LossWrapper,
    MultiUseParameterConfig,
    Pipe,
    PipeSequential,
    TrivialLossWrapper,
    pipe_split,
    pipeline,
    stage_backward,
)
from wholestep.pipelining.run.microbatch_backward import stage_backward_input, stage_backward_weight
from wholestep.torch_private.fx_graphs import pytree


class WithLoss(LossWrapper):
    """Any model; its result is returned together with the loss."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The loss and the results."""
        results = self.module(*args, **kwargs)
        return {"results": results, "loss": self.loss_fn(results)}


def mean_of_squares(results: Any) -> torch.Tensor:
    values = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    return sum(value.float().square().mean() for value in values if value.requires_grad)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "sharing"),
    [
        *(
            pytest.param(name, "replicate", marks=pytest.mark.long if name in ("t5", "llama", "gpt2") else ())
            for name in CASES
        ),
        ("skip", "transmit"),
        ("gpt2", "transmit"),
    ],
)
def test_a_call_accumulates_the_gradients_of_autograd(name, sharing):
    inner, args, kwargs = make(name)
    model = WithLoss(inner, mean_of_squares)
    before = copy.deepcopy(model.state_dict())
    split = {f"module.{path}": point for path, point in (CASES[name].split or {}).items()} or None
    pipe = pipeline(model, args, kwargs, split_spec=split, multi_use_params=sharing, loss="loss")
    assert pipe.has_loss_and_backward
    assert pipe.info().has_loss_and_backward
    torch.manual_seed(3)
    wanted = model(*args, **kwargs)
    wanted["loss"].backward()
    wanted_gradients = gradients(model)
    model.zero_grad()
    model.load_state_dict(before)
    torch.manual_seed(3)
    found = pipe(*args, **kwargs)
    assert_same(found["loss"], wanted["loss"].detach())
    assert not found["loss"].requires_grad
    assert_same(gradients(model), wanted_gradients)


class Skips(nn.Module):
    """Three stages; a parameter in the first and the last; one input in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x, targets):
        first = x @ self.weight
        pipe_split()
        second = self.layer(first) + x
        pipe_split()
        out = (second + first) @ self.weight + x
        return (out - targets).square().mean(), out


@pytest.mark.parametrize("sharing", ["replicate", "transmit"])
def test_arguments_that_require_gradients_get_them(sharing):
    model, targets = Skips(), torch.randn(2, 4)
    x = torch.randn(2, 4, requires_grad=True)
    pipe = pipeline(model, (x, targets), multi_use_params=sharing, loss=(True, False))
    pipe(x, targets)
    found, found_x = gradients(model), x.grad
    model.zero_grad()
    x.grad = None
    model(x, targets)[0].backward()
    assert_same(found, gradients(model))
    assert_same(found_x, x.grad)


def test_gradients_flow_into_the_graph_of_an_argument():
    model, before, targets = Skips(), nn.Linear(4, 4), torch.randn(2, 4)
    x = torch.randn(2, 4)
    pipe = pipeline(model, (x.requires_grad_(), targets), loss=(True, False))
    pipe(before(x), targets)
    found = gradients(before)
    before.zero_grad()
    model(before(x), targets)[0].backward()
    assert_same(found, gradients(before))


def test_calls_accumulate_gradients_as_backward_does():
    model, x, targets = Skips(), torch.randn(2, 4), torch.randn(2, 4)
    pipe = pipeline(model, (x, targets), loss=[True, False])
    for _ in range(2):
        pipe(x, targets)
    found = gradients(model)
    model.zero_grad()
    (2 * model(x, targets)[0]).backward()
    assert_same(found, gradients(model))


def test_no_backward_runs_under_no_grad():
    model, x, targets = Skips(), torch.randn(2, 4), torch.randn(2, 4)
    pipe = pipeline(model, (x, targets), loss=(True, False))
    with torch.no_grad():
        assert torch.equal(pipe(x, targets)[0], model(x, targets)[0])
    assert all(gradient is None for gradient in gradients(model).values())


def test_a_result_named_loss_is_found_and_runs_in_a_detach_executor_only():
    model = WithLoss(nn.Linear(4, 2), mean_of_squares)
    x = torch.randn(3, 4)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x)

    pipe = pipeline(Plain(), (x,))
    assert (pipe.has_loss_and_backward, pipe.loss_spec) == (True, "loss")
    assert pipe(x)["loss"].requires_grad
    assert model.module.weight.grad is None
    with pytest.raises(RuntimeError, match="invoke the Pipe object directly"):
        pipe.split_gm(x)
    DetachExecutor(pipe.split_gm).run(x)
    found = gradients(model)
    model.zero_grad()
    model(x)["loss"].backward()
    assert_same(found, gradients(model))


def test_a_trivial_loss_wrapper_needs_no_spec():
    model = TrivialLossWrapper(PipeSequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), nn.MSELoss())
    x, targets = torch.randn(3, 4), torch.randn(3, 2)
    pipe = pipeline(model, (x, targets))
    assert (pipe.num_stages, pipe.loss_spec) == (3, True)
    found = pipe(x, targets)[0]
    left = gradients(model)
    model.zero_grad()
    wanted = model(x, targets)
    wanted.backward()
    assert torch.equal(found, wanted)
    assert_same(left, gradients(model))


def test_a_loss_of_an_early_stage_has_no_backward_in_later_ones():
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.first(x)
            loss = hidden.square().mean()
            pipe_split()
            return self.second(hidden), loss

    model, x = Early(), torch.randn(2, 4)
    pipeline(model, (x,), loss=(False, True))(x)
    assert model.second.weight.grad is None
    found = model.first.weight.grad.clone()
    model.zero_grad()
    model(x)[1].backward()
    assert_same(found, model.first.weight.grad)


class Drawn(nn.Module):
    """A random program: each line uses values and parameters of earlier lines or stages; some cuts between."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)])
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.lines = []
        for line in range(12):
            kind = "cut" if line == 6 else draw.choice(["weight", "layer", "add", "chunk", "detach", "cut"])
            self.lines.append((kind, draw.randrange(line + 1), draw.randrange(line + 1), draw.randrange(6)))

    def forward(self, x):
        values = [x]
        for kind, a, b, c in self.lines:
            first, second = values[a % len(values)], values[b % len(values)]
            if kind == "cut":
                pipe_split()
            elif kind == "weight":
                values.append(torch.tanh(first @ self.weights[c % 3]))
            elif kind == "layer":
                values.append(self.layers[c % 2](first))
            elif kind == "add":
                values.append(first * 0.5 + second)
            elif kind == "chunk":
                left, right = first.chunk(2, dim=-1)
                values.append(torch.cat([right, left.sin()], dim=-1))
            else:
                values.append(first.detach() * second)
        loss = (values[-1] @ self.weights[0]).square().mean() + values[len(values) // 2].mean()
        return loss, values[len(values) // 3]


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_have_the_gradients_of_autograd(seed):
    torch.manual_seed(seed)
    model, x = Drawn(seed).double(), torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    model(x)[0].backward()
    wanted, wanted_x = gradients(model), x.grad
    pipes = [
        pipeline(model, (x,), multi_use_params=("replicate", "transmit")[seed % 2], loss=(True, False)),
        Pipe.from_tracing(model, MultiUseParameterConfig.REPLICATE, output_loss_value_spec=(True, False)),
        Pipe.from_tracing(model, MultiUseParameterConfig.TRANSMIT, output_loss_value_spec=(True, False)),
    ]
    assert pipes[1].num_stages == pipes[2].num_stages > 1
    for pipe in pipes:
        model.zero_grad()
        x.grad = None
        found = pipe(x)
        assert torch.equal(found[1], model(x)[1])
        assert_same(gradients(model), wanted)
        assert_same(x.grad, wanted_x)


class Pair(NamedTuple):
    """Two results."""

    loss: Any
    out: Any


class Returns(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.form = form

    def forward(self, x):
        out = self.layer(x)
        return self.form(out.square().mean(), out)


def as_dict(loss: Any, out: Any) -> Any:
    return {"loss": loss, "out": out}


def as_tuple(loss: Any, out: Any) -> Any:
    return out, (loss, 3)


def only_loss(loss: Any, out: Any) -> Any:
    return loss


FITTING = [
    (Pair, (True, False)),
    (Pair, Pair(True, False)),
    (Pair, "loss"),
    (as_dict, {"out": False, "loss": True}),
    (as_dict, "loss"),
    (as_tuple, (False, (True, False))),
    (as_tuple, [False, [True, None]]),
    (only_loss, True),
]


def cut(model: nn.Module, spec: Any, symbolic: bool) -> Pipe:
    if symbolic:
        return Pipe.from_tracing(model, output_loss_value_spec=spec)
    return pipeline(model, (torch.randn(2, 4),), loss=spec)


@pytest.mark.parametrize(("form", "spec"), FITTING)
@pytest.mark.parametrize("symbolic", [False, True])
def test_specs_have_the_structure_of_the_results(form, spec, symbolic):
    model, x = Returns(form), torch.randn(2, 4)
    cut(model, spec, symbolic)(x)
    found = gradients(model)
    model.zero_grad()
    model.layer(x).square().mean().backward()
    assert_same(found, gradients(model))


MISFITS = [
    (as_dict, (True, False), "{'loss': True, 'out': False}"),
    (as_dict, {"loss": True}, "{'loss': True, 'out': False}"),
    (as_dict, True, "{'loss': True, 'out': False}"),
    (as_dict, "lost", "{'loss': True, 'out': False}"),
    (as_dict, {"loss": False, "out": False}, "{'loss': True, 'out': False}"),
    (as_dict, {"loss": True, "out": True}, "{'loss': True, 'out': False}"),
    (as_tuple, (True,), "(True, (False, False))"),
    (as_tuple, (False, (False, True)), "(True, (False, False))"),
    (as_tuple, {"loss": True}, "(True, (False, False))"),
    (only_loss, (True,), "True"),
    (only_loss, 3, "True"),
]


@pytest.mark.parametrize(("form", "spec", "shown"), MISFITS)
@pytest.mark.parametrize("symbolic", [False, True])
def test_an_invalid_spec_raises_with_a_valid_one(form, spec, shown, symbolic):
    with pytest.raises(PipelineLossError) as caught:
        cut(Returns(form), spec, symbolic)
    assert shown in caught.value.fix
    assert isinstance(caught.value, RuntimeError)  # PiPPy's


def test_a_loss_is_a_scalar_that_requires_a_gradient():
    with pytest.raises(PipelineLossError, match=r"shape \[2, 4\]"):
        pipeline(Returns(as_dict), (torch.randn(2, 4),), loss={"loss": False, "out": True})
    frozen = Returns(only_loss).requires_grad_(False)
    with pytest.raises(PipelineLossError, match="does not depend on a parameter"):
        pipeline(frozen, (torch.randn(2, 4),), loss=True)


def test_a_loss_wrapper_without_forward_says_what_to_implement():
    with pytest.raises(NotImplementedError, match="implement forward"):
        LossWrapper(nn.Linear(2, 2), nn.MSELoss())(1)


def test_stage_backward_ignores_outputs_without_gradient_and_accepts_pytrees():
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    output = {"a": (x * y), "b": [x.exp(), torch.tensor(2)]}
    given = stage_backward(output, {"a": torch.ones(3), "b": [None, None]}, [(x, 1), y])
    assert_same(given[0][0], y.detach())
    assert given[0][1] is None
    assert_same(given[1], x.detach())
    assert x.grad is None


def test_stage_backward_starts_at_gradient_edges_too():
    x = torch.randn(3, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(x * 3)
    (found,) = stage_backward((edge, None), (torch.ones(3), None), (x,))
    assert_same(found, torch.full((3,), 3.0))


def test_input_and_weight_backward_add_up_to_a_whole_backward():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    gradient = torch.randn(2, 4)
    of_inputs, rest = stage_backward_input([model(x)], [gradient], ["no tensor", x], model.parameters())
    assert of_inputs[0] is None
    assert all(parameter.grad is None for parameter in model.parameters())
    stage_backward_weight(model.parameters(), rest)
    found, found_x = gradients(model), x.grad
    assert_same(of_inputs[1], found_x)
    model.zero_grad()
    x.grad = None
    model(x).backward(gradient)
    assert_same(found, gradients(model))
    assert_same(found_x, x.grad)
