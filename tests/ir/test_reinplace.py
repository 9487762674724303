"""Updates become in-place again where nothing reads the old contents, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import wholestep as ws
from wholestep.ir.reinplace import reinplaced

aten = torch.ops.aten


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def both(step: Callable[..., Any], *args: torch.Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graph of a step in normal form and in place, after checking that both do what eager does."""
    graph = ws.capture(step, *args)
    in_place = reinplaced(graph)
    runs = []
    for run in (step, graph.gm, in_place):
        copies = [arg.clone() for arg in args]
        result = run(*copies)
        result = result if isinstance(result, tuple) else (result,)
        runs.append([*result, *copies])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    return graph.gm, in_place


def test_an_input_is_updated_in_place_and_the_epilogue_is_gone() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(1)
        return x.sum()

    normal, in_place = both(step, torch.ones(3))
    assert aten.copy_.default in targets(normal)
    assert targets(in_place) == [aten.mul_.Tensor, aten.add_.Tensor, aten.sum.default]


def test_an_old_value_that_is_read_later_is_kept() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        old = x.clone()
        y = x * 1
        x.add_(1)
        return old + y + x

    _, in_place = both(step, torch.ones(3))
    assert targets(in_place).count(aten.clone.default) == 1

    def reads_after(x: torch.Tensor) -> torch.Tensor:
        y = x + 0
        z = y.relu()
        y.add_(1)
        return z + y

    both(reads_after, torch.randn(3))


def test_an_input_that_is_not_written_back_is_never_written() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.detach()
        z = y * 2
        return z.add_(y)

    x = torch.ones(3)
    _, in_place = both(step, x)
    assert torch.equal(x, torch.ones(3))
    assert aten.copy_.default not in targets(in_place)


def test_a_write_to_a_part_goes_into_the_part() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x[0] = 5
        x[1:].mul_(3)
        return x.sum()

    normal, in_place = both(step, torch.ones(4, 2))
    assert aten.select_scatter.default in targets(normal)
    assert aten.select_scatter.default not in targets(in_place)
    assert aten.slice_scatter.default not in targets(in_place)


def test_two_names_for_one_value_are_not_updated_in_place_together() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x + 1, x + 1
        torch._foreach_mul_([a, b], 2.0)
        return a, b

    both(step, torch.ones(2))


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_an_adam_step_runs_without_a_single_copy_of_its_state(form: dict[str, bool], amsgrad: bool) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=amsgrad, **form)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(torch.randn(3, 4))
    graph = ws.capture(step, torch.randn(3, 4))
    copies = targets(reinplaced(graph)).count(aten.copy_.default)
    # Only `torch.maximum(.., out=)` of the single-tensor form has no in-place operator to go back to.
    assert copies == (2 if amsgrad and form == {"foreach": False} else 0)
    assert len(graph.signature.write_backs) == 2 * (5 if amsgrad else 4)


def test_a_copy_that_remains_is_done_before_its_source_changes() -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.copy_(b)
        b.add_(1)
        a.copy_(a * 2)
        return a + b

    both(step, torch.ones(2), torch.full((2,), 3.0))


def test_two_inputs_can_be_exchanged() -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        return a - b

    both(step, torch.ones(2), torch.full((2,), 3.0))


def test_the_input_of_a_collective_is_not_written_before_its_wait() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, device="meta")

    def call(target: Any, *args: Any, in_place: Any = None) -> fx.Node:
        from wholestep.ir.meta import NodeMeta, set_node_meta

        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(2, device="meta")
        set_node_meta(node, NodeMeta(in_place=in_place))
        return node

    y = call(aten.mul.Tensor, x, 2)
    started = call(torch.ops._c10d_functional.all_reduce.default, y, "sum", "0")
    changed = call(aten.add.Tensor, y, 1, in_place=aten.add_.Tensor)
    waited = call(torch.ops._c10d_functional.wait_tensor.default, started)
    graph.output((changed, waited))

    from wholestep.ir.reinplace import reinplace

    reinplace(graph)
    assert aten.add_.Tensor not in [node.target for node in graph.nodes]
