"""Input and weight backward together give the gradients of one backward, for any graph."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from wholestep.pipelining.run.microbatch_backward import input_backward, plan_groups, weight_backward


def same_as_whole(outputs: list[torch.Tensor], inputs: list[torch.Tensor], parameters: list[torch.Tensor]) -> int:
    """Compare; returns how many groups there were."""
    roots = [output for output in outputs if output.requires_grad]
    gradients = [torch.randn_like(root) for root in roots]
    expected = torch.autograd.grad(roots, [*inputs, *parameters], gradients, retain_graph=True, allow_unused=True)
    found, groups = input_backward(roots, gradients, inputs, parameters)
    by_parameter = {id(parameter): gradient for parameter, gradient in weight_backward(groups)}
    for value, gradient in zip(found, expected[: len(inputs)], strict=True):
        torch.testing.assert_close(value, gradient)
    for parameter, gradient in zip(parameters, expected[len(inputs) :], strict=True):
        torch.testing.assert_close(by_parameter.get(id(parameter)), gradient)
    return len(groups)


def test_consecutive_layers_are_separate_groups():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(5, 3, requires_grad=True)
    assert same_as_whole([model(x)], [x], list(model.parameters())) == 3


def test_a_weight_that_is_used_at_two_depths_is_counted_once_each():
    linear = nn.Linear(3, 3)
    x = torch.randn(5, 3, requires_grad=True)
    assert same_as_whole([linear(torch.tanh(linear(x)))], [x], list(linear.parameters())) == 1


def test_unreached_parameters_view_roots_and_operators_with_several_results():
    x = torch.randn(4, 6, requires_grad=True)
    w, alone, both = (torch.randn(6, requires_grad=True) for _ in range(3))
    a, b, c = (x * w).split(2, dim=1)
    scaled = both.exp()
    outputs = [(a * b).t(), c.sum() * scaled.sum(), (alone * scaled).view(2, 3), alone.cos()]
    same_as_whole(outputs, [x], [w, alone, both, torch.randn(1, requires_grad=True)])


def test_a_checkpointed_region_is_recomputed():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    x = torch.randn(5, 3, requires_grad=True)
    result = checkpoint(model, torch.tanh(x), use_reentrant=False)
    same_as_whole([result], [x], list(model.parameters()))


@given(st.integers(0, 10**6))
def test_random_graphs(seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(0, count, (1,), generator=generator))

    inputs = [torch.randn(2, 2, requires_grad=True) for _ in range(1 + pick(2))]
    parameters = [torch.randn(2, 2, requires_grad=True) for _ in range(1 + pick(3))]
    values = [*inputs, *parameters]
    for _ in range(1 + pick(10)):
        one, other = values[pick(len(values))], values[pick(len(values))]
        made = [
            one @ other,
            one * other.sin(),
            torch.stack([one, other]).sum(0),
            one.t(),
            one.unbind(0)[pick(2)] + other,
        ]
        values.append(made[pick(len(made))])
    outputs = [value for value in values[-3:] if value.grad_fn is not None]
    if outputs:
        same_as_whole(outputs, inputs, parameters)


@pytest.mark.parametrize("trained", [True, False])
def test_frozen_parameters_get_no_gradient(trained):
    linear = nn.Linear(3, 3).requires_grad_(trained)
    x = torch.randn(2, 3, requires_grad=True)
    assert len(plan_groups([linear(x)], [torch.ones(2, 3)], [x], list(linear.parameters()))) == trained
