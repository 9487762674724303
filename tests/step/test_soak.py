"""Ten thousand calls and hundreds of captures: memory stays flat, caches do not grow, what was dropped is freed."""

from __future__ import annotations

import gc
import tracemalloc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from harness import device
from selection import each_now
from soak import SoakTrainer, cache_sizes, grown, grown_each_time, live_objects, resident_bytes
from wholestep import compiled_step as api
from wholestep.torch_private import fake_tensors

_MEGABYTE = 2**20


@pytest.fixture(autouse=True)
def _many_graphs_are_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ws.errors.RecompileWarning)
        yield


def _play(trainer: SoakTrainer, step: Any, first: int, last: int) -> None:
    for i in range(first, last):
        trainer.change(i)
        step(torch.randn(2, 3), 1.0 + 0.1 * (i % 5))


@pytest.mark.parametrize("calls", each_now([2_000, 10_000], "2000"))
def test_thousands_of_calls_with_changing_numbers_keep_memory_flat(calls: int) -> None:
    trainer = SoakTrainer(device(), torch.optim.AdamW)
    step = ws.compile(trainer.step, lower="eager")
    _play(trainer, step, 0, 300)
    graphs, objects, caches, bytes_before = len(step.graphs), live_objects(), cache_sizes(), resident_bytes()
    _play(trainer, step, 300, calls - 500)
    tracemalloc.start()
    try:
        _play(trainer, step, calls - 500, calls - 400)
        before = tracemalloc.take_snapshot()
        _play(trainer, step, calls - 400, calls)
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    growth = sum(each.size_diff for each in after.compare_to(before, "filename") if "wholestep" in str(each.traceback))
    assert len(step.graphs) == graphs <= 4
    assert trainer.calls == calls
    assert not grown(objects, live_objects(), by=150)
    assert cache_sizes() == caches
    assert growth < 64 * 1024
    assert resident_bytes() - bytes_before < 8 * _MEGABYTE


def test_the_number_of_graphs_is_capped_and_the_oldest_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api._MAX_GRAPHS <= 128
    monkeypatch.setattr(api, "_MAX_GRAPHS", 4)
    trainer = SoakTrainer(device())
    step = ws.compile(trainer.step, lower="eager", dynamic=False)
    step(torch.randn(2, 3), 1.0)
    step(torch.randn(2, 3), 1.0)
    oldest = weakref.ref(step.graphs[0])
    for rows in range(3, 3 + api._MAX_GRAPHS + 2):
        step(torch.randn(rows, 3), 1.0)
    assert len(step.graphs) == api._MAX_GRAPHS
    gc.collect()
    assert oldest() is None


def _capture_often(step: Any, times: int) -> None:
    for rows in range(2, 2 + times):
        trainer = SoakTrainer(device())
        step(trainer, torch.randn(rows, 3), 1.0)
        if rows % 20 == 0:
            step.reset()


@pytest.mark.long  # the tests around it have fewer captures
def test_two_hundred_captures_of_new_models_and_shapes_keep_memory_flat() -> None:
    step = ws.compile(lambda trainer, x, weight: trainer.step(x, weight), lower="eager", dynamic=False)
    _capture_often(step, 80)  # the process takes its room
    step.reset()
    objects, caches, bytes_before = live_objects(), cache_sizes(), resident_bytes()
    _capture_often(step, 150)
    step.reset()
    assert not grown(objects, live_objects(), by=100)
    assert {k: (caches.get(k, 0), n) for k, n in cache_sizes().items() if n > caches.get(k, 0)} == {}
    assert resident_bytes() - bytes_before < 24 * _MEGABYTE


def test_reset_frees_graphs_fakes_and_the_models_that_were_captured() -> None:
    step = ws.compile(lambda trainer, x, weight: trainer.step(x, weight), lower="eager")
    before = live_objects()
    gone = []
    for rows in (2, 3, 4):
        trainer = SoakTrainer(device())
        for _ in range(3):
            step(trainer, torch.randn(rows, 3), 1.0)
        gone += [weakref.ref(trainer.model), weakref.ref(trainer.optimizer), weakref.ref(step.graphs[-1])]
    del trainer
    assert any(each() is not None for each in gone)
    step.reset()
    after = live_objects()
    assert [each() for each in gone] == [None] * len(gone)
    for name in ("fx.node.Node", "fx.graph_module.GraphModule", "fx.graph.Graph", "_subclasses.fake_tensor.FakeTensor"):
        assert after[f"torch.{name}"] <= before[f"torch.{name}"], name


def test_a_step_that_is_dropped_frees_what_it_held() -> None:
    trainer = SoakTrainer(device())
    step = ws.compile(trainer.step, lower="eager")
    for i in range(4):
        step(torch.randn(2, 3), 1.0 + i)
    gone = [weakref.ref(trainer.model), weakref.ref(step.graphs[0]), weakref.ref(step)]
    del trainer, step
    gc.collect()
    assert [each() for each in gone] == [None] * 3


class _Refused(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float((x * 2).numpy()[0, 0])


def test_refused_captures_leave_nothing_behind() -> None:
    step = ws.compile(lambda model, x: model(x), lower="eager")

    def refuse(times: int) -> None:
        for rows in range(2, 2 + times):
            with pytest.raises(ws.errors.ItemError):
                step(_Refused(), torch.randn(rows, 3))

    refuse(10)
    caches = cache_sizes()
    assert not grown_each_time(lambda: refuse(15), by=10)
    assert cache_sizes() == caches


def test_new_compiled_steps_do_not_add_up() -> None:
    def use(times: int) -> None:
        for _ in range(times):
            trainer = SoakTrainer(device())
            step = ws.compile(trainer.step, lower="eager")
            step(torch.randn(2, 3), 1.0)
            step(torch.randn(2, 3), 2.0)

    use(3)
    caches = cache_sizes()
    assert not grown_each_time(lambda: use(10), by=8)
    assert {k: (caches.get(k, 0), n) for k, n in cache_sizes().items() if n > caches.get(k, 0)} == {}


def test_what_torch_remembers_of_fake_operators_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensors, "_MAX_CACHED_RESULTS", 60)
    step = ws.compile(lambda x: (x * 2).sin().sum(), lower="eager", dynamic=False)
    sizes = []
    for rows in range(2, 42):
        step(torch.randn(rows, 3))
        sizes.append(len(fake_tensors.FakeTensorMode.cache))
    assert max(sizes) < 90
    assert sizes != sorted(sizes)
