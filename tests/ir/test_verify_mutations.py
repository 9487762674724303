"""Faults put into correct graphs one at a time: verifier, replay or agreement object to every one, and to no graph
without a fault.

    level 1        faults of form: waits, write-backs, outputs
    level 2        values that are not what the operators give
    level 3        edges that go elsewhere, where every rule holds: only running the graph tells
    agreement      another order of collectives on one rank
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from ir.step_graphs import aten
from passes.captured_steps import NAMES, four_ranks, fresh
from wholestep.errors import PassError, VerifyError
from wholestep.ir import StepGraph, verify
from wholestep.ir.effects import is_collective, is_wait
from wholestep.passes import graph_optimization_pass, overlap_optimizer_with_next_forward, run_passes
from wholestep.passes.comm_fusion import bucket_all_gather, bucket_reduce_scatter, comm_fusion_with_concat
from wholestep.passes.engine.manager import apply_pass
from wholestep.passes.engine.registry import DEFAULT
from wholestep.passes.schedule_comm_wait import schedule_comm_wait
from wholestep.ranks.agreement_records import digest_of, first_difference

pytestmark = pytest.mark.fake_group

SMALL = (
    comm_fusion_with_concat(bucket_size_mb=1e-4),
    bucket_reduce_scatter(bucket_size_mb=1e-4),
    bucket_all_gather(bucket_size_mb=1e-4),
    schedule_comm_wait(),
)
LISTS: dict[str, Any] = {"as captured": (), "default": DEFAULT, "small buckets": SMALL}
MOST = 5
"""Faults of one kind tried per graph: places spread over the whole graph."""


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with four_ranks():
        yield


def graph_of(name: str, passes: str) -> StepGraph:
    step = fresh(name)
    run_passes(step, LISTS[passes])
    return step


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        pytest.param(name, passes, marks=() if (i + j) % len(LISTS) == 0 and i % 2 == 0 else pytest.mark.long)
        for i, name in enumerate(NAMES)
        for j, passes in enumerate(LISTS)
    ],
)
def test_correct_graphs_pass_every_level(name: str, passes: str) -> None:
    step = graph_of(name, passes)
    verify(step, 2)
    run_passes(step, [does(lambda step: None), overlap_optimizer_with_next_forward], level=3)
    assert not disagree(graph_of(name, passes), graph_of(name, passes))


def does(mutation: Callable[[fx.GraphModule], Any]) -> Any:
    """A pass that promises to change nothing."""

    @graph_optimization_pass(numerics="exact", allow_rerun=True)
    def mutate(gm: fx.GraphModule) -> None:
        mutation(gm)

    return mutate


def spread(found: list[Any]) -> list[Any]:
    """Some of many places."""
    return found[:: max(1, -(-len(found) // MOST))]


def waits(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if is_wait(n.target)]


def copies(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=aten.copy_.default)


def named(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def results(gm: fx.GraphModule) -> tuple[Any, ...]:
    found = gm.graph.output_node().args[0]
    assert isinstance(found, tuple | list)
    return tuple(found)


Fault = tuple[str, Callable[[fx.GraphModule], None]]
"""Where, and what is done to the graph. Nodes are found by name: each fault is put into a graph of its own."""


def dropped_waits(gm: fx.GraphModule) -> Iterator[Fault]:
    for wait in waits(gm):

        def drop(gm: fx.GraphModule, name: str = wait.name) -> None:
            node = named(gm, name)
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)

        yield wait.name, drop


def late_waits(gm: fx.GraphModule) -> Iterator[Fault]:
    """One reader does not wait."""
    for wait in waits(gm):
        for user in list(wait.users)[:1]:

            def bypass(gm: fx.GraphModule, name: str = wait.name, reader: str = user.name) -> None:
                node = named(gm, name)
                named(gm, reader).replace_input_with(node, node.all_input_nodes[0])

            yield f"{user.name} reads {wait.name}", bypass


def reads_after_writes(gm: fx.GraphModule) -> Iterator[Fault]:
    """What a parameter was is asked for behind its write-back."""
    for copy in copies(gm):

        def read(gm: fx.GraphModule, name: str = copy.name) -> None:
            target = named(gm, name).args[0]
            assert isinstance(target, fx.Node)
            with gm.graph.inserting_after(named(gm, name)):
                late = gm.graph.call_function(aten.neg.default, (target,))
            late.meta["val"] = target.meta["val"]
            gm.graph.output_node().args = ((late, *results(gm)[1:]),)

        yield copy.name, read


def returned_after_writes(gm: fx.GraphModule) -> Iterator[Fault]:
    """A view of a parameter is returned, which by then has other contents."""
    for copy in copies(gm):

        def view(gm: fx.GraphModule, name: str = copy.name) -> None:
            target = named(gm, name).args[0]
            assert isinstance(target, fx.Node)
            with gm.graph.inserting_before(copies(gm)[0]):
                seen = gm.graph.call_function(aten.alias.default, (target,))
            seen.meta["val"] = target.meta["val"]
            gm.graph.output_node().args = ((seen, *results(gm)[1:]),)

        yield copy.name, view


def writes_inside(gm: fx.GraphModule) -> Iterator[Fault]:
    """A write-back as soon as its value is there, or an operator in place."""
    for copy in copies(gm):
        value = copy.args[1]
        if isinstance(value, fx.Node) and value.op != "placeholder" and value.next is not copies(gm)[0]:

            def early(gm: fx.GraphModule, name: str = copy.name) -> None:
                named(gm, name).args[1].append(named(gm, name))  # type: ignore[union-attr]

            yield f"early {copy.name}", early
    for node in gm.graph.nodes:
        if node.target in (aten.mul.Tensor, aten.add.Tensor) and isinstance(node.args[0], fx.Node):

            def in_place(gm: fx.GraphModule, name: str = node.name) -> None:
                found = named(gm, name)
                found.target = {aten.mul.Tensor: aten.mul_.Tensor, aten.add.Tensor: aten.add_.Tensor}[found.target]

            yield f"{node.name} in place", in_place


def dropped_write_backs(gm: fx.GraphModule) -> Iterator[Fault]:
    for copy in copies(gm):
        yield copy.name, lambda gm, name=copy.name: gm.graph.erase_node(named(gm, name))  # type: ignore[misc]


def doubled_write_backs(gm: fx.GraphModule) -> Iterator[Fault]:
    for copy in copies(gm):

        def double(gm: fx.GraphModule, name: str = copy.name) -> None:
            node = named(gm, name)
            with gm.graph.inserting_after(node):
                gm.graph.node_copy(node).meta = dict(node.meta)

        yield copy.name, double


def dropped_outputs(gm: fx.GraphModule) -> Iterator[Fault]:
    for i in range(len(results(gm))):

        def drop(gm: fx.GraphModule, i: int = i) -> None:
            kept = results(gm)
            gm.graph.output_node().args = ((*kept[:i], *kept[i + 1 :]),)

        yield f"output {i}", drop


FORM = [
    dropped_waits,
    late_waits,
    reads_after_writes,
    returned_after_writes,
    writes_inside,
    dropped_write_backs,
    doubled_write_backs,
    dropped_outputs,
]


def put_in(step: StepGraph, fault: Callable[[fx.GraphModule], None]) -> StepGraph:
    """With a signature that does not say what outputs look like: that is not what must be seen."""
    fault(step.gm)
    outputs = tuple(replace(spec, tensor=None) for spec in step.signature.outputs)
    step.signature = replace(step.signature, outputs=outputs)
    return step


@pytest.mark.parametrize("kind", FORM, ids=lambda kind: kind.__name__)
def test_faults_of_form_are_seen_at_level_1(kind: Callable[[fx.GraphModule], Iterator[Fault]]) -> None:
    tried, missed = 0, []
    for name, passes in GRAPHS:
        for where, fault in spread(list(kind(graph_of(name, passes).gm))):
            tried += 1
            try:
                verify(put_in(graph_of(name, passes), fault), 1)
            except VerifyError:
                continue
            missed.append((name, passes, where))
    assert tried > 20
    assert not missed


GRAPHS = [(name, list(LISTS)[i % len(LISTS)]) for i, name in enumerate(NAMES)]


@pytest.mark.parametrize("kind", FORM, ids=lambda kind: kind.__name__)
def test_a_pass_that_makes_such_a_fault_is_undone(kind: Callable[[fx.GraphModule], Iterator[Fault]]) -> None:
    for name, passes in GRAPHS[::3]:
        step = graph_of(name, passes)
        before = str(step.gm.graph), step.signature
        for where, fault in spread(list(kind(step.gm)))[::4]:
            with pytest.raises(PassError):
                apply_pass(does(fault), step, (), {})
            assert (str(step.gm.graph), step.signature) == before, where


def other(val: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a tensor might wrongly be said to look like."""
    yield "dtype", val.to(torch.float64 if val.dtype is not torch.float64 else torch.float16)
    yield "shape", val.new_empty([*val.shape, 2])
    if val.dim() > 1 and val.shape[0] > 1 and val.shape[1] > 1:
        yield "stride", val.new_empty([*reversed(val.shape)]).permute(*reversed(range(val.dim())))


