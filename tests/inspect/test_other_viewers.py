"""Graphs in the structured log of torch (`TORCH_TRACE`), which tlparse shows."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._logging._internal import trace_log

import wholestep as ws

ROOT = Path(__file__).parents[2]


class Kept(logging.Handler):
    """A handler that keeps what torch logs: metadata and payload."""

    def __init__(self) -> None:
        super().__init__()
        self.root_dir = "a folder"
        self.artefacts: list[tuple[dict[str, Any], str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "artifact" in record.__dict__["metadata"]:
            self.artefacts.append((record.__dict__["metadata"], record.__dict__["payload"]))


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    trace_log.addHandler(handler)
    yield handler
    trace_log.removeHandler(handler)


def trained() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = ws.compile(train_step, lower="eager", name="train_step")
    for _ in range(3):
        step(torch.ones(3, 4))


def test_each_graph_is_three_artefacts_of_a_compilation(kept: Kept) -> None:
    trained()
    names = [metadata["artifact"]["name"] for metadata, _ in kept.artefacts]
    assert names == ["wholestep_graph", "wholestep_explain", "wholestep_step"] * 2  # the first call, and the others
    assert {metadata["frame_compile_id"] for metadata, _ in kept.artefacts} == {0, 1}
    assert len({metadata["frame_id"] for metadata, _ in kept.artefacts}) == 1
    (_, graph), (_, explained), (_, step), *_ = kept.artefacts
    assert "aten.addmm.default" in graph
    assert "no communication" in explained
    assert json.loads(step)["format"] == "wholestep.step_graph"


@pytest.mark.long  # the same by the environment variable, in a process of its own
def test_torch_trace_writes_them_into_a_folder(tmp_path: Path) -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; import inspect_viewers; inspect_viewers.trained()"
    (tmp_path / "inspect_viewers.py").write_text(Path(__file__).read_text(encoding="utf-8"))
    environment = {"PYTHONPATH": str(ROOT / "src"), "TORCH_TRACE": str(tmp_path / "log"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, env=os.environ | environment, check=True, timeout=100)
    (log,) = (tmp_path / "log").iterdir()
    text = log.read_text()
    assert text.count('"name": "wholestep_graph"') == 2
    assert "aten.addmm.default" in text
