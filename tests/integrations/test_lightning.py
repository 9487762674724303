"""Lightning's Trainer with WholestepCallback beside Lightning alone: the same weights, counts, logs, checkpoints."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from selection import each_now
from wholestep import errors
from wholestep.integrations.lightning import WholestepCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(ModelCheckpoint with manual|Checkpoint directory|no `validation_step`).*"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|LeafSpec|pin_memory|Experiment logs).*"),
]


class Regression(pl.LightningModule):
    """Automatic optimization, a scheduler by step, values logged by step and by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"twice": loss * 2, "rate": self.trainer.optimizers[0].param_groups[0]["lr"]})
        return {"loss": loss, "shown": loss.detach() + 1}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Regression):
    """The same by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        found = super().training_step(batch, batch_idx)
        self.manual_backward(found["loss"])
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        scheduler: Any = self.lr_schedulers()
        scheduler.step()
        return found


class Adversaries(pl.LightningModule):
    """Two optimizers, each of which sees only its own parameters, and one of them gets a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(6, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        makes, judges = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(makes)
        loss = F.softplus(-self.judge(self.maker(x))).mean()
        makes.zero_grad()
        self.manual_backward(loss)
        makes.step()
        self.untoggle_optimizer(makes)

        def closure() -> Tensor:
            judges.zero_grad()
            wrong = F.softplus(self.judge(self.maker(x).detach())).mean() + F.softplus(-self.judge(y)).mean()
            self.manual_backward(wrong)
            self.log("judge", wrong)
            return wrong

        judges.step(closure)
        self.log("maker", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.maker.parameters(), 0.01), torch.optim.SGD(self.judge.parameters(), 0.1)]


class Hooks(Regression):
    """Hooks of the module between the parts of a step: one logs norms, one changes gradients."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.zeroed = getattr(self, "zeroed", 0) + 1


def loader(count: int = 10) -> Any:
    generator = torch.Generator().manual_seed(5)
    data = [(torch.randn(6, generator=generator), torch.randn(4, generator=generator)) for _ in range(count)]
    return torch.utils.data.DataLoader(data, batch_size=2)


def fit(
    make: Callable[[], pl.LightningModule], folder: Path, ours: Any = None, ckpt_path: Any = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Train, and what is seen of it."""
    torch.manual_seed(0)
    module = make()
    saves = ModelCheckpoint(dirpath=folder / "saved", every_n_train_steps=3, save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=options.pop("max_epochs", 2),
        accelerator="cpu",
        devices=options.pop("devices", 1),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[*([ours] if ours else []), saves, *options.pop("callbacks", ())],
        **options,
    )
    trainer.fit(module, loader(), loader(4), ckpt_path=ckpt_path)
    file = Path(trainer.logger.log_dir) / "metrics.csv"
    seen = {
        "global_step": trainer.global_step,
        "logged": list(csv.reader(file.read_text().splitlines())),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "weights": [p.tolist() for p in module.parameters()],
        "optimizers": [str(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "saved": sorted(path.name for path in (folder / "saved").glob("*")),
        "attributes": {k: v for k, v in vars(module).items() if k == "zeroed"},
    }
    return trainer, seen


def both(
    make: Callable[[], pl.LightningModule], folder: Path, callbacks: Callable[[], Any] = list, **options: Any
) -> WholestepCallback:
    """Train in eager and with graphs; the same is seen."""
    _, expected = fit(make, folder / "eager", callbacks=callbacks(), **options)
    callback = WholestepCallback()
    _, actual = fit(make, folder / "graphs", callback, callbacks=callbacks(), **options)
    for name, want in expected.items():
        assert actual[name] == want, name
    assert callback.compiled_steps
    return callback


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "accumulation and clipping": (
        Regression,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 1},
    ),
    "bf16, clipping by value": (
        Regression,
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    "manual": (Manual, {}),
    "two optimizers": (Adversaries, {}),
    "hooks": (Hooks, {}),
}


@pytest.mark.parametrize("name", each_now(CASES, "accumulation and clipping", "manual", "two optimizers", "hooks"))
def test_training_with_graphs_shows_what_lightning_shows(name: str, tmp_path: Path) -> None:
    make, options = CASES[name]
    both(make, tmp_path, **options)


def test_a_training_batch_is_one_graph_of_everything(tmp_path: Path) -> None:
    callback = both(Regression, tmp_path, max_epochs=3)
    (step,) = callback.compiled_steps
    assert len(step.graphs) <= 4, step.recompiles  # with and without gradients, state and the first change of counts
    kinds = {spec.kind.name for spec in step.last.signature.inputs}
    assert {"PARAMETER", "OPTIMIZER_STATE", "HYPER_PARAMETER", "BATCH"} <= kinds


@pytest.mark.parametrize("make", each_now([Regression, Manual], "Regression"))
def test_training_resumed_from_a_checkpoint_continues_as_in_lightning(make: Any, tmp_path: Path) -> None:
    found = []
    for name in ("eager", "graphs"):
        ours = [WholestepCallback() if name == "graphs" else None for _ in range(2)]
        folder = tmp_path / name
        fit(make, folder, ours[0])
        saved = folder / "saved" / "epoch=1-step=9.ckpt"
        _, seen = fit(make, folder, ours[1], ckpt_path=saved, max_epochs=3)
        found.append(seen)
    assert found[0] == found[1]
    assert found[0]["global_step"] == 15


def test_callbacks_of_lightning_do_their_work(tmp_path: Path) -> None:
    both(Regression, tmp_path, max_epochs=4, callbacks=lambda: [EarlyStopping("val_loss", patience=1, min_delta=0.1)])


class ReadsWhatWasLogged(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        found["loss"] = found["loss"] * (1 + len(self.trainer.callback_metrics))
        return found


def test_what_a_replay_would_not_repeat_is_refused_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(errors.WholestepError) as caught:
        fit(ReadsWhatWasLogged, tmp_path, WholestepCallback())
    assert "test_lightning.py" in str(caught.value)


class AppendsLosses(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        losses.append(found["loss"].detach())
        return found


losses: list[Tensor] = []


def test_a_list_that_the_training_step_appends_to_is_appended_to(tmp_path: Path) -> None:
    seen = []
    for more in ([], [WholestepCallback()]):
        fit(AppendsLosses, tmp_path, *more)
        seen.append([loss.clone() for loss in losses])
        losses.clear()
    assert len(seen[0]) == len(seen[1]) > 0
    assert all(map(torch.equal, *seen))


def test_lightnings_own_loops_are_back_after_training(tmp_path: Path) -> None:
    trainer, _ = fit(Regression, tmp_path, WholestepCallback(), max_epochs=1)
    epoch = trainer.fit_loop.epoch_loop
    assert "run" not in vars(epoch.automatic_optimization)
    assert "run" not in vars(epoch.manual_optimization)
