"""Optimizers of real packages, each as a training step with a learning rate that changes between calls.

OPTIMIZERS["timm/Lookahead"].run()   a fresh model, optimizer and step (harness.Run)
outcome(sample)                      equal to eager, or refused with a code and a line; anything else is a fault
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from harness import SEED, Run, batch_of, differences, play
from packages.timm_optimizers import timm_optimizer

STEPS = 8
WIDE = 96
"""A width at which torchao quantizes: a weight of 4,096 elements or more."""

Step = Callable[..., Any]


@dataclass(frozen=True)
class Sample:
    """One optimizer of a package: how it is built, and the step that uses it."""

    make: Callable[[nn.Module], Any]
    step: Step | None = None
    width: int = 8
    refused: str | None = None
    """The code of the refusal that is expected; None: equal to eager."""

    def run(self) -> Run:
        results = 64 if self.width == WIDE else 4
        model = nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), nn.Linear(self.width, results))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = self.make(model)
        where = torch.device("cpu")

        def change_rate(i: int, result: Any) -> None:
            for group in optimizer.param_groups:
                if isinstance(group.get("lr"), Tensor):
                    group["lr"].mul_(0.9)
                elif group.get("lr") is not None:
                    group["lr"] *= 0.9

        return Run(
            self.step or train,
            lambda i: (model, optimizer, batch_of(where, i, 5, 6), batch_of(where, 50 + i, 5, results)),
            {"model": model, "optimizer": Plain(optimizer)},
            after=change_rate,
        )


class Plain:
    """The state of an optimizer in plain tensors: what a subclass is made of, and attributes beside the state."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        public = {k: v for k, v in vars(self._optimizer).items() if not k.startswith("_")}
        attributes = {k: v for k, v in public.items() if isinstance(v, int | float | str | Tensor)}
        return {**_plain(self._optimizer.state_dict()), "attributes": attributes}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
    if isinstance(value, Tensor | int | float | str | None):
        return value
    return _plain(dict(vars(value))) if hasattr(value, "__dict__") else value


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """The step of most optimizers."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def train_with_graph(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """For optimizers that differentiate the gradients."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward(create_graph=True)
    optimizer.step()
    for p in model.parameters():
        p.grad = None
    return loss


