"""What a capture must not leave behind in torch, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import wholestep as ws

PROGRAM = """
import builtins, importlib, logging
import torch
import wholestep as ws

model = torch.nn.Linear(2, 2)

def step(x):
    importlib.import_module("torch.export._trace")
    loss = model(x).sum()
    print("loss", loss)
    return loss

before = builtins.print, logging.Logger.info, logging.Logger._log
ws.compile(step, lower="eager")(torch.ones(1, 2))
torch.export.export(model, (torch.ones(1, 2),))
assert (builtins.print, logging.Logger.info, logging.Logger._log) == before
"""


@pytest.mark.long  # a process of its own; in others torch.export is loaded already
def test_torch_export_works_after_a_capture_and_keeps_print_and_loggers() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(ws.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("loss tensor(")
