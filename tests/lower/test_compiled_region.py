"""A graph lowered by hand checks its inputs: calls for which code is not valid run operator by operator."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from lower.graphs import interpreted, run_graph
from wholestep.errors import LowerError, LowerWarning, OptionError
from wholestep.lower import LowerOptions, partial_lower
from wholestep.lower.report import found_lowering

__all__ = ["interpreted"]

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

    monkeypatch.setattr("wholestep.lower.compiled_region.compile_inductor", count)
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
def test_inputs_with_another_layout_than_at_trace_time_are_detected(other: str, calls: list[int]) -> None:
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


def test_sizes_that_were_equal_at_trace_time_must_be_equal(calls: list[int]) -> None:
    gm = lowered(torch.randn(4, 6), torch.randn(4, 6), "symbolic")
    for rows in (4, 7):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(gm(x, x + 1), work(x, x + 1))
    assert calls == [1, 1]
    x, y = torch.randn(5, 6), torch.randn(1, 6)
    with pytest.warns(LowerWarning, match="y_1 is f32"):
        torch.testing.assert_close(gm(x, y), work(x, y))
    assert calls == [1, 1]


def test_strides_of_dimensions_of_size_one_do_not_matter(calls: list[int]) -> None:
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


def under_vmap(gm: Any) -> Tensor:
    return torch.vmap(gm, (0, None))(torch.arange(48.0).view(2, 4, 6), torch.ones(4, 6))


def with_tangents(gm: Any) -> tuple[Tensor, ...]:
    return torch.func.jvp(lambda x: gm(x, x + 1), (torch.ones(4, 6),), (torch.arange(24.0).view(4, 6),))


def with_dual_tensors(gm: Any) -> tuple[Tensor, ...]:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(4, 6), torch.arange(24.0).view(4, 6))
        return tuple(forward_ad.unpack_dual(gm(x, torch.ones(4, 6))))


def with_the_other_sign(gm: Any) -> Tensor:
    x = torch._neg_view(torch.arange(24.0).view(4, 6) - 12)
    return gm(x, torch.ones(4, 6))


def traced_again(gm: Any) -> Tensor:
    again = make_fx(gm, tracing_mode="fake")(torch.ones(4, 6), torch.ones(4, 6))
    return again(torch.arange(24.0).view(4, 6), torch.ones(4, 6))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("use", [under_vmap, with_tangents, with_dual_tensors, with_the_other_sign, traced_again])
def test_tensors_that_are_not_plain_memory_are_not_read(use: Callable[[Any], Any], calls: list[int]) -> None:
    gm = lowered(torch.randn(4, 6), torch.randn(4, 6))
    with pytest.warns(LowerWarning, match=r"x_1 is a .*, and its code reads plain memory"), torch.no_grad():
        got = use(gm)
    assert not calls
    torch.testing.assert_close(got, use(work))


@pytest.mark.usefixtures("interpreted")
def test_a_step_whose_input_is_a_negated_view_is_not_compiled() -> None:
    def step(x: Tensor) -> Tensor:
        return (x * 2 + 1).exp()

    compiled = ws.compile(step, lower="inductor", lower_options=ANY)
    x = torch.randn(8, dtype=torch.complex64).conj().imag
    with pytest.warns(LowerWarning, match=r"x is a negated view, .* Pass x.resolve_neg\(\)"):
        torch.testing.assert_close(compiled(x), step(x))
    assert lowering_of_step(compiled) is None
    torch.testing.assert_close(compiled(x.resolve_neg()), step(x))
    assert lowering_of_step(compiled) is not None


def lowering_of_step(step: Any) -> Any:
    return found_lowering(step.executable)


@pytest.mark.parametrize("options", [{"min_aten_ops": 1}, {}, None])
def test_options_may_be_a_dict(options: Any, calls: list[int]) -> None:
    gm = partial_lower(make_fx(work, tracing_mode="fake")(torch.randn(4, 6), torch.randn(4, 6)), options=options)
    gm(torch.randn(4, 6), torch.randn(4, 6))
    assert calls == [1] * bool(options)


@pytest.mark.parametrize("options", [3, {"minimum": 1}, "strict"])
def test_invalid_options_are_refused(options: Any) -> None:
    gm = make_fx(work, tracing_mode="fake")(torch.randn(4, 6), torch.randn(4, 6))
    with pytest.raises(OptionError, match=r"options=.*\n.*use a dict with some of config, exact"):
        partial_lower(gm, options=options)


def test_an_input_that_is_only_returned_needs_no_shape() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"), None))
    gm = partial_lower(fx.GraphModule(torch.nn.Module(), graph))
    assert gm(3) == (3, None)
