"""The user's objects stay live: what is done to them between steps counts, as it does in eager."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import wholestep as ws
from cases.parts import adamw, mlp, plain_run, train_step
from cases.structure import Trainer
from harness import Run, Story, assert_frames_equal, assert_same_story, batch_of, device, freeze, play, reasons

FORMS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


class Net(nn.Module):
    """Dropout, a buffer, and a plain float that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 4)
        self.temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x))))) / self.temperature


def net_run(where: torch.device, **options: Any) -> Run:
    model = Net().to(where)
    return plain_run(where, model, adamw(model, **options))


def parts(story: Story) -> tuple[Any, Any]:
    return story.run.watch["model"], story.run.watch["optimizer"]


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


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_parameter_group_added_between_steps_is_trained(form: dict[str, Any]) -> None:
    def make(where: torch.device) -> Run:
        model = Net().to(where)
        return plain_run(where, model, torch.optim.AdamW(model.last.parameters(), lr=0.01, **form))

    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call(3)
        optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.5})
        told.call(3)

    assert_same_story(make, story)


def test_eval_and_train_switch_batch_norm_and_dropout_and_return_to_the_first_graph() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        model.eval()
        told.call(2)
        model.train()
        told.call(2)
        model.drop.eval()
        told.call(2)

    step = assert_same_story(net_run, story)
    assert len(step.graphs) <= 4, reasons(step)


def test_requires_grad_toggled_between_steps_freezes_and_thaws() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(2)
        model.first.requires_grad_(False)
        told.call(2)
        model.first.requires_grad_(True)
        told.call(2)

    assert_same_story(net_run, story)


def test_a_changed_dropout_probability_is_used() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        model.drop.p = 0.8
        told.call(2)
        model.drop.p = 0.0
        told.call(2)

    assert_same_story(net_run, story)


def test_a_changed_float_attribute_of_a_module_is_used() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        model.temperature = 5.0
        told.call(2)
        model.norm.momentum = 0.5
        told.call(2)
        model.norm.eps = 1e-2
        told.call(2)

    assert_same_story(net_run, story)


def test_a_replaced_submodule_is_used() -> None:
    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call(3)
        model.last = nn.Linear(8, 3).to(device())
        optimizer.add_param_group({"params": list(model.last.parameters())})
        told.call(3)
        model.drop = nn.Identity()
        told.call(2)

    assert_same_story(net_run, story)


def test_a_replaced_activation_function_is_used() -> None:
    def make(where: torch.device) -> Run:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(where)
        return plain_run(where, model, adamw(model))

    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        model[1] = nn.Tanh()
        told.call(3)

    assert_same_story(make, story)


def test_a_replaced_parameter_of_the_same_shape_is_read_and_trained() -> None:
    def story(told: Story) -> None:
        model, optimizer = parts(told)
        told.call(3)
        replaced = model.last.weight
        model.last.weight = nn.Parameter(torch.ones(4, 8))
        told.call(2)
        del optimizer.state[replaced]
        optimizer.param_groups[0]["params"][:] = list(model.parameters())
        told.call(3)

    assert_same_story(net_run, story)


def test_weights_written_between_steps_are_read() -> None:
    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(3)
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        model.last.bias.data = torch.ones(4)
        model.norm.running_mean.zero_()
        told.call(3)
        nn.init.ones_(model.last.weight)
        told.call(2)

    assert_same_story(net_run, story)


def test_a_module_moved_to_another_dtype_trains_in_that_dtype() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            return train_step(model, optimizer, x.to(next(model.parameters()).dtype))

        return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "optimizer": optimizer})

    def story(told: Story) -> None:
        told.call(3)
        told.run.watch["model"].double()
        told.call(3)

    assert_same_story(make, story)


@pytest.mark.parametrize(
    ("key", "value"), [("weight_decay", 0.0), ("amsgrad", False), ("maximize", True), ("foreach", False), ("eps", 1e-3)]
)
def test_an_option_of_the_optimizer_changed_between_steps_is_obeyed(key: str, value: Any) -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        return plain_run(where, model, adamw(model, foreach=True, amsgrad=True))

    def story(told: Story) -> None:
        _, optimizer = parts(told)
        told.call(3)
        optimizer.param_groups[0][key] = value
        told.call(3)

    assert_same_story(make, story)


