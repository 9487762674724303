"""Every optimizer of single-process capture, in every form, on two ranks: the bits of DDP and of fully_shard."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

import wholestep as ws
from cases.optimizers import CHANGED_BETWEEN_STEPS, FORMS, VARIANTS, Lion, TensorStepAdam, build
from parallel.pairs import (
    Case,
    all_of,
    beside_ddp,
    beside_fully_shard,
    beside_one_process,
    net,
    sharded_beside_ddp,
    world_mesh,
)
from selection import some_now

FORM = [(name, form) for name, forms in FORMS.items() for form, (_, devices) in forms.items() if "cpu" in devices]
FIRST_FORM = [(name, next(iter(forms))) for name, forms in FORMS.items()]
OTHER_FORMS = [each for each in FORM if each not in FIRST_FORM]
NOT_ON_DTENSORS = [("Adagrad", "fused"), ("Adafactor", "single"), ("Adafactor", "foreach")]
BY_WHOLE_MATRICES = [("Muon", "default")]  # torch's own, on DTensors, adds in another order, and that in bfloat16
AS_FULLY_SHARD = [each for each in FORM if each not in NOT_ON_DTENSORS + BY_WHOLE_MATRICES + [("SGD", "fused")]]


def optimizer_case(name: str, form: str, settings: dict[str, Any], **fields: Any) -> Case:
    def optimizer(model: nn.Module) -> Optimizer:
        return build(name, model.parameters(), **settings, **FORMS[name][form][0])

    said = [f"{key}={value}" for key, value in settings.items()]
    return Case("-".join([name, form, *said]), partial(net, bias=name != "Muon"), optimizer, **fields)


def every_variant(*forms: tuple[str, str]) -> list[Case]:
    return [optimizer_case(name, form, settings) for name, form in forms for settings in VARIANTS[name]]


def one_variant(*forms: tuple[str, str]) -> list[Case]:
    return [optimizer_case(name, form, VARIANTS[name][-1]) for name, form in forms]


def changed_every_step(name: str, form: str) -> Case:
    """Every hyper-parameter takes a new value after every step, which is no reason for a new graph."""
    settings = CHANGED_BETWEEN_STEPS[name]

    def after(i: int, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for key, value in settings.items():
                factor = 1 - 0.03 * (i + 1)
                group[key] = tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor

    return optimizer_case(name, form, settings, after=after, steps=5)


def two_groups(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return build("AdamW", [{"params": vectors, "lr": 0.1, "weight_decay": 0.0}, {"params": matrices}], lr=0.01)


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


REPLICATED = every_variant(*FIRST_FORM) + one_variant(*OTHER_FORMS)
SHARDED = [
    *every_variant(*(each for each in FIRST_FORM if each in AS_FULLY_SHARD)),
    *one_variant(*(each for each in OTHER_FORMS if each in AS_FULLY_SHARD)),
    *(changed_every_step(name, "single") for name in ("SGD", "AdamW", "NAdam")),
    Case("two groups", optimizer=two_groups),
]
OWN = [Case(kind.__name__, optimizer=lambda m, kind=kind: kind(m.parameters())) for kind in (Lion, TensorStepAdam)]
FORMS_OF_TWO = [each for each in FORM if each[0] in ("SGD", "AdamW")]


@pytest.mark.parametrize("cases", some_now(REPLICATED, *names(one_variant(*FORMS_OF_TWO))))
def test_replicated_training_has_the_bits_of_ddp(cases: list[Case]) -> None:
    all_of(beside_ddp, cases)


@pytest.mark.parametrize(
    "cases",
    some_now(
        SHARDED,
        *names(one_variant(*(each for each in FIRST_FORM if each in AS_FULLY_SHARD))),
        *names(one_variant(("AdamW", "foreach"), ("AdamW", "fused"))),
        *names(SHARDED[-4:]),
    ),
)
def test_sharded_training_has_the_bits_of_fully_shard(cases: list[Case]) -> None:
    all_of(beside_fully_shard, cases)


@pytest.mark.parametrize(
    "cases",
    some_now(
        OWN + every_variant(*NOT_ON_DTENSORS, *BY_WHOLE_MATRICES),
        *names(OWN + one_variant(*NOT_ON_DTENSORS, *BY_WHOLE_MATRICES)),
    ),
)
def test_optimizers_that_torch_has_not_for_shards_have_the_bits_of_whole_parameters(cases: list[Case]) -> None:
    all_of(sharded_beside_ddp, cases)


def test_a_fused_kernel_on_shards_agrees_with_it_on_whole_parameters_but_for_its_last_elements() -> None:
    """Fused SGD rounds otherwise in the vectorised part than in the rest, and a shard ends elsewhere."""
    all_of(partial(sharded_beside_ddp, rtol=1e-6), every_variant(("SGD", "fused")))


@pytest.mark.long  # the bits of torch's wrappers, above
@pytest.mark.parametrize("plan", [ws.Replicate, ws.FullyShard])
def test_training_agrees_with_one_process_on_all_batches(plan: type[ws.Replicate] | type[ws.FullyShard]) -> None:
    all_of(lambda case: beside_one_process(case, plan(world_mesh())), one_variant(*FIRST_FORM))
