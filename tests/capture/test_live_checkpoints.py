"""State dicts, checkpoints and copies of models between steps count, as they do in eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from capture.live import FORMS, Net, net_run, parts
from cases.parts import adamw, train_step
from harness import Run, Story, assert_same_story, batch_of, device, reasons


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_loading_a_state_dict_takes_training_back_to_where_it_was(form: dict[str, Any]) -> None:
    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call(3)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        told.call(3)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        told.look()
        told.call(3)

    step = assert_same_story(lambda where: net_run(where, **form), story)
    assert len(step.graphs) <= 2, reasons(step)


def test_loading_a_state_dict_with_assign_puts_other_parameters_in_the_module() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        told.call(3)

    assert_same_story(net_run, story)


def test_loading_into_a_fresh_optimizer_needs_no_guess_of_its_state() -> None:
    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call_eager(2)
        saved = copy.deepcopy(optimizer.state_dict())
        told.run.watch["optimizer"] = fresh = adamw(model)
        fresh.load_state_dict(saved)
        told.run.arguments = lambda i: (model, fresh, batch_of(device(), i, 5, 6))
        told.call(3)

    assert_same_story(net_run, story)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_saved_and_loaded_between_steps_restores_training(tmp_path: Path) -> None:
    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call(3)
        where = tmp_path / str(len(list(tmp_path.iterdir())))
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=where, no_dist=True)
        told.call(2)
        loaded = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(loaded, checkpoint_id=where, no_dist=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        told.look()
        told.call(3)

    assert_same_story(net_run, story)


def test_the_state_dict_helpers_of_distributed_checkpoint_work_between_steps() -> None:
    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call(3)
        saved = copy.deepcopy(get_state_dict(model, optimizer))
        told.call(2)
        set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
        told.look()
        told.call(3)

    assert_same_story(net_run, story)


def test_a_deep_copy_of_the_model_is_independent_and_equal() -> None:
    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call(3)
        twin, other = copy.deepcopy((model, optimizer))
        told.call(2)
        told.look(twin=twin, other=other)
        assert not any(p is q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        told.run.arguments = lambda i: (twin, other, batch_of(device(), i, 5, 6))
        told.call(2)
        told.look(twin=twin, other=other)

    assert_same_story(net_run, story)


def test_two_models_may_take_turns_in_one_compiled_step() -> None:
    def make(where: torch.device) -> Run:
        models = [Net().to(where), Net().to(where)]
        optimizers = [adamw(model) for model in models]
        return Run(
            train_step,
            lambda i: (models[i % 2], optimizers[i % 2], batch_of(where, i, 5, 6)),
            {"models": list(models), "optimizers": list(optimizers)},
        )

    assert_same_story(make, lambda told: told.call(6))
