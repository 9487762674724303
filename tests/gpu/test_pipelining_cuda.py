"""Two NCCL ranks on one GPU train a pipeline under every schedule of torch, as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SOURCES = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
"""The started processes import what this one does, also from a source tree with nothing installed."""
KINDS = [
    "GPipe",
    "1F1B",
    "1F1B transmit",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "DualPipeV transmit",
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_schedule_trains_like_one_process(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        command = [sys.executable, str(HERE / "pipeline_on_ranks.py"), "nccl", str(rank), "2", str(tmp_path / "store")]
        hosts = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen([*command, *KINDS], env=os.environ | SOURCES | hosts, text=True, **pipes))
    try:
        outputs = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    found = json.loads(outputs[0][0].strip().splitlines()[-1])
    assert [each["kind"] for each in found] == KINDS
    for each in found:
        assert each["loss"] < 1e-4, each
        assert each["parameters"] < 1e-4, each
        assert not each["missing"], each
