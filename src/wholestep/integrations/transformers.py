"""`transformers.Trainer` with the whole update as one graph: forward, loss, backward, clipping, optimizer.

    trainer = WholestepTrainer(model=model, args=args, train_dataset=data)
    trainer.train()

    class MyTrainer(WholestepTrainerMixin, SFTTrainer): ...

Trainer's own loop runs as it is. It calls `training_step` for each micro-batch, then clips, steps the optimizer and
the scheduler:

    the loop of Trainer                       here
    training_step(..)                         the last micro-batch: training_step, clipping, optimizer, zero_grad in one
                                              graph; the others: training_step in a graph of its own
    _clip_grad_norm(model)                    gives the norm that the graph returned
    callbacks: on_pre_optimizer_step          where one listens, the graph ends before the optimizer, which has its own
    optimizer.step()                          nothing more: the graph has done it
    lr_scheduler.step()                       as it is: a new learning rate is a new input of the graph
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from wholestep.api import compile as compile_step
from wholestep.compiled_step import CompiledStep
from wholestep.errors import UnsupportedError
from wholestep.integrations import framework, lines_of_users

_FRAMEWORKS = ("transformers", "accelerate")
_LISTENS_BEFORE = "on_pre_optimizer_step"
_LISTENS_AFTER = "on_optimizer_step"


class WholestepTrainerMixin:
    """Compiles the update of the `Trainer` that it stands before in the bases of a class.

    `compile_options`: options of `ws.compile`, such as `{"lower": "eager"}`. All else is as in `Trainer`.
    """

    args: Any
    accelerator: Any
    optimizer: Any
    callback_handler: Any

    def __init__(self, *args: Any, compile_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._wholestep = _Steps(self, dict(compile_options or {}))
        super().__init__(*args, **kwargs)

    @property
    def compiled_steps(self) -> list[CompiledStep[Any, Any]]:
        """What was compiled: the update, micro-batches before it, the optimizer where callbacks come between."""
        return self._wholestep.compiled

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`; models and optimizers of an earlier call are released."""
        self._wholestep.reset()
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch; with the last one of an update also clipping and the optimizer."""
        loss: Tensor = self._wholestep.run(model, inputs, num_items_in_batch)
        return loss

    def _wholestep_training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        found: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        return found

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = self._wholestep.norm
        return super()._clip_grad_norm(model) if norm is None else norm  # type: ignore[misc]

    def _wholestep_clip(self, model: nn.Module) -> Any:
        norm = None
        if self.args.max_grad_norm > 0:
            norm = super()._clip_grad_norm(model)  # type: ignore[misc]
        return super()._get_grad_norm(model, grad_norm=norm)  # type: ignore[misc]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = self._wholestep.norm
        return super()._get_grad_norm(model, grad_norm=grad_norm) if norm is None else norm  # type: ignore[misc]


if TYPE_CHECKING:
    from transformers import Trainer

    class WholestepTrainer(WholestepTrainerMixin, Trainer):  # type: ignore[misc]
        """`transformers.Trainer` that compiles its update."""


def __getattr__(name: str) -> Any:
    if name != "WholestepTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    framework("transformers", "accelerate")
    from transformers import Trainer

    about = {"__module__": __name__, "__doc__": "`transformers.Trainer` that compiles its update."}
    made = globals()[name] = type(name, (WholestepTrainerMixin, Trainer), about)
    return made


class _Steps:
    """The compiled steps of one trainer, and what the loop is to find already done."""

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self._trainer = trainer
        name = type(trainer).__name__
        self._micro_batch = compile_step(_micro_batch, **{"name": f"{name}.training_step", **options})
        self._update = compile_step(_update, **{"name": f"{name}.update", **options})
        self._optimizer = compile_step(_step_optimizer, **{"name": f"{name}.optimizer", **options})
        self.norm: Any = None
        """The norm of the gradients of the update that the loop is in the middle of."""

    @property
    def compiled(self) -> list[CompiledStep[Any, Any]]:
        return [step for step in (self._update, self._micro_batch, self._optimizer) if step.graphs]

    def reset(self) -> None:
        self._taken_back()
        for step in (self._update, self._micro_batch, self._optimizer):
            step.reset()

    def run(self, model: Any, inputs: Any, items: Any) -> Any:
        with lines_of_users(_FRAMEWORKS, lambda: type(self._trainer).compute_loss):
            return self._run(model, inputs, items)

    def _run(self, model: Any, inputs: Any, items: Any) -> Any:
        trainer = self._trainer
        _refuse_other_engines(trainer)
        self._taken_back()
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        if not trainer.accelerator.gradient_state.sync_gradients:
            loss, metrics = self._micro_batch(trainer, model, inputs, items)
            _note_metrics(trainer, metrics)
            return loss
        steps, zeroes = not self._listens(_LISTENS_BEFORE), not self._listens(_LISTENS_AFTER)
        scaler = trainer.accelerator.scaler
        scale = None if scaler is None else scaler.get_scale()
        loss, self.norm, metrics = self._update(trainer, model, inputs, items, steps, steps and zeroes)
        _note_metrics(trainer, metrics)
        if not steps:
            self._once(lambda: self._run_optimizer(scale))
            return loss
        self._note_skipped(scale)
        self._once(lambda: None)
        return loss

    def _run_optimizer(self, scale: float | None) -> None:
        self._optimizer(self._trainer)
        self._note_skipped(scale)

    def _note_skipped(self, scale: float | None) -> None:
        """Tell Accelerate whether the scaler skipped the step; the graph cannot, as it takes both ways at once."""
        if scale is not None:
            self._trainer.optimizer._is_overflow = self._trainer.accelerator.scaler.get_scale() < scale

    def _listens(self, event: str) -> bool:
        """Whether a callback wants to see gradients in the middle of the update."""
        from transformers import TrainerCallback

        plain = getattr(TrainerCallback, event)
        return any(getattr(type(each), event, plain) is not plain for each in self._trainer.callback_handler.callbacks)

    # `optimizer.step()` of the loop.

    def _once(self, instead: Callable[[], None]) -> None:
        """The next `optimizer.step()` does this instead."""
        optimizer = self._trainer.optimizer
        self._before = vars(optimizer).get("step")

        def step(*args: Any, **kwargs: Any) -> None:
            self._taken_back()
            instead()

        vars(optimizer)["step"] = self._instead = step

    _before: Any = None
    _instead: Any = None

    def _taken_back(self) -> None:
        """The loop finds nothing done."""
        self.norm = None
        optimizer, instead, self._instead = self._trainer.__dict__.get("optimizer"), self._instead, None
        if instead is None or optimizer is None or vars(optimizer).get("step") is not instead:
            return
        if self._before is None:
            del vars(optimizer)["step"]
        else:
            vars(optimizer)["step"] = self._before


def _micro_batch(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> tuple[Any, Any]:
    return _training_step(trainer, model, inputs, num_items_in_batch)


def _update(
    trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any, steps: bool, zeroes: bool
) -> tuple[Any, Any, Any]:
    loss, metrics = _training_step(trainer, model, inputs, num_items_in_batch)
    norm = trainer._wholestep_clip(model)
    if steps:
        trainer.optimizer.step()
    if zeroes:
        model.zero_grad()
    return loss, norm, metrics


def _training_step(trainer: Any, model: Any, inputs: Any, items: Any) -> tuple[Any, Any]:
    """`training_step`, and what it adds to the metrics of the trainer, which is a result of the graph."""
    known = trainer.__dict__.get("_metrics")
    if not isinstance(known, Mapping):
        return trainer._wholestep_training_step(model, inputs, items), None
    added = {mode: _AddedMetrics() for mode in known}
    trainer._metrics = added
    try:
        loss = trainer._wholestep_training_step(model, inputs, items)
    finally:
        trainer._metrics = known
    return loss, {mode: (dict(metrics), dict(metrics.replaced)) for mode, metrics in added.items()}


class _AddedMetrics(defaultdict[str, list[Any]]):
    """The metrics of trl's trainers in one step: `metrics[name].append(value)`, `metrics[name] = [value]`."""

    def __init__(self) -> None:
        super().__init__(list)
        self.replaced: dict[str, Any] = {}

    def __setitem__(self, name: str, values: list[Any]) -> None:
        if values:
            self.replaced[name] = values
        else:
            super().__setitem__(name, values)


def _note_metrics(trainer: Any, added: Any) -> None:
    """Add what a step returned to the metrics of the trainer."""
    for mode, (appended, replaced) in (added or {}).items():
        for name, values in appended.items():
            trainer._metrics[mode][name].extend(values)
        for name, values in replaced.items():
            trainer._metrics[mode][name] = list(values)


def _step_optimizer(trainer: Any) -> None:
    trainer.optimizer.step()


def _refuse_other_engines(trainer: Any) -> None:
    kind = trainer.accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise UnsupportedError(
            f"the trainer runs on {kind}, which has an engine of its own for the step.",
            fix="use Trainer itself with that engine, or DistributedDataParallel or FSDP2 with WholestepTrainer.",
        )
