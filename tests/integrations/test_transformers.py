"""WholestepTrainer beside transformers' Trainer: the same losses, norms, rates and weights, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from selection import each_now
from wholestep import errors, integrations
from wholestep.integrations.transformers import WholestepTrainer, WholestepTrainerMixin

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def tiny_model(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=layers,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def sentences(count: int = 20, length: int = 8) -> list[dict[str, Tensor]]:
    """Token ids; some labels do not count, in another number in each sentence."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for i in range(count):
        ids = torch.randint(50, (length,), generator=generator)
        labels = ids.clone()
        labels[: i % 4] = -100
        found.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return found


def trainer_of(kind: Any, folder: Path, callbacks: Any = None, layers: int = 2, **options: Any) -> Any:
    chosen = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    args = TrainingArguments(output_dir=str(folder), **chosen)
    return kind(
        model=tiny_model(layers), args=args, train_dataset=sentences(), eval_dataset=sentences(4), callbacks=callbacks
    )


def seen(trainer: Any) -> dict[str, Any]:
    """What training left: all that was logged but times, weights, optimizer and scheduler."""
    logs = [
        {k: v for k, v in log.items() if "runtime" not in k and "per_second" not in k}
        for log in trainer.state.log_history
    ]
    optimizer = trainer.optimizer.state_dict()["state"]
    return {
        "logs": logs,
        "global_step": trainer.state.global_step,
        "weights": [p.tolist() for p in trainer.model.parameters()],
        "optimizer": [
            [torch.as_tensor(0 if v is None else v).tolist() for v in values.values()] for values in optimizer.values()
        ],
        "scheduler": trainer.lr_scheduler.state_dict(),
    }


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    for want, got in zip(expected["logs"], actual["logs"], strict=True):
        assert want == got
    for name in ("global_step", "weights", "optimizer", "scheduler"):
        assert expected[name] == actual[name], name


def both(folder: Path, kinds: Any = (Trainer, WholestepTrainer), **options: Any) -> Any:
    """Train with Trainer and with ours; the same is seen. Returns ours."""
    plain = trainer_of(kinds[0], folder / "plain", **options)
    plain.train()
    ours = trainer_of(kinds[1], folder / "ours", **options)
    ours.train()
    assert_same(seen(plain), seen(ours))
    return ours


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulation": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.3},
    "no clipping, bf16, label smoothing": {"max_grad_norm": 0.0, "bf16": True, "label_smoothing_factor": 0.1},
    "evaluation in between": {"eval_strategy": "steps", "eval_steps": 3},
    "warm-up, cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
    "Adafactor": {"optim": "adafactor", "max_steps": 4},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2, "max_steps": 6},
}


NOW = [name for name in CASES if name not in ("Adafactor", "warm-up, cosine", "default")]


@pytest.mark.parametrize("name", each_now(CASES, *NOW))
def test_training_arguments_give_what_trainer_gives(name: str, tmp_path: Path) -> None:
    ours = both(tmp_path, **CASES[name])
    assert ours.compiled_steps


def test_the_whole_update_is_one_graph(tmp_path: Path) -> None:
    ours = both(tmp_path)
    (update,) = ours.compiled_steps
    assert len(update.graphs) == 2  # the first creates the optimizer's state
    written = {change.path for change in update.last.signature.state_changes}
    kinds = {spec.kind.name for spec in update.last.signature.inputs}
    assert {"PARAMETER", "OPTIMIZER_STATE", "HYPER_PARAMETER", "BATCH"} <= kinds
    assert len(update.last.signature.write_backs) >= 3 * len(list(ours.model.parameters())), written


def test_training_resumed_from_a_checkpoint_continues_as_in_trainer(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
    }
    found = []
    for kind in (Trainer, WholestepTrainer):
        folder = tmp_path / kind.__name__
        trainer_of(kind, folder, **options).train()
        resumed = trainer_of(kind, folder, **options)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        found.append(seen(resumed))
    assert_same(*found)
    crossed = trainer_of(WholestepTrainer, tmp_path / "crossed", **options)
    crossed.train(resume_from_checkpoint=str(tmp_path / "Trainer" / "checkpoint-4"))
    assert_same(found[0], seen(crossed))


