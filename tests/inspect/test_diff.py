"""`ws.inspect.diff` names the cause of a difference: seeded regressions of a captured step, each found and named."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from simulate.sharded_steps import fully_sharded
from wholestep.inspect import ChangeCause, GraphDiff
from wholestep.inspect.differences.correspondence import aligned, longest_increasing
from wholestep.ir import StepGraph
from wholestep.ir.effects import is_collective, is_wait
from wholestep.passes import bucket_reduce_scatter, reinplace_tail

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.plain_norm = self.full_precision = self.again = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.normal(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.full_precision):
            y = checkpoint(self.mlp, x, use_reentrant=False) if self.again else self.mlp(x)
        return x + y

    def normal(self, x: Tensor) -> Tensor:
        if not self.plain_norm:
            return self.norm(x)
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return scaled * self.norm.weight + self.norm.bias

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


BATCH = torch.randn(2, 8, 16)


def captured(
    edit: Callable[[nn.Sequential], None] = lambda model: None,
    batch: Tensor = BATCH,
    scale: float = 1.0,
    fused: bool = True,
    **options: Any,
) -> StepGraph:
    model = nn.Sequential(Block(16), Block(16))
    edit(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)

    def step(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(batch) * scale).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return ws.compile(step, lower="eager", **options).capture(batch)


@pytest.fixture(scope="module")
def base() -> StepGraph:
    return captured()


def first_block(**changes: bool) -> Callable[[nn.Sequential], None]:
    def edit(model: nn.Sequential) -> None:
        for name, value in changes.items():
            setattr(model[0], name, value)

    return edit


def assert_named(found: GraphDiff, kind: ChangeCause, *words: str) -> None:
    """The cause is there by its kind, and the text that a person reads says it."""
    assert found
    assert found.of(kind), str(found)
    text = str(found)
    print(text)
    assert [word for word in words if word not in text] == [], text


def test_equal_steps_differ_in_nothing(base: StepGraph) -> None:
    found = ws.inspect.diff(base, captured())
    assert not found
    assert found.pairs == found.equal == base.num_nodes
    assert "no difference" in str(found)
    assert not ws.inspect.diff(base, StepGraph.from_json(base.to_json()))


def test_another_attention_backend_is_named(base: StepGraph) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        found = ws.inspect.diff(base, captured())
    assert_named(found, ChangeCause.ATTENTION, "_scaled_dot_product_flash_attention_for_cpu", "bmm", "test_diff.py")
    assert found.of(ChangeCause.ATTENTION)[0].times == 2


def test_an_upcast_is_named_with_the_nodes_that_it_makes_wider(base: StepGraph) -> None:
    found = ws.inspect.diff(base, captured(first_block(full_precision=True)))
    assert_named(found, ChangeCause.DTYPE, "casts", "f32 instead of bf16", "model.0.mlp")
    assert not any("model.1.mlp" in cause.module_path for cause in found.causes)


def test_a_fused_operator_in_parts_is_named(base: StepGraph) -> None:
    found = ws.inspect.diff(base, captured(first_block(plain_norm=True)))
    assert_named(found, ChangeCause.FUSION, "native_layer_norm", "mean ×2")
    lost = ws.inspect.diff(base, captured(fused=False))
    assert_named(lost, ChangeCause.FUSION, "_fused_adamw")


def test_one_more_recomputation_is_named(base: StepGraph) -> None:
    found = ws.inspect.diff(base, captured(first_block(again=True)))
    assert_named(found, ChangeCause.RECOMPUTE, "recomputed in the backward", "gelu", "model.0.mlp")
    assert found.cost_b.step_us > found.cost_a.step_us


def test_another_shape_is_one_cause_and_all_else_follows(base: StepGraph) -> None:
    found = ws.inspect.diff(base, captured(batch=torch.randn(6, 8, 16)), labels=("call 1", "call 2"))
    assert [cause.kind for cause in found.causes] == [ChangeCause.INPUT], str(found)
    assert_named(
        found, ChangeCause.INPUT, "batch: float32[2, 8, 16] on cpu in call 1, float32[6, 8, 16] on cpu in call 2"
    )
    assert found.causes[0].follows > 100
    assert found.causes[0].us > 0


def test_a_size_that_became_symbolic_is_the_cause(base: StepGraph) -> None:
    found = ws.inspect.diff(base, captured(dynamic={"batch": {0: ws.Dim()}}))
    assert [cause.kind for cause in found.causes] == [ChangeCause.INPUT], str(found)
    assert_named(found, ChangeCause.INPUT, "batch: float32[2, 8, 16] on cpu in a, float32[s")


def test_another_constant_is_named(base: StepGraph) -> None:
    found = ws.inspect.diff(base, captured(scale=2.0))
    assert {cause.kind for cause in found.causes} == {ChangeCause.CONSTANT}
    assert_named(found, ChangeCause.CONSTANT, "mul: 1.0 in a, 2.0 in b", "test_diff.py")


def test_updates_that_are_no_longer_in_place_are_named(base: StepGraph) -> None:
    functional = captured(fused=False)
    in_place = functional.copy()
    reinplace_tail(in_place.gm)
    found = ws.inspect.diff(in_place, functional)
    assert_named(found, ChangeCause.IN_PLACE, "only a updates without a copy", "copy_")
    assert not found.of(ChangeCause.STATE)


def test_a_parameter_that_is_no_longer_written_is_named(base: StepGraph) -> None:
    less = base.copy()
    dropped = less.signature.write_backs[0]
    path = next(spec.path for spec in less.signature.inputs if spec.name == dropped.target)
    for node in list(less.gm.graph.nodes):
        if node.target is aten.copy_.default and str(node.args[0]) == dropped.target:
            less.gm.graph.erase_node(node)
    less.signature = replace(less.signature, write_backs=less.signature.write_backs[1:])
    assert_named(ws.inspect.diff(base, less), ChangeCause.STATE, f"only a writes {path}")


def test_an_operand_that_is_another_value_is_named(base: StepGraph) -> None:
    other = base.copy()
    adds = [n for n in other.gm.graph.nodes if n.target is aten.add.Tensor and "model" in str(n.meta)]
    node = next(n for n in adds if len(n.all_input_nodes) == 2)
    node.args = (node.args[0], node.args[0])
    assert_named(ws.inspect.diff(base, other), ChangeCause.EDGE, "add reads")


def edited(change: Callable[[StepGraph], None]) -> tuple[StepGraph, StepGraph]:
    one = fully_sharded(layers=4, rows=64, width=64)
    other = one.copy()
    change(other)
    other.gm.graph.lint()
    return one, other


def scatters(sg: StepGraph) -> list[Any]:
    return [n for n in sg.gm.graph.nodes if is_collective(n.target) and "reduce_scatter" in str(n.target)]


def test_another_reduce_op_is_named() -> None:
    def change(sg: StepGraph) -> None:
        node = scatters(sg)[1]
        node.args = tuple("sum" if arg == "avg" else arg for arg in node.args)

    assert_named(ws.inspect.diff(*edited(change)), ChangeCause.REDUCE_OP, "reduce_scatter_tensor: avg in a, sum in b")


def test_a_missing_collective_is_named_with_what_it_communicates() -> None:
    def change(sg: StepGraph) -> None:
        node = scatters(sg)[0]
        wait = next(user for user in node.users if is_wait(user.target))
        part = sg.gm.graph.inserting_before(node)
        with part:
            instead = sg.gm.graph.call_function(aten.slice.Tensor, (node.args[0], 0, 0, 8))
        instead.meta = dict(wait.meta)
        wait.replace_all_uses_with(instead)
        sg.gm.graph.erase_node(wait)
        sg.gm.graph.erase_node(node)

    assert_named(ws.inspect.diff(*edited(change)), ChangeCause.COLLECTIVE, "only a has reduce_scatter_tensor(avg")


def test_collectives_in_another_order_are_named() -> None:
    def change(sg: StepGraph) -> None:
        gathers = [n for n in sg.gm.graph.nodes if "all_gather" in str(n.target)]
        gathers[0].prepend(gathers[1])

    found = ws.inspect.diff(*edited(change))
    assert_named(found, ChangeCause.ORDER, "collectives are issued in another order", "all_gather_into_tensor")
    assert found.pairs == found.cost_a.nodes


def test_a_lost_bucket_is_named() -> None:
    one = fully_sharded(layers=4, rows=64, width=64)
    bucketed = one.copy()
    ws.passes.run_passes(bucketed, [bucket_reduce_scatter(bucket_size_mb=100)])
    assert len(scatters(bucketed)) == 1
    found = ws.inspect.diff(bucketed, one)
    assert_named(found, ChangeCause.BUCKET, "reduce_scatter_tensor", "1 of", "4 of")
    assert not found.of(ChangeCause.COLLECTIVE)


def test_compiled_steps_are_compared_with_what_they_could_not_compile() -> None:
    class Compiled:
        def __init__(self, graph: StepGraph, lowering: Any) -> None:
            self.last, self.lowering = graph, lowering

    one = fully_sharded(layers=2)
    region = ws.lower.report.RegionReport(0, "subgraph_0", "", 9, 1, 1, 0, ("forward",))
    all_in = ws.lower.report.Lowering([region], [])
    part = ws.lower.report.Lowering([region], [("sort", "aten.sort", "no lowering")])
    found = ws.inspect.diff(Compiled(one, all_in), Compiled(one, part))
    assert_named(found, ChangeCause.LOWERING, "1 more outside in b: no lowering")


def test_the_result_is_plain_data() -> None:
    one, other = edited(lambda sg: None)
    data = json.loads(json.dumps(ws.inspect.diff(one, other).as_data()))
    assert data["different"] is False
    assert data["cost_a"]["collectives"] == 12


def test_what_has_no_graph_is_refused() -> None:
    with pytest.raises(ws.WholestepError, match="no graph to compare"):
        ws.inspect.diff(fully_sharded(layers=1), 3)


def test_alignment_is_increasing_and_finds_what_is_common() -> None:
    a, b = list("the quick brown fox"), list("a quick red fox jumps")
    pairs = aligned(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert pairs == sorted(pairs)
    assert all(j < k for (_, j), (_, k) in pairwise(pairs))
    assert len(pairs) >= len("quick fox")
    assert aligned("x" * 900, "x" * 1000) == [(i, i) for i in range(900)]
    assert len(aligned(["a", "b"] * 500, ["b", "a"] * 500)) >= 500
    assert longest_increasing([3, 1, 2, 5, 4]) == [1, 2, 4]


@pytest.mark.long
def test_graphs_of_50000_nodes_are_compared_in_seconds() -> None:
    one = fully_sharded(layers=2400, rows=64, width=64)
    other = one.copy()
    other.gm.graph.find_nodes(op="call_function", target=aten.relu.default)[1200].target = aten.silu.default
    begin = time.perf_counter()
    found = ws.inspect.diff(one, other)
    assert time.perf_counter() - begin < 120
    assert found.cost_a.nodes > 40_000
    assert "silu" in str(found)
