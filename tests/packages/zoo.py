"""Optimizers of real packages, each as a training step with a learning rate that changes between calls.

OPTIMIZERS["timm/Lookahead"].run()   a fresh model, optimizer and step (harness.Run)
outcome(sample)                      equal to eager, or refused with a code and a line; anything else is a fault
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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
    graphs: int | None = None
    """The most graphs that the calls may need."""
    options: dict[str, Any] = field(default_factory=dict)

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
    found = {name: Sample(_all(getattr(torch.optim, name))) for name in names}
    found["Muon"] = Sample(lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]))
    found["SGD-nesterov"] = Sample(_all(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True))
    found["Adam-amsgrad"] = Sample(_all(torch.optim.Adam, amsgrad=True))
    found["AdamW-tensor-lr"] = Sample(
        lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
    )
    found["LBFGS"] = Sample(_all(torch.optim.LBFGS), step=train_with_closure, refused="WS-OPT-CLOSURE")
    return found


def schedulefree_samples() -> dict[str, Sample]:
    import schedulefree

    found: dict[str, Sample] = {}
    references = ("SGDScheduleFreeReference", "AdamWScheduleFreeReference", "AdamWScheduleFreePaper")
    for name in ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree", *references):
        found[name] = Sample(_training(getattr(schedulefree, name), lr=0.05))
    for name in ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"):
        kind = getattr(schedulefree, name)
        found[f"{name}-not-foreach"] = Sample(_training(kind, lr=0.05, foreach=False))
        found[f"{name}-modes"] = Sample(_training(kind, lr=0.05), step=modes)
        closing = _training(getattr(schedulefree, f"{name}Closure"), lr=0.05)
        found[f"{name}Closure"] = Sample(closing, step=train_with_closure, refused="WS-OPT-CLOSURE")
    for name in ("SGDScheduleFree", "AdamWScheduleFree"):
        found[f"{name}-warmup"] = Sample(_training(getattr(schedulefree, name), lr=0.05, warmup_steps=4))
    for name in ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"):
        found[name] = Sample(_wrapping(getattr(schedulefree, name), momentum=0.9))
    return found


def timm_samples() -> dict[str, Sample]:
    classes = {
        "adabelief": "AdaBelief", "adafactor": "Adafactor", "adafactor_bv": "AdafactorBigVision", "adamp": "AdamP",
        "adamw": "AdamWLegacy", "adan": "Adan", "adopt": "Adopt", "kron": "Kron", "lamb": "Lamb", "laprop": "LaProp",
        "lars": "Lars", "lion": "Lion", "madgrad": "MADGRAD", "mars": "Mars", "muon": "Muon", "nadam": "NAdamLegacy",
        "nadamw": "NAdamW", "nvnovograd": "NvNovoGrad", "radam": "RAdamLegacy", "rmsprop_tf": "RMSpropTF",
        "sgdp": "SGDP", "sgdw": "SGDW",
    }  # fmt: skip
    found = {name: Sample(_all(timm_optimizer(module, name), lr=0.01)) for module, name in classes.items()}
    found["Lamb-trust-clip"] = Sample(_all(timm_optimizer("lamb", "Lamb"), lr=0.01, trust_clip=True, always_adapt=True))
    found["MADGRAD-momentum-0"] = Sample(_all(timm_optimizer("madgrad", "MADGRAD"), lr=0.01, momentum=0.0))
    found["Lion-not-foreach"] = Sample(_all(timm_optimizer("lion", "Lion"), lr=0.01, foreach=False))
    found["Adan-not-foreach"] = Sample(_all(timm_optimizer("adan", "Adan"), lr=0.01, foreach=False))
    found["Lookahead"] = Sample(
        lambda model: timm_optimizer("lookahead", "Lookahead")(torch.optim.AdamW(model.parameters(), lr=0.01), k=3)
    )
    found["Adahessian"] = Sample(_all(timm_optimizer("adahessian", "Adahessian"), lr=0.01), step=train_with_graph)
    return found


def torch_optimizer_samples() -> dict[str, Sample]:
    import torch_optimizer

    names = (
        "A2GradExp A2GradInc A2GradUni AccSGD AdaBelief AdaBound AdaMod Adafactor AdamP AggMo Apollo DiffGrad LARS "
        "Lamb MADGRAD NovoGrad PID QHAdam QHM RAdam Ranger RangerQH RangerVA SGDP SGDW SWATS Shampoo Yogi"
    ).split()
    extra: dict[str, dict[str, Any]] = {"LARS": {"lr": 0.01}, "QHM": {"lr": 0.01, "momentum": 0.9}}
    found = {name: Sample(_all(getattr(torch_optimizer, name), **extra.get(name, {}))) for name in names}
    found["Lookahead"] = Sample(lambda model: torch_optimizer.Lookahead(torch_optimizer.Yogi(model.parameters()), k=3))
    found["Adahessian"] = Sample(_all(torch_optimizer.Adahessian), step=train_with_graph)
    return found


def pytorch_optimizer_samples() -> dict[str, Sample]:
    import pytorch_optimizer as other

    needs_more = set(
        "AdaGO AdaLOMO AdaMuon AdamMini AliG BSAM DeMo DistributedMuon FriendlySAM GSAM LBFGS LOMO LookSAM Lookahead "
        "Muon MuonClip NorMuon OrthoGrad PCGrad Ranger21 SAM SafeFP16Optimizer ScheduleFreeWrapper SpectralSphere "
        "TRAC WSAM AdaHessian SophiaH".split()
    )
    names = [
        name for name, kind in vars(other).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in needs_more
    ]  # fmt: skip
    found = {name: Sample(_all(getattr(other, name))) for name in sorted(names)}
    for name in ("ScheduleFreeAdamW", "ScheduleFreeRAdam", "ScheduleFreeSGD"):
        found[name] = Sample(_training(getattr(other, name), lr=0.05))
    for name in ("AdaGO", "AdaMuon", "Muon", "NorMuon"):
        found[name] = Sample(_with_muon(getattr(other, name)))
    for name in ("AdaHessian", "SophiaH"):
        found[name] = Sample(_all(getattr(other, name)), step=train_with_graph)
    for name in ("SAM", "LookSAM", "FriendlySAM"):
        make = _all(getattr(other, name), base_optimizer=torch.optim.SGD, lr=0.05)
        found[name] = Sample(make, step=train_twice)
        found[f"{name}-closure"] = Sample(make, step=train_with_closure, refused="WS-OPT-CLOSURE")
    for name in ("Lookahead", "OrthoGrad", "TRAC", "ScheduleFreeWrapper"):
        kind = getattr(other, name)
        found[name] = Sample(
            lambda model, kind=kind: _into_training(kind(torch.optim.AdamW(model.parameters(), lr=0.01)))
        )
    found["AdamMini"] = Sample(lambda model: other.AdamMini(model, lr=0.01))
    found["SpectralSphere"] = Sample(lambda model: other.SpectralSphere([p for p in model.parameters() if p.ndim == 2]))
    found["Ranger21"] = Sample(_all(other.Ranger21, num_iterations=20))
    found["BSAM"] = Sample(_all(other.BSAM, num_data=40), step=train_with_closure, refused="WS-OPT-CLOSURE")
    found["AliG"] = Sample(_all(other.AliG), step=train_with_closure, refused="WS-OPT-CLOSURE")
    found["LBFGS"] = Sample(_all(other.LBFGS), step=train_with_closure, refused="WS-OPT-CLOSURE")
    return found


def other_samples() -> dict[str, Sample]:
    import lion_pytorch
    import torchao.optim

    found = {"lion_pytorch/Lion": Sample(_all(lion_pytorch.Lion, lr=0.01))}
    found["lion_pytorch/Lion-decoupled"] = Sample(
        _all(lion_pytorch.Lion, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)
    )
    for name in "Adam8bit AdamW8bit Adam4bit AdamW4bit AdamFp8 AdamWFp8".split():
        found[f"torchao/{name}"] = Sample(_all(getattr(torchao.optim, name)), width=WIDE)
    return found


def samples() -> dict[str, Sample]:
    """Every optimizer by package and name."""
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
            found[f"{package}/{name}" if package else name] = sample
    return found


def _all(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), **options)


def _training(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: _into_training(kind(model.parameters(), **options))


def _wrapping(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: _into_training(kind(torch.optim.AdamW(model.parameters(), lr=0.01), **options))


def _into_training(optimizer: Any) -> Any:
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def _with_muon(kind: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return kind([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])

    return make


@dataclass(frozen=True)
class Outcome:
    """What became of one optimizer."""

    kind: str
    """equal, refused, different, crash, eager-fails."""
    text: str = ""
    graphs: int = 0
    error: BaseException | None = None


def outcome(sample: Sample, steps: int = STEPS, **options: Any) -> Outcome:
    """Run eager and compiled from one seed, and compare every bit after every call."""
    torch.manual_seed(SEED)
    run = sample.run()
    try:
        expected = play(run, run.step, steps)
    except Exception as error:
        return Outcome("eager-fails", f"{type(error).__name__}: {error}", 0, error)
    torch.manual_seed(SEED)
    run = sample.run()
    step = ws.compile(run.step, max_recompiles=1000, **{**sample.options, **options})
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