def test_a_momentum_that_is_switched_on_creates_its_state_then() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        return plain_run(where, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def story(told: Story) -> None:
        _, optimizer = parts(told)
        told.call(3)
        optimizer.param_groups[0]["momentum"] = 0.9
        told.call(3)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        told.call(3)

    assert_same_story(make, story)


def test_optimizer_state_cleared_between_steps_is_created_again() -> None:
    def story(told: Story) -> None:
        _, optimizer = parts(told)
        told.call(3)
        optimizer.state.clear()
        told.call(3)

    step = assert_same_story(net_run, story)
    assert len(step.graphs) <= 2, reasons(step)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_going_back_to_eager_and_returning_loses_nothing(form: dict[str, Any]) -> None:
    def story(told: Story) -> None:
        told.call_eager(2)
        told.call(3)
        told.call_eager(2)
        told.call(3)

    step = assert_same_story(lambda where: net_run(where, **form), story)
    assert len(step.graphs) <= 2, reasons(step)


def test_gradients_left_by_eager_are_added_to() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        return plain_run(where, model, adamw(model))

    def story(told: Story) -> None:
        model, _ = parts(told)
        model(batch_of(device(), 99, 5, 6)).sum().backward()
        told.look()
        told.call(2)
        model(batch_of(device(), 98, 5, 6)).sum().backward()
        told.call(2)

    assert_same_story(make, story)


def test_the_tensors_of_parameters_state_and_buffers_keep_their_identity() -> None:
    run = net_run(device())
    step = ws.compile(run.step)
    model, optimizer = run.watch["model"], run.watch["optimizer"]
    parameters = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    buffers = {name: (b, b.data_ptr()) for name, b in model.named_buffers()}
    play(run, step, 2)
    state = {p: dict(optimizer.state[p]) for p in model.parameters()}
    play(run, step, 3)
    for name, p in model.named_parameters():
        assert p is parameters[name][0]
        assert p.data_ptr() == parameters[name][1]
        assert all(optimizer.state[p][key] is value for key, value in state[p].items())
    for name, b in model.named_buffers():
        assert b is buffers[name][0]
        assert b.data_ptr() == buffers[name][1]


def test_a_result_is_not_overwritten_by_a_later_step() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[torch.Tensor]:
            loss = train_step(model, optimizer, x)
            return [loss, *(p.detach().clone() for p in model.parameters())]

        return plain_run(where, model, adamw(model), step)

    run = make(device())
    step = ws.compile(run.step)
    results = [step(*run.arguments(i)) for i in range(3)]
    kept = [freeze(result) for result in results]
    for i in range(3, 6):
        step(*run.arguments(i))
    assert [freeze(result) for result in results] == kept


def test_gradients_kept_by_the_user_behave_as_in_eager() -> None:
    """`zero_grad(set_to_none=True)` lets go of the gradient, so what the user kept stays; set to zero it does not."""

    def make(where: torch.device) -> Run:
        model = mlp(where)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return plain_run(where, model, adamw(model), step)

    def story(told: Story) -> None:
        model, _ = parts(told)
        told.call(2)
        kept = [p.grad for p in model.parameters()]
        told.call(2)
        told.look(kept=kept)
        assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))

    assert_same_story(make, story)


