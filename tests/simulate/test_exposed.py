"""Each reason for exposed communication is true: without what it names, the time goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

import wholestep as ws
from ir.collectives import Build
from ir.step_graphs import aten
from simulate.sharded_steps import experts, fully_sharded, tensor_parallel
from wholestep.ir import StepGraph
from wholestep.passes import overlap_communication
from wholestep.simulate import GroupSpread, StepTimeline

SPREAD = {"0": GroupSpread(8, 8), "1": GroupSpread(8, 1)}
GRAPHS: dict[str, Callable[[], StepGraph]] = {
    "fully sharded": lambda: fully_sharded(5),
    "fully sharded, narrow": lambda: fully_sharded(5, rows=512, width=512),
    "tensor parallel": lambda: tensor_parallel(5),
    "tensor parallel, narrow": lambda: tensor_parallel(5, rows=1024, width=512),
    "experts": lambda: experts(4),
    "experts, narrow": lambda: experts(4, rows=1024, width=512),
}


def true_reasons(timeline: StepTimeline) -> tuple[int, int]:
    """How many reasons there are, and without how many at least four fifths of the exposed time go."""
    found = timeline.exposed()
    without = [timeline.without(each).exposed_by.get(each.name, 0.0) for each in found]
    return len(found), sum(left <= 0.2 * each.exposed_us + 0.1 for each, left in zip(found, without, strict=True))


@pytest.mark.parametrize("name", GRAPHS)
def test_without_the_named_constraint_the_exposed_time_goes(name: str) -> None:
    timeline = ws.simulate.step(GRAPHS[name](), machine=ws.simulate.H100, groups=SPREAD)
    reasons, true = true_reasons(timeline)
    assert reasons > 8
    assert true >= 0.9 * reasons


def test_the_reasons_of_scheduled_steps_are_true() -> None:
    reasons = true = 0
    for make in GRAPHS.values():
        graph = make()
        limit = int(1.05 * ws.simulate.step(graph, machine=ws.simulate.H100).peak_bytes)
        overlap_communication(graph, machine=ws.simulate.H100, bucket=None)
        found, right = true_reasons(ws.simulate.step(graph, machine=ws.simulate.H100, peak_bytes=limit))
        reasons, true = reasons + found, true + right
    assert reasons > 50
    assert true >= 0.9 * reasons


def one_gather(*, early: bool = False, waits_late: bool = False, independent: bool = False) -> Build:
    build = Build()
    p, x = build.input("p", 8, 8), build.input("x", 16, 16)
    made = p if early else build.call(aten.mm.default, p, build.input("q", 8, 8))
    between: list[fx.Node] = []
    if independent:
        between.append(build.call(aten.mm.default, x, x))
    started = build.gather(made)
    if waits_late:
        between.append(build.call(aten.mm.default, x, x))
    done = build.wait(started)
    used = build.call(aten.mm.default, done, build.input("r", 8, 8))
    build.finish(used, *between)
    return build


def times(node: fx.Node) -> float:
    return 100.0 if node.target is aten.mm.default else 50.0


def reason_of(build: Build) -> tuple[str, str]:
    timeline = ws.simulate.step(build.graph, cost=times)
    (found,) = timeline.exposed()
    left = timeline.without(found).exposed_by.get(found.name, 0.0)
    assert left <= 0.2 * found.exposed_us
    return found.reason, timeline.explain(found.name)


def test_a_collective_whose_input_is_there_earlier_is_badly_placed() -> None:
    reason, text = reason_of(one_gather(early=True, independent=True))
    assert reason == "place"
    assert "could be issued from the beginning and waited for before mm_default_1" in text


def test_a_collective_between_its_producer_and_its_user_depends_on_them() -> None:
    reason, text = reason_of(one_gather())
    assert reason == "dependence"
    assert "can only be issued after mm_default and is needed before mm_default_1" in text
    assert "mm_default: train.py:" in text  # the user's line


def test_a_collective_that_the_step_begins_with_cannot_be_hidden_in_it() -> None:
    reason, text = reason_of(one_gather(early=True))
    assert reason == "start"
    assert "start it a step earlier" in text


def test_a_collective_behind_others_of_its_stream_waits_for_the_link() -> None:
    build = Build()
    p, x = build.input("p", 8, 8), build.input("x", 16, 16)
    first, second = build.gather(p), build.gather(p)
    product = build.call(aten.mm.default, x, x)
    done = build.wait(second)
    build.finish(done, product, build.wait(first))
    timeline = ws.simulate.step(build.graph, cost=lambda node: 100.0 if node is product else 90.0)
    (found,) = timeline.exposed()
    assert (found.reason, found.queued_us, found.behind) == ("link", 0.0, (timeline.index.number[first],))
    assert timeline.without(found).exposed_us == 0.0
    assert "the link is busy with all_gather_into_tensor" in timeline.explain(second.name)
    assert timeline.explain(first.name).endswith("all of them hidden.")


def test_a_gather_that_memory_keeps_late_says_how_many_bytes_are_missing() -> None:
    build = one_gather(early=True, independent=True)
    timeline = ws.simulate.step(build.graph, cost=times)
    limited = ws.simulate.step(build.graph, cost=times, peak_bytes=timeline.peak_bytes)
    assert [each.reason for each in limited.exposed()] == ["place"]  # it fits
    small = ws.simulate.step(build.graph, cost=times, peak_bytes=timeline.input_bytes + 1024 + 256)
    (found,) = small.exposed()
    assert (found.reason, found.more_bytes) == ("memory", 256)
    assert "256 B more than the limit allows" in small.explain(found.name)
