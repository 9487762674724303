"""Viewers of other people get what they read: `TORCH_TRACE` logs for tlparse, Chrome traces for Perfetto, DOT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch, wholestep as ws
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

@ws.compile(lower="eager")
def train_step(x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(3):
    train_step(torch.ones(3, 4))
"""


def records(text: str) -> list[tuple[dict[str, object], str]]:
    """The records of a structured log of torch with their payloads, which are the lines behind them with a tab."""
    found: list[tuple[dict[str, object], str]] = []
    for line in text.splitlines():
        if line.startswith("\t"):
            found[-1] = found[-1][0], found[-1][1] + line[1:] + "\n"
        elif "{" in line:
            found.append((json.loads(line[line.index("{") :]), ""))
    return found


def test_graphs_are_artefacts_of_a_log_that_tlparse_reads(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {"PYTHONPATH": str(ROOT / "src"), "TORCH_TRACE": str(tmp_path / "log"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(script)], env=os.environ | environment, check=True, timeout=100)
    (log,) = (tmp_path / "log").iterdir()
    artefacts = [(record, text) for record, text in records(log.read_text()) if "artifact" in record]
    ours = [(record, text) for record, text in artefacts if str(record["artifact"]["name"]).startswith("wholestep_")]  # type: ignore[index]
    names = [record["artifact"]["name"] for record, _ in ours]  # type: ignore[index]
    assert names == ["wholestep_graph", "wholestep_explain", "wholestep_step"] * 2  # the first call, and the others
    assert {record["frame_compile_id"] for record, _ in ours} == {0, 1}
    assert len({record["frame_id"] for record, _ in ours}) == 1
    assert "aten.addmm.default" in ours[0][1]
    assert "no communication" in ours[1][1]
    assert json.loads(ours[2][1])["format"] == "wholestep.step_graph"
