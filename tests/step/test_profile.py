"""`step.profile` measures real steps, restores all state, and gives what calibration and traces take."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import wholestep as ws
from wholestep.simulate.measured_step import RANGE, kernel_spans


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses: list[float] = []
        self.calls = 0

    def step(self, batch: Tensor) -> Tensor:
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.calls += 1
        self.losses.append(loss.item())
        return loss.detach()


class CompiledTrainer(Trainer):
    step = ws.compile(Trainer.step, lower="eager")


def state(trainer: Trainer) -> Any:
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    moments = [value.clone() for each in trainer.optimizer.state.values() for value in each.values()]
    return [*weights, *moments, torch.get_rng_state()], list(trainer.losses), trainer.calls, random.getstate()


def same(one: Any, other: Any) -> bool:
    return len(one[0]) == len(other[0]) and all(map(torch.equal, one[0], other[0])) and one[1:] == other[1:]


BATCH = torch.ones(8, 16)


def test_all_state_is_restored_and_training_continues_as_without_a_profile() -> None:
    torch.manual_seed(0)
    plain = CompiledTrainer()
    expected = [plain.step(BATCH) for _ in range(3)]
    torch.manual_seed(0)
    trainer = CompiledTrainer()
    before = state(trainer)
    trainer.step.profile(BATCH, steps=2)
    assert same(before, state(trainer))
    got = [trainer.step(BATCH)]
    between = state(trainer)
    measured = trainer.step.profile(BATCH, steps=2)
    assert same(between, state(trainer))
    got += [trainer.step(BATCH) for _ in range(2)]
    assert all(map(torch.equal, expected, got))
    assert measured.name == "Trainer.step"


def test_every_operator_has_a_time_in_every_run_and_the_table_says_where_time_goes() -> None:
    trainer = CompiledTrainer()
    measured = trainer.step.profile(BATCH, steps=3)
    ran = [node.name for node in CompiledTrainer.step.executable.graph.nodes if node.op == "call_function"]
    assert [row.name for row in measured.measured] == ran
    assert {len(row.runs) for row in measured.measured} == {3}
    assert len(measured.step_runs) == len(measured.timed_runs) == 3
    assert {"forward", "backward", "optimizer"} <= set(measured.by("phase"))
    assert {"self.model.0", "self.model.3"} <= set(measured.by("module_path"))
    assert sum(us for us, _ in measured.by("what").values()) == pytest.approx(measured.nodes_us)
    assert any("test_profile.py" in row.line for row in measured.measured)
    text = str(measured)
    assert "lower='eager': 3 steps" in text
    assert "aten.addmm.default" in text
    json.dumps(measured.as_data())


def test_the_profile_calibrates_a_machine_and_is_drawn_beside_the_prediction(tmp_path: Path) -> None:
    trainer = CompiledTrainer()
    measured = trainer.step.profile(BATCH, steps=2)
    graph = CompiledTrainer.step.last
    machine = ws.simulate.calibrate(ws.simulate.CPU, measured)
    assert "aten::addmm" in machine.correction
    timeline = ws.simulate.step(graph, machine=machine)
    products = {row.name: row.us for row in measured.measured if row.what == "aten.mm.default"}
    predicted = sum(timeline.span(name).us for name in products)
    assert predicted == pytest.approx(sum(products.values()), rel=1e-6)
    timeline.perfetto(tmp_path / "step.json", measured=measured)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    drawn = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1}
    assert drawn == {row.name for row in measured.measured}
    product = next(event for event in events if event["name"].startswith("addmm") and event["pid"] == 1)
    assert product["args"]["module"] in ("self.model.0", "self.model.3")
    assert product["args"]["operator"] == "addmm"
    assert "test_profile.py" in product["args"]["line"]
    again = ws.simulate.StepProfile.from_json(measured.to_json())
    assert ws.simulate.calibrate(ws.simulate.CPU, again).correction == machine.correction


def test_a_call_that_runs_in_eager_is_refused_and_nothing_changed() -> None:
    weight = torch.ones(2)

    def step(x: Tensor) -> Tensor:
        return weight.mul_(2) + x.sum()

    compiled = ws.compile(step, lower="eager")
    refused = pytest.raises(ws.WholestepError, match="the call ran in eager")
    with FlopCounterMode(display=False), pytest.warns(ws.EagerWarning), refused:
        compiled.profile(BATCH)
    assert torch.equal(weight, torch.ones(2))


def test_steps_must_be_a_whole_number() -> None:
    with pytest.raises(ws.WholestepError, match="steps=0"):
        ws.compile(lambda x: x + 1, lower="eager").profile(BATCH, steps=0)


def test_kernels_belong_to_the_range_around_their_launch() -> None:
    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, correlation: int = 0) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid} | {
            "args": {"correlation": correlation}
        }

    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            event("user_annotation", RANGE + "mm", 10, 5),
            event("user_annotation", RANGE + "add", 16, 4),
            event("user_annotation", "the user's own", 9, 50),
            event("cuda_runtime", "cudaLaunchKernel", 12, 1, correlation=7),
            event("cuda_runtime", "cudaLaunchKernel", 14, 1, correlation=8),
            event("cuda_runtime", "cudaLaunchKernel", 17, 1, correlation=9),
            event("cuda_driver", "cuLaunchKernel", 17, 1, tid=2, correlation=10),
            event("kernel", "gemm", 40, 10, 99, 7),
            event("kernel", "splitk", 50, 2, 99, 8),
            event("gpu_memset", "Memset", 52, 3, 99, 9),
            event("kernel", "of another thread", 55, 1, 99, 10),
        ]
    }
    assert kernel_spans(json.dumps(trace)) == {"mm": [(40, 50), (50, 52)], "add": [(52, 55)], "": [(55, 56)]}
