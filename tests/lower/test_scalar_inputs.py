"""Scalars that change from call to call are inputs of compiled code, with the semantics of eager."""

from __future__ import annotations

import pytest
import torch

from lower.graphs import aten, graph_of, interpreted, report
from selection import each_now
from wholestep.lower import LowerOptions, partial_lower
from wholestep.lower.scalar_inputs import _OPERANDS, pack_scalars

__all__ = ["interpreted"]

OPERATORS = {
    "add": (aten.add.Tensor, "x", "n"),
    "add_alpha": (aten.add.Tensor, "x", "y", {"alpha": "n"}),
    "add_both": (aten.add.Tensor, "x", "n", {"alpha": "k"}),
    "add_scalar": (aten.add.Scalar, "x", "n", "k"),
    "sub": (aten.sub.Tensor, "x", "n"),
    "sub_alpha": (aten.sub.Tensor, "x", "y", {"alpha": "n"}),
    "sub_scalar": (aten.sub.Scalar, "x", "n", 3),
    "rsub": (aten.rsub.Scalar, "x", "n"),
    "rsub_alpha": (aten.rsub.Scalar, "x", "n", "k"),
    "rsub_tensors": (aten.rsub.Tensor, "x", "y", {"alpha": "n"}),
    "mul": (aten.mul.Tensor, "x", "n"),
    "mul_scalar": (aten.mul.Scalar, "x", "n"),
    "div": (aten.div.Tensor, "x", "n"),
    "div_floor": (aten.div.Tensor_mode, "x", "n", {"rounding_mode": "floor"}),
    "div_trunc": (aten.div.Scalar_mode, "x", "n", {"rounding_mode": "trunc"}),
    "true_divide": (aten.true_divide.Tensor, "x", "n"),
    "eq": (aten.eq.Scalar, "x", "n"),
    "ne": (aten.ne.Scalar, "x", "n"),
    "lt": (aten.lt.Scalar, "x", "n"),
    "le": (aten.le.Scalar, "x", "n"),
    "gt": (aten.gt.Scalar, "x", "n"),
    "ge": (aten.ge.Scalar, "x", "n"),
    "fmod": (aten.fmod.Scalar, "x", "n"),
    "remainder": (aten.remainder.Scalar, "x", "n"),
    "remainder_of": (aten.remainder.Scalar_Tensor, "n", "x"),
    "pow": (aten.pow.Tensor_Scalar, "p", "n"),
    "pow_of": (aten.pow.Scalar, "n", "x"),
    "clamp": (aten.clamp.default, "x", "n", "k"),
    "clamp_low": (aten.clamp.default, "x", "n"),
    "clamp_high": (aten.clamp.default, "x", None, "n"),
    "clamp_named": (aten.clamp.default, "x", {"max": "n"}),
    "clamp_min": (aten.clamp_min.default, "x", "n"),
    "clamp_max": (aten.clamp_max.default, "x", "n"),
    "where_self": (aten.where.ScalarSelf, "m", "n", "x"),
    "where_other": (aten.where.ScalarOther, "m", "x", "n"),
    "fill": (aten.fill.Scalar, "x", "n"),
    "masked_fill": (aten.masked_fill.Scalar, "x", "m", "n"),
    "lerp": (aten.lerp.Scalar, "x", "y", "n"),
    "addcmul": (aten.addcmul.default, "x", "y", "p", {"value": "n"}),
    "addcdiv": (aten.addcdiv.default, "x", "y", "p", {"value": "n"}),
    "full": (aten.full.default, [3], "n", {"dtype": torch.float32, "device": torch.device("cpu")}),
    "full_like": (aten.full_like.default, "x", "n"),
    "full_like_of": (aten.full_like.default, "x", "n", {"dtype": torch.float64}),
    "xlogy": (aten.xlogy.Scalar_Other, "x", "n"),
    "xlogy_of": (aten.xlogy.Scalar_Self, "n", "p"),
    "single": (aten.mul.Tensor, "s", "n"),
    "single_add": (aten.add.Tensor, "s", "s", {"alpha": "n"}),
    "single_lerp": (aten.lerp.Scalar, "s", "s", "n"),
}
NUMBERS = [(0.3, 1.7), (0.1, 0.5), (0.9, 1e-3)]
ONLY_IN_LISTS = {"maximum", "minimum"}
"""Take scalars only as `_foreach_` operators (test_foreach.py); their tensor forms have no overload with a scalar."""


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    x[0, 0], x[0, 1], x[0, 2] = 0.3, 0.1, float("nan")
    given = {"x": x, "y": y, "p": y.abs() + 0.1, "s": torch.tensor(0.7)}
    return {**{name: value.to(dtype) for name, value in given.items()}, "m": x > 0}


