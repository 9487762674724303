"""Passes and finders on graphs that wholestep did not make: by hand, by symbolic tracing, by make_fx.

Such graphs have nodes without our metadata, often without any; they take and return trees, call methods and modules,
write in place and wait twice. Every pass either computes the same afterwards or raises an error with a code.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import wholestep as ws
from passes.pretend import Pretend
from ranks import run_ranks
from selection import each_now
from wholestep.errors import IterMoveError, OptionError, PassError
from wholestep.ir.effects import is_collective
from wholestep.passes import (
    BoundPass,
    IterGraphModule,
    bucket_all_gather,
    bucket_reduce_scatter,
    comm_fusion_with_concat,
    dedup_collectives,
    drop_dead_collectives,
    find_all_descendants,
    get_all_comm_blocks,
    get_all_fused_optimizer_blocks,
    get_comm_block,
    get_fused_optimizer_block,
    graph_optimization_pass,
    iter_move_grads_and_optimizers,
    merge_common_subexpressions,
    overlap_optimizer_with_next_forward,
    reinplace,
    reinplace_tail,
    remove_copy_from_optimizer,
    remove_dead_collectives,
    remove_duplicate_collectives,
    run_passes,
    schedule_comm_wait,
    split_fused_optimizer,
)

aten = torch.ops.aten
comm = torch.ops._c10d_functional
Made = tuple[fx.GraphModule, tuple[Any, ...]]


# Graphs that others make.


def of_modules() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    return fx.symbolic_trace(model), (torch.randn(2, 3),)


def of_python() -> Made:
    def code(x: Tensor, y: Tensor) -> Any:
        z = torch.add(x.relu() + y, y) * 2
        z = operator.add(z, z.sum(dim=0, keepdim=True))
        return {"a": z, "b": [z.t(), (x.relu(),)]}

    return fx.symbolic_trace(code), (torch.randn(2, 3), torch.randn(2, 3))


def of_python_in_place() -> Made:
    def code(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        F.relu(y, inplace=True)
        torch.relu_(y)
        before = y.view(-1) * 3
        y.mul_(2)
        after = y.view(-1) * 3
        x.mul_(2)
        return y + x + (before + after).sum()

    return fx.symbolic_trace(code), (torch.randn(3, 3),)


def of_nothing() -> Made:
    graph = fx.Graph()
    graph.placeholder("x")
    graph.output(None)
    return fx.GraphModule(nn.Module(), graph), (torch.randn(2),)


def by_hand() -> Made:
    """A step of two parameters, in normal form; no node has metadata."""
    graph = fx.Graph()
    p, q, x, lr = (graph.placeholder(name) for name in ("p", "q", "x", "lr"))
    call = graph.call_function
    hidden = call(aten.tanh.default, (call(aten.mul.Tensor, (x, p)),))
    loss = call(aten.sum.default, (call(aten.mul.Tensor, (hidden, q)),))
    new = []
    for parameter, grad in ((q, call(aten.mul.Tensor, (hidden, 0.5))), (p, call(aten.mul.Tensor, (x, hidden)))):
        done = call(comm.wait_tensor.default, (call(comm.all_reduce.default, (grad, "sum", "0")),))
        new.append((parameter, call(aten.sub.Tensor, (parameter, call(aten.mul.Tensor, (done, lr))))))
    for pair in new:
        call(aten.copy_.default, pair)
    graph.output((loss,))
    return fx.GraphModule(nn.Module(), graph), (torch.ones(3), torch.ones(3), torch.randn(3), 0.1)


def by_make_fx(mode: str, optimizer: str, waits_twice: bool = False) -> Made:
    """A step with an optimizer that works in place, on trees of tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    names = [name for name, _ in model.named_parameters()]

    def step(params: list[Tensor], first: list[Tensor], second: list[Tensor], counts: list[Tensor], x: Tensor) -> Any:
        leaves = [p.detach().requires_grad_() for p in params]
        loss = torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), (x,)).square().mean()
        reduced = [functional.all_reduce(g, "avg", dist.group.WORLD) for g in torch.autograd.grad(loss, leaves)]
        if waits_twice:
            reduced = [functional.wait_tensor(g) for g in reduced]
        with torch.no_grad():
            if optimizer == "fused":
                numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
                options = {"amsgrad": False, "maximize": False}
                torch._fused_adam_(params, reduced, first, second, [], counts, **numbers, **options)
            else:
                torch._foreach_lerp_(first, reduced, 0.1)
                torch._foreach_add_(params, first, alpha=-0.1)
        return {"loss": loss}

    params = [p.detach().clone() for p in model.parameters()]
    moments = [[torch.full_like(p, 0.5) for p in params] for _ in range(2)]
    given = (params, *moments, [torch.ones(()) for _ in params], torch.randn(5, 3))
    return make_fx(step, tracing_mode=mode)(*given), given


