"""Code and tests of PyTorch's `_spmd` passes: its helpers and its messages work here too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.passes.optimizers import optimizer_step
from torch import fx, nn
from torch.fx.passes.infra.pass_base import PassResult

import wholestep.passes as wp
from wholestep.errors import PassError

aten = torch.ops.aten


@wp.graph_optimization_pass(prerequisites=[], apply_after=[])
def opens(gm: Any) -> None:
    """Nothing."""


@wp.graph_optimization_pass(prerequisites=[opens], apply_after=[])
def builds_on_it(gm: Any) -> None:
    """Nothing."""


@wp.graph_optimization_pass(prerequisites=[], apply_after=[opens])
def closes(gm: Any) -> None:
    """Nothing."""


def small() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.neg.default, (x,), name="first")
    second = graph.call_function(aten.mul.Tensor, (first, x), name="second")
    graph.output(second)
    return fx.GraphModule(nn.Module(), graph)


def iterating() -> wp.IterGraphModule:
    return wp.IterGraphModule(small())


def test_the_order_of_passes_holds_for_each_iter_graph_module_by_itself() -> None:
    one = iterating()
    for each in (opens, closes, builds_on_it):
        each(one)
    closes(iterating())
    with pytest.raises(AssertionError, match="are the prerequisites of"):
        builds_on_it(iterating())
    other = iterating()
    closes(other)
    with pytest.raises(AssertionError, match="must be applied after"):
        opens(other)
    with pytest.raises(AssertionError, match="Cannot apply closes twice"):
        closes(other)
    closes(other, allow_rerun=True)


def test_nodes_are_found_in_both_directions() -> None:
    graph = small().graph
    calls = wp.find_node(graph, lambda n: n.op == wp.OP.CALL_FUNCTION)
    assert [node.name for node in calls] == ["first", "second"]
    assert wp.find_node(graph, lambda n: n.op == wp.OP.CALL_FUNCTION, reverse_order=True) == calls[::-1]
    assert wp.get_output(graph).args == (calls[-1],)
    with pytest.raises(ValueError, match="no output node"):
        wp.get_output(fx.Graph())


def test_a_subgraph_is_a_leaf_if_only_the_output_needs_it_and_its_copy_computes_the_same() -> None:
    gm = small()
    calls = wp.find_node(gm.graph, lambda n: n.op == wp.OP.CALL_FUNCTION)
    assert wp.is_leaf_subgraph(gm.graph, calls)
    assert not wp.is_leaf_subgraph(gm.graph, calls[:1])
    output = wp.get_output(gm.graph)
    copies = wp.clone_subgraph(gm.graph, calls, output)
    assert copies[1].args == (copies[0], calls[0].args[0])
    output.args = (copies[1],)
    wp.rebuild_graph(gm)
    assert len(gm.graph.nodes) == 4
    assert torch.equal(gm(torch.arange(3.0)), small()(torch.arange(3.0)))


def test_graphs_are_written_to_a_folder_of_their_own_or_to_one_that_is_given(tmp_path: Path) -> None:
    gm = small()
    made = wp.dump_graphs_to_files({"one": gm})
    assert wp.dump_graphs_to_files({"two": "text"}, made) == made
    files = {file.name: file.read_text() for file in Path(made).iterdir()}
    assert files == {"one.graph": str(gm), "two.graph": "text"}
    for name in files:
        (Path(made) / name).unlink()
    Path(made).rmdir()
    assert wp.dump_graphs_to_files({"one": gm}, tmp_path / "new") == str(tmp_path / "new")


def test_descendants_of_nothing_fail_as_they_did() -> None:
    with pytest.raises(AssertionError, match="No parent nodes are given"):
        wp.find_all_descendants(small(), [])


@pytest.mark.parametrize("kind", ["graph", "another step"])
def test_a_graph_that_a_pass_returns_and_that_would_be_ignored_is_refused(kind: str) -> None:
    step = optimizer_step("SGD", {})

    @wp.graph_optimization_pass()
    def transforms(gm: fx.GraphModule) -> Any:
        return copy.deepcopy(gm.graph) if kind == "graph" else optimizer_step("SGD", {})

    with pytest.raises(PassError, match="which nothing would use"):
        transforms(step)


def test_results_of_torchs_passes_are_taken() -> None:
    gm = small()

    @wp.graph_optimization_pass(numerics="changes")
    def negates(gm: fx.GraphModule) -> PassResult:
        new = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        wp.find_node(new.graph, lambda n: n.name == "first")[0].target = aten.abs.default
        return PassResult(new, True)

    assert negates(gm) is gm
    assert torch.equal(gm(torch.tensor([-2.0])), torch.tensor([-4.0]))
