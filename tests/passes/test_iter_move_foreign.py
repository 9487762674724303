"""Optimizers of graphs of others move across iterations too: traced by make_fx, or as `_spmd` had them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from wholestep.errors import IterMoveError, OptionError
from wholestep.ir.functionalize import functionalize, writes_in_place
from wholestep.passes import (
    FusedAdamBlock,
    IterGraphModule,
    applied_passes,
    comm_fusion_with_concat,
    functionalize_optimizer,
    get_all_comm_blocks,
    get_all_fused_optimizer_blocks,
    get_fused_optimizer_block,
    iter_move_grads_and_optimizers,
    overlap_optimizer_with_next_forward,
    remove_copy_from_optimizer,
    schedule_comm_wait,
)
from wholestep.torch_private.fake_tensors import FakeTensorMode

pytestmark = pytest.mark.fake_group

aten = torch.ops.aten
comm = torch.ops._c10d_functional
SMALL = 0.00002
"""MiB: every gradient is a bucket of its own."""


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


# Steps as make_fx traces them.


def update(kind: str, params: list[Tensor], grads: list[Tensor], state: Any) -> None:
    exp_avgs, exp_avg_sqs, steps = state
    if kind == "fused adam":
        torch._foreach_add_(steps, 1)
        numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        torch._fused_adam_(params, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, **numbers)
    elif kind == "foreach adam":
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(exp_avgs, grads, 0.1)
        torch._foreach_mul_(exp_avg_sqs, 0.99)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 0.01)
        roots = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(roots, 1e-8)
        torch._foreach_addcdiv_(params, exp_avgs, roots, -0.01)
    elif kind == "foreach sgd":
        torch._foreach_add_(params, grads, alpha=-0.1)
    elif kind == "sgd":
        for param, grad in zip(params, grads, strict=True):
            param.add_(grad, alpha=-0.1)
    else:
        for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
            exp_avg.lerp_(grad, 0.1)
            exp_avg_sq.mul_(0.99).addcmul_(grad, grad, value=0.01)
            param.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(1e-8), value=-0.01)


KINDS = ["fused adam", "foreach adam", "foreach sgd", "sgd", "adam"]


def inputs() -> tuple[Any, ...]:
    torch.manual_seed(0)
    params = [torch.randn(4, 4) for _ in range(3)]
    state = ([torch.zeros(4, 4) for _ in params], [torch.ones(4, 4) for _ in params], [torch.zeros(()) for _ in params])
    return params, state, torch.randn(2, 4)


def traced(kind: str, detached: bool = False) -> fx.GraphModule:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def step(params: list[Tensor], state: Any, x: Tensor) -> Tensor:
        own = [param.detach().requires_grad_() for param in params]
        hidden = x
        for param in own:
            hidden = torch.tanh(hidden @ param)
        loss = hidden.square().mean()
        grads = torch.autograd.grad(loss, own)
        grads = [comm.wait_tensor.default(comm.all_reduce.default(grad, "sum", group)) for grad in grads]
        with torch.no_grad():
            update(kind, [each.detach() for each in own] if detached else params, list(grads), state)
        return loss.detach()

    return make_fx(step, tracing_mode="fake")(*inputs())


def run(module: Any, calls: int = 4, flush: bool = False) -> list[Tensor]:
    given = inputs()
    found = []
    for i in range(calls):
        last = {"last_iter": i == calls - 1} if isinstance(module, IterGraphModule) and not flush else {}
        found.append(module(*given, **last).clone())
    if flush:
        module.flush()
    return found + pytree.tree_leaves(given)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("detached", [False, True], ids=["direct", "through detach"])
@pytest.mark.parametrize("bucket", [SMALL, 25.0], ids=["buckets", "one bucket"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_writes_in_place_overlaps_with_the_next_forward(
    kind: str, bucket: float, detached: bool
) -> None:
    gm = traced(kind, detached)
    expected = run(gm)
    module = IterGraphModule(gm)
    comm_fusion_with_concat(module, bucket)
    schedule_comm_wait(module)
    overlap_optimizer_with_next_forward(module)
    assert len(module.graph.moves) == (3 if bucket == SMALL else 1)
    assert same(run(module), expected)
    assert same(run(module, flush=True), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_one_reduction_of_an_optimizer_that_writes_in_place_moves(kind: str) -> None:
    gm = traced(kind)
    expected = run(gm)
    module = IterGraphModule(gm)
    comm_fusion_with_concat(module, SMALL)
    remove_copy_from_optimizer(module)
    first = next(n.name for n in module.graph.nodes if n.op == "call_function")
    for block in get_all_comm_blocks(module, "all_reduce")[:2]:  # type: ignore[arg-type]
        iter_move_grads_and_optimizers(module, block.comm_node.name, first)
    assert len(module.graph.moves) == 2
    assert same(run(module), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_detached_parameter_is_used_where_somebody_reads_it(kind: str) -> None:
    gm = traced(kind, detached=True)
    expected = run(gm)
    module = IterGraphModule(gm)
    remove_copy_from_optimizer(module)
    first, second = [node.name for node in module.graph.nodes if node.target is aten.mm.default][:2]
    comms = [block.comm_node.name for block in get_all_comm_blocks(module, "all_reduce")]  # type: ignore[arg-type]
    code = module.main_gm.code
    with pytest.raises(IterMoveError, match=f"{second} is after {first}, the first use of params_1"):
        iter_move_grads_and_optimizers(module, comms[0], second)
    assert module.main_gm.code == code
    iter_move_grads_and_optimizers(module, comms[1], second)  # after all detach nodes
    assert len(module.graph.moves) == 1
    assert same(run(module), expected)


@pytest.mark.parametrize("view", [aten.detach.default, aten.t.default])
def test_an_update_through_a_view_that_others_read_gets_a_view_of_its_own(view: Any) -> None:
    graph = fx.Graph()
    p, x = graph.placeholder("p"), graph.placeholder("x")
    seen = graph.call_function(view, (p,), name="seen")
    flat = graph.call_function(aten.alias.default, (seen,), name="flat")
    loss = graph.call_function(aten.mul.Tensor, (x, seen), name="loss")
    new = graph.call_function(aten.sub.Tensor, (flat, loss), name="new")
    write = graph.call_function(aten.copy_.default, (flat, new), name="write")
    graph.output((loss, write) if view is aten.detach.default else (loss,))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    module = IterGraphModule(gm)
    nodes = {node.name: node for node in module.graph.nodes}
    module.graph.move_to_next_iter_before([nodes["new"], nodes["write"]], nodes["seen"])
    sides = []
    for each in (gm, module):
        given = torch.arange(4.0).reshape(2, 2), torch.full((2, 2), 0.5)
        losses = [each(*given)[0] for _ in range(3)]
        if each is module:
            assert not torch.equal(given[0], sides[0][-1])
            module.flush()
        sides.append([*losses, given[0]])
    assert same(*sides)


@pytest.mark.parametrize("kind", KINDS)
def test_functional_updates_compute_the_same_bits(kind: str) -> None:
    gm = traced(kind)
    expected = run(gm)
    assert any(map(writes_in_place, gm.graph.nodes))
    functionalize_optimizer(gm)
    gm.graph.lint()
    assert not any(map(writes_in_place, gm.graph.nodes))
    assert applied_passes(gm) == ("functionalize_optimizer",)
    assert same(run(gm), expected)
    writes = [n for n in gm.graph.nodes if n.target is aten.copy_.default]
    assert len({n.args[0] for n in writes}) == len(writes)  # nothing is written twice
    assert all(n.args[0].op == "placeholder" for n in writes)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["fused adam", "foreach adam", "foreach sgd"])
def test_blocks_of_in_place_optimizers_are_refused_and_found_once_they_are_functional(kind: str) -> None:
    gm = traced(kind)
    with pytest.raises(OptionError, match=r"updates its parameters in place[\s\S]*functionalize_optimizer\(gm\)"):
        get_all_fused_optimizer_blocks(gm)
    node = next(n for n in gm.graph.nodes if "_foreach_" in n.name or "_fused_" in n.name)
    with pytest.raises(OptionError, match="updates its parameters in place"):
        get_fused_optimizer_block(node)
    functionalize_optimizer(gm)
    (block,) = get_all_fused_optimizer_blocks(gm)
    assert len(block.params) == len(block.grads) == 3
    assert isinstance(block.optim, FusedAdamBlock) == ("adam" in kind)
    assert (block.step is not None) == (kind == "fused adam")  # the others do not read the count


# What functionalizing must not change.


def views(p: Tensor, x: Tensor) -> Tensor:
    row = p[0]
    p.add_(1)
    y = row * 2  # sees the new value
    row.mul_(x)
    p.mul_(3)
    return y.sum() + p.sum()


def narrow(p: Tensor, x: Tensor) -> Tensor:
    p.add_(x.double())  # computed in double, kept in single
    return p * 3


def result_is_the_tensor(p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    q = p.add_(x)
    p.mul_(2)
    return q * 1, q


def temporary(p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    t = x * 2
    u = t.add_(1)
    v = t.view(-1)
    t.mul_(p)
    return u + v, t


def twice(p: Tensor, x: Tensor) -> Tensor:
    torch._foreach_add_([p, p], [x, x])
    return p * 1


@pytest.mark.parametrize("code", [views, narrow, result_is_the_tensor, temporary, twice])
def test_views_temporaries_and_dtypes_see_what_they_saw(code: Any) -> None:
    def given() -> tuple[Tensor, Tensor]:
        return torch.full((3,), 1.0) / 3 + torch.zeros(3, 3)[0], torch.ones(3) / 7

    if code is views:
        start = (torch.rand(2, 3), torch.rand(3))
    else:
        start = given()
    gm = make_fx(code)(*[t.clone() for t in start])
    functional = copy.deepcopy(gm)
    functionalize(functional.graph)
    functional.recompile()
    a, b = [t.clone() for t in start], [t.clone() for t in start]
    want, got = pytree.tree_leaves(gm(*a)), pytree.tree_leaves(functional(*b))
    assert same(want, got)
    assert same(a, b)
    assert [t.data_ptr() == a[0].data_ptr() for t in want] == [t.data_ptr() == b[0].data_ptr() for t in got]


def test_in_place_operators_before_a_collective_stay() -> None:
    def step(p: Tensor, x: Tensor) -> Tensor:
        hidden = (x * p).relu_()
        done = comm.wait_tensor.default(comm.all_reduce.default(hidden, "sum", dist.group.WORLD.group_name))  # type: ignore[union-attr]
        p.sub_(done)
        return done * 1

    gm = make_fx(step, tracing_mode="fake")(torch.ones(3), torch.ones(3))
    assert functionalize(gm.graph) == 1
    assert any(n.target is aten.relu_.default for n in gm.graph.nodes)
    assert not any(n.target is aten.sub_.Tensor for n in gm.graph.nodes)


# Graphs as `torch.distributed._spmd` made them: the output has the write-backs.


def old_graph(outputs: bool) -> fx.GraphModule:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    graph = fx.Graph()
    count = 4
    names = [[graph.placeholder(f"{kind}{i}") for i in range(count)] for kind in "pmvs"]
    params, exp_avgs, exp_avg_sqs, steps = names
    x = graph.placeholder("x")
    call = graph.call_function
    hidden = x
    for param in params:
        hidden = call(aten.mul.Tensor, (hidden, param))
    loss = call(aten.sum.default, (hidden,))
    grads = []
    for param in params:
        started = call(comm.all_reduce.default, (call(aten.mul.Tensor, (param, loss)), "sum", group))
        grads.append(call(comm.wait_tensor.default, (started,)))
    added = call(aten._foreach_add.Scalar, (steps, 1))
    counts = [call(aten.copy_.default, (step, call(operator.getitem, (added, i)))) for i, step in enumerate(steps)]
    numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    new = call(
        aten._fused_adam.default,
        (params, grads, exp_avgs, exp_avg_sqs, [], counts),
        {**numbers, "amsgrad": False, "maximize": False},
    )
    copies = []
    for which, targets in ((0, params), (1, grads), (2, exp_avgs), (3, exp_avg_sqs)):
        part = call(operator.getitem, (new, which))
        for i, target in enumerate(targets):
            copies.append(call(aten.copy_.default, (target, call(operator.getitem, (part, i)))))
    kept = copies[:count] + copies[2 * count :] + counts
    graph.output((loss, kept) if outputs else (loss,))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    mode = FakeTensorMode()
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*[mode.from_tensor(t) for t in old_inputs()])
    return gm


def old_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    zeros = [torch.zeros(3) for _ in range(8)]
    return [torch.rand(3) for _ in range(4)] + zeros + [torch.zeros(()) for _ in range(4)] + [torch.rand(3)]


def run_old(module: Any, calls: int = 4) -> list[Tensor]:
    given, found = old_inputs(), []
    for i in range(calls):
        last = {"last_iter": i == calls - 1} if isinstance(module, IterGraphModule) else {}
        found.append(module(*given, **last)[0].clone())
    return found + given


@pytest.mark.parametrize("outputs", [False, True], ids=["loss only", "write-backs among the outputs"])
@pytest.mark.parametrize("removed", [False, True], ids=["with orphans", "without orphans"])
def test_overlap_takes_graphs_of_the_old_api(outputs: bool, removed: bool) -> None:
    gm = old_graph(outputs)
    expected = run_old(copy.deepcopy(gm))
    module = IterGraphModule(gm)
    comm_fusion_with_concat(module, SMALL)
    if removed:
        remove_copy_from_optimizer(module)
    overlap_optimizer_with_next_forward(module)
    assert len(module.graph.moves) == 4
    assert same(run_old(module), expected)


def test_iter_move_takes_write_backs_among_the_outputs_and_gives_the_state_itself() -> None:
    gm = old_graph(outputs=True)
    expected = run_old(copy.deepcopy(gm))
    module = IterGraphModule(gm)
    remove_copy_from_optimizer(module)
    for block in get_all_comm_blocks(module, "all_reduce"):  # type: ignore[arg-type]
        iter_move_grads_and_optimizers(module, block.comm_node.name, "mul_tensor")
    assert len(module.graph.moves) == 4
    assert same(run_old(module), expected)
    given = old_inputs()
    _, states = module(*given)
    assert [state.data_ptr() for state in states[:4]] == [p.data_ptr() for p in given[:4]]
    module.flush()


def test_collectives_that_the_next_iteration_waits_for_have_no_block_and_the_others_have() -> None:
    module = IterGraphModule(old_graph(outputs=False))
    remove_copy_from_optimizer(module)
    blocks = get_all_comm_blocks(module, "all_reduce")  # type: ignore[arg-type]
    assert len(blocks) == 4
    iter_move_grads_and_optimizers(module, blocks[0].comm_node.name, "mul_tensor")
    left = get_all_comm_blocks(module, "all_reduce")  # type: ignore[arg-type]
    assert [block.comm_node for block in left] == [block.comm_node for block in blocks[1:]]


@pytest.mark.parametrize("way", ["overlap", "one by one"])
def test_moves_that_are_marked_in_a_graph_module_are_made_by_its_iter_graph_module(way: str) -> None:
    gm = old_graph(outputs=False)
    expected = run_old(copy.deepcopy(gm))
    remove_copy_from_optimizer(gm)
    if way == "overlap":
        overlap_optimizer_with_next_forward(gm)
    else:
        for block in get_all_comm_blocks(gm, "all_reduce")[:2]:
            iter_move_grads_and_optimizers(gm, block.comm_node.name, "mul_tensor")
    assert same(run_old(copy.deepcopy(gm)), expected)  # the marked graph computes what it did
    module = IterGraphModule(gm)
    assert len(module.graph.moves) == (4 if way == "overlap" else 2)
    assert same(run_old(module), expected)


def test_a_reduction_that_the_user_gets_says_what_to_do() -> None:
    gm = old_graph(outputs=False)
    output = gm.graph.output_node()
    block = get_all_comm_blocks(gm, "all_reduce")[0]
    output.args = ((*output.args[0], block.wait_nodes[0]),)  # type: ignore[misc]
    module = IterGraphModule(gm)
    remove_copy_from_optimizer(module)
    with pytest.raises(
        IterMoveError, match=r"cannot be completed in the next[\s\S]*overlap_optimizer_with_next_forward"
    ):
        iter_move_grads_and_optimizers(module, block.comm_node.name, "mul_tensor")