def by_make_fx_with_old_collectives() -> Made:
    """`dist.all_reduce` is an in-place operator on a process group, which the graph holds as an attribute."""

    def step(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + torch.arange(3.0)

    return make_fx(step, tracing_mode="fake")(torch.randn(3)), (torch.randn(3),)


GRAPHS: dict[str, Callable[[], Made]] = {
    "modules": of_modules,
    "python": of_python,
    "python in place": of_python_in_place,
    "nothing": of_nothing,
    "by hand": by_hand,
    "make_fx real fused": lambda: by_make_fx("real", "fused"),
    "make_fx fake fused": lambda: by_make_fx("fake", "fused", waits_twice=True),
    "make_fx fake foreach": lambda: by_make_fx("fake", "foreach"),
    "make_fx symbolic fused": lambda: by_make_fx("symbolic", "fused", waits_twice=True),
    "make_fx c10d": by_make_fx_with_old_collectives,
}


# What is done to them.


def collective_of(graph: fx.Graph) -> str:
    return next((node.name for node in graph.nodes if is_collective(node.target)), "all_reduce")


def iter_move(gm: Any) -> None:
    remove_copy_from_optimizer(gm)
    first = next(node.name for node in gm.graph.nodes if node.op != "placeholder")
    iter_move_grads_and_optimizers(gm, collective_of(gm.graph), first)


def schedule(gm: Any) -> None:
    comm_fusion_with_concat(gm, 25)
    schedule_comm_wait(gm)


def split(gm: Any) -> None:
    for block in get_all_fused_optimizer_blocks(gm, "_fused_adam"):
        split_fused_optimizer(gm, block, set(block.grads[:1]))


PASSES: dict[str, Callable[[Any], Any]] = {
    "comm_fusion_with_concat": comm_fusion_with_concat,
    "bucket_all_gather": bucket_all_gather,
    "bucket_reduce_scatter": bucket_reduce_scatter,
    "schedule_comm_wait": schedule,
    "remove_copy_from_optimizer": remove_copy_from_optimizer,
    "merge_common_subexpressions": merge_common_subexpressions,
    "remove_duplicate_collectives": remove_duplicate_collectives,
    "remove_dead_collectives": remove_dead_collectives,
    "reinplace_tail": reinplace_tail,
    "overlap_optimizer_with_next_forward": overlap_optimizer_with_next_forward,
    "iter_move_grads_and_optimizers": iter_move,
    "dedup_collectives": dedup_collectives,
    "drop_dead_collectives": drop_dead_collectives,
    "reinplace": lambda gm: reinplace(gm.graph),
    "find_all_descendants": lambda gm: find_all_descendants(gm, list(gm.graph.nodes)[:1]),
    "get_all_comm_blocks": lambda gm: get_all_comm_blocks(gm, ("all_reduce", "all_gather_into_tensor")),
    "get_comm_block": lambda gm: [get_comm_block(n) for n in gm.graph.nodes if is_collective(n.target)],
    "get_all_fused_optimizer_blocks": get_all_fused_optimizer_blocks,
    "split_fused_optimizer": split,
    "all of them": lambda gm: run_passes(
        gm,
        [
            comm_fusion_with_concat,
            bucket_reduce_scatter,
            bucket_all_gather,
            schedule_comm_wait,
            remove_copy_from_optimizer,
            merge_common_subexpressions,
            remove_duplicate_collectives,
            overlap_optimizer_with_next_forward,
        ],
    ),
}
ONLY_FINDS = ("find_all_descendants", "get_all_comm_blocks", "get_comm_block", "get_all_fused_optimizer_blocks")


def run(gm: Any, given: tuple[Any, ...], **last: bool) -> list[Any]:
    """Results, and what is in the arguments afterwards."""
    own = copy.deepcopy(given)
    result = gm(*own, **last)
    return pytree.tree_leaves((result, own))


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(torch.allclose(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def try_all(rank: int, kind: str) -> list[str]:
    said = []
    for name, apply in PASSES.items():
        gm, given = GRAPHS[kind]()
        expected, text = run(gm, given), str(gm.graph)
        try:
            apply(gm)
        except IterMoveError as error:
            said += [] if name == "iter_move_grads_and_optimizers" else [f"{name}: {error}"]
            said += [] if str(gm.graph) == text else [f"{name}: raised and left another graph"]
        except PassError as error:
            said += [] if "no known size" in error.what else [f"{name}: {error}"]
        except OptionError as error:
            said += [] if "updates its parameters in place" in error.what else [f"{name}: {error}"]
        except Exception as error:
            said.append(f"{name}: {type(error).__name__}: {error}")
        gm.recompile()
        if not same(expected, run(gm, given)):
            said.append(f"{name}: other results")
        if name in ONLY_FINDS and str(gm.graph) != text:
            said.append(f"{name}: changed the graph")
    return said


TRIED = ("modules", "python", "python in place", "nothing", "by hand", "make_fx fake fused", "make_fx c10d")
ITERATED = ("modules", "python in place", "by hand", "make_fx fake foreach", "make_fx c10d")


@pytest.mark.parametrize("kind", each_now(GRAPHS, *TRIED, "make_fx symbolic fused"))
def test_every_pass_and_finder_computes_the_same_or_says_why_not(kind: str) -> None:
    assert run_ranks(try_all, 1, kind) == [[]]


def try_iterations(rank: int, kind: str) -> list[str]:
    said = []
    for name in ("overlap_optimizer_with_next_forward", "iter_move_grads_and_optimizers", "schedule_comm_wait"):
        gm, given = GRAPHS[kind]()
        module = IterGraphModule(GRAPHS[kind]()[0])
        try:
            PASSES[name](module)
        except PassError as error:
            said += [] if "no known size" in error.what else [f"{name}: {error}"]
            continue
        except IterMoveError as error:
            said += [] if name == "iter_move_grads_and_optimizers" else [f"{name}: {error}"]
        mine, theirs = copy.deepcopy(given), copy.deepcopy(given)
        for last in (False, False, False, True):
            results = pytree.tree_leaves(module(*mine, last_iter=last)), pytree.tree_leaves(gm(*theirs))
            said += [] if same(*results) else [f"{name}: other results"]
        said += [] if same(pytree.tree_leaves(mine), pytree.tree_leaves(theirs)) else [f"{name}: other state"]
    return said


@pytest.mark.parametrize("kind", each_now((kind for kind in GRAPHS if kind != "nothing"), *ITERATED))
def test_an_iter_graph_module_has_the_modules_and_constants_of_any_graph(kind: str) -> None:
    assert run_ranks(try_iterations, 1, kind) == [[]]


@pytest.mark.parametrize("kind", [kind for kind in GRAPHS if "make_fx" in kind and "c10d" not in kind])
def test_graphs_of_make_fx_are_bucketed_and_their_optimizers_found(kind: str) -> None:
    def code(rank: int) -> list[int]:
        gm, _ = GRAPHS[kind]()
        before = len(get_all_comm_blocks(gm, "all_reduce"))
        comm_fusion_with_concat(gm, 25)
        return [before, len(get_all_comm_blocks(gm, "all_reduce"))]

    assert run_ranks(code, 1) == [[4, 1]]


def test_a_graph_that_cannot_be_replayed_is_not_replayed_and_the_log_says_so(caplog: Any) -> None:
    for make in (of_modules, of_python):
        gm, given = make()
        expected = run(gm, given)
        with caplog.at_level("WARNING", logger="wholestep.passes"):
            run_passes(gm, [comm_fusion_with_concat], level=3)  # type: ignore[arg-type]
        assert "comm_fusion_with_concat is not replayed" in caplog.text
        assert 'node.meta["val"]' in caplog.text
        caplog.clear()
        assert same(expected, run(gm, given))


# Writes in place between collectives.


def with_writes(kind: str) -> fx.GraphModule:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    call = graph.call_function
    one, two = call(aten.mul.Tensor, (a, 2.0)), call(aten.mul.Tensor, (b, 3.0))

    def reduce(node: fx.Node) -> fx.Node:
        return call(comm.wait_tensor.default, (call(comm.all_reduce.default, (node, "sum", "0")),))

    if kind == "a view is written before":
        call(aten.mul_.Tensor, (call(aten.view.default, (one, [-1])), 0.5))
        results = [reduce(two), reduce(one)]
    elif kind == "it is written after":
        results = [reduce(one)]
        call(aten.zero_.default, (one,))
        results.append(reduce(call(aten.add.Tensor, (two, one))))
    elif kind == "a method writes before":
        graph.call_method("mul_", (graph.call_method("view", (one, -1)), 0.5))
        results = [reduce(two), reduce(one)]
    else:
        results = [reduce(one)]
        graph.call_method("zero_", (graph.call_method("t", (one,)),))
        results.append(reduce(call(aten.add.Tensor, (two, one))))
    graph.output(tuple(call(aten.mul.Tensor, (result, 2.0)) for result in results))
    gm = fx.GraphModule(nn.Module(), graph)
    for node in graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.empty(2, 2, device="meta")
    return gm


@pytest.mark.parametrize(
    "kind",
    ["a view is written before", "it is written after", "a method writes before", "a method writes after"],
)
def test_a_collective_does_not_move_past_a_write_to_its_operand(kind: str) -> None:
    given = torch.randn(2, 2), torch.randn(2, 2)
    expected = Pretend(with_writes(kind)).run(*copy.deepcopy(given))
    gm = with_writes(kind)
    comm_fusion_with_concat(gm)
    schedule_comm_wait(gm)
    merge_common_subexpressions(gm)
    found = Pretend(gm).run(*copy.deepcopy(given))
    assert all(map(torch.allclose, found, expected))


# Arguments that are not graphs, and passes that fail.


@graph_optimization_pass()
def breaks_halfway(gm: fx.GraphModule) -> None:
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    node.args = ()
    raise RuntimeError("halfway")


def test_a_graph_on_trees_still_takes_trees_after_a_pass_failed() -> None:
    gm = make_fx(lambda tree: {"sum": tree["a"] + tree["b"][0]})({"a": torch.ones(2), "b": [torch.ones(2)]})
    with pytest.raises(PassError, match="halfway"):
        breaks_halfway(gm)
    assert torch.equal(gm({"a": torch.ones(2), "b": [torch.ones(2)]})["sum"], torch.full((2,), 2.0))


@pytest.mark.parametrize("given", [fx.Graph(), nn.Linear(2, 2)], ids=["graph", "module"])
def test_what_is_no_graph_module_is_not_taken_for_an_option(given: Any) -> None:
    for each in (schedule_comm_wait, comm_fusion_with_concat, overlap_optimizer_with_next_forward):
        with pytest.raises(OptionError, match=rf"{each.name} got an object of type (Graph|Linear)"):
            each(given)
        with pytest.raises(OptionError, match=rf"{each.name} got an object of type (Graph|Linear)"):
            BoundPass(each)(given)


def test_finders_refuse_nodes_of_another_kind() -> None:
    for make in (of_python, by_hand):
        gm, _ = make()
        for node in gm.graph.nodes:
            if not is_collective(node.target):
                with pytest.raises(ws.WholestepError, match="is not a collective"):
                    get_comm_block(node)
            with pytest.raises(ws.WholestepError, match="is not part of an optimizer"):
                get_fused_optimizer_block(node)
