"""Ten thousand calls and two hundred captures on CUDA: device memory stays flat, and reset() gives it back."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import wholestep as ws
from soak import SoakTrainer, cache_sizes, grown, live_objects

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _many_graphs_are_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ws.errors.RecompileWarning)
        yield


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _play(trainer: SoakTrainer, step: Any, first: int, last: int) -> None:
    for i in range(first, last):
        trainer.change(i)
        step(torch.randn(2, 3, device=CUDA), 1.0 + 0.1 * (i % 5))


@pytest.mark.parametrize("cuda_graph", [False, "auto"])
def test_ten_thousand_calls_keep_device_memory_flat(cuda_graph: Any) -> None:
    trainer = SoakTrainer(CUDA, torch.optim.AdamW)
    step = ws.compile(trainer.step, lower="eager", cuda_graph=cuda_graph)
    _play(trainer, step, 0, 1_000)
    allocated, reserved, objects, caches = _allocated(), torch.cuda.memory_reserved(), live_objects(), cache_sizes()
    _play(trainer, step, 1_000, 10_000)
    assert _allocated() <= allocated
    assert torch.cuda.memory_reserved() <= reserved
    assert not grown(objects, live_objects(), by=150)
    assert cache_sizes() == caches


@pytest.mark.parametrize("cuda_graph", [False, "auto"])
def test_two_hundred_captures_give_device_memory_back(cuda_graph: Any) -> None:
    step = ws.compile(lambda trainer, x, weight: trainer.step(x, weight), lower="eager", cuda_graph=cuda_graph)

    def capture_often(times: int) -> None:
        for rows in range(2, 2 + times):
            trainer = SoakTrainer(CUDA)
            for _ in range(3):
                step(trainer, torch.randn(rows, 3, device=CUDA), 1.0)
            if rows % 20 == 0:
                step.reset()
        step.reset()

    capture_often(40)
    allocated, objects = _allocated(), live_objects()
    capture_often(100)
    assert _allocated() <= allocated
    assert not grown(objects, live_objects(), by=100)
