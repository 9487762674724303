"""Numbers that a step derives from one that changes: `int(fraction * n)` makes a graph for each size, not for each
fraction; `float(weight)` is the same input."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from capture.followed import assert_follows
from harness import device
from selection import each_now

SIZES: dict[str, Callable[[Tensor, float], Any]] = {
    "int": lambda x, f: x[: int(f * 8)].sum(),
    "topk": lambda x, f: x.topk(max(1, int(f * len(x)))).values.sum(),
    "round": lambda x, f: x[: round(f * 8)].sum(),
    "int of round": lambda x, f: x[: int(round(f * 8, 1))].sum(),
    "int of ceil": lambda x, f: x[: int(math.ceil(f * 8))].sum(),  # noqa: RUF046
    "negative": lambda x, f: x[int(-f * 7.9) :].sum(),
    "and the number": lambda x, f: x[: int(f * 8)].sum() * f,
}


@pytest.mark.parametrize("name", each_now(SIZES, "int", "topk", "negative", "and the number"))
def test_a_size_computed_from_a_fraction_makes_a_graph_for_each_size(name: str) -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        config = SimpleNamespace(f=0.6)
        x = torch.arange(8.0, device=device())
        return lambda: SIZES[name](x, config.f), lambda i: setattr(config, "f", 0.6 - 0.03 * i)

    assert_follows(case, graphs=6, steps=12)


def test_float_of_a_number_that_changes_is_an_input() -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        config = SimpleNamespace(w=1.0, n=3)

        def change(i: int) -> None:
            config.w, config.n = 0.5 ** (i + 1), i

        def read() -> Any:
            w = float(config.w)
            assert isinstance(w, float)
            return w * float(config.n) + (1.0 if type(w) is float else 2.0)

        return read, change

    assert_follows(case, graphs=2)


@pytest.mark.parametrize("convert", [int, round, math.floor, math.trunc], ids=lambda f: str(f.__name__))
def test_a_number_that_python_cannot_convert_raises_what_eager_raises(convert: Callable[[float], int]) -> None:
    config = SimpleNamespace(f=0.5)

    def step(x: Tensor) -> Tensor:
        return x[: convert(config.f * 4)] * config.f

    compiled = ws.compile(step)
    x = torch.arange(8.0, device=device())
    for f in (0.5, 0.6, 0.55, math.nan, 0.6, math.inf, -math.inf, 0.7, 0.8):
        config.f = f
        if math.isfinite(f):
            assert torch.equal(compiled(x), step(x))
            continue
        with pytest.raises((ValueError, OverflowError)) as expected:
            step(x)
        with pytest.raises(type(expected.value), match=str(expected.value)):
            compiled(x)
