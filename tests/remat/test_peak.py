"""Storages and the peak of a graph, on graphs whose peaks are known."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.ir.effects import find_storages
from wholestep.ir.io.node_values import tensor_bytes
from wholestep.remat.measure import bytes_at_most, held_bytes, timeline
from wholestep.runtime.python_program import program


def graph_of(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def check(function, *inputs):
    gm = graph_of(function, *inputs)
    found = timeline(gm.graph)
    run = program(gm)
    with torch.no_grad():
        run(*inputs)
        _, most = bytes_at_most(lambda: run(*inputs), torch.device("cpu"))
    assert 0 <= most - (found.peak - found.held) <= 64  # single numbers that operators wrap
    assert found.held == held_bytes(list(inputs), torch.device("cpu"))
    return found


def test_values_are_freed_after_their_last_use():
    found = check(lambda x: ((x + 1) * 2).exp().relu(), torch.ones(1000))
    assert found.peak == 4000 + 2 * 4000


def test_views_keep_their_base_alive():
    def function(x):
        part = (x + 1).view(10, 100)[3]
        other = x * 2
        return part + other.view(10, 100)[0]

    assert check(function, torch.ones(1000)).peak == 3 * 4000 + 400


def test_elements_of_a_tuple_are_freed_one_by_one():
    def function(x):
        spread, mean = torch.var_mean(x.view(10, 100), dim=0)
        return spread * 2, mean.sum()

    assert check(function, torch.ones(1000)).peak == 4000 + 3 * 400


def test_updates_in_place_take_no_memory():
    def function(x):
        a = x + 1
        a.mul_(2)
        a.add_(x)
        return a

    assert check(function, torch.ones(1000)).peak == 8000


def test_results_live_to_the_end():
    assert check(lambda x: (x + 1, (x + 2).sum(), (x + 3).sum()), torch.ones(1000)).peak == 3 * 4000 + 4 + 4


def test_the_memory_of_a_compiled_call_is_given():
    gm = graph_of(lambda x: (x + 1) * 2, torch.ones(1000))
    assert timeline(gm.graph, lambda node: 123 if node.name == "mul" else None).peak == 8000 + 123


def test_only_one_device_counts():
    gm = graph_of(lambda x: x + 1, torch.ones(1000))
    assert timeline(gm.graph, device=torch.device("cuda", 0)).peak == 0


def test_bytes_of_tensors_with_gaps_and_without_elements():
    assert tensor_bytes(torch.empty_strided((3, 4), (10, 1))) == 4 * 24
    assert tensor_bytes(torch.empty(0, 5)) == 0
    assert tensor_bytes(torch.empty(1).expand(7)) == 4


def test_nested_lists_have_a_storage_for_each_tensor():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    both = graph.call_function(print, (x,))
    both.meta["val"] = ([torch.empty(3), torch.empty(4)], torch.empty(5))
    first = graph.call_function(__import__("operator").getitem, (both, 0))
    first.meta["val"] = both.meta["val"][0]
    second = graph.call_function(__import__("operator").getitem, (first, 1))
    second.meta["val"] = both.meta["val"][0][1]
    graph.output(second)
    pieces = find_storages(graph)
    assert [pieces.size[p] for p in pieces.seen_by[second]] == [16]
    assert len(pieces.made_by[both]) == 3
