"""Elements of lists belong together where data flows between them, and only there."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from torch import fx

from ir.step_graphs import aten
from wholestep.passes.list_lanes import Lanes, element_of, is_list_op, width


class Lists:
    """Two parameters with step counts, updated by list operators."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.p, self.s, self.w = ([self.graph.placeholder(f"{name}{i}") for i in range(2)] for name in "psw")
        self.add = self.call(aten._foreach_add.Scalar, self.s, 1)
        self.steps = [self.call(operator.getitem, self.add, i) for i in range(2)]

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def lanes(self, op: fx.Node) -> list[bool]:
        """Whether each element of an operator is in the lane of the step count with its index."""
        self.graph.output(())
        lanes = Lanes(self.graph)
        one = lanes.lane(self.add, 0) != lanes.lane(self.add, 1)
        assert one, "two lanes"
        return [lanes.lane(op, i) == lanes.lane(self.add, i) for i in range(2)]


def test_elements_that_read_each_other_are_one_lane() -> None:
    lists = Lists()
    assert lists.lanes(lists.call(aten._foreach_mul.List, lists.p, lists.steps)) == [True, True]


def test_numbers_in_between_do_not_end_a_lane() -> None:
    lists = Lists()
    numbers = [lists.call(operator.pow, 0.9, lists.call(aten._local_scalar_dense.default, s)) for s in lists.steps]
    assert lists.lanes(lists.call(aten._foreach_mul.ScalarList, lists.p, numbers)) == [True, True]


def test_what_all_read_is_of_no_lane() -> None:
    lists = Lists()
    op = lists.call(aten._foreach_mul.List, lists.p, [lists.steps[0], lists.steps[0]])
    assert lists.lanes(op) == [False, False]


def test_what_depends_on_all_is_of_no_lane() -> None:
    lists = Lists()
    norm = lists.call(aten.add.Tensor, *lists.steps)
    factors = [lists.call(aten.mul.Tensor, norm, w) for w in lists.w]
    assert lists.lanes(lists.call(aten._foreach_mul.List, lists.p, factors)) == [False, False]


def test_operators_that_share_no_lane_are_apart() -> None:
    lists = Lists()
    other = lists.call(aten._foreach_neg.default, lists.p)
    third = lists.call(aten._foreach_mul.List, lists.p, lists.steps)
    lists.graph.output(())
    assert Lanes(lists.graph).blocks() == [[lists.add, third], [other]]


def test_only_functional_operators_on_lists_are_list_operators() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert is_list_op(graph.call_function(aten._foreach_add.Scalar, ([x], 1)))
    for target, args in (
        (aten._foreach_add_.Scalar, ([x], 1)),
        (aten.add.Tensor, (x, 1)),
        (aten._fused_dropout.default, (x, 0.5)),
        (aten.cat.default, ([x],)),
    ):
        assert not is_list_op(graph.call_function(target, args))


@pytest.mark.parametrize(("index", "expected"), [(0, 0), (1, 1), (-1, 1), (slice(0, 1), None)])
def test_elements_are_found_by_index_from_both_ends(index: Any, expected: int | None) -> None:
    lists = Lists()
    found = element_of(lists.call(operator.getitem, lists.add, index))
    assert found == (None if expected is None else (lists.add, 0, expected))
    assert width(lists.add) == 2
