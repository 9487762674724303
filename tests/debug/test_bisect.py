"""`ws.debug.bisect` names the part of the way, and the node, of bugs that were put there on purpose: 20 of 20."""

from __future__ import annotations

import copy
import importlib
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh

import wholestep as ws
from debug.graphs import die
from debug.seeded import (
    call_of,
    changes_a_constant,
    drops_a_wait,
    looks_around,
    seeded,
    swaps,
    targets,
    train_step,
    writes_wrong_meta,
)
from ranks import run_ranks
from wholestep.debug import bisect

aten = torch.ops.aten
MANY = {swaps: 6, changes_a_constant: 6, writes_wrong_meta: 4}
"""With the four waits below: twenty."""
BUGS = [
    pytest.param(bug, number, id=f"{bug.__name__}-{number}", marks=() if number in (0, many - 1) else pytest.mark.long)
    for bug, many in MANY.items()
    for number in range(many)
]


def step_with(*passes: Any, **options: Any) -> Any:
    return ws.compile(train_step, passes=list(passes), verify=0, **{"lower": "eager", **options})


def warm_call() -> tuple[Any, ...]:
    """Arguments of a call that is not the first: the optimizer has its state."""
    call = call_of()
    train_step(*call)
    return call


@cache
def names_for(bug: Any) -> list[str]:
    return targets(ws.capture(train_step, *warm_call()).gm.graph, bug)


def some(names: list[str], number: int, of: int) -> str:
    """One of the names, spread over all of them."""
    return names[number * len(names) // of]


@pytest.mark.parametrize(("bug", "number"), BUGS)
def test_a_bug_in_a_pass_is_localised_to_the_node(bug, number):
    name = some(names_for(bug), number, MANY[bug])
    passes: list[Any] = [looks_around, "remove_dead_collectives", looks_around]
    passes.insert(random.Random(number).randrange(4), seeded(bug, name))
    found = bisect(step_with(*passes), warm_call(), minimise=False, quiet=True)
    assert (found.stage, found.pass_name, found.node) == ("pass", "wrong_pass", name)


@ws.passes.graph_optimization_pass(numerics="exact")
def forgets_tanh(gm: fx.GraphModule) -> None:
    """A pass that drops a node."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.tanh.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def test_a_removed_node_is_shown_by_its_user():
    found = bisect(step_with(forgets_tanh), warm_call(), minimise=False, quiet=True)
    assert found.pass_name == "forgets_tanh"
    assert "tanh_default" in found.was
    assert "tanh_default" not in found.text
    assert found.text.startswith(found.node)
    assert f"before  {found.was}" in str(found)


@pytest.mark.parametrize("many", [1, pytest.param(4, marks=pytest.mark.long)])
def test_waits_that_were_dropped_are_found_on_two_ranks_by_both(many):
    def code(rank: int) -> list[tuple[str, str, str]]:
        call = call_of()
        plan = ws.Replicate(init_device_mesh("cpu", (2,)))
        right = step_with(parallel=plan)
        right(*call)
        right(*call)
        graph = right.last.gm.graph
        answers = []
        for name in targets(graph, drops_a_wait)[:many]:
            wait = next(node for node in graph.nodes if node.name == name)
            reader = next(node.name for node in graph.nodes if node in wait.users)
            step = step_with(looks_around, seeded(drops_a_wait, name), looks_around, parallel=plan)
            found = bisect(step, call, minimise=False, quiet=True)
            assert (found.stage, found.pass_name) == ("pass", "wrong_pass")
            answers.append((name, found.node, reader))
        return answers

    first, second = run_ranks(code, 2, deadline=60)
    assert first == second
    assert len(first) == many
    assert all(node == reader for _, node, reader in first)


def test_a_fault_on_one_rank_is_reported_by_all():
    def code(rank: int) -> tuple[str, str, str]:
        call = call_of()
        plan = ws.Replicate(init_device_mesh("cpu", (2,)))
        step_with(parallel=plan)(*call)
        bug = seeded(changes_a_constant, "mul_tensor") if rank == 1 else seeded(lambda gm, name: None, "")
        found = bisect(step_with(looks_around, bug, parallel=plan), call, quiet=True)
        return found.stage, found.pass_name, found.node

    assert run_ranks(code, 2, deadline=60) == [("pass", "wrong_pass", "mul_tensor")] * 2


@ws.passes.graph_optimization_pass(numerics="exact")
def square_is_cube(gm: fx.GraphModule) -> None:
    """A pass with a bug that a script can import."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        node.args = (node.args[0], 3)


def test_a_repro_with_the_pass_and_a_handful_of_nodes_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, square_is_cube.__module__, sys.modules[__name__])
    call = warm_call()
    before = copy.deepcopy([call[0].state_dict(), call[1].state_dict()])
    found = bisect(step_with(square_is_cube), call, folder=tmp_path)
    assert found.node == "pow_tensor_scalar"
    assert found.repro_path is not None
    text = Path(found.repro_path).read_text()
    assert text.count("torch.ops.aten") <= 2
    assert "pow.Tensor_Scalar" in text
    shown = capsys.readouterr().out
    assert "wrong   pass square_is_cube" in shown
    assert "pow_tensor_scalar" in shown
    torch.testing.assert_close([call[0].state_dict(), call[1].state_dict()], before, rtol=0, atol=0)


