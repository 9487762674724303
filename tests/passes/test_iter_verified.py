"""Passes on an IterGraphModule are verified, held to their numerics and rolled back like those on any graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ir.iter.test_graph import Sides, moved_module, nodes, two_parameters
from wholestep.errors import PassError
from wholestep.ir.iter.graph import IterGraph
from wholestep.ir.iter.graph_module import IterGraphModule
from wholestep.passes import (
    applied_passes,
    disable_graph_optimization_dump,
    enable_graph_optimization_dump,
    graph_optimization_pass,
    merge_common_subexpressions,
    run_passes,
)
from wholestep.passes.engine.dump import PassDump

aten = torch.ops.aten
comm = torch.ops._c10d_functional


def reduced() -> fx.GraphModule:
    """Two reductions of what is computed from two inputs."""
    graph = fx.Graph()
    found = []
    for name in ("x", "y"):
        given = graph.placeholder(name)
        given.meta["val"] = torch.ones(3)
        twice = graph.call_function(aten.mul.Tensor, (given, 2))
        started = graph.call_function(comm.all_reduce.default, (twice, "sum", "0"))
        done = graph.call_function(comm.wait_tensor.default, (started,))
        found.append(graph.call_function(aten.add.Tensor, (done, 0)))
    graph.output(tuple(found))
    for node in graph.nodes:
        node.meta.setdefault("val", torch.ones(3))
    return fx.GraphModule(torch.nn.Module(), graph)


@graph_optimization_pass()
def forget_waits(gm: Any) -> None:
    """Read what is still under way."""
    for node in list(gm.graph.nodes):
        if node.target is comm.wait_tensor.default:
            node.replace_all_uses_with(node.args[0])


@graph_optimization_pass()
def wrong_factor(gm: Any) -> None:
    """Compute something else."""
    for node in gm.graph.nodes:
        if node.target is aten.mul.Tensor:
            node.args = (node.args[0], 99)


@graph_optimization_pass()
def half_done(gm: Any) -> None:
    """Change something, then fail."""
    wrong_factor.function(gm)
    raise RuntimeError("boom")


def text_of(module: IterGraphModule) -> str:
    return str(module.graph)


@pytest.mark.parametrize("broken", [forget_waits, half_done], ids=lambda p: p.name)
def test_a_pass_that_breaks_a_rule_is_refused_and_everything_is_as_it_was(broken: Callable[..., Any]) -> None:
    module = IterGraphModule(reduced())
    before, setup = text_of(module), str(module.setup_gm.graph)
    with pytest.raises(PassError, match=r"forget_waits left a graph|half_done raised RuntimeError: boom"):
        broken(module)
    assert text_of(module) == before
    assert str(module.setup_gm.graph) == setup
    assert isinstance(module.graph, IterGraph)
    assert applied_passes(module) == ()  # type: ignore[arg-type]


def test_level_3_holds_a_pass_to_its_numerics() -> None:
    module = IterGraphModule(make_fx(lambda x, y: (x * 2, y * 2 + x))(torch.ones(3), torch.ones(3)))
    before = text_of(module)
    with pytest.raises(PassError, match="has other values than before the pass"):
        run_passes(module, [wrong_factor], level=3)  # type: ignore[arg-type]
    assert text_of(module) == before
    run_passes(module, [merge_common_subexpressions], level=3)  # type: ignore[arg-type]


@graph_optimization_pass()
def too_early(gm: Any) -> None:
    """Read a parameter before its update of the last iteration."""
    (scaled,) = nodes(gm.graph, "scaled")
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    first.prepend(scaled)


@graph_optimization_pass()
def gives_away(gm: Any) -> None:
    """Let the user have what the next iteration computes."""
    (moved,) = nodes(gm.graph, "new_p")
    output = gm.graph.output_node()
    result, carried = output.args[0]
    output.args = (([result, moved], carried),)


@graph_optimization_pass()
def another_module(gm: Any) -> Any:
    """Return a graph without moves."""
    return two_parameters()


def movable() -> IterGraphModule:
    module = IterGraphModule(two_parameters())
    moving = nodes(module.graph, "step_p", "new_p", "write_p")
    module.graph.move_to_next_iter_before(moving, nodes(module.graph, "scaled")[0])
    return module


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (too_early, "too_early left a graph that breaks a rule: scaled reads p before write_p"),
        (gives_away, "the output needs what was moved"),
        (another_module, "returned another graph module"),
    ],
)
def test_a_pass_that_makes_a_move_illegal_is_refused_and_the_move_stays(broken: Callable[..., Any], text: str) -> None:
    module = movable()
    before = text_of(module)
    with pytest.raises(PassError, match=text):
        broken(module)
    assert text_of(module) == before
    (move,) = module.graph.moves
    assert [n.name for n in move.nodes] == ["step_p", "new_p", "write_p"]
    assert module.graph.num_extra_output == 2
    sides = Sides(module)
    for i in range(4):
        sides.call(last_iter=i == 3)
    sides.assert_same()


def test_after_a_rollback_more_can_move() -> None:
    module = movable()
    with pytest.raises(PassError):
        too_early(module)
    moving = nodes(module.graph, "step_q", "new_q", "write_q")
    module.graph.move_to_next_iter_before(moving, nodes(module.graph, "product")[0])
    sides = Sides(module)
    for i in range(4):
        sides.call(last_iter=i == 3)
    sides.assert_same()


@graph_optimization_pass()
def adds_nodes(gm: Any) -> None:
    """A value that is read, and one that is not."""
    output = gm.graph.output_node()
    (result,) = output.args
    with gm.graph.inserting_before(output):
        gm.graph.call_function(aten.neg.default, (result,))
        output.args = (gm.graph.call_function(aten.mul.Tensor, (result, 1)),)


def test_dead_nodes_go_and_new_ones_get_values() -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    module = IterGraphModule(make_fx(code)(torch.ones(3)))
    adds_nodes(module)
    assert not any(n.target is aten.neg.default for n in module.graph.nodes)
    (new,) = [n for n in module.graph.nodes if n.target is aten.mul.Tensor]
    assert new.meta["val"].shape == ()


def test_dumps_have_both_sides_of_an_iter_graph_module(tmp_path: Path) -> None:
    enable_graph_optimization_dump(tmp_path)
    try:
        adds_nodes(IterGraphModule(make_fx(lambda x: x.sum())(torch.ones(3))))
    finally:
        disable_graph_optimization_dump()
    before, after = (next(tmp_path.glob(f"*adds_nodes.{side}.txt")).read_text() for side in ("before", "after"))
    assert "mul" not in before
    assert "mul" in after


@graph_optimization_pass()
def unprintable(gm: Any) -> None:
    """Leave a graph that has no end."""
    gm.graph.erase_node(gm.graph.output_node())
    raise RuntimeError("boom")


@pytest.mark.parametrize("broken", [half_done, forget_waits, unprintable], ids=lambda p: p.name)
def test_a_pass_that_fails_is_dumped_as_it_left_the_graph(broken: Any, tmp_path: Path) -> None:
    dump = PassDump(tmp_path)
    enable_graph_optimization_dump(tmp_path)
    try:
        for graph in (reduced(), IterGraphModule(reduced())):
            with pytest.raises(PassError):
                broken(graph)
    finally:
        disable_graph_optimization_dump()
    before = sorted(tmp_path.glob("*.before.txt"))
    failed = sorted(tmp_path.glob("*.failed.txt"))
    assert len(before) == len(failed) == 2
    assert before[0].read_text() != failed[0].read_text()
    assert "99" in failed[0].read_text() or broken is not half_done
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert all(f"{i:03d}-{broken.name}: failed, " in line for i, line in enumerate(lines))
    assert PassDump(tmp_path)._number == dump._number + 2


def test_a_frozen_module_stays_frozen_after_a_rollback() -> None:
    module = moved_module("p")
    with pytest.raises(PassError):
        too_early(module)
    with pytest.raises(RuntimeError, match="frozen"):
        module.graph.move_to_next_iter_before(nodes(module.graph, "write_q"), nodes(module.graph, "product")[0])
