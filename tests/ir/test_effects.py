from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from wholestep.ir.effects import is_collective, is_data_dependent, is_wait, returns_tensors, shared_inputs, writes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def call(target: object, *args: object, **kwargs: object) -> fx.Node:
    return fx.Graph().call_function(target, args, kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", [aten.add_.Tensor, aten.copy_.default, aten.add.out, aten._foreach_add_.Scalar])
def test_operators_that_say_so_write(op: object) -> None:
    assert writes(call(op, 1, 2))


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.view.default, aten._foreach_add.Scalar, operator.add, max])
def test_functional_operators_do_not_write(op: object) -> None:
    assert not writes(call(op, 1, 2))


def test_batch_norm_writes_its_statistics_when_training_although_its_schema_does_not_say_so() -> None:
    op = aten.native_batch_norm.default
    graph = fx.Graph()
    x, mean, var = (graph.placeholder(name) for name in ("x", "mean", "var"))
    assert writes(graph.call_function(op, (x, None, None, mean, var, True, 0.1, 1e-5)))
    assert not writes(graph.call_function(op, (x, None, None, mean, var, False, 0.1, 1e-5)))
    assert not writes(graph.call_function(op, (x, None, None, None, None, True, 0.1, 1e-5)))


def test_views_share_memory_with_what_they_show() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for op in (aten.t.default, aten.detach.default, aten.split.Tensor, aten._unsafe_view.default, operator.getitem):
        assert shared_inputs(graph.call_function(op, (x, 1))) == [x]
    assert shared_inputs(graph.call_function(aten.view.default, (), {"self": x, "size": [1]})) == [x]
    for op in (aten.add.Tensor, aten.clone.default, aten.cat.default, max):
        assert shared_inputs(graph.call_function(op, (x, y))) == []


def test_collectives_and_waits_are_known_by_their_target() -> None:
    assert is_collective(c10d.all_reduce.default)
    assert is_collective(c10d.all_gather_into_tensor_coalesced.default)
    assert not is_collective(c10d.wait_tensor.default)
    assert is_wait(c10d.wait_tensor.default)
    assert not is_wait(c10d.all_reduce.default)
    assert not is_collective(aten.add.Tensor)
    assert not is_collective("all_reduce")


def test_what_depends_on_data_is_known() -> None:
    assert is_data_dependent(aten._local_scalar_dense.default)
    assert is_data_dependent(aten.nonzero.default)
    assert not is_data_dependent(aten.add.Tensor)


def test_results_that_are_tensors_are_known() -> None:
    assert returns_tensors(aten.split.Tensor)
    assert not returns_tensors(aten.sym_size.int)
    assert not returns_tensors(aten._assert_async.msg)
