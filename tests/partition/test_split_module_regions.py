"""Autocast and grad mode: each child enters what its nodes need and exits it."""

from __future__ import annotations

from itertools import accumulate, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from partition.splitting import assert_like_torchs, by_name, call_order, children, tensors, torchs
from wholestep.errors import SplitError
from wholestep.partition import split_module

ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
SET_GRAD = torch._C._set_grad_enabled


def module(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(nn.Module(), graph)


def enter(graph: fx.Graph, dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> fx.Node:
    return graph.call_function(ENTER, ("cpu", dtype, enabled, None))


def autocast_graph() -> fx.GraphModule:
    """mm in float32, two in bfloat16, one in float16 inside of it, one in float32."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.mm, (x, x))
    outer = enter(graph)
    b = graph.call_function(torch.mm, (x, x))
    inner = enter(graph, enabled=False)
    c = graph.call_function(torch.mm, (x, x))
    graph.call_function(EXIT, (inner,))
    d = graph.call_function(torch.mm, (x, x))
    graph.call_function(EXIT, (outer,))
    e = graph.call_function(torch.mm, (x, x))
    graph.output((a, b, c, d, e))
    return module(graph)


def numbered(gm: fx.GraphModule, numbers: list[int]):
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call")]
    assert len(nodes) == len(numbers)
    return dict(zip(nodes, numbers, strict=True)).__getitem__


def dtypes(results) -> list[torch.dtype]:
    return [result.dtype for result in results]


EXPECTED = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]


def test_increasing_partition_numbers_give_the_children_of_torch():
    gm = autocast_graph()
    (x,) = tensors(1, 3, 3)
    for cuts in product((0, 1), repeat=8):
        callback = numbered(gm, list(accumulate((0, *cuts))))
        split = split_module(gm, None, callback)
        assert_like_torchs(split, torchs(gm, callback))
        assert dtypes(split(x)) == EXPECTED
        assert not torch.is_autocast_enabled("cpu")


@given(numbers=st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_partition_numbers_need_not_increase_along_the_graph(numbers):
    gm = autocast_graph()
    split = split_module(gm, None, numbered(gm, numbers), partition_affix="pp")
    (x,) = tensors(1, 3, 3)
    assert dtypes(split(x)) == EXPECTED
    assert all(map(torch.equal, split(x), gm(x)))
    for child in children(split).values():
        child.graph.lint()
        child(*[x for node in child.graph.nodes if node.op == "placeholder"])
        assert not torch.is_autocast_enabled("cpu")


def test_autocasts_may_be_exited_in_another_order():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = enter(graph), enter(graph)
    a = graph.call_function(torch.mm, (x, x))
    graph.call_function(EXIT, (second,))
    b = graph.call_function(torch.mm, (x, x))
    graph.call_function(EXIT, (first,))
    graph.output((a, b, graph.call_function(torch.mm, (x, x))))
    gm = module(graph)
    (x,) = tensors(1, 3, 3)
    for cut in range(1, 8):
        split = split_module(gm, None, numbered(gm, [int(i >= cut) for i in range(7)]))
        assert dtypes(split(x)) == dtypes(gm(x)) == [torch.bfloat16, torch.bfloat16, torch.float32]


def grad_graph(*switches: bool) -> fx.GraphModule:
    """A product of two parameters' copies before, between and after the switches."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    results = [graph.call_function(torch.sin, (x,))]
    for switch in switches:
        graph.call_function(SET_GRAD, (switch,))
        results.append(graph.call_function(torch.sin, (x,)))
    graph.output(tuple(results))
    return module(graph)


def requires_grad(results) -> list[bool]:
    return [result.requires_grad for result in results]


@given(
    switches=st.lists(st.booleans(), min_size=1, max_size=3),
    data=st.data(),
    before=st.booleans(),
)
def test_nodes_run_in_their_grad_mode_and_the_final_one_remains(switches, data, before):
    gm = grad_graph(*switches)
    count = 2 * len(switches) + 1
    numbers = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    split = split_module(gm, None, numbered(gm, numbers))
    x = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(before):
        assert requires_grad(split(x)) == [before, *switches]
        assert torch.is_grad_enabled() is switches[-1]
    order = call_order(split)
    for name in order[:-1]:
        child = split.get_submodule(name)
        with torch.set_grad_enabled(before):
            child(*[x for node in child.graph.nodes if node.op == "placeholder"])
            assert torch.is_grad_enabled() in (before, switches[-1])


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_child_that_disables_gradients_restores_grad_mode(cut):
    gm = grad_graph(False, True)
    split = split_module(gm, None, numbered(gm, [int(i >= cut) for i in range(5)]))
    x = torch.ones(2, requires_grad=True)
    for name in call_order(split):
        child = split.get_submodule(name)
        child(*[x for node in child.graph.nodes if node.op == "placeholder"])
        assert torch.is_grad_enabled()
    assert requires_grad(split(x)) == [True, False, True]


def test_a_finished_region_is_cut_as_torch_cuts_it():
    gm = grad_graph(False, True)
    callback = numbered(gm, [0, 0, 0, 0, 1])
    assert_like_torchs(split_module(gm, None, callback), torchs(gm, callback))


def test_a_child_with_a_restored_mode_can_be_split_again():
    gm = grad_graph(False, True)
    split = split_module(gm, None, numbered(gm, [0, 0, 0, 1, 1]))
    again = split_module(split.submod_0, None, lambda node: 0)
    x = torch.ones(2, requires_grad=True)
    assert requires_grad(again(x)) == [True, False]
    assert torch.is_grad_enabled()


def test_autocast_and_grad_mode_combine():
    graph = fx.Graph()
    x = graph.placeholder("x")
    cast = enter(graph)
    graph.call_function(SET_GRAD, (False,))
    a = graph.call_function(torch.mm, (x, x))
    b = graph.call_function(torch.mm, (a, x))
    graph.call_function(SET_GRAD, (True,))
    c = graph.call_function(torch.mm, (b, x))
    graph.call_function(EXIT, (cast,))
    graph.output((a, b, c, graph.call_function(torch.mm, (x, x))))
    gm = module(graph)
    x = torch.randn(3, 3, requires_grad=True)
    for affix in (None, "stage"):
        split = split_module(gm, None, by_name(mm_1=1, mm_2=2, _set_grad_enabled_1=1), partition_affix=affix)
        assert dtypes(split(x)) == dtypes(gm(x))
        assert requires_grad(split(x)) == [False, False, True, True]


def test_an_autocast_without_exit_is_refused():
    graph = fx.Graph()
    enter(graph)
    graph.output(None)
    with pytest.raises(SplitError, match="autocast must exit"):
        split_module(module(graph), None, lambda node: 0)


def test_an_exit_of_an_autocast_that_is_not_open_is_refused():
    graph = fx.Graph()
    cast = enter(graph)
    graph.call_function(EXIT, (cast,))
    graph.call_function(EXIT, (cast,))
    graph.output(None)
    with pytest.raises(SplitError, match="_exit_autocast_1 exits an autocast that is not open"):
        split_module(module(graph), None, lambda node: 0)


def test_data_dependent_modes_that_must_be_repeated_are_refused():
    graph = fx.Graph()
    flag, x = graph.placeholder("flag"), graph.placeholder("x")
    graph.call_function(SET_GRAD, (flag,))
    graph.output((graph.call_function(torch.sin, (x,)), graph.call_function(torch.cos, (x,))))
    gm = module(graph)
    split_module(gm, None, lambda node: 0)
    with pytest.raises(SplitError, match="sets grad mode from a value of the graph"):
        split_module(gm, None, by_name(cos=1))
    graph = fx.Graph()
    graph.call_function(ENTER, ("cpu", None, graph.placeholder("flag"), None))
    graph.output(None)
    with pytest.raises(SplitError, match="enters an autocast whose settings are values"):
        split_module(module(graph), None, lambda node: 0)
