"""Another batch compiles once more and says why; a dynamic dimension compiles once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from cases.parts import adamw, mlp, train_step
from harness import Run, assert_frames_equal, assert_same_story, batch_of, device, freeze, play, reasons


def sized_run(where: torch.device, size_of: Any) -> Run:
    model = mlp(where, dropout=0.2)
    optimizer = adamw(model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batch(i: int) -> dict[str, torch.Tensor]:
        return {"x": batch_of(where, i, size_of(i), 6), "y": batch_of(where, 100 + i, size_of(i), 4)}

    return Run(step, lambda i: (model, optimizer, batch(i)), {"model": model, "optimizer": optimizer})


def test_a_new_batch_shape_compiles_once_more_and_says_why() -> None:
    sizes = [4, 4, 4, 7, 4, 7, 7]
    step = assert_same_story(lambda where: sized_run(where, lambda i: sizes[i]), lambda told: told.call(7))
    assert len(step.graphs) == 3, reasons(step)
    assert len(step.recompiles) == len(step.graphs) - 1
    said = str(step.recompiles[-1])
    assert "batch" in said
    assert "7" in said
    assert "4" in said


def test_a_new_dtype_of_the_batch_compiles_once_more() -> None:
    def make(where: torch.device) -> Run:
        model = nn.Embedding(11, 4).to(where)
        optimizer = adamw(model)
        dtypes = [torch.int64, torch.int64, torch.int32, torch.int64]
        ids = torch.arange(5, device=where)
        return Run(
            train_step, lambda i: (model, optimizer, ids.to(dtypes[i])), {"model": model, "optimizer": optimizer}
        )

    step = assert_same_story(make, lambda told: told.call(4))
    assert len(step.graphs) == 3, reasons(step)


def test_a_new_structure_of_the_batch_compiles_once_more() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        optimizer = adamw(model)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = model(batch["x"]).square()
            loss = (loss * batch["mask"]).mean() if "mask" in batch else loss.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def batch(i: int) -> dict[str, torch.Tensor]:
            mask = {"mask": torch.ones(5, 1, device=where)} if i % 2 else {}
            return {"x": batch_of(where, i, 5, 6), **mask}

        return Run(step, lambda i: (batch(i),), {"model": model, "optimizer": optimizer})

    step = assert_same_story(make, lambda told: told.call(6))
    assert len(step.graphs) == 3, reasons(step)


@pytest.mark.parametrize("sizes", [(5, 1, 2, 3, 4, 6, 7, 8, 9), (1, 9, 1, 2, 64, 3)], ids=["from_5", "from_1"])
def test_a_dynamic_dimension_compiles_once_for_all_sizes_in_range(sizes: tuple[int, ...]) -> None:
    step = assert_same_story(
        lambda where: sized_run(where, lambda i: sizes[i]),
        lambda told: told.call(len(sizes)),
        dynamic={"batch": {0: ws.Dim(min=1, max=64)}},
    )
    assert len(step.graphs) <= 2, reasons(step)


def test_a_dynamic_dimension_may_be_named_by_the_path_of_one_leaf() -> None:
    dim = ws.Dim(min=1, max=64)
    step = assert_same_story(
        lambda where: sized_run(where, lambda i: 3 + i),
        lambda told: told.call(6),
        dynamic={"batch['x']": {0: dim}, "batch['y']": {0: dim}},
    )
    assert len(step.graphs) <= 2, reasons(step)


def test_a_sequence_of_any_length_in_range_runs_in_one_graph() -> None:
    def make(where: torch.device) -> Run:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).to(where)
        optimizer = adamw(model)
        return Run(
            train_step,
            lambda i: (model, optimizer, batch_of(where, i, 2, 3 + i, 8)),
            {"model": model, "optimizer": optimizer},
        )

    step = assert_same_story(make, lambda told: told.call(6), dynamic={"x": {1: ws.Dim(min=2, max=32)}})
    assert len(step.graphs) <= 2, reasons(step)


def test_a_size_outside_the_range_of_a_dynamic_dimension_raises_and_changes_nothing() -> None:
    run = sized_run(device(), lambda i: 4 if i < 2 else 9)
    step = ws.compile(run.step, dynamic={"batch": {0: ws.Dim(min=2, max=8)}})
    play(run, step, 2)
    before = freeze(run.watch), torch.get_rng_state()
    with pytest.raises(ws.errors.DynamicShapeError, match=r"\[WS-DYNAMIC\]") as caught:
        step(*run.arguments(2))
    assert "9" in str(caught.value)
    assert "8" in str(caught.value)
    assert freeze(run.watch) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_sizes_of_one_dimension_that_are_no_longer_equal_raise_and_the_graph_stays() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() * 2 + y.exp().sum()

    dim = ws.Dim(min=2, max=32)
    run = ws.compile(step, dynamic={"x": {0: dim}, "y": {0: dim}})
    for size in (4, 5):
        run(torch.ones(size), torch.ones(size))
    with pytest.raises(ws.errors.DynamicShapeError, match=r"y has size 7 .* the same Dim has 5"):
        run(torch.ones(5), torch.ones(7))
    assert torch.equal(run(torch.ones(6), torch.ones(6)), step(torch.ones(6), torch.ones(6)))
    assert len(run.graphs) == 1


def seen_as_four_rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(4, 6).sum()  # this line


def branching(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 4:  # this line
        x = x * 2
    return x.sum()


def added_to_four_rows(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return (y + torch.ones(4, 1, device=x.device)).sum()  # this line


def row_by_row(x: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(())
    for row in range(x.shape[0]):  # this line
        total = total + x[row].sum()
    return total


@pytest.mark.parametrize("step", [seen_as_four_rows, branching, added_to_four_rows, row_by_row])
def test_a_dynamic_dimension_that_the_step_fixes_raises_and_names_the_line(step: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(ws.errors.DynamicShapeError, match=r"dimension 0 of x .* only for size 4") as caught:
        ws.compile(step, dynamic={"x": {0: ws.Dim(min=1, max=64)}})(batch_of(device(), 0, 4, 6))
    where = caught.value.location
    assert where is not None
    assert (where.function, where.text.endswith("# this line")) == (step.__name__, True), where


def test_a_dynamic_path_that_names_nothing_raises() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    with pytest.raises(ws.errors.WholestepError, match="nothing_here"):
        ws.compile(step, dynamic={"nothing_here": {0: ws.Dim(min=1, max=64)}})(batch_of(device(), 0, 4, 6))


def test_too_many_graphs_warn_with_the_reasons_and_stay_right() -> None:
    torch.manual_seed(5)
    run = sized_run(device(), lambda i: i + 1)
    expected = play(run, run.step, 6)
    torch.manual_seed(5)
    run = sized_run(device(), lambda i: i + 1)
    step = ws.compile(run.step, max_recompiles=3, dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = play(run, step, 6)
    said = [str(each.message) for each in caught if each.category is ws.errors.RecompileWarning]
    assert said
    assert "batch" in said[0]
    assert_frames_equal(expected, actual)


def test_below_the_limit_of_recompiles_nothing_is_said() -> None:
    run = sized_run(device(), lambda i: i % 3 + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(run, ws.compile(run.step, max_recompiles=8), 6)
