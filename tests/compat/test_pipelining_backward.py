"""What torch's tests of `_backward` and `microbatch` ask for, with the prefix of the imports changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from wholestep.compat.pipelining import microbatch
from wholestep.compat.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from wholestep.compat.pipelining.microbatch import (
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)

WIDTH, BATCH = 8, 6


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def reference(module: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    other, inputs = copy.deepcopy(module), x.detach().clone().requires_grad_(True)
    nn.functional.mse_loss(other(inputs), target, reduction="sum").backward()
    assert inputs.grad is not None
    return inputs.grad, {name: p.grad for name, p in other.named_parameters() if p.grad is not None}


@pytest.fixture
def case() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return TwoLayers(), torch.randn(BATCH, WIDTH, requires_grad=True), torch.randn(BATCH, WIDTH)


def test_the_backward_of_a_stage_gives_the_gradients_of_autograd(case: Any) -> None:
    module, x, target = case
    of_input, of_weights = reference(*case)
    loss = nn.functional.mse_loss(module(x), target, reduction="sum")
    (found,) = stage_backward(stage_output=loss, output_grads=None, input_values=(x,))
    torch.testing.assert_close(found, of_input)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, of_weights[name])


def test_the_first_half_leaves_the_weights_and_the_second_adds_to_them(case: Any) -> None:
    module, x, target = case
    of_input, of_weights = reference(*case)
    for times in (1, 2):
        x.grad = None
        loss = nn.functional.mse_loss(module(x), target, reduction="sum")
        found, groups = stage_backward_input(
            stage_outputs_or_loss=[loss], output_grads=None, input_values=[x], weights=module.parameters()
        )
        torch.testing.assert_close(found[0], of_input)
        torch.testing.assert_close(x.grad, of_input)
        if times == 1:
            assert all(parameter.grad is None for parameter in module.parameters())
        gradients = stage_backward_weight(module.parameters(), groups)
        for (name, parameter), gradient in zip(module.named_parameters(), gradients, strict=True):
            assert gradient is parameter.grad
            torch.testing.assert_close(parameter.grad, times * of_weights[name])


def test_both_halves_begin_and_end_at_gradient_edges(case: Any) -> None:
    module, x, target = case
    of_input, of_weights = reference(*case)
    edge = get_gradient_edge(nn.functional.mse_loss(module(x), target, reduction="sum"))
    found, groups = stage_backward_input([edge], None, [get_gradient_edge(x)], module.parameters())
    torch.testing.assert_close(found[0], of_input)
    assert x.grad is None  # an edge has no `grad`
    stage_backward_weight(module.parameters(), groups)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, of_weights[name])


def test_a_gradient_comes_in_at_an_edge_of_an_output(case: Any) -> None:
    module, x, _ = case
    coming = torch.randn(BATCH, WIDTH)
    (wanted,) = torch.autograd.grad(module(x), x, coming)
    output = module(x)
    found, _ = stage_backward_input([get_gradient_edge(output)], [coming], [x], module.parameters())
    torch.testing.assert_close(found[0], wanted)
    torch.testing.assert_close(x.grad, wanted)


def test_outputs_without_a_gradient_take_no_part(case: Any) -> None:
    module, x, _ = case
    found, groups = stage_backward_input([torch.ones(2)], None, [x, "text"], module.parameters())
    assert found == (None, None)
    assert groups == []


def test_batches_are_cut_by_specs_and_merged_again() -> None:
    x, mask, shift = torch.arange(12.0).view(6, 2), torch.arange(6).view(1, 6), torch.tensor(3.0)
    positional, named = split_args_kwargs_into_chunks(
        (x, shift),
        {"mask": mask, "flag": True},
        3,
        (TensorChunkSpec(0), Replicate),
        {"mask": TensorChunkSpec(1), "flag": Replicate()},
    )
    assert [chunk[0].shape for chunk in positional] == [(2, 2)] * 3
    assert all(chunk[1] is shift for chunk in positional)
    assert [chunk["mask"].shape for chunk in named] == [(1, 2)] * 3
    assert all(chunk["flag"] is True for chunk in named)
    assert torch.equal(merge_chunks([chunk[0] for chunk in positional], TensorChunkSpec(0)), x)


def test_replicate_stands_for_a_whole_nested_argument() -> None:
    state = {"a": torch.ones(1, 2), "b": [torch.zeros(3)]}
    positional, _ = split_args_kwargs_into_chunks((torch.ones(4, 1), state), None, 2, (TensorChunkSpec(0), Replicate))
    assert all(chunk[1]["b"][0] is state["b"][0] for chunk in positional)


@pytest.fixture
def masked() -> Iterator[None]:
    microbatch._debug_mask_minibatches = True
    yield
    microbatch._debug_mask_minibatches = False


def test_masked_minibatches_have_all_rows_with_zeros_for_those_of_the_others(masked: None) -> None:
    assert microbatch._debug_mask_minibatches is True
    x = torch.randn(4, 3)
    chunks, _ = split_args_kwargs_into_chunks((x,), {}, 2)
    assert [chunk[0].shape for chunk in chunks] == [(4, 3)] * 2
    assert torch.equal(chunks[0][0][:2], x[:2])
    assert not chunks[0][0][2:].any()
    assert torch.equal(chunks[0][0] + chunks[1][0], x)


def test_the_switch_for_masks_is_off_otherwise() -> None:
    assert microbatch._debug_mask_minibatches is False
    chunks, _ = split_args_kwargs_into_chunks((torch.randn(4, 3),), {}, 2)
    assert chunks[0][0].shape == (2, 3)
