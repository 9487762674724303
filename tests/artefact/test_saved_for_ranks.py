"""One file, made on one machine with a fake group, serves all ranks of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import wholestep as ws
from artefact.of_ranks import batch, made, plan_named, train_step
from ranks import run_ranks
from wholestep import step as stages
from wholestep.errors import ArtefactError

CALLS = 3


def saved(folder: Path, *names: str, ranks: int = 2) -> None:
    """Make files in a process of its own: no rank can be forked from one with a fake group."""
    paths = [str(Path(ws.__file__).parent.parent), str(Path(__file__).parents[1])]
    program = f"from artefact.of_ranks import save_with_a_fake_group as f; f({names!r}, {ranks}, {str(folder)!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def trained(rank: int, step: Any) -> list[torch.Tensor]:
    model, optimizer = made()
    losses = [step(model, optimizer, batch(rank, call)) for call in range(CALLS)]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [*losses, *(p.detach() for p in whole)]


def loaded_beside_compiled(rank: int, name: str, path: str) -> bool:
    """Whether a loaded step has the bits of one that this rank captured."""
    plan = plan_named(name)
    expected = trained(rank, ws.compile(train_step, lower="eager", parallel=plan, progress=False))
    step = ws.load(path, train_step, parallel=plan)
    with mock.patch.object(stages, "trace_step", side_effect=AssertionError("traced")):
        found = trained(rank, step)
    return all(map(torch.equal, found, expected)) and len(step.graphs) == 2


def test_two_ranks_load_what_one_process_made_and_have_the_bits_of_a_capture(tmp_path: Path) -> None:
    names = ("shard", "replicate")
    saved(tmp_path, *names)

    def code(rank: int) -> dict[str, bool]:
        return {name: loaded_beside_compiled(rank, name, str(tmp_path / f"{name}.ws")) for name in names}

    assert run_ranks(code, 2) == [dict.fromkeys(names, True)] * 2


def refusals(rank: int, path: str) -> list[str]:
    """What is said where the plan is another one."""
    found = []
    for plan in (None, plan_named("replicate")):
        with pytest.raises(ArtefactError) as error:
            ws.load(path, train_step, parallel=plan)
        found.append(error.value.what)
    dist.barrier()
    return found


def test_another_plan_or_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "shard", ranks=4)
    [none, other], _ = run_ranks(refusals, 2, str(tmp_path / "shard.ws"))
    assert "captured with parallel=FullyShard(dp=4" in none
    assert "is loaded with Replicate(dp=2" in other
