"""A graph lowered by hand may be called with anything: what compiled code is not for runs operator by operator."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lower.graphs import run_graph
from wholestep.errors import LowerError, LowerWarning
from wholestep.lower import LowerOptions, partial_lower

ANY = LowerOptions(min_aten_ops=1, strict=True)


def work(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2 + y).relu().sum(0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often compiled code was called; FX runs it."""
    found: list[int] = []

    def count(gm: fx.GraphModule, *_: Any, **__: Any) -> Any:
        run = run_graph(gm)
        return lambda tensors: found.append(1) or run(tensors)

    monkeypatch.setattr("wholestep.lower.inductor.compile_inductor", count)
    return found


def lowered(x: Tensor, y: Tensor, tracing: str = "fake") -> fx.GraphModule:
    return partial_lower(make_fx(work, tracing_mode=tracing)(x, y), options=ANY)


OTHERS = {
    "dtype": torch.randn(4, 6, dtype=torch.float64),
    "size": torch.randn(9, 6),
    "strides": torch.randn(6, 4).t(),
    "dimensions": torch.randn(2, 4, 6),
}


@pytest.mark.parametrize("other", OTHERS)
def test_inputs_that_look_otherwise_than_they_were_traced_are_seen(other: str, calls: list[int]) -> None:
    gm = lowered(torch.randn(4, 6), torch.randn(4, 6))
    value = OTHERS[other]
    with pytest.warns(LowerWarning, match=r"region 0 runs operator by operator for some inputs: x_1 is .* code is for"):
        result = gm(value, value)
    assert not calls
    torch.testing.assert_close(result, work(value, value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm(value, value)  # said once
        gm(torch.randn(4, 6), torch.randn(4, 6))
    assert calls == [1]


def test_compiled_code_does_not_read_one_dtype_as_another() -> None:
    gm = lowered(torch.randn(4, 6), torch.randn(4, 6))
    x = torch.randn(4, 6, dtype=torch.float64)
    with pytest.warns(LowerWarning, match=r"f64\[4, 6\]"):
        torch.testing.assert_close(gm(x, x), work(x, x))


def test_sizes_that_were_equal_in_the_trace_must_be_equal(calls: list[int]) -> None:
    gm = lowered(torch.randn(4, 6), torch.randn(4, 6), "symbolic")
    for rows in (4, 7):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(gm(x, x + 1), work(x, x + 1))
    assert calls == [1, 1]
    x, y = torch.randn(5, 6), torch.randn(1, 6)
    with pytest.warns(LowerWarning, match="y_1 is f32"):
        torch.testing.assert_close(gm(x, y), work(x, y))
    assert calls == [1, 1]


def test_steps_where_there_is_one_element_do_not_matter(calls: list[int]) -> None:
    gm = lowered(torch.randn(1, 6), torch.randn(1, 6))
    x = torch.randn(1, 6).as_strided((1, 6), (99, 1))
    gm(x, x)
    assert calls == [1]


def test_inputs_that_require_gradients_get_them(calls: list[int]) -> None:
    gm = lowered(torch.randn(4, 6), torch.randn(4, 6))
    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    with pytest.warns(LowerWarning, match=r"inputs that require gradients: .* under torch.no_grad\(\)"):
        gm(x, y).sum().backward()
    expected = x.detach().clone().requires_grad_()
    work(expected, y).sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert not calls
    with torch.no_grad():
        gm(x, y)
    assert calls == [1]


def test_a_lowered_graph_can_be_copied_and_says_that_it_cannot_be_pickled(calls: list[int]) -> None:
    gm = lowered(torch.randn(4, 6), torch.randn(4, 6))
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(copy.deepcopy(gm)(x, y), work(x, y))
    with pytest.raises(LowerError, match="cannot be pickled"):
        pickle.dumps(gm.subgraph_0)


def test_a_dumper_that_returns_nothing_is_refused() -> None:
    gm = make_fx(work, tracing_mode="fake")(torch.randn(4, 6), torch.randn(4, 6))
    with pytest.raises(LowerError, match="dumper returned None for region 0"):
        partial_lower(gm, dumper=lambda text: None, options=ANY)  # type: ignore[arg-type, return-value]