class Watches(TrainerCallback):  # type: ignore[misc]
    """Looks at gradients and weights in the middle of an update."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def _look(self, event: str, model: Any) -> None:
        grads = [None if p.grad is None else p.grad.sum().item() for p in model.parameters()]
        self.found.append((event, grads, [p.sum().item() for p in model.parameters()]))


class WatchesBefore(Watches):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._look("before", model)


class WatchesAfter(Watches):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._look("after", model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._look("end", model)

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._look("part", model)


@pytest.mark.parametrize("kind", [WatchesBefore, WatchesAfter])
def test_callbacks_see_gradients_and_weights_where_trainer_shows_them(kind: Any, tmp_path: Path) -> None:
    watchers = []
    for trainer, folder in ((Trainer, "plain"), (WholestepTrainer, "ours")):
        watcher = kind()
        watchers.append(watcher)
        options = {"gradient_accumulation_steps": 2, "max_steps": 4}
        trainer_of(trainer, tmp_path / folder, callbacks=[watcher], **options).train()
    assert watchers[0].found == watchers[1].found
    assert any(any(g is not None for g in grads) for _, grads, _ in watchers[0].found)


class Own(Trainer):  # type: ignore[misc]
    """A user's subclass with a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        weights = torch.where(inputs["labels"] == -100, 0.5, 1.0)
        losses = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), inputs["input_ids"], reduction="none")
        loss = (losses * weights).mean()
        return (loss, outputs) if return_outputs else loss


class OwnCompiled(WholestepTrainerMixin, Own):
    pass


def test_the_mixin_compiles_a_users_own_trainer(tmp_path: Path) -> None:
    ours = both(tmp_path, kinds=(Own, OwnCompiled), gradient_accumulation_steps=2)
    assert [step.options.name for step in ours.compiled_steps] == ["OwnCompiled.update", "OwnCompiled.training_step"]


def test_a_second_call_of_train_continues_as_in_trainer(tmp_path: Path) -> None:
    found = []
    for kind in (Trainer, WholestepTrainer):
        trainer = trainer_of(kind, tmp_path / kind.__name__, max_steps=3)
        trainer.train()
        trainer.train()
        found.append(seen(trainer))
    assert_same(*found)


def test_compile_options_are_those_of_compile(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, max_steps=1, disable_tqdm=True)
    trainer = WholestepTrainer(
        model=tiny_model(), args=args, train_dataset=sentences(), compile_options={"lower": "debug", "name": "mine"}
    )
    trainer.train()
    (update,) = trainer.compiled_steps
    assert (update.options.lower, update.options.name) == ("debug", "mine")


class StopsOnLargeLosses(Own):
    """Its loss function branches on what the step computes."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if loss > 1e6:
            raise FloatingPointError("the loss is too large")
        return loss


def test_what_a_replay_would_not_repeat_is_refused_with_the_users_line(tmp_path: Path) -> None:
    kind = type("Compiled", (WholestepTrainerMixin, StopsOnLargeLosses), {})
    with pytest.raises(errors.WholestepError) as caught:
        trainer_of(kind, tmp_path).train()
    assert "test_transformers.py" in str(caught.value)


class KeepsLosses(Own):
    """Its loss function also appends what it computes to a list."""

    kept: ClassVar[list[Tensor]] = []

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.kept.append(loss.detach())
        return loss


def test_a_list_that_the_loss_function_appends_to_is_appended_to(tmp_path: Path) -> None:
    seen = []
    for kind in (KeepsLosses, type("Compiled", (WholestepTrainerMixin, KeepsLosses), {})):
        trainer_of(kind, tmp_path).train()
        seen.append([loss.clone() for loss in KeepsLosses.kept])
        KeepsLosses.kept.clear()
    assert len(seen[0]) == len(seen[1]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_a_framework_that_is_missing_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"needs no_such_framework.*pip install 'wholestep\[no_such_framework\]'"):
        integrations.framework("no_such_framework")
