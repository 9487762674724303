"""The stages of a step as public functions: what each returns can be held, and `ws.compile` is their composition."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep import api, compiled_step, step
from wholestep.ir.step_graph import StepGraph
from wholestep.passes import run_passes


class Training:
    """A model with an optimizer that creates state in its first step."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.step = ws.compile(self.train_step, **options)

    def train_step(self, batch: Tensor) -> Tensor:
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def batch(rows: int = 5) -> Tensor:
    return torch.arange(rows * 6.0).reshape(rows, 6) / 10


def test_capture_and_build_compose_to_what_compile_does() -> None:
    compiled, staged = Training(lower="eager"), Training()
    for _ in range(2):  # the first graph creates optimizer state
        graph = ws.capture(staged.train_step, batch())
        executable = ws.build(graph, lower="eager")
        assert torch.equal(executable(batch()), compiled.step(batch()))
        assert graph.fingerprint() == compiled.step.last.fingerprint()
    assert torch.equal(executable(batch()), compiled.step(batch()))
    for mine, theirs in zip(staged.state(), compiled.state(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_build_makes_of_a_captured_graph_is_what_compile_runs() -> None:
    for options in ({"lower": "eager"}, {"lower": "eager", "memory_budget": 0.0}):
        compiled, staged = Training(**options), Training()
        for training in (compiled, staged):
            training.train_step(batch())
        compiled.step(batch())
        executable = ws.build(ws.capture(staged.train_step, batch()), **options)
        assert executable.graph_module.code == compiled.step.executable.code


def test_capture_build_and_compile_are_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    whole = step.compile_step

    def noted(start: Any, *rest: Any, **named: Any) -> Any:
        made = whole(start, *rest, **named)
        seen.append((type(start).__name__, type(made).__name__))
        return made

    for module in (step, compiled_step, api):
        monkeypatch.setattr(module, "compile_step", noted)
    training = Training(lower="eager")
    ws.build(ws.capture(training.train_step, batch()), lower="eager")
    training.step(batch())
    assert seen == [("StepCall", "BoundGraph"), ("BoundGraph", "Executable")] * 2


def test_capturing_and_building_change_nothing() -> None:
    training = Training()
    before = training.state()
    ws.build(ws.capture(training.train_step, batch()), lower="eager")
    assert not training.optimizer.state
    for now, then in zip(training.state(), before, strict=True):
        assert torch.equal(now, then)


def test_an_executable_raises_with_the_guard_that_failed_and_changes_nothing() -> None:
    training = Training()
    executable = ws.build(ws.capture(training.train_step, batch()), lower="eager")
    before = training.state()
    with pytest.raises(ws.errors.GuardError, match="size"):
        executable(batch(rows=7))
    executable(batch())
    with pytest.raises(ws.errors.GuardError, match="has state for 4 parameters instead of 0"):
        executable(batch())
    assert not torch.equal(training.state()[0], before[0])


def test_one_graph_builds_many_executables_and_stays_as_it_is() -> None:
    training = Training()
    training.train_step(batch())
    graph = ws.capture(training.train_step, batch())
    before = graph.print_readable(print_output=False)
    executables = [ws.build(graph, lower="eager"), ws.build(graph, lower="eager", memory_budget=0.0)]
    for executable in executables:
        eager = Training()
        eager.train_step(batch())
        with torch.no_grad():
            for mine, theirs in zip(training.model.parameters(), eager.model.parameters(), strict=True):
                mine.copy_(theirs)
        training.optimizer.load_state_dict(copy.deepcopy(eager.optimizer.state_dict()))
        assert torch.equal(executable(batch()), eager.train_step(batch()))
        assert torch.equal(training.state()[0], eager.state()[0])
    assert graph.print_readable(print_output=False) == before


def test_a_pass_between_capture_and_build_is_in_what_runs() -> None:
    training = Training()
    graph = ws.capture(training.train_step, batch())
    seen: list[int] = []

    @ws.passes.graph_optimization_pass(numerics="exact")
    def count_nodes(gm: torch.fx.GraphModule) -> None:
        seen.append(len(gm.graph.nodes))

    run_passes(graph, [count_nodes])
    executable = ws.build(graph, lower="eager")
    assert seen
    assert ws.passes.applied_passes(executable.step_graph.gm) == ("count_nodes",)


def test_a_graph_from_a_file_cannot_be_built() -> None:
    training = Training()
    read = StepGraph.from_json(ws.capture(training.train_step, batch()).to_json())
    with pytest.raises(ws.errors.OptionError, match="not bound to a model"):
        ws.build(read)


def test_capture_of_a_compiled_step_has_its_options() -> None:
    training = Training(lower="eager", dynamic={"batch": {0: ws.Dim(min=2, max=16)}})
    executable = ws.build(ws.capture(training.step, batch()), lower="eager")
    eager = Training()
    assert torch.equal(executable(batch(rows=9)), eager.train_step(batch(rows=9)))
    assert list(training.step.capture(batch()).signature.dynamic.values()) == [(2, 16)]


def test_an_executable_refuses_modes_that_act_on_the_operators_of_eager() -> None:
    training = Training()
    executable = ws.build(ws.capture(training.train_step, batch()), lower="eager")
    before = training.state()
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(ws.errors.UnsupportedError, match="is active around"),
    ):
        executable(batch())
    with pytest.raises(ws.errors.UnsupportedError, match="the capture of another step"):
        ws.compile(lambda x: executable(x), lower="eager")(batch())
    for now, then in zip(training.state(), before, strict=True):
        assert torch.equal(now, then)
