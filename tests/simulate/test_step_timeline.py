"""Simulated steps against rules written out slowly, and against times worked out by hand."""

from __future__ import annotations

import json
import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import wholestep as ws
from ir.collectives import Build, comm
from ir.step_graphs import aten
from passes.random_graphs import communicating_steps
from wholestep.errors import OptionError
from wholestep.ir import StepGraph
from wholestep.ir.effects import find_storages, is_collective, is_wait
from wholestep.simulate import GroupSpread, Machine, StepTimeline
from wholestep.simulate.step_index import index_step, memory_of
from wholestep.simulate.step_replay import StreamRules, replay

Cost = Callable[[fx.Node], float]


def pretend_cost(seed: int = 0) -> Cost:
    """Times that depend on the name only."""
    return lambda node: float((sum(map(ord, node.name)) * 7 + seed) % 23)


def named_cost(**times: float) -> Cost:
    return lambda node: times.get(node.name, 0.0)


def collective_behind(node: fx.Node) -> fx.Node | None:
    while node.all_input_nodes and not is_collective(node.target):
        node = node.all_input_nodes[0]
    return node if is_collective(node.target) else None


def plain_times(step: StepGraph, cost: Cost) -> tuple[float, float]:
    """Step and compute time by the rules: one compute stream, one stream per group, waits stop computation."""
    clock = compute = 0.0
    free: dict[str, float] = defaultdict(float)
    end: dict[fx.Node, float] = {}
    for node in step.gm.graph.nodes:
        if node.op != "call_function":
            continue
        if is_collective(node.target):
            group = str(node.args[-1])
            end[node] = free[group] = max(clock, free[group]) + cost(node)
        elif is_wait(node.target):
            behind = collective_behind(node)
            clock = max(clock, end[behind]) if behind is not None else clock
        elif node.target not in VIEWS:
            clock, compute = clock + cost(node), compute + cost(node)
    return max(clock, *free.values(), 0.0), compute


VIEWS = frozenset({aten.slice.Tensor, aten.view.default, operator.getitem})


def plain_peak(step: StepGraph) -> int:
    """Peak bytes, asking at every node for every storage whether somebody needs it from there on."""
    storages = find_storages(step.gm.graph)
    nodes = list(step.gm.graph.nodes)
    needs: dict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(nodes):
        touched = [node, *node.all_input_nodes]
        if is_wait(node.target) and (behind := collective_behind(node)) is not None:
            touched += behind.all_input_nodes
        for each in touched:
            for storage in storages.seen_by.get(each, ()):
                needs[storage].append(place)
    held = {s for s, maker in enumerate(storages.maker) if maker.op == "placeholder"}
    peak = 0
    for place in range(len(nodes)):
        alive = {s for s, places in needs.items() if min(places) <= place <= max(places)}
        peak = max(peak, sum(storages.size[s] for s in alive | held))
    return peak


@settings(max_examples=60, deadline=None)
@given(communicating_steps(), st.integers(0, 100))
def test_times_and_peaks_of_random_steps_are_those_of_the_rules(step: StepGraph, seed: int) -> None:
    cost = pretend_cost(seed)
    timeline = ws.simulate.step(step, cost=cost)
    expected, compute = plain_times(step, cost)
    assert timeline.step_us == pytest.approx(expected)
    assert timeline.compute_us == pytest.approx(compute)
    assert timeline.exposed_us == pytest.approx(expected - compute)
    assert sum(timeline.exposed_by.values()) == pytest.approx(timeline.exposed_us)
    assert timeline.peak_bytes == plain_peak(step)
    assert timeline.bounds.largest <= expected + 1e-6
    path = timeline.critical_path
    assert sum(span.us for span in path) == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(communicating_steps(), st.integers(0, 100))
def test_streams_that_may_slow_each_other_but_do_not_give_the_same_times(step: StepGraph, seed: int) -> None:
    index = index_step(step)
    cost = [float((i * 5 + seed) % 17) if kind in (2, 3) else 0.0 for i, kind in enumerate(index.kind)]
    alone = replay(index, cost, None, StreamRules())
    # A tiny contention takes the general path.
    shared = replay(index, cost, None, StreamRules(contention=1e-12))
    assert shared.step == pytest.approx(alone.step)
    assert shared.start == pytest.approx(alone.start)


def two_gathers(groups: str = "01") -> StepGraph:
    """Two gathers, computation beside them, and what needs both."""
    build = Build()
    p, q, x = build.input("p", 4, 2), build.input("q", 4, 2), build.input("x", 4, 4)
    first, second = build.gather(p, groups[0]), build.gather(q, groups[1])
    product = build.call(aten.mm.default, x, x)
    waited = build.wait(first)
    after = build.wait(second)
    joined = build.call(aten.add.Tensor, waited, after)
    name_nodes(gather_p=first, gather_q=second, mm=product, add=joined)
    return build.finish(joined, product)


def name_nodes(**nodes: fx.Node) -> None:
    for name, node in nodes.items():
        node.name = name


TIMES = named_cost(gather_p=60.0, gather_q=60.0, mm=100.0, add=10.0)


def rules(machine: Machine, groups: dict[str, GroupSpread] | None = None) -> StepTimeline:
    return ws.simulate.step(two_gathers(), machine=machine, cost=TIMES, groups=groups)


