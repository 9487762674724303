"""WholestepTrainer as torchrun starts it, on two ranks: Trainer's DistributedDataParallel is in the graphs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401   DDP imports it: here once, instead of on every rank

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer

from integrations.test_accelerate_ranks import collectives
from integrations.test_transformers import assert_same, seen, trainer_of
from ranks import run_ranks
from wholestep.integrations.transformers import WholestepTrainer


def as_torchrun(rank: int) -> None:
    from accelerate.state import AcceleratorState, GradientState

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_trainer_on_two_ranks_gives_what_trainer_gives_and_resumes(tmp_path: Path) -> None:
    def code(rank: int) -> Any:
        found, graphs = [], []
        for kind in (Trainer, WholestepTrainer):
            as_torchrun(rank)
            options: dict[str, Any] = {
                "layers": 1,
                "gradient_accumulation_steps": 2,
                "save_strategy": "steps",
                "save_steps": 2,
                "ddp_backend": "gloo",
            }
            folder = tmp_path / kind.__name__
            trainer = trainer_of(kind, folder, **options)
            trainer.train()
            resumed = trainer_of(kind, folder, **options)
            resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
            found.append((seen(trainer), seen(resumed)))
            graphs = [collectives(graph) for step in getattr(trainer, "compiled_steps", ()) for graph in step.graphs]
        for plain, ours in zip(*found, strict=True):
            assert_same(plain, ours)
        return graphs, found[1][0]["weights"]

    (graphs, weights), (_, others) = run_ranks(code, 2, deadline=120)
    assert weights == others
    assert {"all_reduce" in graph for graph in graphs} == {True, False}  # not in the first micro-batch of two
