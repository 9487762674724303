"""Which updates may wait for the next iteration is found by data flow, and what cannot is left where it is."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholestep as ws
from cases.parts import train_step
from wholestep.cross_iteration.executor import iteration_graphs
from wholestep.errors import IterMoveError, PassOrderError
from wholestep.ir import StepGraph
from wholestep.ir.effects import is_collective, is_wait
from wholestep.ir.iter.graph_module import IterGraphModule
from wholestep.passes.comm_fusion import comm_fusion_with_concat
from wholestep.passes.functionalize_optimizer import remove_copy_from_optimizer
from wholestep.passes.iter_move import (
    DESTINATIONS,
    STAYS,
    iter_move_grads_and_optimizers,
    marked_moves,
    overlap_optimizer_with_next_forward,
)
from wholestep.passes.schedule_comm_wait import schedule_comm_wait

pytestmark = pytest.mark.fake_group


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.1, foreach=False)


def captured(
    step: Callable[..., Any] = train_step, optimizer: Callable[[nn.Module], Optimizer] = adamw, calls: int = 2
) -> StepGraph:
    """The graph of a step whose optimizer has its state."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("fake_dp",))
    compiled = ws.compile(step, parallel=ws.Replicate(mesh), passes=None)
    made = optimizer(model)
    for _ in range(calls):
        compiled(model, made, torch.randn(5, 3))
    assert compiled.last is not None
    return compiled.last


def reasons(graph: StepGraph) -> set[str]:
    return set(graph.gm.meta[STAYS].values())


def moved(graph: StepGraph) -> list[list[fx.Node]]:
    return list(marked_moves(graph.gm.graph).values())


def test_each_reduction_crosses_with_its_own_optimizer_and_write_backs() -> None:
    graph = captured()
    overlap_optimizer_with_next_forward(graph)
    moves = moved(graph)
    assert len(moves) == 4
    for nodes in moves:
        assert sum(is_wait(node.target) for node in nodes) == 1
        assert sum(node.target is torch.ops.aten.copy_.default for node in nodes) == 4  # parameter, step, two moments
        assert not any(is_collective(node.target) for node in nodes)
    graph.verify(2)
    assert graph.gm.meta[STAYS] == {}


def test_an_update_runs_before_the_first_use_of_its_parameter() -> None:
    graph = captured()
    overlap_optimizer_with_next_forward(graph)
    uses = []
    for nodes, target in zip(moved(graph), graph.gm.meta[DESTINATIONS].values(), strict=True):
        parameter = next(n.args[0] for n in nodes if n.target is torch.ops.aten.copy_.default)
        assert isinstance(parameter, fx.Node)
        uses.append(target in [user.name for user in parameter.users])
    assert uses == [True] * 4


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_an_optimizer_of_all_parameters_is_split_by_bucket(kind: str) -> None:
    graph = captured(optimizer=lambda model: AdamW(model.parameters(), lr=0.1, **{kind: True}))
    comm_fusion_with_concat(graph, 0.00006)
    schedule_comm_wait(graph)
    overlap_optimizer_with_next_forward(graph)
    assert len(moved(graph)) > 1
    graph.verify(2)


def test_a_split_and_marked_graph_computes_the_same() -> None:
    graph = captured(optimizer=lambda model: AdamW(model.parameters(), lr=0.1, foreach=True))
    ws.passes.run_passes(graph, [comm_fusion_with_concat(bucket_size_mb=0.00006)])
    ws.passes.run_passes(graph, [overlap_optimizer_with_next_forward], level=3)


def test_pieces_write_in_place_and_the_rest_of_the_graph_does_not_write_what_they_do() -> None:
    graph = captured()
    overlap_optimizer_with_next_forward(graph)
    iterations = iteration_graphs(graph)
    assert iterations is not None
    for piece in iterations.pieces:
        assert any(str(n.target).startswith("aten.addcdiv_") for n in piece.gm.graph.nodes)
        assert not any(is_collective(n.target) for n in piece.gm.graph.nodes)
    assert not any(is_wait(n.target) for n in iterations.setup.graph.nodes)
    order = [n for n in iterations.main.graph.nodes if is_collective(n.target)]
    assert [str(n.target) for n in order] == [str(n.target) for n in graph.gm.graph.nodes if is_collective(n.target)]


