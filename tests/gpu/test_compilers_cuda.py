"""The AOT compilers, memory budgets and the debugging bench on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_module
from torch import Tensor, fx, nn

import wholestep as ws
from compilers.networks import SMALL, assert_trains_as_in_eager
from remat.steps import Images, Net, Trained, pictures, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "error::wholestep.LowerWarning"),
]

aten = torch.ops.aten


def on_gpu(network: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = SMALL[network]()
    return model.cuda(), {name: value.cuda() for name, value in inputs.items()}


# TorchScript cannot call the backward of fused attention: its schema has no None for the bias.
PAIRS = [(name, network) for name in ("nop", "debug_nop", "ts_compile") for network in SMALL]
PAIRS.remove(("ts_compile", "attention"))


@pytest.mark.parametrize(("name", "network"), PAIRS)
def test_compilers_train_as_eager_does(name: str, network: str) -> None:
    model, inputs = on_gpu(network)
    each = getattr(ws.compilers, name)
    exact = name != "ts_compile" and network != "convolution"  # traced batch norm is not cuDNN's
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        assert_trains_as_in_eager(
            model, lambda m: aot_module(m, fw_compiler=each, bw_compiler=each), inputs, exact=exact
        )


@pytest.mark.parametrize("network", SMALL)
def test_memory_efficient_fusion_has_the_gradients_of_eager(network: str) -> None:
    model, inputs = on_gpu(network)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        assert_trains_as_in_eager(model, ws.compilers.memory_efficient_fusion, inputs, exact=False)


def test_a_step_runs_under_the_checks_of_every_node() -> None:
    eager = Trained(lambda: Net(dropout=0.0).cuda(), lambda i: rows(i).cuda(), eager=True)
    assert Trained(lambda: Net(dropout=0.0).cuda(), lambda i: rows(i).cuda(), lower="debug").equals(eager)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("network", ["blocks", "images"])
def test_budgets_are_honoured(lower: str, network: str) -> None:
    make: Any = (lambda: Net(dropout=0.0).cuda()) if network == "blocks" else (lambda: Images().cuda())
    batch: Any = (lambda i: rows(i).repeat(16, 1).cuda()) if network == "blocks" else (lambda i: pictures(i).cuda())
    eager = Trained(make, batch, eager=True)
    peaks = []
    for fraction in (0.0, 0.5, 1.0):
        ours = Trained(make, batch, lower=lower, memory_budget=fraction)
        memory = ours.memory
        assert memory.measured_peak is not None
        # Blocks of the allocator: 512 bytes each.
        assert abs(memory.measured_peak - memory.planned_peak) <= 0.05 * memory.planned_peak
        assert memory.measured_peak <= 1.02 * memory.budget
        torch.testing.assert_close(torch.stack(ours.losses), torch.stack(eager.losses), rtol=2e-3, atol=1e-4)
        peaks.append(memory.planned_peak)
    assert peaks == sorted(peaks)
    assert network == "images" or peaks[0] < peaks[-1]  # compiled, the images have nothing to save at their peak


def test_the_node_that_makes_a_nan_is_found(tmp_path: Path) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return ((x.sin() + y).exp() * (x - 100).log()).sum()

    x, y = torch.rand(8, device="cuda"), torch.rand(8, device="cuda")
    gm = fx.symbolic_trace(function)
    found = ws.debug.minify(gm, [x, y], lambda m, args: bool(torch.isnan(m(*args)).any()), folder=tmp_path)
    assert len([n for n in found.gm.graph.nodes if n.op.startswith("call")]) <= 2
    assert found.repro_path.exists()
