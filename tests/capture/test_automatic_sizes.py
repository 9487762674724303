"""Sizes that vary become symbolic by themselves, where the step does the same with symbols; the bits are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from harness import Run, assert_frames_equal, batch_of, device, play, reasons
from wholestep.capture.graph.dynamic_shapes import SeenSizes

SIZES = [8, 8, 3, 5, 1, 7, 0]


def training(model: nn.Module, loss: Callable[..., Tensor], batch: Callable[[int, int], tuple[Any, ...]]) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step(*batch: Tensor) -> Tensor:
        found = loss(model, *batch)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return Run(step, lambda i: batch(i, SIZES[i]), {"model": model, "optimizer": optimizer})


def classifier() -> Run:
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.GELU(), nn.Linear(7, 3))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="sum") / max(x.shape[0], 1)

    return training(model, loss, lambda i, size: (batch_of(device(), i, size, 5), torch.arange(size) % 3))


def sequences() -> Run:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    batch = lambda i, size: (batch_of(device(), i, 2, max(size, 1), 8),)  # noqa: E731
    return training(model, lambda model, x: model(x).square().mean(), batch)


def pixels() -> Run:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    batch = lambda i, size: (batch_of(device(), i, max(size, 1), 3, 6, 6),)  # noqa: E731
    return training(model, lambda model, x: model(x).square().mean(), batch)


@pytest.mark.parametrize(("make", "static"), [(classifier, 2), (sequences, 1), (pixels, 1)])
def test_from_the_second_size_on_there_is_one_graph_for_all(make: Callable[[], Run], static: int) -> None:
    """One that creates optimizer state, one for the first size, one for all others; sizes 0 and 1 have their own."""
    torch.manual_seed(5)
    run = make()
    expected = play(run, run.step, len(SIZES))
    torch.manual_seed(5)
    run = make()
    step = ws.compile(run.step, lower="eager")
    assert_frames_equal(expected, play(run, step, len(SIZES)))
    assert len(step.graphs) == 3 + static, reasons(step)


def plain(x: Tensor) -> Any:
    return x * 2 + x.mean(0)


def formats(x: Tensor) -> Any:
    return f"{tuple(x.shape)}", x + 1


def looks_up(x: Tensor) -> Any:
    return x * {8: 1.0, 3: 2.0, 5: 3.0}.get(x.shape[0], 9.0)


def returns_sizes(x: Tensor) -> Any:
    return x.shape[0], x.numel() / 2, x.sum()


def loops(x: Tensor) -> Any:
    return sum(x[i] * i for i in range(x.shape[0]))


def asks_the_type(x: Tensor) -> Any:
    return x + (1 if type(x.shape[0]) is int else 2)


def branches(x: Tensor) -> Any:
    return x.sum() if x.shape[0] > 4 else x.mean()


def makes_tensors(x: Tensor) -> Any:
    return x + torch.arange(x.shape[0])[:, None] + torch.full((x.shape[0], 1), float(x.shape[0]))


def squeezes(x: Tensor) -> Any:
    return x[:, :1].squeeze()


class Recurrent:
    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model = nn.LSTM(3, 2)
        self.__name__ = "recurrent"

    def __call__(self, x: Tensor) -> Any:
        return self.model(x.unsqueeze(1))[0].detach()


@pytest.mark.parametrize(
    "step",
    [plain, formats, looks_up, returns_sizes, loops, asks_the_type, branches, makes_tensors, squeezes, Recurrent()],
    ids=lambda step: step.__name__,
)
def test_what_sizes_do_in_python_is_what_eager_does(step: Callable[..., Any]) -> None:
    """With symbols where that changes nothing, otherwise with a graph for each size; never an error."""
    compiled: Any = ws.compile(step, lower="eager")
    for i, size in enumerate([8, 3, 5, 1, 8]):
        x = batch_of(device(), i, size, 3)
        expected, actual = step(x), compiled(x)
        assert type(expected) is type(actual)
        for want, got in zip(*(v if isinstance(v, tuple) else (v,) for v in (expected, actual)), strict=True):
            assert type(want) is type(got)
            assert torch.equal(want, got) if isinstance(want, Tensor) else want == got
    if step is plain:
        assert len(compiled.graphs) == 3


@pytest.mark.parametrize("dynamic", [False, None])
def test_dynamic_false_is_one_graph_per_size(dynamic: bool | None) -> None:
    compiled = ws.compile(plain, lower="eager", dynamic=dynamic)
    for size in (8, 3, 5, 7):
        compiled(torch.ones(size, 2))
    assert len(compiled.graphs) == (2 if dynamic is None else 4)


def test_a_tensor_that_is_not_contiguous_has_a_graph_of_its_own() -> None:
    compiled = ws.compile(lambda x: x * 2, lower="eager")
    for x in (torch.ones(3, 4), torch.ones(5, 4), torch.ones(4, 3).t(), torch.ones(7, 4), torch.ones(4, 6).t()):
        assert compiled(x).stride() == (x * 2).stride()
    assert len(compiled.graphs) == 4


def test_sizes_that_were_equal_are_one_symbol_until_they_differ() -> None:
    seen = SeenSizes()
    x, y = torch.ones(8, 5), torch.ones(8)
    assert seen.varying([x, y], "tree") is None
    seen.note([x, y], "tree")
    found = seen.varying([x[:3], y[:3]], "tree")
    assert found is not None
    assert list(found.dims) == [0, 1]
    assert found.dims[0][0] is found.dims[1][0]
    assert list(found.dims[0]) == [0]
    apart = seen.varying([x[:3], y[:4]], "tree")
    assert apart is not None
    assert apart.dims[0][0] is not apart.dims[1][0]
    assert seen.varying([x[:3], y[:3]], "another tree") is None
    assert seen.varying([x[:1], y[:1]], "tree") is None
    assert seen.varying([x.t()[:3], y], "tree") is None
    seen.fix("tree", [(0, 0)])
    fixed = seen.varying([x[:3], y[:3]], "tree")
    assert fixed is not None
    assert list(fixed.dims) == [1]
    seen.give_up("tree")
    assert seen.varying([x[:3], y[:3]], "tree") is None
