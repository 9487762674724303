from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from ir.step_graphs import aten, dynamic_step, find, sgd_step, with_everything
from wholestep.errors import VerifyError
from wholestep.ir import StepGraph, verify


def _dtype(step: StepGraph) -> None:
    node = find(step, aten.mm.default)
    node.meta["val"] = node.meta["val"].to(torch.float64)


def _shape(step: StepGraph) -> None:
    node = find(step, aten.mm.default)
    node.meta["val"] = node.meta["val"].new_empty(3, 2)


def _rank(step: StepGraph) -> None:
    node = find(step, aten.mm.default)
    node.meta["val"] = node.meta["val"].new_empty(2, 3, 1)


def _stride(step: StepGraph) -> None:
    node = find(step, aten.mm.default)
    node.meta["val"] = node.meta["val"].new_empty(3, 2).t()


def _device(step: StepGraph) -> None:
    node = find(step, aten.mm.default)
    node.meta["val"] = torch.empty(2, 3, device="meta")


def _number_of_results(step: StepGraph) -> None:
    node = find(step, aten.mm.default)
    node.meta["val"] = (node.meta["val"], node.meta["val"])


def _operand(step: StepGraph) -> None:
    node = find(step, aten.mm.default)
    node.args = (node.args[1], node.args[1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_dtype, "dtype torch.float32, its `val` says torch.float64"),
        (_shape, r"shape \[2, 3\], its `val` says \[3, 2\]"),
        (_rank, "shape"),
        (_stride, "stride"),
        (_device, "device"),
        (_number_of_results, "its `val` says"),
        (_operand, "does not accept its arguments"),
    ],
)
def test_a_recorded_value_that_is_not_what_the_operator_gives_is_found(
    damage: Callable[[StepGraph], None], message: str
) -> None:
    step = sgd_step()
    damage(step)
    verify(step, level=1)
    with pytest.raises(VerifyError, match=message) as caught:
        verify(step, level=2)
    assert "mm" in caught.value.node


def test_a_constant_is_compared_with_the_tensor_itself() -> None:
    step = with_everything()
    step.gm._tensor_constant0 = step.gm._tensor_constant0.float()
    with pytest.raises(VerifyError, match="_tensor_constant0 has dtype"):
        verify(step, level=2)


def test_symbolic_dimensions_are_compared_by_what_they_stand_for() -> None:
    step = dynamic_step()
    node = find(step, aten.cat.default)
    rows = node.meta["val"].shape[0]
    node.meta["val"] = node.meta["val"].new_empty((rows + 1, node.meta["val"].shape[1]))
    with pytest.raises(VerifyError, match="shape"):
        verify(step, level=2)


def test_checking_adds_no_guards() -> None:
    step = dynamic_step()
    env = find(step, aten.cat.default).meta["val"].shape[0].node.shape_env
    before = len(env.guards)
    verify(step, level=2)
    assert len(env.guards) == before


def test_numbers_of_a_capture_that_has_ended_are_used_by_their_hint_only() -> None:
    class Node:
        hint = None

        def is_float(self) -> bool:
            return True

        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    step = sgd_step()
    node = find(step, aten.mul.Tensor)
    with step.gm.graph.inserting_before(node):
        number = step.gm.graph.call_function(max, (1.0, 2.0))
    number.meta["val"] = torch.SymFloat(Node())
    node.args = (node.args[0], number)
    verify(step, level=2)


def test_numbers_read_from_tensors_may_be_unknown() -> None:
    step = sgd_step()
    node = find(step, aten.mul.Tensor)
    with step.gm.graph.inserting_before(node):
        item = step.gm.graph.call_function(aten._local_scalar_dense.default, (find(step, aten.mean.default),))
        number = step.gm.graph.call_function(operator.truediv, (item, 0.0))
    node.args = (node.args[0], number)
    verify(step, level=2)
    item.meta["val"] = number.meta["val"] = None
    verify(step, level=2)


@given(st.randoms(use_true_random=False))
def test_exchanging_two_arguments_of_other_shape_is_found(random: object) -> None:
    step = sgd_step()
    nodes = [n for n in step.gm.graph.nodes if n.op == "call_function" and n.target is not aten.copy_.default]
    node = random.choice(nodes)  # type: ignore[attr-defined]
    before = [n for n in step.gm.graph.nodes if n < node and n.op != "output"]
    other = random.choice(before)  # type: ignore[attr-defined]
    old = node.args[0]
    assert isinstance(old, fx.Node)
    if old.meta["val"].shape == other.meta["val"].shape:
        return
    node.args = (other, *node.args[1:])
    recorded = node.meta["val"].shape
    try:
        verify(step, level=2)
    except VerifyError:
        return
    shapes = [arg.meta["val"].shape for arg in node.all_input_nodes]
    assert node.target in (aten.sub.Tensor, aten.add.Tensor, aten.mean.default), (node.target, shapes)
    assert node.target is aten.mean.default or torch.broadcast_shapes(*shapes) == recorded