def lowered_operators(dtype: torch.dtype):
    gm = graph_of(OPERATORS, **tensors(dtype), n=0.25, k=2.0)
    return partial_lower(gm, options=LowerOptions(min_aten_ops=1, strict=True))


def expected(dtype: torch.dtype, n: float, k: float) -> dict[str, torch.Tensor]:
    known = {**tensors(dtype), "n": n, "k": k}
    found = {}
    for name, (target, *given) in OPERATORS.items():
        keywords = given.pop() if isinstance(given[-1], dict) else {}
        args = [known.get(value, value) if isinstance(value, str) else value for value in given]
        named = {key: known.get(value, value) if isinstance(value, str) else value for key, value in keywords.items()}
        found[name] = target(*args, **named)
    return found


def test_integer_scalars_beside_integer_tensors_stay_outside() -> None:
    big = torch.tensor([2**24, 2**24 + 1, 2**40])
    nodes = {"eq": (aten.eq.Scalar, "i", "n"), "mul": (aten.mul.Tensor, "i", "n"), "half": (aten.div.Tensor, "i", 2)}
    gm = partial_lower(graph_of(nodes, i=big, n=3), options=LowerOptions(min_aten_ops=1, strict=True))
    assert [reason for _, _, reason in report(gm).outside] == [
        "takes n, a scalar that may change from call to call"
    ] * 2
    same, product, half = gm(big, 2**24 + 1)
    assert same.tolist() == [False, True, False]
    assert torch.equal(product, big * (2**24 + 1))
    torch.testing.assert_close(half, big / 2)


@pytest.mark.usefixtures("interpreted")
def test_scalars_of_a_region_are_passed_in_one_tensor_per_precision() -> None:
    nodes = {"a": (aten.mul.Tensor, "x", "n"), "b": (aten.add.Tensor, "d", "k"), "c": (aten.mul.Tensor, "b", "n")}
    gm = partial_lower(
        graph_of(nodes, x=torch.ones(2), d=torch.ones(2, dtype=torch.float64), n=0.1, k=0.2),
        options=LowerOptions(min_aten_ops=1, strict=True),
    )
    packs = gm.graph.find_nodes(op="call_function", target=pack_scalars)
    assert [node.args[1] for node in packs] == [torch.float32, torch.float64]
    a, _, c = gm(torch.ones(2), torch.ones(2, dtype=torch.float64), 1 / 3, 1e-17)
    assert a.tolist() == (torch.ones(2) * (1 / 3)).tolist()
    assert c.tolist() == ((torch.ones(2, dtype=torch.float64) + 1e-17) * (1 / 3)).tolist()


def test_a_changing_learning_rate_does_not_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(
        "wholestep.lower.compiled_region.compile_inductor",
        lambda gm, *_, **__: (compiled.append(gm), lambda tensors: tuple(gm(*tensors)))[1],
    )
    parameter, gradient = torch.randn(4), torch.randn(4)
    nodes = {"scaled": (aten.mul.Tensor, "g", "lr"), "new": (aten.sub.Tensor, "p", "scaled")}
    gm = partial_lower(graph_of(nodes, p=parameter, g=gradient, lr=0.1), options=LowerOptions(min_aten_ops=1))
    for lr in (0.1, 0.01, 3.0):
        torch.testing.assert_close(gm(parameter, gradient, lr)[1], parameter - lr * gradient)
    assert len(compiled) == 1


def test_the_table_of_operators_is_complete() -> None:
    tested = {target._schema.name.removeprefix("aten::") for target, *_ in OPERATORS.values()}
    assert tested | ONLY_IN_LISTS == _OPERANDS - {"atan2"} | (tested & {"atan2"})


@pytest.mark.parametrize(
    "dtype", each_now([torch.float32, torch.float64, torch.bfloat16], "torch.float32", "torch.bfloat16")
)
def test_every_operator_takes_scalar_inputs_as_eager_does(dtype: torch.dtype) -> None:
    gm = lowered_operators(dtype)
    assert len(report(gm).regions) == 1
    outside = [] if dtype != torch.bfloat16 else ["eq", "ne", "lt", "le", "gt", "ge", "fmod", "remainder"]
    assert {name.split("_")[0] for name, *_ in report(gm).outside} == set(outside)
    for n, k in NUMBERS:
        want = expected(dtype, n, k)
        got = dict(zip(want, gm(*tensors(dtype).values(), n, k), strict=True))
        for name, value in want.items():
            assert got[name].dtype == value.dtype, name
            limits = {"rtol": 2e-2, "atol": 1e-2} if value.dtype == torch.bfloat16 else {}
            torch.testing.assert_close(
                got[name], value, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}", **limits
            )
