"""Stage modules are graphs: they are lowered by `ws.partial_lower`, and trained through torch.compile."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wholestep as ws
from pipelining.models import make
from wholestep.lower import LowerOptions
from wholestep.pipelining import SplitPoint, pipeline, schedule

pytestmark = pytest.mark.compiles


def test_a_stage_is_lowered_by_partial_lower():
    model, args, _ = make("skip")
    pipe = pipeline(model.eval(), args)
    stage = pipe.get_stage_module(1)
    lowered = copy.deepcopy(stage)
    with torch.no_grad():
        values = pipe.get_stage_module(0)(*pipe.flatten_inputs(args))
        ws.partial_lower(lowered, options=LowerOptions(min_aten_ops=1, strict=True))
        torch.testing.assert_close(lowered(*values), stage(*values))
    assert "subgraph_0" in dict(lowered.named_children())


def test_compiled_stages_train_like_eager(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (torch.randn(2, 3),), split_spec={"2": SplitPoint.BEGINNING})
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        stages = [pipe.build_stage(index, "cpu") for index in range(2)]
        for stage in stages:
            stage.submod.compile(backend="aot_eager")
        steps = schedule("InterleavedZeroBubble", stages, 2, nn.functional.mse_loss)
        x, target = torch.randn(4, 3), torch.randn(4, 2)
        for _ in range(2):
            result = steps.step(x, target=target)
            expected = reference(x)
            nn.functional.mse_loss(expected, target).backward()
            torch.testing.assert_close(result, expected)
            for name, parameter in reference.named_parameters():
                ours = dict(stages[0].submod.named_parameters()) | dict(stages[1].submod.named_parameters())
                torch.testing.assert_close(ours[name].grad, parameter.grad)
    finally:
        dist.destroy_process_group()
