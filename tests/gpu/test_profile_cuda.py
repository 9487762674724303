"""`step.profile` on CUDA: kernels belong to the nodes that launched them, and all state is restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep as ws
from cases.parts import adamw, train_step
from harness import batch_of, differences, frame

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_nearly_all_kernel_time_belongs_to_nodes_and_nothing_is_changed(lower: str) -> None:
    model = nn.Sequential(nn.Linear(6, 512), nn.GELU(), nn.Dropout(0.3), nn.Linear(512, 4)).to(CUDA)
    optimizer = adamw(model, fused=True)
    x = batch_of(CUDA, 0, 4096, 6)
    torch.rand(1, device=CUDA)
    before = frame("before", None, {"model": model, "optimizer": optimizer}, (x,))
    step = ws.compile(train_step, lower=lower)
    measured = step.profile(model, optimizer, x, steps=3)
    assert differences(before, frame("after", None, {"model": model, "optimizer": optimizer}, (x,))) == []
    outside = sum(row.us for row in measured.measured if row.name.startswith("(outside"))
    assert outside <= 0.01 * measured.nodes_us, str(measured)
    assert measured.device.startswith("cuda")
    assert ws.simulate.calibrate(ws.simulate.H200, measured).correction
