"""What wholestep relies on in `torch_private/autograd.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torch_private.contract_table import contracts_of
from wholestep.torch_private import autograd

of = contracts_of("autograd")


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


@of("below_autograd", "recording_again")
def nothing_is_recorded_below_autograd_until_it_records_again() -> None:
    x = leaf()
    with autograd.below_autograd():
        assert torch.is_grad_enabled()
        y = torch.ops.aten.mul.Tensor(x, 2)
        assert y.grad_fn is None
        with autograd.recording_again():
            again = x.detach().requires_grad_() * 3
            (grad,) = torch.autograd.grad(again.sum(), again.grad_fn.next_functions[0][0].variable)
        assert grad.tolist() == [3, 3]
        assert torch.ops.aten.mul.Tensor(x, 2).grad_fn is None
    assert (x * 2).grad_fn is not None


@of("gradient_leaves")
def a_backward_accumulates_into_the_variables_of_its_leaves() -> None:
    x, y = leaf(), leaf()
    loss = (x * y).sum() + x.sum()
    assert {id(each) for each in autograd.gradient_leaves([loss.grad_fn])} == {id(x), id(y)}


@of("current_autograd_node", "is_accumulating_gradient", "graph_task", "after_backward")
def a_backward_says_where_it_is() -> None:
    x, seen = leaf(), list[Any]()
    y = x.sin()

    def at_result(grad: Tensor) -> None:
        node = autograd.current_autograd_node()
        seen.append((node.name(), autograd.is_accumulating_gradient(), autograd.graph_task() >= 0))
        autograd.after_backward(lambda: seen.append("over"))

    y.register_hook(at_result)
    x.register_post_accumulate_grad_hook(lambda t: seen.append(autograd.is_accumulating_gradient()))
    y.sum().backward()
    assert seen == [("SinBackward0", False, True), True, "over"]
    assert autograd.current_autograd_node() is None
    assert autograd.graph_task() == -1


@of("autograd_sequence_number", "node_sequence_number")
def nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    x = leaf()
    before = autograd.autograd_sequence_number()
    first = x.sin()
    second = first.cos()
    assert autograd.node_sequence_number(first.grad_fn) == before
    assert autograd.node_sequence_number(second.grad_fn) == before + 1
    assert autograd.autograd_sequence_number() == before + 2


@of("error_in_backward")
def a_delayed_error_is_the_identity_whose_backward_raises() -> None:
    x = leaf()
    y = autograd.error_in_backward("no backward here")(x)
    assert torch.equal(y, x)
    with pytest.raises(RuntimeError, match="no backward here"):
        y.sum().backward()


@of("HOOK_ATTRIBUTES", "tensor_hooks", "hook_dicts", "post_accumulate_hooks")
def a_tensor_keeps_its_hooks_by_kind() -> None:
    x = leaf()
    assert [read(x) for read in autograd.HOOK_ATTRIBUTES] == [None, None]
    hook, after = lambda grad: None, lambda t: None
    x.register_hook(hook)
    x.register_post_accumulate_grad_hook(after)
    assert autograd.tensor_hooks(x) == [hook, after]
    assert autograd.post_accumulate_hooks(x) == [after]
    assert [list(hooks.values()) for hooks in autograd.hook_dicts(x)] == [[hook], [after]]
    assert [list(read(x).values()) for read in autograd.HOOK_ATTRIBUTES] == [[hook], [after]]


@of("SET_GRAD_ENABLED", "ENTER_AUTOCAST", "EXIT_AUTOCAST", "MODE_SWITCHES")
def graphs_switch_modes_by_these_functions() -> None:
    autograd.SET_GRAD_ENABLED(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        autograd.SET_GRAD_ENABLED(True)
    block = autograd.ENTER_AUTOCAST("cpu", torch.bfloat16, True, True)
    try:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    finally:
        autograd.EXIT_AUTOCAST(block)
    assert not torch.is_autocast_enabled("cpu")


@of("cpu_bytes_at_most", "is_profiling")
def the_legacy_profiler_counts_bytes_of_the_cpu() -> None:
    def work() -> Tensor:
        assert autograd.is_profiling()
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        return second + 1

    result, most = autograd.cpu_bytes_at_most(work)
    assert result.shape == (500,)
    assert most == 6000
    assert not autograd.is_profiling()


@of("is_transformed")
def tensors_of_transforms_are_seen() -> None:
    seen = []

    def inside(x: Tensor) -> Tensor:
        seen.append(autograd.is_transformed(x))
        return x * 2

    torch.vmap(inside)(torch.ones(2, 3))
    assert seen == [True]
    assert not autograd.is_transformed(torch.ones(2))


@of("ones_at")
def an_edge_knows_the_metadata_of_its_gradient() -> None:
    edge = get_gradient_edge(torch.zeros(2, 3, dtype=torch.float64, requires_grad=True).sum(0))
    assert torch.equal(autograd.ones_at(edge), torch.ones(3, dtype=torch.float64))


@of("identity_named")
def a_python_node_has_the_name_that_it_is_given() -> None:
    y = autograd.identity_named("OnlyHereBackward7")(leaf() * 1)
    assert "OnlyHereBackward7" in repr(y)
    assert type(y.grad_fn).__name__ == "OnlyHereBackward7"