def train_with_closure(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """For optimizers that evaluate the model themselves."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure)


def train_twice(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Sharpness-aware minimisation, in its two-step form."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.first_step(zero_grad=True)
    F.mse_loss(model(x), y).backward()
    optimizer.second_step(zero_grad=True)
    return loss


def modes(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Schedule-free: the averaged weights are swapped in and out within the step."""
    optimizer.eval()
    with torch.no_grad():
        averaged = F.mse_loss(model(x), y)
    optimizer.train()
    return averaged + train(model, optimizer, x, y).detach()


def torch_samples() -> dict[str, Sample]:
    names = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
    found = {name: Sample(_all(f"torch.optim:{name}")) for name in names}
    found["Muon"] = Sample(_matrices("torch.optim:Muon"))
    found["SGD-nesterov"] = Sample(_all("torch.optim:SGD", lr=0.1, momentum=0.9, nesterov=True))
    found["Adam-amsgrad"] = Sample(_all("torch.optim:Adam", amsgrad=True))
    found["AdamW-tensor-lr"] = Sample(
        lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
    )
    found["LBFGS"] = Sample(_all("torch.optim:LBFGS"), step=train_with_closure, refused="WS-OPT-CLOSURE")
    return found


def schedulefree_samples() -> dict[str, Sample]:
    found: dict[str, Sample] = {}
    references = ("SGDScheduleFreeReference", "AdamWScheduleFreeReference", "AdamWScheduleFreePaper")
    for name in ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree", *references):
        found[name] = Sample(_all(f"schedulefree:{name}", lr=0.05))
    for name in ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"):
        kind = f"schedulefree:{name}"
        found[f"{name}-not-foreach"] = Sample(_all(kind, lr=0.05, foreach=False))
        found[f"{name}-modes"] = Sample(_all(kind, lr=0.05), step=modes)
        closing = _all(f"{kind}Closure", lr=0.05)
        found[f"{name}Closure"] = Sample(closing, step=train_with_closure)
    for name in ("SGDScheduleFree", "AdamWScheduleFree"):
        found[f"{name}-warmup"] = Sample(_all(f"schedulefree:{name}", lr=0.05, warmup_steps=4))
    for name in ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"):
        found[name] = Sample(_wrapping(f"schedulefree:{name}", torch.optim.SGD, momentum=0.9))
    return found


def timm_samples() -> dict[str, Sample]:
    names = (
        "adabelief:AdaBelief adafactor:Adafactor adafactor_bv:AdafactorBigVision adamp:AdamP adamw:AdamWLegacy "
        "adan:Adan adopt:Adopt kron:Kron lamb:Lamb laprop:LaProp lars:Lars lion:Lion madgrad:MADGRAD mars:Mars "
        "muon:Muon nadam:NAdamLegacy nadamw:NAdamW nvnovograd:NvNovoGrad radam:RAdamLegacy rmsprop_tf:RMSpropTF "
        "sgdp:SGDP sgdw:SGDW"
    ).split()
    found = {name.split(":")[1]: Sample(_all(f"timm.optim.{name}", lr=0.01)) for name in names}
    found["Lamb-trust-clip"] = Sample(_all("timm.optim.lamb:Lamb", lr=0.01, trust_clip=True, always_adapt=True))
    found["MADGRAD-momentum-0"] = Sample(_all("timm.optim.madgrad:MADGRAD", lr=0.01, momentum=0.0))
    found["Lion-not-foreach"] = Sample(_all("timm.optim.lion:Lion", lr=0.01, foreach=False))
    found["Adan-not-foreach"] = Sample(_all("timm.optim.adan:Adan", lr=0.01, foreach=False))
    found["Lookahead"] = Sample(_wrapping("timm.optim.lookahead:Lookahead", k=3))
    found["Adahessian"] = Sample(_all("timm.optim.adahessian:Adahessian", lr=0.01), step=train_with_graph)
    return found


def torch_optimizer_samples() -> dict[str, Sample]:
    names = (
        "A2GradExp A2GradInc A2GradUni AccSGD AdaBelief AdaBound AdaMod Adafactor AdamP AggMo Apollo DiffGrad LARS "
        "Lamb MADGRAD NovoGrad PID QHAdam QHM RAdam Ranger RangerQH RangerVA SGDP SGDW SWATS Shampoo Yogi"
    ).split()
    extra: dict[str, dict[str, Any]] = {"LARS": {"lr": 0.01}, "QHM": {"lr": 0.01, "momentum": 0.9}}
    found = {name: Sample(_all(f"torch_optimizer:{name}", **extra.get(name, {}))) for name in names}
    found["Adahessian"] = Sample(_all("torch_optimizer:Adahessian"), step=train_with_graph)
    return found


def pytorch_optimizer_samples() -> dict[str, Sample]:
    names = (
        "A2Grad ADOPT APOLLO ASGD AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaFactor AdaGC AdaMax AdaMod "
        "AdaNorm AdaPNM AdaShift AdaSmooth AdaTAM Adai Adalite Adam AdamC AdamG AdamP AdamS AdamW AdamWSN "
        "Adan AggMo Aida Alice Amos Ano ApolloDQN AvaGrad BCOS CAME Conda DASH DAdaptAdaGrad DAdaptAdam "
        "DAdaptAdan DAdaptLion DAdaptSGD DiffGrad DualAdam EXAdam EmoFact EmoLynx EmoNavi FAdam FOCUS FTRL "
        "Fira FlashAdamW Fromage GaLore Grams Gravity GrokFastAdamW Kate Kron LARS LaProp Lamb Lion LoRARite "
        "MADGRAD MARS MSVAG Magma NAdam Nero NovoGrad PAdam PID PNM Prodigy QHAdam QHM RACS RAdam RMSprop "
        "ROSE Ranger SCION SCIONLight SGD SGDP SGDSaI SGDW SM3 SOAP SPAM SPlus SRMM SWATS SaRA "
        "ScalableShampoo Shampoo SignSGD SimplifiedAdEMAMix StableAdamW StableSPAM TAM Tiger VSGD Yogi"
    ).split()
    other = "pytorch_optimizer"
    found = {name: Sample(_all(f"{other}:{name}")) for name in names}
    for name in ("ScheduleFreeAdamW", "ScheduleFreeRAdam", "ScheduleFreeSGD"):
        found[name] = Sample(_all(f"{other}:{name}", lr=0.05))
    for name in ("AdaGO", "AdaMuon", "Muon", "NorMuon"):
        found[name] = Sample(_with_muon(f"{other}:{name}"))
    for name in ("AdaHessian", "SophiaH"):
        found[name] = Sample(_all(f"{other}:{name}"), step=train_with_graph)
    for name in ("SAM", "LookSAM", "FriendlySAM"):
        make = _all(f"{other}:{name}", base_optimizer=torch.optim.SGD, lr=0.05)
        found[name] = Sample(make, step=train_twice)
        found[f"{name}-closure"] = Sample(make, step=train_with_closure)
    for name in ("Lookahead", "OrthoGrad", "TRAC", "ScheduleFreeWrapper"):
        found[name] = Sample(_wrapping(f"{other}:{name}"))
    found["AdamMini"] = Sample(lambda model: _class(f"{other}:AdamMini")(model, lr=0.01))
    found["SpectralSphere"] = Sample(_matrices(f"{other}:SpectralSphere"))
    found["Ranger21"] = Sample(_all(f"{other}:Ranger21", num_iterations=20))
    found["LBFGS"] = Sample(_all(f"{other}:LBFGS"), step=train_with_closure, refused="WS-OPT-CLOSURE")
    return found


def other_samples() -> dict[str, Sample]:
    lion = "lion_pytorch:Lion"
    found = {
        "lion_pytorch/Lion": Sample(_all(lion, lr=0.01)),
        "lion_pytorch/Lion-decoupled": Sample(_all(lion, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)),
    }
    for name in "Adam8bit AdamW8bit Adam4bit AdamW4bit AdamFp8 AdamWFp8".split():
        found[f"torchao/{name}"] = Sample(_all(f"torchao.optim:{name}"), width=WIDE)
    return found


REFUSED = {
    "WS-CONTROL-FLOW": (
        "timm/AdamP timm/Kron timm/Mars timm/SGDP "
        "torch_optimizer/A2GradExp torch_optimizer/Adafactor torch_optimizer/AdamP torch_optimizer/Lamb "
        "torch_optimizer/SGDP torch_optimizer/SWATS "
        "pytorch_optimizer/ASGD pytorch_optimizer/AdaGC pytorch_optimizer/AdamP pytorch_optimizer/AvaGrad "
        "pytorch_optimizer/DAdaptAdaGrad pytorch_optimizer/DAdaptAdam pytorch_optimizer/DAdaptAdan "
        "pytorch_optimizer/DAdaptLion pytorch_optimizer/DAdaptSGD pytorch_optimizer/Nero pytorch_optimizer/Prodigy "
        "pytorch_optimizer/RACS pytorch_optimizer/SGDP pytorch_optimizer/SGDSaI "
        "pytorch_optimizer/SWATS pytorch_optimizer/SpectralSphere pytorch_optimizer/StableSPAM pytorch_optimizer/TRAC"
    ),
    "WS-SIDE-EFFECT": (
        "pytorch_optimizer/Conda pytorch_optimizer/ScalableShampoo pytorch_optimizer/ScheduleFreeWrapper"
    ),
    "WS-ITEM": "pytorch_optimizer/Lookahead",
    "WS-RNG": "pytorch_optimizer/Kron",
}
"""Optimizers that branch on values of tensors, keep objects with tensors in their state, draw from numpy, ..."""


def samples() -> dict[str, Sample]:
    """Every optimizer by package and name."""
    codes = {name: code for code, names in REFUSED.items() for name in names.split()}
    found: dict[str, Sample] = {}
    for package, group in (
        ("torch", torch_samples()),
        ("schedulefree", schedulefree_samples()),
        ("timm", timm_samples()),
        ("torch_optimizer", torch_optimizer_samples()),
        ("pytorch_optimizer", pytorch_optimizer_samples()),
        ("", other_samples()),
    ):
        for name, sample in group.items():
            whole = f"{package}/{name}" if package else name
            found[whole] = replace(sample, refused=codes.get(whole, sample.refused))
    return found


def _class(name: str) -> Any:
    """`package.module:Name`, imported when it is first used: collecting tests imports no package."""
    module, _, kind = name.partition(":")
    if module.startswith("timm.optim."):
        return timm_optimizer(module.removeprefix("timm.optim."), kind)
    return getattr(importlib.import_module(module), kind)


def _all(kind: str, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: _into_training(_class(kind)(model.parameters(), **options))


def _matrices(kind: str) -> Callable[[nn.Module], Any]:
    return lambda model: _class(kind)([p for p in model.parameters() if p.ndim == 2])


def _wrapping(kind: str, inner: Any = torch.optim.AdamW, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: _into_training(_class(kind)(inner(model.parameters(), lr=0.01), **options))


def _with_muon(kind: str) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return _class(kind)([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])

    return make


def _into_training(optimizer: Any) -> Any:
    if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers
        optimizer.train()
    return optimizer


def as_written() -> Any:
    """A context in which functions from `torch.compile` run their Python."""
    return torch.compiler.set_stance("force_eager")


@dataclass(frozen=True)
class Outcome:
    """What became of one optimizer."""

    kind: str
    """equal, refused, different, crash, eager-fails."""
    text: str = ""
    graphs: int = 0
    error: BaseException | None = None


def outcome(sample: Sample, steps: int = STEPS, **options: Any) -> Outcome:
    """Run eager and compiled from one seed, and compare every bit after every call.

    Eager means the package's Python as written, also where a package compiles parts of it (torchao, timm's Kron).
    """
    torch.manual_seed(SEED)
    run = sample.run()
    try:
        with as_written():
            expected = play(run, run.step, steps)
    except Exception as error:
        return Outcome("eager-fails", f"{type(error).__name__}: {error}", 0, error)
    torch.manual_seed(SEED)
    run = sample.run()
    step = ws.compile(run.step, max_recompiles=1000, **options)
    try:
        actual = play(run, step, steps)
    except ws.errors.WholestepError as error:
        return Outcome("refused", str(error), len(step.graphs), error)
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {error}", len(step.graphs), error)
    for want, got in zip(expected, actual, strict=True):
        lines = differences(want, got)
        if lines:
            return Outcome("different", f"{want.label}: {lines[0]} (+{len(lines) - 1})", len(step.graphs))
    return Outcome("equal", "", len(step.graphs))


def main() -> None:
    import os
    import sys

    os.environ.setdefault("WHOLESTEP_LOWER", "eager")
    torch.set_num_threads(1)
    for name, sample in samples().items():
        if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = outcome(sample)
        expected = "refused" if sample.refused else "equal"
        mark = " " if found.kind == expected else "?" if found.kind == "refused" else "X"
        text = " | ".join(found.text.splitlines())[:230]
        print(f"{mark} {name:42s} {found.kind:10s} {found.graphs} {text}", flush=True)
        with contextlib.suppress(Exception):
            torch._dynamo.reset()


if __name__ == "__main__":
    main()