def test_results_and_gradients_have_the_strides_of_eager() -> None:
    def strides(compiled: bool) -> list[tuple[int, ...]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)).to(device())
        model = model.to(memory_format=torch.channels_last)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            out = model(x)
            out.square().mean().backward()
            return out, out.transpose(1, 2), out.permute(0, 2, 3, 1).contiguous()

        run_step = ws.compile(step) if compiled else step
        results: tuple[torch.Tensor, ...] = ()
        for i in range(3):
            x = batch_of(device(), i, 2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
            results = run_step(x)
        return [t.stride() for t in results] + [p.grad.stride() for p in model.parameters() if p.grad is not None]

    assert strides(compiled=True) == strides(compiled=False)


def test_autocast_around_the_call_is_a_reason_for_another_graph() -> None:
    def story(told: Story) -> None:
        told.call(2)
        for _ in range(2):  # a context of its own each time: eager keeps casts of old weights while one is open
            with torch.autocast("cpu", dtype=torch.bfloat16):
                told.call()
        told.call(2)

    assert_same_story(net_run, story)


def test_no_grad_around_an_evaluation_gives_what_eager_gives() -> None:
    def make(where: torch.device) -> Run:
        model = Net().to(where).eval()
        return Run(lambda model, x: model(x), lambda i: (model, batch_of(where, i, 5, 6)), {"model": model})

    def story(told: Story) -> None:
        told.call(2)
        with torch.no_grad():
            told.call(2)

    assert_same_story(make, story)


def test_default_dtype_changed_between_steps_is_used() -> None:
    def make(where: torch.device) -> Run:
        return Run(lambda x: torch.zeros(2) + x.sum(), lambda i: (batch_of(where, i, 5, 6),), {})

    def story(told: Story) -> None:
        told.call(2)
        torch.set_default_dtype(torch.float64)
        try:
            told.call(2)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same_story(make, story)


def test_attributes_of_self_changed_between_steps_are_used() -> None:
    def play_trainer(compiled: bool) -> list[Any]:
        torch.manual_seed(3)
        trainer = Trainer(device())
        run = trainer.run()
        step = ws.compile(trainer.step) if compiled else trainer.step
        frames = play(run, step, 3)
        trainer.limits["norm"] = 0.01
        frames += play(run, step, 3)
        trainer.weight = torch.arange(4.0)
        frames += play(run, step, 3)
        trainer.model = mlp(device())
        trainer.optimizer = adamw(trainer.model)
        return frames + play(trainer.run(), step, 3)

    assert_frames_equal(play_trainer(compiled=False), play_trainer(compiled=True))


def test_a_decorated_method_serves_every_instance() -> None:
    def play_trainers(decorate: Any) -> list[Any]:
        class Decorated(Trainer):
            step = decorate(Trainer.step)

        torch.manual_seed(3)
        first, second = Decorated(device()), Decorated(device())
        frames = play(first.run(), first.step, 3)
        frames += play(second.run(), second.step, 3)
        return frames + play(first.run(), first.step, 3)

    assert_frames_equal(play_trainers(lambda step: step), play_trainers(ws.compile))


def test_a_global_number_changed_between_steps_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        monkeypatch.setitem(globals(), "WEIGHT", 1.0)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean() * WEIGHT
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return plain_run(where, model, torch.optim.SGD(model.parameters(), lr=0.1), step)

    def story(told: Story) -> None:
        told.call(2)
        monkeypatch.setitem(globals(), "WEIGHT", 3.0)
        told.call(2)

    assert_same_story(make, story)


WEIGHT = 1.0


def test_a_number_in_a_closure_changed_between_steps_is_used() -> None:
    def make(where: torch.device) -> Run:
        model = mlp(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = 1.0
        limits = {"norm": 1.0}

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean() * weight
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), limits["norm"])
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def after(i: int, result: Any) -> None:
            nonlocal weight
            weight = 1.0 if i < 2 else 2.0
            limits["norm"] = 1.0 if i < 5 else 0.1

        return Run(step, lambda i: (batch_of(where, i, 5, 6),), {"model": model, "optimizer": optimizer}, after=after)

    assert_same_story(make, lambda told: told.call(8))


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


def test_a_dynamic_dimension_that_the_step_fixes_raises() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.view(4, 6).sum()

    with pytest.raises(ws.errors.DynamicShapeError, match=r"\[WS-DYNAMIC\]"):
        ws.compile(step, dynamic={"x": {0: ws.Dim(min=1, max=64)}})(batch_of(device(), 0, 4, 6))


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
    step = ws.compile(run.step, max_recompiles=3)
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