def test_the_fused_optimizer_of_a_bucket_updates_in_place() -> None:
    graph = captured(optimizer=lambda model: AdamW(model.parameters(), lr=0.1, fused=True))
    comm_fusion_with_concat(graph, 0.00006)
    overlap_optimizer_with_next_forward(graph)
    iterations = iteration_graphs(graph)
    assert iterations is not None
    ops = [str(n.target) for n in iterations.main.graph.nodes if "_fused_adamw" in str(n.target)]
    assert set(ops) == {"aten._fused_adamw_.default"}
    assert len(ops) == len(iterations.pieces) > 1


def returns_a_weight(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    train_step(model, optimizer, x)
    return model[0].weight  # type: ignore[index,return-value]


def returns_the_norm(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    model(x).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def uses_the_update(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    train_step(model, optimizer, x)
    return model(x).sum()


def rounds_at_random(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.copy_(torch.bernoulli(p.grad.sigmoid()))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("step", "crossing", "reason"),
    [
        (returns_a_weight, 3, "the step returns model_0_weight"),
        (returns_the_norm, 0, "the step's output needs it"),
        (uses_the_update, 0, "the step's output needs it"),
        (rounds_at_random, 0, "draws random numbers"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_the_user_gets_in_this_iteration_is_not_put_off(
    step: Callable[..., Any], crossing: int, reason: str
) -> None:
    graph = captured(step)
    overlap_optimizer_with_next_forward(graph)
    assert len(moved(graph)) == crossing
    assert all(reason in why for why in reasons(graph))
    assert len(graph.gm.meta[STAYS]) == 4 - crossing


def test_the_log_says_what_stays_and_why(caplog: pytest.LogCaptureFixture) -> None:
    graph = captured(returns_a_weight)
    with caplog.at_level(logging.INFO, "wholestep.passes"):
        overlap_optimizer_with_next_forward(graph)
    assert "(model.0.weight) stays in its own iteration: the step returns model_0_weight" in caplog.text


def test_a_graph_that_creates_the_optimizer_state_lets_it_stay() -> None:
    graph = captured(optimizer=lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9), calls=1)
    overlap_optimizer_with_next_forward(graph)
    assert moved(graph) == []
    assert iteration_graphs(graph) is None


def test_moving_averages_of_parameters_cross_with_them() -> None:
    average = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        return loss

    graph = captured(step)
    overlap_optimizer_with_next_forward(graph)
    assert len(moved(graph)) == 4
    assert all(sum(n.target is torch.ops.aten.copy_.default for n in nodes) == 5 for nodes in moved(graph))


def first_reduction(graph: Any) -> str:
    return next(n.name for n in graph.nodes if is_collective(n.target))


def test_one_reduction_moves_to_a_named_node() -> None:
    graph = captured()
    remove_copy_from_optimizer(graph)
    for reduction in [n.name for n in graph.gm.graph.nodes if is_collective(n.target)][:2]:
        iter_move_grads_and_optimizers(graph, reduction, "t_default")
    assert len(moved(graph)) == 2
    assert list(graph.gm.meta[DESTINATIONS].values()) == ["t_default", "t_default"]
    iterations = iteration_graphs(graph)
    assert iterations is not None
    names = [n.name for n in iterations.main.graph.nodes]
    assert names.index("mark_done_1") < names.index("t_default")


def test_a_destination_after_the_first_use_raises_and_marks_nothing() -> None:
    graph = captured()
    remove_copy_from_optimizer(graph)
    with pytest.raises(IterMoveError, match=r"is after .*, the first use of"):
        iter_move_grads_and_optimizers(graph, first_reduction(graph.gm.graph), "mean_default")
    assert moved(graph) == []


def test_names_that_are_not_there_raise() -> None:
    graph = captured()
    remove_copy_from_optimizer(graph)
    with pytest.raises(ValueError, match="Cannot find nothing"):
        iter_move_grads_and_optimizers(graph, "nothing", "t_default")
    with pytest.raises(ValueError, match="Cannot find the destination nowhere"):
        iter_move_grads_and_optimizers(graph, first_reduction(graph.gm.graph), "nowhere")


def test_order_rules_are_those_of_the_old_api() -> None:
    graph = captured()
    with pytest.raises(PassOrderError, match="are the prerequisites of"):
        iter_move_grads_and_optimizers(graph, first_reduction(graph.gm.graph), "t_default")
    remove_copy_from_optimizer(graph)
    comm_fusion_with_concat(graph, 1.0)
    iter_move_grads_and_optimizers(graph, first_reduction(graph.gm.graph), "t_default")
    with pytest.raises(PassOrderError, match="must be applied after"):
        schedule_comm_wait(graph)


def test_in_a_compiled_step_the_graph_that_creates_optimizer_state_lets_it_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reduction = first_reduction(captured().gm.graph)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("fake_dp",))
    passes = [remove_copy_from_optimizer, iter_move_grads_and_optimizers(reduction, "t_default")]
    step = ws.compile(train_step, parallel=ws.Replicate(mesh), passes=passes)
    optimizer = adamw(model)
    with caplog.at_level(logging.INFO, "wholestep.passes"):
        step(model, optimizer, torch.randn(5, 3))
    assert not step.has_pending
    assert "creates optimizer state stay in it" in caplog.text
    step(model, optimizer, torch.randn(5, 3))
    assert step.has_pending
    assert [len(moved(graph)) for graph in step.graphs] == [0, 1]


@pytest.mark.parametrize("bucketed", [False, True])
def test_an_iter_graph_module_moves_at_once(bucketed: bool) -> None:
    graph = captured(optimizer=lambda model: AdamW(model.parameters(), lr=0.1, fused=True))
    module = IterGraphModule(graph.gm)
    if bucketed:
        comm_fusion_with_concat(module, 0.00006)
        schedule_comm_wait(module)
    remove_copy_from_optimizer(module)
    name = first_reduction(module.graph)
    target = next(n.name for n in module.graph.nodes if n.op == "call_function")
    iter_move_grads_and_optimizers(module, name, target)
    module.finalize_setup()
    (move,) = module.graph.moves
    assert any("_fused_adamw" in str(node.target) for node in move.nodes)
    assert len([n for n in module.setup_gm.graph.nodes if "_fused_adamw" in str(n.target)]) == 1
    assert [n.name for n in module.graph.nodes].index(move.nodes[-1].name) < [n.name for n in module.graph.nodes].index(
        target
    )


def test_an_iter_graph_module_overlaps_all_updates() -> None:
    graph = captured()
    module = IterGraphModule(graph.gm)
    overlap_optimizer_with_next_forward(module)
    module.finalize_setup()
    assert len(module.graph.moves) == 4
    assert not any(is_wait(n.target) for n in module.setup_gm.graph.nodes)


def test_a_pass_that_makes_a_move_illegal_afterwards_costs_the_overlap_only(caplog: pytest.LogCaptureFixture) -> None:
    graph = captured()
    overlap_optimizer_with_next_forward(graph)
    node = next(n for n in moved(graph)[0] if is_wait(n.target))
    output = graph.gm.graph.output_node()
    output.args = ((*output.args[0], node),)  # type: ignore[misc]
    with caplog.at_level(logging.WARNING, "wholestep"):
        assert iteration_graphs(graph) is None
    assert "updates stay in their own iteration" in caplog.text


def test_a_pass_may_return_an_iter_graph_module_and_its_moves_become_marks() -> None:
    @ws.passes.graph_optimization_pass(numerics="exact")
    def as_before(gm: fx.GraphModule) -> IterGraphModule:
        iterating = IterGraphModule(gm)
        overlap_optimizer_with_next_forward(iterating)
        return iterating

    graph, other = captured(), captured()
    overlap_optimizer_with_next_forward(other)
    made = as_before(graph)
    assert isinstance(made, IterGraphModule)
    assert made.graph.has_moves
    names = [[node.name for node in group] for group in moved(graph)]
    assert names == [[node.name for node in group] for group in moved(other)]
    assert graph.gm.meta[DESTINATIONS] == other.gm.meta[DESTINATIONS]
    assert [str(n.target) for n in graph.gm.graph.nodes][-5:] == [str(n.target) for n in other.gm.graph.nodes][-5:]
    assert iteration_graphs(graph) is not None
    assert ws.passes.applied_passes(graph.gm)[-2:] == ("overlap_optimizer_with_next_forward", "as_before")
