"""Two NCCL ranks on one GPU train under a plan with the bits of torch's own wrappers."""

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
    "replicate",
    "replicate passes",
    "replicate fused passes",
    "fully shard",
    "fully shard passes",
    "fully shard fused bf16 passes",
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_have_the_bits_of_torchs_wrappers(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        command = [sys.executable, str(HERE / "train_on_ranks.py"), str(rank), "2", str(tmp_path / "store"), *KINDS]
        hosts = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        ranks.append(
            subprocess.Popen(
                command, env=os.environ | SOURCES | hosts, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate(timeout=240) for process in ranks]
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    found = json.loads(outputs[0][0].strip().splitlines()[-1])
    assert [each["kind"] for each in found] == KINDS
    for each in found:
        assert each["loss"] == 0, each
        assert each["parameters"] == 0, each
        assert each["graphs"] == 2, each
