"""Compilers take the graph of a whole step, and a compiled step can run under the debug interpreter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from cases.parts import train_step
from wholestep.errors import DebugError, OptionError
from wholestep.ir.io.dump import random_input, record_of


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(6, 4)


def test_a_step_under_the_debug_interpreter_trains_to_the_bit_as_eager_does() -> None:
    results = []
    for make in (lambda f: f, lambda f: ws.compile(f, lower="debug")):
        model, optimizer, x = parts()
        step: Any = make(train_step)
        torch.manual_seed(5)
        losses = [step(model, optimizer, x) for _ in range(3)]
        results.append([*losses, *model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [(torch.float16, partial(torch.optim.AdamW, eps=1e-3)), (torch.bfloat16, torch.optim.Adafactor)],
    ids=["float16", "bfloat16"],
)
def test_half_precision_is_rounded_as_by_in_place_operators_of_eager(dtype: torch.dtype, optimizer: Any) -> None:
    results = []
    for make in (lambda f: f, lambda f: ws.compile(f, lower="debug")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
        chosen = optimizer(model.parameters(), lr=0.01, foreach=True)
        step: Any = make(train_step)
        losses = [step(model, chosen, torch.randn(16, 8, dtype=dtype)) for _ in range(5)]
        results.append([*losses, *model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_updates_that_cross_iterations_are_checked_too() -> None:
    results = []
    for make in (
        lambda f: f,
        lambda f: ws.compile(f, lower="debug", passes=["overlap_optimizer_with_next_forward"]),
    ):
        model, optimizer, x = parts()
        step: Any = make(train_step)
        torch.manual_seed(5)
        losses = [step(model, optimizer, x) for _ in range(3)]
        results.append([*losses, *model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_pass_that_leaves_wrong_metadata_is_found_when_the_step_runs() -> None:
    @ws.passes.graph_optimization_pass(numerics="changes")
    def lies(gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten.addmm.default:
                with node.meta["val"].fake_mode:
                    node.meta["val"] = node.meta["val"].double()
                return

    model, optimizer, x = parts()
    step = ws.compile(train_step, lower="debug", passes=[lies], verify=0)
    with pytest.raises(DebugError, match=r"(?s)addmm.*dtype is torch.float32, metadata says torch.float64.*"):
        step(model, optimizer, x)


def test_an_unknown_way_to_lower_says_which_there_are() -> None:
    with pytest.raises(OptionError, match='"debug"'):
        ws.compile(train_step, lower="interpreted")


def step_and_inputs() -> tuple[ws.StepGraph, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    found = ws.capture(step, model, torch.randn(6, 4))
    generator = torch.Generator().manual_seed(0)
    nodes = found.gm.graph.find_nodes(op="placeholder")
    return found, [random_input(record_of(node.meta["val"], node.name), None, generator).detach() for node in nodes]


@pytest.mark.parametrize("name", ["nop", "print_compile", "ts_compile", "simple_ts_compile", "debug_nop"])
def test_a_compiler_takes_a_step_graph(name: str) -> None:
    graph, inputs = step_and_inputs()
    expected = graph.gm(*inputs)
    found = getattr(ws.compilers, name)(graph, inputs)(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_step_graph_is_dumped_with_the_paths_of_its_inputs(tmp_path: Path) -> None:
    graph, inputs = step_and_inputs()
    ws.compilers.debug_compile(graph, inputs, folder=tmp_path, name="step")(*inputs)
    dump = ws.compilers.read_dump(tmp_path / "step_0")
    assert [record.path for record in dump.records] == [spec.path for spec in graph.signature.inputs]
    assert dump.step_graph is not None
    assert all(torch.equal(a, b) for a, b in zip(graph.gm(*inputs), dump.step_graph.gm(*dump.inputs), strict=True))
