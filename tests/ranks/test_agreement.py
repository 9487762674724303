"""Agreement of ranks on what they run: differences are named on both sides, and no rank enters a collective alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from ranks import RanksFailed
from ranks import run_ranks as run_unmet_ranks
from wholestep.errors import DesyncError, Location, PeerFailedError
from wholestep.ir.meta import NodeMeta, set_node_meta
from wholestep.ir.signature import InputKind, InputSpec, Signature
from wholestep.ranks.agreement import Agreement, GraphDigest, difference, digest_of
from wholestep.ranks.agreement_records import first_difference
from wholestep.ranks.channel import Channel
from wholestep.runtime.python_program import program

ops = torch.ops._c10d_functional
aten = torch.ops.aten


def run_ranks(fn: Callable[[int], Any], size: int, deadline: float = 40) -> list[Any]:
    """Ranks that begin together."""

    def code(rank: int) -> object:
        dist.barrier()
        return fn(rank)

    return run_unmet_ranks(code, size, deadline=deadline)


def step_graph(reduce: str = "sum", swapped: bool = False, extra: bool = False, rows: int = 2) -> fx.GraphModule:
    """Two collectives of inputs a and b, and some arithmetic on a batch of `rows` rows."""
    graph = fx.Graph()
    sizes = {"a": (4,), "b": (3,), "x": (rows, 2)}
    inputs = {name: graph.placeholder(name) for name in sizes}
    for name, node in inputs.items():
        node.meta["val"] = torch.empty(sizes[name], device="meta")
    scaled = add(graph, aten.mul.Tensor, (inputs["x"], 2), torch.empty(sizes["x"], device="meta"), 10)
    if extra:
        scaled = add(graph, aten.relu.default, (scaled,), scaled.meta["val"], 11)
    waits = []
    for name, op in (("b", reduce), ("a", "sum")) if swapped else (("a", "sum"), ("b", reduce)):
        value = inputs[name].meta["val"]
        started = add(graph, ops.all_reduce.default, (inputs[name], op, "0"), value, 12)
        waits.append(add(graph, ops.wait_tensor.default, (started,), value, 12))
    graph.output((*waits, scaled))
    return fx.GraphModule({}, graph)


def add(graph: fx.Graph, target: Any, args: tuple[Any, ...], value: torch.Tensor, line: int) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = value
    set_node_meta(node, NodeMeta(module_path="model.head", location=Location("train.py", line)))
    return node


def digest(ragged: bool = False, **options: Any) -> GraphDigest:
    return digest_of(step_graph(**options), Signature(), ragged)


def inputs(rows: int = 2) -> list[torch.Tensor]:
    return [torch.ones(4), torch.ones(3), torch.ones(rows, 2)]


def agree(call: int, shown: GraphDigest, deadline: float = 15.0, step: str = "train_step") -> None:
    channel = Channel.current()
    assert channel is not None
    Agreement(channel, step, deadline).agree(call, shown)


def run(call: int, gm: fx.GraphModule, shown: GraphDigest, rows: int = 2, step: str = "train_step") -> list[float]:
    channel = Channel.current()
    assert channel is not None
    with channel.running(step, call, shown):
        return [float(value.sum()) for value in program(gm)(*inputs(rows))]


def outcome(function: Callable[[], object]) -> str:
    """The error of a function with its type, or what it returned."""
    try:
        return str(function())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_equal_graphs_agree_and_run():
    def code(rank: int) -> list[float]:
        gm = step_graph()
        shown = digest_of(gm, Signature(), ragged=False)
        agree(1, shown)
        return run(1, gm, shown)

    assert run_ranks(code, 3) == [[12.0, 9.0, 8.0]] * 3


@pytest.mark.parametrize(
    ("change", "one", "other"),
    [
        (
            {"reduce": "max"},
            "'sum', '0')  # f32[3]  train.py:12, model.head",
            "'max', '0')  # f32[3]  train.py:12, model",
        ),
        ({"swapped": True}, "all_reduce.default(a, 'sum'", "all_reduce.default(b, 'sum'"),
        (
            {"extra": True},
            "all_reduce.default(a",
            "aten.relu.default(mul_tensor)  # f32[2, 2]  train.py:11, model.head",
        ),
        ({"rows": 3}, "x = <input>  # f32[2, 2]", "x = <input>  # f32[3, 2]"),
    ],
    ids=["reduce op", "swapped", "extra node", "shape"],
)
def test_ranks_with_different_graphs_all_raise_and_name_both_sides(change: dict[str, Any], one: str, other: str):
    def code(rank: int) -> list[str]:
        shown = digest(**change) if rank == 1 else digest()
        first = outcome(lambda: agree(1, shown))
        gm = step_graph()
        agree(2, digest())  # the groups still work
        return [first, str(run(2, gm, digest()))]

    results = run_ranks(code, 3)
    assert len({text for text, _ in results}) == 1
    assert {after for _, after in results} == {"[12.0, 9.0, 8.0]"}
    lines = results[0][0].splitlines()
    assert lines[0].startswith("DesyncError: [WS-DESYNC] Ranks disagree on the graph of call 1 of train_step")
    assert "ranks 0, 2 against rank 1. The first difference is node " in lines[0]
    assert lines[1].startswith("    ranks 0, 2  ")
    assert one in lines[1]
    assert lines[2].startswith("    rank 1      ")
    assert other in lines[2]


def test_a_signature_that_differs_is_named():
    def code(rank: int) -> str:
        kind = InputKind.BUFFER if rank else InputKind.PARAMETER
        signature = Signature(inputs=(InputSpec("a", kind, "model.a"), InputSpec("b", InputKind.BATCH, "batch")))
        return outcome(lambda: agree(1, digest_of(step_graph(), signature, ragged=False)))

    first, second = run_ranks(code, 2)
    assert first == second
    assert "rank 0  input model.a (parameter)" in first
    assert "rank 1  input model.a (buffer)" in first


def test_ragged_batches_need_only_the_same_communication():
    def code(rank: int) -> list[float]:
        gm = step_graph(rows=rank + 1)
        shown = digest_of(gm, Signature(), ragged=True)
        agree(1, shown)
        return run(1, gm, shown, rows=rank + 1)

    assert run_ranks(code, 2) == [[8.0, 6.0, 4.0], [8.0, 6.0, 8.0]]


def test_ragged_batches_with_other_communication_disagree():
    def code(rank: int) -> str:
        return outcome(lambda: agree(1, digest(ragged=True, reduce="max" if rank else "sum", rows=rank + 1)))

    first, second = run_ranks(code, 2)
    assert first == second
    assert "The first difference is collective 1:" in first
    assert "rank 0  all_reduce(sum" in first
    assert "rank 1  all_reduce(max" in first


def test_a_rank_with_a_known_graph_runs_with_one_that_captured_the_same_collectives():
    def code(rank: int) -> list[list[float]]:
        known = step_graph()
        shown = digest_of(known, Signature(), ragged="short batch")
        agree(1, shown)
        results = [run(1, known, shown)]
        if rank == 1:
            known = step_graph(extra=True)  # a new guard key on this rank only
            shown = digest_of(known, Signature(), ragged="long batch")
            time.sleep(0.5)
            agree(2, shown)
        results.append(run(2, known, shown))
        results.append(run(3, known, shown))
        return results

    assert run_ranks(code, 3) == [[[12.0, 9.0, 8.0]] * 3] * 3


@pytest.mark.parametrize("hit", [0, 1])
def test_a_rank_in_a_known_graph_leaves_its_collective_if_the_other_has_other_ones(hit: int):
    def code(rank: int) -> str:
        known = step_graph()
        shown = digest_of(known, Signature(), ragged=False)
        agree(1, shown)
        run(1, known, shown)
        if rank == hit:
            return outcome(lambda: run(2, known, shown))
        return outcome(lambda: agree(2, digest(swapped=True)))

    for text in run_ranks(code, 2):
        assert text.startswith("DesyncError: [WS-DESYNC] Ranks disagree on the graph of call 2 of train_step")
        assert "The first difference is node" in text
        assert f"rank {hit}  " in text


def test_a_rank_that_ran_ahead_with_a_graph_it_knows_is_answered_for():
    """A graph without collectives does not hold a rank up: it is several calls ahead when the other asks."""

    def code(rank: int) -> str:
        graph = fx.Graph()
        graph.output((graph.placeholder("x"),))
        plain = fx.GraphModule({}, graph)
        shown = digest_of(plain, Signature(), ragged=False)
        agree(1, shown)
        channel = Channel.current()
        assert channel is not None
        if rank == 0:
            for call in range(2, 50):
                with channel.running("train_step", call, shown):
                    pass
            return "ahead"
        time.sleep(0.5)
        agree(2, shown)
        return "agreed"

    assert run_ranks(code, 2) == ["ahead", "agreed"]


def test_a_rank_that_does_not_come_is_named_with_what_it_did_last():
    fork = multiprocessing.get_context("fork")
    have_raised, come = fork.Semaphore(0), fork.Barrier(2)

    def code(rank: int) -> str:
        shown = digest()
        agree(1, shown)
        run(1, step_graph(), shown)
        if rank == 1:
            assert have_raised.acquire(timeout=30)
            assert have_raised.acquire(timeout=30)
        else:
            come.wait(30)
        said = outcome(lambda: agree(2, shown, deadline=1.0))
        have_raised.release()
        return said

    first, second, third = run_ranks(code, 3)
    assert "DesyncError: [WS-DESYNC] rank 1 did not reach call 2 of train_step within 1 s." in first
    assert "rank 1 is outside of any step (last: call 1 of train_step); last heartbeat" in first
    assert first.splitlines()[0] == third.splitlines()[0] == second.splitlines()[0]  # also where it came too late


def test_a_rank_that_never_called_a_step_is_named():
    def code(rank: int) -> str:
        return "elsewhere" if rank == 1 else outcome(lambda: agree(1, digest(), deadline=1.0))

    first, _ = run_ranks(code, 2)
    assert "rank 1 has not called a compiled step yet" in first


def test_a_rank_that_comes_late_with_a_graph_it_knows_does_not_enter_its_collective():
    has_raised = multiprocessing.get_context("fork").Event()

    def code(rank: int) -> str:
        known, shown = step_graph(), digest()
        agree(1, shown)
        run(1, known, shown)
        if rank == 1:
            assert has_raised.wait(30)
            return outcome(lambda: run(2, known, shown))
        said = outcome(lambda: agree(2, digest(extra=True), deadline=1.0))
        has_raised.set()
        return said

    assert all("rank 1 did not reach call 2 of train_step within 1 s." in text for text in run_ranks(code, 2))


def test_a_slow_compiler_is_waited_for():
    def code(rank: int) -> list[float]:
        channel = Channel.current()
        assert channel is not None
        gm, shown = step_graph(), digest()
        with channel.compiling("train_step", 1):
            time.sleep(4.0 * rank)
        agree(1, shown, deadline=3.0)  # a heartbeat says once a second that the other compiles
        return run(1, gm, shown)

    assert run_ranks(code, 2) == [[8.0, 6.0, 8.0]] * 2


def test_a_rank_that_fails_to_compile_is_named_at_once_and_the_groups_live_on():
    def code(rank: int) -> list[str]:
        channel = Channel.current()
        assert channel is not None

        def step() -> None:
            with channel.compiling("train_step", 1):
                if rank == 1:
                    raise ValueError("branch on a tensor")
            agree(1, digest())

        first = outcome(step)
        agree(2, digest())
        return [first, str(run(2, step_graph(), digest()))]

    results = run_ranks(code, 3)
    assert results[1] == ["ValueError: branch on a tensor", "[12.0, 9.0, 8.0]"]
    for first, after in (results[0], results[2]):
        assert "PeerFailedError: [WS-PEER-FAILED] Rank 1 raised while compiling call 1 of train_step:" in first
        assert "ValueError: branch on a tensor" in first
        assert after == "[12.0, 9.0, 8.0]"


def test_a_rank_that_dies_while_others_wait_for_its_graph_is_named():
    def code(rank: int) -> str:
        channel = Channel.current()
        assert channel is not None
        if rank == 1:
            with channel.compiling("train_step", 1):
                time.sleep(1.5)
                os.kill(os.getpid(), signal.SIGKILL)
        return outcome(lambda: agree(1, digest(), deadline=4.0))

    with pytest.raises(RanksFailed) as caught:
        run_ranks(code, 3)
    assert set(caught.value.results) == {0, 2}
    for text in caught.value.results.values():
        assert "PeerFailedError: [WS-PEER-FAILED] Rank 1 died or hangs" in text
        assert "(is compiling call 1 of train_step; last heartbeat" in text


def test_the_store_does_not_grow_with_calls():
    def code(rank: int) -> list[int]:
        known, shown = step_graph(), digest()
        other, newer = step_graph(extra=True), digest(extra=True)
        sizes = []
        for call in range(1, 121):
            if call % 10 == 1:
                fresh = rank == 1 or call % 20 == 1  # else a cache hit on rank 0 only
                if fresh:
                    agree(call, newer if call % 20 == 1 else shown)
            run(call, *((other, newer) if call % 20 == 1 else (known, shown)))
            if call in (40, 120):
                dist.barrier()
                time.sleep(0.5)
                store = dist.distributed_c10d._get_default_store()
                sizes.append(len([key for key in store.list_keys() if "wholestep" in key]))
                dist.barrier()
        return sizes

    for early, late in run_ranks(code, 2, deadline=60):
        assert late <= early


def test_difference_is_none_where_ranks_may_run_together():
    strict = {"fingerprint": "f", "communication": "c", "ragged": False}
    ragged = {"fingerprint": "g", "communication": "c", "ragged": True}
    answered = {"fingerprint": "f", "communication": "c", "ragged": False, "answered": True}
    assert difference(dict(enumerate([strict, strict]))) is None
    assert difference(dict(enumerate([strict, ragged, answered]))) is None
    assert difference(dict(enumerate([strict, {**strict, "fingerprint": "h"}]))) == ([0], [1])
    assert difference(dict(enumerate([strict, strict, {**answered, "communication": "d"}]))) == ([0, 1], [2])
    assert difference(dict(enumerate([{**ragged, "communication": "d"}, strict, strict]))) == ([1, 2], [0])


def test_the_first_difference_of_lists_of_unequal_length_is_where_one_ends():
    lines = [("1", "one"), ("2", "two")]
    assert first_difference(lines, lines) is None
    assert first_difference(lines, lines[:1]) == (1, "two", "nothing more")
    assert first_difference([("0", "zero"), *lines], lines) == (0, "zero", "one")


def test_a_digest_does_not_depend_on_names_or_lines():
    moved = step_graph()
    for node in moved.graph.nodes:
        set_node_meta(node, replace(NodeMeta(), location=Location("other.py", 99)))
    there = digest_of(moved, Signature(), ragged=False)
    assert (there.fingerprint, there.communication) == (digest().fingerprint, digest().communication)


def test_errors_of_agreement_can_be_caught_as_runtime_errors():
    assert issubclass(DesyncError, RuntimeError)
    assert issubclass(PeerFailedError, RuntimeError)