def test_a_step_that_kills_its_process_is_narrowed_to_the_node():
    def kills(gm: fx.GraphModule, name: str) -> None:
        node = next(node for node in gm.graph.nodes if node.name == name)
        node.target, node.args = die, node.args[:1]

    step = step_with(looks_around, seeded(kills, "tanh_default"))
    found = bisect(step, warm_call(), quiet=True)
    assert (found.stage, found.pass_name, found.node) == ("pass", "wrong_pass", "tanh_default")
    assert "SIGSEGV" in found.what
    assert found.repro_path is not None


def test_a_region_that_kills_its_process_is_named(monkeypatch):
    def compile_deadly(retraced: Any, config: Any) -> Any:
        return lambda tensors: die(tensors[0])

    monkeypatch.setattr(importlib.import_module("wholestep.lower.partial_lower"), "compile_whole", compile_deadly)
    step = step_with(lower="inductor", lower_options={"remat": False, "min_aten_ops": 1})
    found = bisect(step, warm_call(), quiet=True, minimise=False)
    assert (found.stage, found.region) == ("lowering", "subgraph_0")
    assert "SIGSEGV" in found.what


def test_a_pass_that_raises_is_named():
    def raises(gm: fx.GraphModule, name: str) -> None:
        raise KeyError("nothing there")

    found = bisect(step_with(looks_around, seeded(raises, ""), looks_around), warm_call(), quiet=True, minimise=False)
    assert (found.stage, found.pass_name) == ("pass", "wrong_pass")
    assert "nothing there" in found.what


def test_a_correct_step_has_no_finding(capsys):
    call = warm_call()
    step = step_with(looks_around)
    step(*call)
    found = bisect(step, call)
    assert not found
    assert found.stage == "nothing"
    assert found.guard_key == 0
    assert "nothing is wrong" in capsys.readouterr().out


@torch.library.custom_op("wholestep_tests::rows", mutates_args=())
def rows(x: Tensor) -> Tensor:
    """All rows but the last, which its metadata do not say."""
    return x[:-1].clone()


@rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_with_wrong_metadata_is_found_in_the_captured_graph():
    def forward(x: Tensor) -> Tensor:
        return rows(x.cos() * 2).sin().sum()

    found = bisect(ws.compile(forward, lower="eager"), (torch.randn(4, 3),), quiet=True)
    assert found.stage == "capture"
    assert "rows" in found.text
    assert "(3, 3)" in found.what
    assert found.repro_path is not None


