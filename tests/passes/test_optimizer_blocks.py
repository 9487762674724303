"""Optimizers of all kinds are found, with their parameters, gradients, states and write-backs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from ir.collectives import Build
from ir.step_graphs import aten
from passes.optimizers import ADAMS, OPTIMIZERS, name_of, optimizer_step
from wholestep.ir import InputKind, StepGraph
from wholestep.passes.optimizer_blocks import (
    AdamArgs,
    ForeachAddBlock,
    FusedAdamBlock,
    FusedOptimizerBlock,
    ListOptimizerBlock,
    find_all_descendants,
    get_all_fused_optimizer_blocks,
    get_fused_optimizer_block,
)


def paths(step: StepGraph, copies: list[fx.Node]) -> list[str]:
    """What some write-backs write."""
    return [step.signature.input(str(copy.args[0])).path for copy in copies]


def the_block(step: StepGraph, optim_ops: Any = ("_fused_", "_foreach_")) -> FusedOptimizerBlock:
    (block,) = get_all_fused_optimizer_blocks(step.gm, optim_ops)
    return block


def parameters(step: StepGraph) -> list[str]:
    """Of the trained model, not of the average."""
    return [spec.name for spec in step.signature.of_kind(InputKind.PARAMETER) if spec.path.startswith("model")]


@pytest.mark.parametrize("more", [{}, {"clip": True, "average": True}, {"scaled": True}, {"first": True}], ids=name_of)
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=name_of)
def test_a_block_knows_parameters_gradients_and_all_its_nodes(
    name: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    step = optimizer_step(name, options, **more)
    block = the_block(step)
    assert [p.name for p in block.params] == parameters(step)
    assert paths(step, block.optim.param_outputs) == [step.signature.input(n).path for n in parameters(step)]
    last = "update" if more.keys() & {"clip", "scaled"} else "backward"
    assert {g.meta["wholestep"].phase for g in block.grads} == {last}
    assert [tuple(g.meta["val"].shape) for g in block.grads] == [tuple(p.meta["val"].shape) for p in block.params]
    assert block.nodes == [node for node in step.gm.graph.nodes if node in block.members]
    outside = {p.name for p in block.params}
    if "first" not in more:
        owned = {str(copy.args[0]) for copy in block.nodes if copy.target is aten.copy_.default}
        assert owned == outside | {s.name for s in step.signature.of_kind(InputKind.OPTIMIZER_STATE)}


@pytest.mark.parametrize("how", ["fused", "foreach"])
@pytest.mark.parametrize(("name", "options"), ADAMS, ids=name_of)
def test_the_states_of_adam_are_in_the_order_of_the_parameters(name: str, options: dict[str, Any], how: str) -> None:
    step = optimizer_step(name, {**options, how: True})
    block = the_block(step)
    assert isinstance(block.optim, FusedAdamBlock)
    assert block.step is not None
    of = [f"updates.state[{step.signature.input(p.name).path}]" for p in block.params]
    assert paths(step, block.optim.exp_avgs_outputs) == [f"{path}.exp_avg" for path in of]
    assert paths(step, block.optim.exp_avg_sqs_outputs) == [f"{path}.exp_avg_sq" for path in of]
    assert paths(step, block.step.outputs) == [f"{path}.step" for path in of]
    maxima = [f"{path}.max_exp_avg_sq" for path in of] if "amsgrad" in options else []
    assert paths(step, block.optim.max_exp_avg_sqs) == maxima
    args = block.args
    assert [step.signature.input(node.name).path for node in args.exp_avgs] == [f"{path}.exp_avg" for path in of]
    assert [step.signature.input(n.name).path for n in args.exp_avg_sqs] == [f"{path}.exp_avg_sq" for path in of]
    assert [step.signature.input(n.name).path for n in args.max_exp_avg_sqs] == maxima
    assert list(args.params) == block.params
    assert list(args.grads) == block.grads
    assert [list(block.step.add_node.users)[i] for i in range(len(of))] == list(args.state_steps)


def test_fused_adam_has_the_arguments_of_the_old_api() -> None:
    step = optimizer_step("Adam", {"fused": True})
    (node,) = step.gm.graph.find_nodes(op="call_function", target=aten._fused_adam.default)
    block = get_fused_optimizer_block(node)
    assert block.optim.optim_node is node
    assert AdamArgs(*node.args) == block.args
    assert FusedAdamBlock(node, generate_output=False).param_outputs == block.optim.param_outputs
    assert block.step is not None
    assert ForeachAddBlock(block.step.add_node, generate_output=False).outputs == block.step.outputs


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_momentum_is_the_state_of_sgd_and_it_counts_no_steps(how: str) -> None:
    step = optimizer_step("SGD", {how: True, "momentum": 0.9})
    block = the_block(step)
    assert block.step is None
    assert isinstance(block.optim, ListOptimizerBlock)
    (momentum,) = block.optim.state_outputs
    assert [path.split(".")[-1] for path in paths(step, momentum)] == ["momentum_buffer"] * 6
    with pytest.raises(ValueError, match="is not an Adam"):
        _ = block.args


def test_steps_that_a_gradient_scaler_takes_back_are_still_the_steps() -> None:
    step = optimizer_step("AdamW", {"fused": True}, scaled=True)
    block = the_block(step)
    assert block.step is not None
    assert [path.split(".")[-1] for path in paths(step, block.step.outputs)] == ["step"] * 6


def test_operators_are_named_by_prefix_or_by_themselves() -> None:
    step = optimizer_step("AdamW", {"fused": True})
    assert the_block(step, "_fused_adam").optim.optim_node.target is aten._fused_adamw.default
    assert the_block(step, aten._fused_adamw).ops == the_block(step, aten._fused_adamw.default).ops
    assert get_all_fused_optimizer_blocks(step.gm, ("_fused_sgd", aten._fused_adam.default)) == []


def test_two_groups_of_parameters_are_two_blocks() -> None:
    import wholestep as ws

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.2}]
    for how in ("fused", "foreach"):
        adam = torch.optim.Adam(groups, lr=0.1, **{how: True})

        def train(model: torch.nn.Module, adam: torch.optim.Optimizer, x: torch.Tensor) -> None:
            model(x).sum().backward()
            adam.step()
            adam.zero_grad()

        train(model, adam, torch.randn(4, 3))
        step = ws.capture(train, model, adam, torch.randn(4, 3))
        blocks = get_all_fused_optimizer_blocks(step.gm)
        names = [[p.name for p in block.params] for block in blocks]
        assert names == [["model_0_weight", "model_0_bias"], ["model_1_weight", "model_1_bias"]]


def test_a_node_that_is_no_optimizer_raises() -> None:
    build = Build()
    x = build.input("x", 4)
    node = build.call(aten.neg.default, x)
    norms = build.call(aten._foreach_norm.Scalar, [x, node], 2)
    build.finish(node)
    for other in (node, norms):
        with pytest.raises(RuntimeError, match="not part of an optimizer"):
            get_fused_optimizer_block(other)


def test_outputs_can_be_generated_as_the_old_api_did() -> None:
    build = Build()
    p, g, m, v, s = (build.input(name, 4) for name in "pgmvs")
    steps = build.call(aten._foreach_add.Scalar, [s], 1)
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    optim = build.graph.call_function(aten._fused_adam.default, ([p], [g], [m], [v], [], [s]), {**numbers, **flags})
    step = build.finish(p)
    counted = ForeachAddBlock(steps, generate_output=True)
    adam = FusedAdamBlock(optim, generate_output=True)
    step.gm.graph.lint()
    written = [*counted.outputs, *adam.param_outputs, *adam.exp_avgs_outputs, *adam.exp_avg_sqs_outputs]
    assert [copy.args[0] for copy in written] == [s, p, m, v]
    assert {copy.next.op for copy in written} <= {"call_function", "output"}
    assert all(copy.target is aten.copy_.default for copy in written)


def test_descendants_are_everything_behind_some_nodes_but_the_output() -> None:
    build = Build()
    x, y = build.input("x", 4), build.input("y", 4)
    a = build.call(aten.neg.default, x)
    other = build.call(aten.neg.default, y)
    b = build.call(aten.add.Tensor, a, other)
    c = build.call(aten.add.Tensor, b, a)
    step = build.finish(c, other)
    assert find_all_descendants(step.gm, [a]) == [a, b, c]
    assert find_all_descendants(step.gm, [b, other]) == [other, b, c]
    with pytest.raises(ValueError, match="No parent nodes"):
        find_all_descendants(step.gm, [])


def test_descendants_of_a_graph_with_many_paths_take_no_time() -> None:
    build = Build()
    node = first = build.input("x", 4)
    for _ in range(2_000):
        node = build.call(aten.add.Tensor, node, node)
        node = build.call(aten.add.Tensor, node, node)
    assert len(find_all_descendants(build.finish(node).gm, [first])) == 4_001
