from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from wholestep.ir.effects import written_positions
from wholestep.ir.graph_functions import (
    SIDE_EFFECTS,
    call_on_copies,
    copy_with_strides,
    get_rng_state,
    manual_seed,
    returns_written,
    set_rng_state,
    split_results,
)

aten = torch.ops.aten


@pytest.fixture(scope="module")
def mylib() -> Iterator[Any]:
    library = torch.library.Library("wholestep_test_mutable", "DEF")
    library.define("update_(Tensor(a!) p, Tensor g, float lr) -> ()")
    library.define("push_(Tensor(a!)[] ps, Tensor(b!)? extra, Tensor g) -> (Tensor, Tensor[])")
    library.define("each_(Tensor(a!)[] ps) -> Tensor(a!)[]")
    library.define("bump_(Tensor(a!) p) -> (Tensor(a!), int)")

    def update_(p: Tensor, g: Tensor, lr: float) -> None:
        p.sub_(g, alpha=lr)

    def push_(ps: list[Tensor], extra: Tensor | None, g: Tensor) -> tuple[Tensor, list[Tensor]]:
        for p in ps:
            p.add_(g)
        if extra is not None:
            extra.mul_(2)
        return g.sum(), [g + 1, g + 2]

    def bump_(p: Tensor) -> tuple[Tensor, int]:
        return p.add_(1), 7

    def each_(ps: list[Tensor]) -> list[Tensor]:
        return [p.add_(1) for p in ps]

    library.impl("each_", each_, "CompositeExplicitAutograd")
    library.impl("update_", update_, "CompositeExplicitAutograd")
    library.impl("push_", push_, "CompositeExplicitAutograd")
    library.impl("bump_", bump_, "CompositeExplicitAutograd")
    yield torch.ops.wholestep_test_mutable
    del library  # the operators live as long as their library


def test_the_arguments_stay_and_the_result_is_what_they_would_have_become(mylib: Any) -> None:
    p, g = torch.ones(3), torch.arange(3.0)
    (new,) = call_on_copies(mylib.update_.default, (0,), p, g, 0.5)
    assert torch.equal(p, torch.ones(3))
    assert torch.equal(new, 1 - 0.5 * g)


def test_results_come_before_new_values_and_lists_are_flat(mylib: Any) -> None:
    a, b, g = torch.zeros(2), torch.ones(2), torch.tensor([1.0, 2.0])
    extra = torch.full((2,), 3.0)
    op = mylib.push_.default
    flat = call_on_copies(op, (0, 1), [a, b], extra, g)
    assert [t.tolist() for t in flat] == [3.0, [2.0, 3.0], [3.0, 4.0], [1.0, 2.0], [2.0, 3.0], [6.0, 6.0]]
    own, new = split_results(op, (0, 1), ([a, b], extra, g), {}, flat)
    assert (len(own), len(new)) == (3, 3)


def test_a_mutated_argument_that_is_none_has_no_value(mylib: Any) -> None:
    g = torch.ones(2)
    op = mylib.push_.default
    flat = call_on_copies(op, (0, 1), [torch.zeros(2)], None, g)
    assert len(flat) == 4
    assert split_results(op, (0, 1), ([None], None, g), {}, flat[:3])[1] == ()


def test_a_result_that_is_the_written_argument_is_not_listed_twice(mylib: Any) -> None:
    flat = call_on_copies(mylib.bump_.default, (0,), torch.zeros(2))
    assert flat[0] == 7
    assert torch.equal(flat[1], torch.ones(2))
    assert returns_written(mylib.bump_.default, (0,)) == (True, False)


def test_a_list_of_results_that_are_the_written_arguments_is_not_listed_twice(mylib: Any) -> None:
    flat = call_on_copies(mylib.each_.default, (0,), [torch.zeros(1), torch.ones(1)])
    assert [t.item() for t in flat] == [1.0, 2.0]


def test_keyword_arguments_are_copied_too() -> None:
    out = torch.zeros(2)
    op = aten.add.out
    assert written_positions(op) == (3,)
    (new,) = call_on_copies(op, (3,), torch.ones(2), torch.ones(2), out=out)
    assert torch.equal(new, torch.full((2,), 2.0))
    assert torch.equal(out, torch.zeros(2))


def test_one_tensor_given_twice_stays_one_tensor() -> None:
    p = torch.zeros(2)
    new = call_on_copies(aten._foreach_add_.Scalar, (0,), [p, p], 1.0)
    assert [t.tolist() for t in new] == [[2.0, 2.0], [2.0, 2.0]]


def test_it_runs_as_a_node_of_a_graph(mylib: Any) -> None:
    graph = fx.Graph()
    p, g = graph.placeholder("p"), graph.placeholder("g")
    new = graph.call_function(call_on_copies, (mylib.update_.default, (0,), p, g, 2.0))
    graph.output((graph.call_function(operator.getitem, (new, 0)),))
    assert torch.equal(fx.GraphModule({}, graph)(torch.zeros(2), torch.ones(2))[0], torch.full((2,), -2.0))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.arange(3.0)[1:].expand(4, 2),
        torch.arange(6.0)[::2],
        torch.zeros(0, 3),
        torch.tensor(1.0),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
)
def test_a_copy_has_the_values_and_strides_of_the_original(tensor: Tensor) -> None:
    copy = copy_with_strides(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or tensor.numel() == 0


def test_a_state_that_is_put_back_draws_the_same_numbers_again() -> None:
    state = get_rng_state("cpu")
    first = torch.rand(3)
    set_rng_state(state, "cpu")
    assert torch.equal(torch.rand(3), first)
    assert state.dtype == torch.uint8
    assert state.device.type == "cpu"


def test_manual_seed_is_torchs() -> None:
    manual_seed(5)
    ours = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), ours)


def test_a_graph_that_calls_them_replays_and_dead_code_elimination_keeps_them() -> None:
    graph = fx.Graph()
    graph.call_function(manual_seed, (3,))
    state = graph.call_function(get_rng_state, ("cpu",))
    first = graph.call_function(torch.ops.aten.rand.default, ([4],))
    graph.call_function(set_rng_state, (state, "cpu"))
    second = graph.call_function(torch.ops.aten.rand.default, ([4],))
    graph.call_function(get_rng_state, ("cpu",))
    graph.output((first, second))
    graph.eliminate_dead_code()
    assert [node.target for node in graph.nodes if node.target in SIDE_EFFECTS] == [
        manual_seed,
        get_rng_state,
        set_rng_state,
        get_rng_state,
    ]
    a, b = fx.GraphModule({}, graph)()
    torch.manual_seed(3)
    assert torch.equal(a, torch.rand(4))
    assert torch.equal(a, b)
