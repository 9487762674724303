"""Torch's own readers and writers of whole models and optimizers complete what is pending, and leave nothing behind."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cross_iteration.test_iterations import Training
from ranks import run_ranks
from wholestep.cross_iteration.pending_updates import replace_methods, restore_methods
from wholestep.errors import PendingError
from wholestep.torch_private.modules_and_optimizers import PARAMETER_ACCESS_METHODS

METHODS = [owner.__dict__[name] for owner, name in PARAMETER_ACCESS_METHODS]
CHECKS: list[Callable[[int], None]] = []


def check(code: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS.append(code)
    return code


def no_method_is_replaced() -> bool:
    return [owner.__dict__[name] for owner, name in PARAMETER_ACCESS_METHODS] == METHODS


@check
def a_cast_comes_after_the_update(rank: int) -> None:
    casts: list[Callable[[nn.Module], Any]] = [
        lambda m: m.double(),
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m[0].double(),
        lambda m: nn.ModuleList([m]).float(),
        lambda m: m.to("cpu"),
    ]
    for cast in casts:
        training = Training()
        cast(training.model)
        assert not training.step.has_pending
        cast(training.eager)
        for mine, theirs in zip(training.model.parameters(), training.eager.parameters(), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


@check
def a_moving_average_of_torch_sees_the_update(rank: int) -> None:
    training = Training(calls=1)
    pairs = [(m, AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5))) for m in (training.model, training.eager)]
    for _ in range(4):
        training.call()
        assert training.step.has_pending
        for model, averaged in pairs:
            averaged.update_parameters(model)
    (_, mine), (_, theirs) = pairs
    assert all(map(torch.allclose, mine.parameters(), theirs.parameters()))


@check
def a_vector_of_parameters_is_complete(rank: int) -> None:
    training = Training()
    vector = parameters_to_vector(training.model.parameters())
    training.check_complete()
    assert torch.allclose(vector, parameters_to_vector(training.eager.parameters()))


@check
def a_vector_is_written_after_the_update(rank: int) -> None:
    training = Training()
    for model in (training.model, training.eager):
        vector_to_parameters(torch.ones(sum(p.numel() for p in training.parameters)), model.parameters())
    training.check_complete()
    training.call(2)
    training.step.flush()
    training.check_complete()


@check
def a_list_of_parameters_or_buffers_is_complete(rank: int) -> None:
    ways: list[Callable[[nn.Module], Any]] = [
        lambda m: torch.save(list(m.parameters()), io.BytesIO()),
        lambda m: dict(m.named_parameters()),
        lambda m: list(m[2].parameters()),
        lambda m: list(m.buffers()),
    ]
    for way in ways:
        training = Training()
        way(training.model)
        training.check_complete()


@check
def another_model_lets_it_wait(rank: int) -> None:
    training = Training()
    other = nn.Linear(2, 2)
    other.double().eval()
    copy.deepcopy(SGD(other.parameters(), lr=0.1))
    assert training.step.has_pending
    training.step.flush()


@check
def a_copy_of_the_optimizer_is_complete(rank: int) -> None:
    for way in (copy.deepcopy, pickle.dumps):
        training = Training()
        way(training.optimizer)
        training.check_complete()


@check
def methods_of_a_model_in_eval_mode_see_the_update(rank: int) -> None:
    training = Training()
    training.model.train()
    assert training.step.has_pending  # a loop may say so before each step
    x = torch.ones(2, 3)
    mine, theirs = (F.linear(x, m.eval()[0].weight) for m in (training.model, training.eager))  # type: ignore[index]
    assert torch.allclose(mine, theirs)
    training.check_complete()


@check
def other_memory_for_a_parameter_raises_instead_of_getting_the_update(rank: int) -> None:
    training = Training()
    weight = training.model[0].weight
    weight.data = weight.data.double()
    with pytest.raises(PendingError, match=r"model\.0\.weight was written while its update"):
        training.step.flush()


@check
def nothing_is_left_behind(rank: int) -> None:
    training = Training()
    assert not no_method_is_replaced()
    training.step.flush()
    assert no_method_is_replaced()
    training.call()
    training.call(last_train_step=True)
    assert no_method_is_replaced()


def test_code_that_reads_all_parameters_gets_completed_updates() -> None:
    def code(rank: int) -> None:
        for each in CHECKS:
            each(rank)
            assert no_method_is_replaced() or each is other_memory_for_a_parameter_raises_instead_of_getting_the_update
            restore_methods()

    run_ranks(code, 2, deadline=120)


def test_a_method_that_somebody_else_replaced_meanwhile_stays() -> None:
    asked: list[Any] = []
    replace_methods(asked.append, asked.append)

    def theirs(self: nn.Module, mode: bool = True) -> nn.Module:
        return self

    nn.Module.train = theirs  # type: ignore[assignment,method-assign]
    try:
        model = nn.Linear(1, 1)
        model.eval()
        assert not asked
        model.half()
        assert asked == [model]
        restore_methods()
        assert nn.Module.train is theirs  # type: ignore[comparison-overlap]
    finally:
        restore_methods()
        nn.Module.train = METHODS[2]  # type: ignore[method-assign]
    assert no_method_is_replaced()
