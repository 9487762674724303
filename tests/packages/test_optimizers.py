"""Optimizers of real packages: equal to eager to the last bit, or refused with a code and a line. Nothing else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import wholestep as ws
from harness import SEED, frame
from packages.zoo import Sample, as_written, outcome, samples
from selection import each_now

SAMPLES = samples()

CHOSEN = (
    # Of torch the rest is in tests/cases/optimizers.py.
    "torch/Adafactor torch/AdamW torch/AdamW-tensor-lr torch/LBFGS torch/Muon torch/NAdam torch/RAdam "
    "torch/SGD-nesterov schedulefree/SGDScheduleFree schedulefree/AdamWScheduleFree "
    "schedulefree/RAdamScheduleFree schedulefree/AdamWScheduleFree-modes schedulefree/AdamWScheduleFree-warmup "
    "schedulefree/AdamWScheduleFreeReference schedulefree/RAdamScheduleFreeClosure "
    "schedulefree/ScheduleFreeWrapper timm/Adan timm/Kron timm/Lion timm/Lookahead timm/MADGRAD "
    "lion_pytorch/Lion torchao/AdamW8bit torchao/AdamW4bit torchao/AdamWFp8 torch_optimizer/AggMo "
    "torch_optimizer/RAdam torch_optimizer/Shampoo pytorch_optimizer/AdaBelief pytorch_optimizer/AdaPNM "
    "pytorch_optimizer/AdaShift torch_optimizer/AccSGD pytorch_optimizer/Conda pytorch_optimizer/DAdaptAdam "
    "pytorch_optimizer/Fromage pytorch_optimizer/Kron pytorch_optimizer/LARS pytorch_optimizer/Prodigy "
    "pytorch_optimizer/Ranger pytorch_optimizer/SAM pytorch_optimizer/SAM-closure pytorch_optimizer/SOAP "
    "pytorch_optimizer/SophiaH"
).split()
"""What `make test` runs; `make optimizers` runs all."""

MORE_GRAPHS = {
    "timm/AdaBelief": 8,  # a table of ten rows in the param group, indexed by the step count
    "timm/RAdamLegacy": 8,
    "torch_optimizer/RAdam": 8,
    "torch_optimizer/Ranger": 8,
    "timm/Lookahead": 5,
    "pytorch_optimizer/AdaShift": 8,  # a queue of ten gradients that grows
    "pytorch_optimizer/LaProp": 8,
    "pytorch_optimizer/LoRARite": 8,
    "pytorch_optimizer/MADGRAD": 8,
    "pytorch_optimizer/Ranger": 5,
    "pytorch_optimizer/Ranger21": 8,  # phases of warm-up and warm-down of 20 iterations, by branches on the count
}
"""Of eight calls. All others need at most four."""


def _marked(name: str) -> Any:
    return pytest.param(name, marks=[] if name in CHOSEN else [pytest.mark.every_optimizer])


@pytest.mark.parametrize("name", [_marked(name) for name in SAMPLES])
def test_an_optimizer_is_equal_to_eager_or_refused_with_a_line(name: str) -> None:
    sample = SAMPLES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages: deprecated calls of torch, advice
        found = outcome(sample)
    if sample.refused is None:
        assert found.kind == "equal", found.text
        assert found.graphs <= MORE_GRAPHS.get(name, 4)
        return
    assert found.kind == "refused", f"{found.kind}: {found.text}"
    assert isinstance(found.error, ws.errors.WholestepError)
    assert found.error.code == sample.refused, found.text
    assert found.error.location is not None
    _assert_nothing_happened(sample)


def _assert_nothing_happened(sample: Sample) -> None:
    """A refused first call leaves everything as it was, and eager goes on."""
    torch.manual_seed(SEED)
    run = sample.run()
    step = ws.compile(run.step)
    before = frame("", None, run.watch).seen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            step(*run.arguments(0))
        except ws.errors.WholestepError:
            assert frame("", None, run.watch).seen == before
        with as_written():
            run.step(*run.arguments(0))


def test_the_choice_names_optimizers_that_exist() -> None:
    assert not {*CHOSEN, *MORE_GRAPHS} - set(SAMPLES)
    assert len({name for name in CHOSEN if SAMPLES[name].refused is None}) >= 30


FEW_GRAPHS = (
    "schedulefree/SGDScheduleFree schedulefree/AdamWScheduleFree schedulefree/RAdamScheduleFree timm/Adan timm/MADGRAD "
    "torch/RAdam pytorch_optimizer/RAdam"
).split()


@pytest.mark.parametrize("name", each_now(FEW_GRAPHS, "schedulefree/AdamWScheduleFree", "timm/MADGRAD", "torch/RAdam"))
def test_a_thousand_calls_need_at_most_four_graphs(name: str) -> None:
    torch.manual_seed(SEED)
    run = SAMPLES[name].run()
    step = ws.compile(run.step)
    for i in range(1000):
        step(*run.arguments(i % 8))
        if i < 40:
            run.after(i, None)
    assert len(step.graphs) <= 4, step.recompiles
    torch.manual_seed(SEED)
    eager = SAMPLES[name].run()
    for i in range(1000):
        eager.step(*eager.arguments(i % 8))
        if i < 40:
            eager.after(i, None)
    assert frame("", None, run.watch).seen == frame("", None, eager.watch).seen