def test_wrong_values_are_seen_at_level_2() -> None:
    tried = 0
    for name, passes in GRAPHS:
        step = graph_of(name, passes)
        calls = [n for n in step.gm.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]
        for node in spread(calls)[::2]:
            val = node.meta["val"]
            with val.fake_mode if hasattr(val, "fake_mode") else contextlib.nullcontext():
                wrong = list(other(val))
            for what, false in wrong:
                if what == "stride" and false.stride() == val.stride():
                    continue
                tried += 1
                node.meta["val"] = false
                with pytest.raises(VerifyError):
                    verify(step, 2)
            node.meta["val"] = val
        verify(step, 2)
    assert tried > 50


def swapped(gm: fx.GraphModule, wanted: Callable[[fx.Node], bool]) -> Iterator[Fault]:
    """Two nodes of one shape exchange their readers."""
    by_shape: dict[Any, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if wanted(node) and isinstance(val, Tensor) and val.numel() and val.is_floating_point():
            by_shape.setdefault((val.shape, val.stride(), val.dtype), []).append(node)
    for nodes in by_shape.values():
        for one, two in itertools.pairwise(nodes):

            def swap(gm: fx.GraphModule, first: str = one.name, second: str = two.name) -> None:
                one, two = named(gm, first), named(gm, second)
                one.args, two.args = (two.args[0], *one.args[1:]), (one.args[0], *two.args[1:])

            yield f"{one.name} and {two.name}", swap


def swapped_operands(gm: fx.GraphModule) -> Iterator[Fault]:
    """Two collectives exchange their operands."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for where, swap in swapped(gm, lambda node: is_collective(node.target)):
        one, two = (named(gm, name) for name in where.split(" and "))
        if origin(one) is origin(two):
            continue  # a parameter that is gathered again
        if all(isinstance(n.args[0], fx.Node) and place[n.args[0]] < min(place[one], place[two]) for n in (one, two)):
            yield where, swap


def origin(node: fx.Node) -> fx.Node:
    """What a collective sends, before casts, padding and views."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def swapped_waits(gm: fx.GraphModule) -> Iterator[Fault]:
    """Two waits wait for each other's collectives."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for where, swap in swapped(gm, lambda node: is_wait(node.target)):
        one, two = (named(gm, name) for name in where.split(" and "))
        if all(place[n.args[0]] < min(place[one], place[two]) for n in (one, two)):  # type: ignore[index]
            yield where, swap


def swapped_updates(gm: fx.GraphModule) -> Iterator[Fault]:
    """Two write-backs write each other's values."""
    for where, _ in swapped(gm, lambda node: node.target is aten.copy_.default):

        def swap(gm: fx.GraphModule, where: str = where) -> None:
            one, two = (named(gm, name) for name in where.split(" and "))
            one.args, two.args = (one.args[0], two.args[1]), (two.args[0], one.args[1])

        yield where, swap


EDGES = [swapped_operands, swapped_waits, swapped_updates]


@pytest.mark.parametrize("kind", EDGES, ids=lambda kind: kind.__name__)
def test_edges_that_go_elsewhere_are_seen_at_level_3(kind: Callable[[fx.GraphModule], Iterator[Fault]]) -> None:
    tried, missed = 0, []
    for name, passes in GRAPHS:
        step = graph_of(name, passes)
        before = str(step.gm.graph)
        for where, fault in spread(list(kind(step.gm)))[:4]:
            tried += 1
            try:
                apply_pass(does(fault), step, (), {}, level=3)
            except PassError:
                assert str(step.gm.graph) == before
                continue
            missed.append((name, passes, where))
            step = graph_of(name, passes)
    assert tried > 3
    assert not missed


def disagree(one: StepGraph, other: StepGraph) -> bool:
    """Whether the ranks that have these graphs refuse to start, and know what differs."""
    digests = [digest_of(step.gm, step.signature, ragged=True) for step in (one, other)]
    found = first_difference(digests[0].communications(), digests[1].communications())
    assert (found is None) == (digests[0].communication == digests[1].communication)
    return found is not None


def test_collectives_in_another_order_on_one_rank_are_seen_by_the_agreement() -> None:
    tried = 0
    for name, passes in GRAPHS:
        step = graph_of(name, passes)
        place = {node: i for i, node in enumerate(step.gm.graph.nodes)}
        started = [n.name for n in step.gm.graph.nodes if is_collective(n.target)]
        for first, second in itertools.pairwise(started):
            moved = graph_of(name, passes)
            one, two = named(moved.gm, first), named(moved.gm, second)
            ready = max(place[named(step.gm, source.name)] for source in two.all_input_nodes)
            if ready > place[named(step.gm, first)]:
                continue  # the second needs what comes after the first
            one.prepend(two)
            verify(moved, 1)  # nothing is wrong with this rank alone
            tried += 1
            assert disagree(step, moved), (name, first, second)
    assert tried > 10