def test_computation_beside_a_collective_is_slower_by_the_contention() -> None:
    # 60 us beside two collectives at half speed do 40 of the 100; the rest is alone.
    timeline = rules(Machine(contention=0.5))
    assert timeline.span("mm") == ("mm", "compute", 0.0, pytest.approx(120.0))
    assert timeline.step_us == pytest.approx(130.0)
    assert rules(Machine()).step_us == pytest.approx(110.0)


def test_collectives_that_share_a_link_share_its_bandwidth() -> None:
    shared = Machine(shared_links=True)
    across = {"0": GroupSpread(2, 2), "1": GroupSpread(2, 2)}
    timeline = rules(shared, across)
    assert timeline.span("gather_p").end == pytest.approx(120.0)
    assert timeline.exposed_us == pytest.approx(20.0)
    # One within the node and one across use different links.
    assert rules(shared, across | {"1": GroupSpread(2, 1)}).exposed_us == 0.0


def test_a_slow_host_holds_the_device_back() -> None:
    timeline = rules(Machine(dispatch=50e-6))
    assert timeline.span("mm").start == pytest.approx(150.0)
    assert timeline.replay.dispatch == pytest.approx(150.0)
    assert timeline.exposed_us == pytest.approx(timeline.step_us - 110.0 - 150.0)


def test_a_group_runs_its_collectives_one_after_the_other() -> None:
    timeline = ws.simulate.step(two_gathers("00"), cost=TIMES)
    assert timeline.span("gather_q")[2:] == (60.0, 120.0)
    assert timeline.exposed_by == {"gather_q": 20.0}
    assert timeline.collective_us == {"0": 120.0}
    assert timeline.bounds.links == {"0": 120.0}
    assert timeline.bounds.binding == "0"
    assert timeline.gap == pytest.approx(130.0 / 120.0 - 1.0)


def test_what_a_collective_sends_is_held_until_its_wait() -> None:
    build = Build()
    x = build.input("x", 8, 8)
    sent = build.call(aten.neg.default, x)
    started = build.scatter(sent, "sum")
    between = build.call(aten.exp.default, x)
    freed = build.call(aten.sum.default, between)
    done = build.wait(started)
    name_nodes(neg=sent, scatter=started, exp=between, total=freed)
    step = build.finish(done, freed)
    live, held = memory_of(index_step(step))
    assert held == 256
    # neg, reduce_scatter (half), exp and sum are alive together; only then is what was sent let go.
    assert live.max() == 256 + 256 + 128 + 256 + 4
    assert ws.simulate.step(step, cost=pretend_cost()).peak_at == "total"
    names = [tensor.name for tensor in ws.simulate.step(step, cost=pretend_cost()).alive_at_peak()]
    assert sorted(names) == ["exp", "neg", "scatter", "total"]


def test_a_result_under_way_from_before_the_graph_is_there() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    done = graph.call_function(comm.wait_tensor.default, (x,))
    done.meta["val"] = x.meta["val"]
    graph.output((done,))
    assert ws.simulate.step(graph, cost=pretend_cost()).step_us == 0.0


def test_the_table_names_bounds_memory_and_the_longest_exposed() -> None:
    text = str(ws.simulate.step(two_gathers("00"), cost=TIMES))
    assert text.splitlines()[0] == "step 0.130 ms: computing 0.110, exposed 0.020"
    assert "the step is 8.3% above the largest (0)" in text
    assert "peak 384 B at " in text
    assert ["all_gather_into_tensor", "0", "2", "0.120", "0.020"] in [line.split() for line in text.splitlines()]
    assert "gather_q: 20.0 us of it are exposed: " in text


def test_the_trace_has_rows_for_streams_and_the_measurement_beside(tmp_path: Path) -> None:
    timeline = ws.simulate.step(two_gathers(), cost=TIMES)
    path = tmp_path / "step.json"
    timeline.perfetto(path, measured={"mm": (3.0, 99.0)})
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {"compute", "host", "group 0", "group 1"}
    drawn = {(e["name"], e["pid"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert drawn["mm", 0] == (0.0, 100.0)
    assert drawn["mm", 1] == (3.0, 96.0)
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == timeline.peak_bytes


def test_unknown_names_and_things_without_a_graph_are_refused() -> None:
    timeline = ws.simulate.step(two_gathers(), cost=TIMES)
    with pytest.raises(OptionError, match="no node 'nothing'"):
        timeline.span("nothing")
    with pytest.raises(OptionError, match=r"is not a collective[\s\S]*collectives of this graph: "):
        timeline.explain("mm")
    with pytest.raises(OptionError, match="has no graph"):
        ws.simulate.step(3, cost=TIMES)  # type: ignore[arg-type]


def test_the_default_machine_follows_the_device() -> None:
    timeline = ws.simulate.step(two_gathers(), groups={"0": GroupSpread(2), "1": GroupSpread(2)})
    assert timeline.machine == "H100"  # meta tensors are on no CPU
    assert timeline.step_us > 0.0
    slower = replace(ws.simulate.H100, launch=1.0)
    assert ws.simulate.step(two_gathers(), machine=slower).compute_us == pytest.approx(2e6)
