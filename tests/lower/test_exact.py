"""`exact=True`: compiled regions are bitwise equal to eager, also for signed zeros, subnormals and infinities."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from lower.graphs import aten, graph_of, report
from selection import each_now
from wholestep.lower import LowerOptions, partial_lower, plan_regions
from wholestep.torch_private.inductor import keeps_roundings

EXACT = LowerOptions(min_aten_ops=1, strict=True, exact=True)
DTYPES = [torch.float32, torch.float64, *([torch.bfloat16, torch.float16] if keeps_roundings() else [])]


def bits(value: Any) -> Any:
    """What can be compared by ==; all NaNs are one."""
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    if not value.is_floating_point():
        return value.tolist()
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[value.dtype.itemsize]
    return value.masked_fill(value.isnan(), 1.0).contiguous().view(kind).tolist()


def special(dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of all sizes, in an order of their own, enough for vectors and what is left of them."""
    generator = torch.Generator().manual_seed(seed)
    tiny = torch.finfo(dtype).smallest_normal
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, tiny, tiny / 4, -tiny / 2, 2.5, -3.5])
    plain = torch.randn(247, generator=generator, dtype=torch.float64) * 10
    both = torch.cat([plain, edges.double().repeat(12)]).to(dtype)
    return both[torch.randperm(len(both), generator=generator)]


def arithmetic(x: Tensor, y: Tensor, n: float) -> list[Tensor]:
    one, two = [x + y, x - y, x * y, x / y], [x * 0.5, x + 0.0, x - 0.0, 1 - x, x / 4.0, x * n, y / n, x + n]
    three = [-x, x.abs(), x.reciprocal(), x * x, torch.maximum(x, y), torch.minimum(x, y), x.clamp(-1.5, 2.0)]
    four = [x.clamp(min=0.5), x.relu(), x < y, x >= 0.5, x == y, torch.where(x > y, x, y), x.isnan(), x.sign()]
    five = [x.floor(), x.ceil(), x.trunc(), x.masked_fill(y > 0, -0.0), torch.cat([x, y])[3:], x.float(), x.double()]
    chain = ((x * y + x) * y - x / y).relu() * 0.25 + y
    lists = torch._foreach_add(torch._foreach_mul([x, y], 0.5), [y, x])
    down = (x.double() * 1.1).to(x.dtype).double() + y.float().to(torch.bfloat16).float()
    return [*one, *two, *three, *four, *five, chain, *lists, down, aten.threshold_backward(x, y, 0.0)]


@pytest.mark.parametrize("dtype", each_now(DTYPES, str(DTYPES[-1])))  # the step below is float32
def test_compiled_arithmetic_is_bitwise_equal_to_eager(dtype: torch.dtype) -> None:
    x, y = special(dtype, 1), special(dtype, 2)
    gm = make_fx(lambda x, y: arithmetic(x, y, 0.75), tracing_mode="fake")(x, y)
    partial_lower(gm, options=EXACT)
    # On old versions of torch the step through bfloat16 is outside.
    assert sum(region.operators for region in report(gm).regions) >= 50
    assert bits(gm(x, y)) == bits(arithmetic(x, y, 0.75))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalar_inputs_are_rounded_as_in_eager(dtype: torch.dtype) -> None:
    names = {"mul": aten.mul.Tensor, "div": aten.div.Tensor, "add": aten.add.Tensor, "sub": aten.sub.Tensor}
    gm = graph_of({name: (op, "x", "n") for name, op in names.items()}, x=special(dtype, 3), n=0.1)
    partial_lower(gm, options=EXACT)
    assert report(gm).regions[0].operators == 4
    for n in (0.1, 1 / 3, -1e-9):
        x = special(dtype, 4)
        assert bits(gm(x, n)) == bits([x * n, x / n, x + n, x - n])


def outside(**values: Any) -> list[str]:
    gm = graph_of(values.pop("nodes"), **values)
    return [str(node) for node, why in plan_regions(gm.graph, min_aten_ops=1, exact=True).reasons.items() if why]


def test_operators_with_their_own_rounding_in_eager_stay_outside() -> None:
    x = torch.rand(8)
    nodes: dict[str, tuple[Any, ...]] = {
        "add_alpha": (aten.add.Tensor, "x", "x", {"alpha": 0.3}),
        "exp": (aten.exp.default, "x"),
        "sqrt": (aten.sqrt.default, "x"),
        "lerp": (aten.lerp.Scalar, "x", "x", 0.1),
        "addcmul": (aten.addcmul.default, "x", "x", "x"),
        "sum_": (aten.sum.default, "x"),
        "floor": (aten.div.Tensor_mode, "x", "x", {"rounding_mode": "floor"}),
    }
    assert len(outside(nodes=nodes, x=x)) == len(nodes)
    assert not outside(nodes={"add": (aten.add.Tensor, "x", "x"), "t": (aten.view.default, "x", [2, 4])}, x=x)


def test_a_scalar_that_low_precision_cannot_represent_stays_outside() -> None:
    nodes = {"exact": (aten.mul.Tensor, "x", 0.5), "rounded": (aten.mul.Tensor, "x", 0.7), "n": (operator.mul, "k", 2)}
    nodes["changing"] = (aten.mul.Tensor, "x", "n")
    found = outside(nodes=nodes, x=torch.rand(8).bfloat16(), k=0.5)
    assert ("mul_tensor" in found) is not keeps_roundings()
    assert len(found) >= 3


@pytest.mark.parametrize("dtype", each_now([torch.float32, torch.bfloat16], "torch.float32"))
def test_a_step_trains_bitwise_equal_to_eager(dtype: torch.dtype) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            h = nn.functional.dropout(self.up(x).relu() * 2 - 0.5, 0.25) + 1
            return self.norm(self.down(h * h.sigmoid()).clamp(-2, 2) + x * 0.5)

    torch.manual_seed(0)
    ours = Model().to(dtype)
    theirs = copy.deepcopy(ours)
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=True)

        def step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        options = {"exact": True, "min_aten_ops": 2, "strict": True}
        run = ws.compile(step, lower="inductor", lower_options=options) if model is ours else step
        torch.manual_seed(1)
        losses.append([run(torch.randn(4, 8).to(dtype)).detach() for _ in range(4)])
        if model is ours:
            assert bool(run.lowering.regions) == (dtype in DTYPES)
    assert bits(losses[0]) == bits(losses[1])
    assert bits(list(ours.state_dict().values())) == bits(list(theirs.state_dict().values()))


def test_settings_of_the_user_apply_to_the_trace_too(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[bool] = []

    def look(gm: fx.GraphModule, *_: Any, **__: Any) -> Any:
        marked.append(any("low_precision_pointwise_barrier" in node.meta for node in gm.graph.nodes))
        return lambda tensors: tuple(gm(*tensors))

    monkeypatch.setattr("wholestep.lower.compiled_region.compile_inductor", look)
    for given in ({}, {"emulate_precision_casts": True}):
        gm = make_fx(lambda x: (x * 3).relu(), tracing_mode="fake")(torch.randn(4).bfloat16())
        partial_lower(gm, options=LowerOptions(min_aten_ops=1, strict=True, config=given))
    assert marked == [False, True]