@torch.library.custom_op("wholestep_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """A copy with other strides than its metadata say."""
    return x.t().contiguous().t()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_with_wrong_strides_in_its_metadata_is_named():
    found = bisect(
        ws.compile(lambda x: turned(x.cos() * 2).sin().sum(), lower="eager"),
        (torch.randn(4, 3),),
        quiet=True,
        minimise=False,
    )
    assert (found.stage, found.node) == ("capture", "turned_default")
    assert "stride" in found.what


def test_fewer_roundings_of_half_precision_are_not_a_fault(monkeypatch):
    """Norms on the CPU keep statistics in float32, which their metadata do not say; Inductor skips roundings."""

    def rounds_elsewhere(retraced: Any, config: Any) -> Any:
        return lambda tensors: [value * (1 + 2**-10) for value in retraced.gm(*tensors)]

    def step(model: torch.nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().pow(2).mean()

    monkeypatch.setattr(importlib.import_module("wholestep.lower.partial_lower"), "compile_whole", rounds_elsewhere)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    lowered = ws.compile(step, lower="inductor", lower_options={"remat": False, "min_aten_ops": 1})
    assert bisect(lowered, (model, torch.randn(8, 4)), quiet=True).stage == "nothing"


@pytest.mark.long  # a region that raises, below, is found in the same way
def test_a_miscompiled_region_is_found_and_minimised(monkeypatch):
    def compile_wrong(retraced: Any, config: Any) -> Any:
        gm = copy.deepcopy(retraced.gm)
        for node in gm.graph.nodes:
            if node.target is aten.tanh.default:
                node.target = aten.sigmoid.default
        gm.recompile()
        return lambda tensors: gm(*tensors)

    monkeypatch.setattr(importlib.import_module("wholestep.lower.partial_lower"), "compile_whole", compile_wrong)
    call = warm_call()
    step = step_with(lower="inductor", lower_options={"remat": False, "min_aten_ops": 1})
    found = bisect(step, call, quiet=True)
    assert found.stage == "lowering"
    assert found.region.startswith("subgraph_")
    assert found.node == "tanh_default"
    assert found.repro_path is not None


def refuses(x: Tensor) -> Tensor:
    raise ArithmeticError("not today")


@pytest.mark.parametrize(
    ("old", "new", "node"),
    [
        pytest.param(aten.rsqrt.default, aten.sqrt.default, "native_layer_norm_default", marks=pytest.mark.long),
        (aten.tanh.default, refuses, "tanh_default"),
    ],
)
def test_the_operator_is_named_where_one_of_its_results_is_wrong_or_a_region_raises(monkeypatch, old, new, node):
    def compile_wrong(retraced: Any, config: Any) -> Any:
        gm = copy.deepcopy(retraced.gm)
        for each in gm.graph.find_nodes(op="call_function", target=old):
            each.target = new
        gm.recompile()
        return lambda tensors: gm(*tensors)

    def step(model: torch.nn.Module, x: Tensor) -> Tensor:
        return model(x * 2).sin().mul(3).sum()

    monkeypatch.setattr(importlib.import_module("wholestep.lower.partial_lower"), "compile_whole", compile_wrong)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.LayerNorm(4))
    lowered = ws.compile(step, lower="inductor", lower_options={"remat": False, "min_aten_ops": 1})
    found = bisect(lowered, (model, torch.randn(3, 4)), quiet=True)
    assert (found.stage, found.region, found.node) == ("lowering", "subgraph_0", node)
    assert found.text.startswith(f"{node} = aten.")


def test_a_cached_graph_that_is_wrong_for_a_call_is_found():
    call = warm_call()
    step = step_with()
    step(*call)
    changes_a_constant(step.graphs[0].gm, "mul_tensor")
    found = bisect(step, call, quiet=True)
    assert (found.stage, found.guard_key, found.node) == ("guard", 0, "mul_tensor")


def test_a_plain_function_is_refused():
    with pytest.raises(ws.errors.BisectError, match="not a compiled step"):
        bisect(train_step, call_of())
