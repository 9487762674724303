"""Machines: collective times against measured ones, costs of nodes, profiles, files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import wholestep as ws
from ir.collectives import Build, comm
from ir.step_graphs import aten
from simulate.sharded_steps import tensor_parallel
from wholestep.errors import OptionError
from wholestep.simulate import GroupSpread, Link, Machine, MeasuredCollective, StepProfile
from wholestep.simulate.cost_model import node_costs
from wholestep.simulate.machine import HOPPER_CLUSTER, CollectiveModel
from wholestep.simulate.step_index import index_step

MIB = 2**20
WITHIN, ACROSS = GroupSpread(8), GroupSpread(8, 8)


def test_measured_sizes_are_taken_from_the_table_and_others_from_between() -> None:
    model = ws.simulate.H100.collectives
    assert model.seconds("all_gather_into_tensor", WITHIN, 16 * MIB) == pytest.approx(358.4e-6)
    assert model.seconds("all_gather_into_tensor_out", WITHIN, 24 * MIB) == pytest.approx((358.4e-6 + 684.6e-6) / 2)
    twice = model.seconds("all_reduce", WITHIN, 4096 * MIB)
    assert twice == pytest.approx(2 * 10.4952e-3, rel=0.02)  # beyond the last row
    assert 0 < model.seconds("reduce_scatter_tensor", WITHIN, 64) <= 17.3e-6  # below the first
    assert model.seconds("all_reduce", GroupSpread(1), 16 * MIB) == 0.0


def test_kinds_without_a_row_follow_from_those_that_have_one() -> None:
    model = HOPPER_CLUSTER
    gather = model.seconds("all_gather_into_tensor", ACROSS, 8 * MIB)
    assert model.seconds("all_to_all_single", ACROSS, 64 * MIB) == pytest.approx(gather)
    scatter = model.seconds("reduce_scatter_tensor", ACROSS, 64 * MIB)
    assert model.seconds("all_reduce", ACROSS, 64 * MIB) == pytest.approx(scatter + gather)


@pytest.mark.parametrize("row", HOPPER_CLUSTER.measured, ids=lambda row: f"{row.kind} {row.spread}")
def test_the_fit_is_near_what_was_measured(row: MeasuredCollective) -> None:
    if row.kind == "all_reduce":
        pytest.skip("the fit is made of gathers and scatters")
    ratios = [
        HOPPER_CLUSTER.fitted(row.kind, row.spread, size) / seconds
        for size, seconds in zip(row.sizes, row.seconds, strict=True)
    ]
    assert 0.7 < min(ratios) <= max(ratios) < 1.35
    assert ratios[-1] == pytest.approx(1.0, abs=0.1)


def test_links_are_fitted_to_measurements() -> None:
    def row(ranks: int) -> MeasuredCollective:
        sizes = tuple(MIB << i for i in range(8))
        seconds = tuple(1e-5 + 2e-6 * (ranks - 1) + size * (ranks - 1) / 5e10 for size in sizes)
        return MeasuredCollective("all_gather_into_tensor", GroupSpread(ranks, ranks), sizes, seconds)

    found = ws.simulate.fit_link([row(4), row(16)])
    assert found.latency == pytest.approx(1e-5, rel=0.01)
    assert found.hop == pytest.approx(2e-6, rel=0.01)
    assert found.bandwidth == pytest.approx(5e10, rel=0.01)
    with pytest.raises(OptionError, match="nothing to fit"):
        ws.simulate.fit_link([])


def test_ranks_of_one_node_share_its_cards_and_exchange_inside_of_it() -> None:
    model = CollectiveModel(Link(0.0, 0.0, 4e11), Link(0.0, 0.0, 5e10))
    assert model.seconds("all_gather_into_tensor", GroupSpread(64, 8), 64e6) == pytest.approx(63 * 64e6 / 4e11)
    assert model.seconds("all_gather_into_tensor", GroupSpread(16, 8), 64e6) == pytest.approx(15 * 64e6 / 1e11)
    # 56 of 64 parts leave the node.
    assert model.seconds("all_to_all_single", GroupSpread(64, 8), 64e6) == pytest.approx(56e6 / 5e10)
    with pytest.raises(OptionError, match="cannot lie on"):
        GroupSpread(2, 4)


def test_pointwise_operators_are_fused_into_what_they_feed() -> None:
    build = Build()
    x = build.input("x", 4096, 4096)
    scaled = build.call(aten.mul.Tensor, x, 2)
    added = build.call(aten.add.Tensor, scaled, 1)
    product = build.call(aten.mm.default, added, x)
    index = index_step(build.finish(product))
    machine = Machine(memory=1e12, flops=1e14, launch=1e-6)
    cost = dict(zip((node.name for node in index.nodes), node_costs(index, machine), strict=True))
    bytes_ = 4096 * 4096 * 4
    assert cost[scaled.name] == pytest.approx(bytes_ / 1e6)  # reads x, writes nothing
    assert cost[added.name] == pytest.approx(bytes_ / 1e6)  # writes what mm reads
    assert cost[product.name] == pytest.approx(2 * 4096**3 / 1e8)


def test_causal_attention_is_half_the_work_and_reading_a_value_stops_the_host() -> None:
    build = Build()
    q = build.input("q", 2, 8, 128, 64, dtype=torch.bfloat16)
    sdpa = aten._scaled_dot_product_flash_attention.default
    full, causal = build.call(sdpa, q, q, q), build.call(sdpa, q, q, q, 0.0, True)
    item = build.graph.call_function(aten._local_scalar_dense.default, (q,))
    build.graph.output((full, causal, item))
    index = index_step(build.graph)
    machine = replace(Machine(), half_flops=1e6, attention=1e6, launch=0.0, memory=1e30, host_read=7e-6)
    cost = node_costs(index, machine)
    assert cost[index.number[causal]] == pytest.approx(cost[index.number[full]] / 2)
    assert cost[index.number[item]] == pytest.approx(7.0)


def test_how_groups_lie_on_nodes_follows_from_their_ranks() -> None:
    machine = Machine(ranks_per_node=8)
    assert machine.spread(tuple(range(8))) == GroupSpread(8, 1)
    assert machine.spread(tuple(range(0, 64, 8))) == GroupSpread(8, 8)
    assert machine.spread(64) == GroupSpread(64, 8)
    assert machine.spread(3) == GroupSpread(3, 1)


def test_a_calibrated_machine_predicts_what_was_measured() -> None:
    step = tensor_parallel(3)
    spread = {"0": ACROSS, "1": WITHIN}
    index = index_step(step)
    model = node_costs(index, ws.simulate.H100, spread)
    factor = {"aten::mm": 1.25, "aten::relu": 0.5}
    measured, collectives = {}, {}
    for node, us in zip(index.nodes, model, strict=True):
        name = str(node.target)
        if node.target is comm.reduce_scatter_tensor.default:
            # Rank 1 comes late: rank 0 waits for it, and that is not communication.
            collectives[node.name] = [[us * 3, us * 2 + 900.0], [us * 2, us * 2]]
        elif us:
            by = next((value for key, value in factor.items() if key.replace("::", ".") in name), 1.0)
            measured[node.name] = [us * by, us * by * 1.01, us * by * 0.99]
    profile = ws.simulate.profile_of(step, measured, collectives=collectives, groups=spread, device="test")
    again = StepProfile.from_json(profile.to_json())
    assert again == profile
    machine = ws.simulate.calibrate(ws.simulate.H100, again)
    found = node_costs(index, machine, spread)
    for node, us, was in zip(index.nodes, found, model, strict=True):
        if node.name in collectives:
            assert us == pytest.approx(2 * was, rel=0.01)
        elif node.name in measured:
            assert us == pytest.approx(measured[node.name][0], rel=0.02)
    assert Machine.from_json(machine.to_json()) == machine


def test_a_measured_region_is_shared_out_among_its_nodes() -> None:
    build = Build()
    x = build.input("x", 4096, 4096)
    first = build.call(aten.mm.default, x, x)
    second = build.call(aten.mm.default, first, x)
    step = build.finish(second)
    model = node_costs(index_step(step), ws.simulate.H100)
    whole = sum(model)
    profile = ws.simulate.profile_of(step, {"region": [3 * whole]}, regions={"region": [first.name, second.name]})
    machine = ws.simulate.calibrate(ws.simulate.H100, profile)
    assert node_costs(index_step(step), machine) == pytest.approx([3 * us for us in model])
    with pytest.raises(OptionError, match="no node 'nothing'"):
        ws.simulate.profile_of(step, {"nothing": [1.0]})


def test_files_of_another_version_are_refused() -> None:
    with pytest.raises(OptionError, match="another version"):
        Machine.from_json('{"version": 7, "machine": {}}')
    with pytest.raises(OptionError, match="no field 'speed'"):
        Machine.from_json('{"version": 1, "machine": {"speed": 3}}')
    with pytest.raises(OptionError, match="another version"):
        StepProfile.from_json("[]")
    with pytest.raises(OptionError, match="2 sizes and 1 times"):
        MeasuredCollective("all_reduce", WITHIN, (1, 2), (0.1,))
