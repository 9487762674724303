"""The public surface: compile, capture, the compiled step and the StepGraph."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import fx, nn

import wholestep as ws
from cases.huggingface import hugging_face_step, language_model
from cases.parts import adamw, mlp, plain_run, train_step
from cases.precision import scaler_for
from harness import Run, assert_frames_equal, batch_of, bits_of, device, frame, freeze, marked_line, play

ROOT = Path(__file__).parents[2]


def small_run() -> Run:
    model = mlp(device(), dropout=0.2)
    return plain_run(device(), model, adamw(model))


def test_compile_is_a_decorator_with_and_without_options() -> None:
    @ws.compile
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @ws.compile(max_recompiles=3, verify=1)
    def with_options(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = batch_of(device(), 0, 3)
    assert torch.equal(plain(x), x * 2)
    assert torch.equal(with_options(x), x * 2)


def test_a_compiled_step_has_the_name_text_and_signature_of_the_function() -> None:
    step = ws.compile(train_step)
    assert step.__name__ == "train_step"
    assert step.__doc__ == train_step.__doc__
    assert inspect.signature(step) == inspect.signature(train_step)


def test_nothing_is_captured_before_the_first_call() -> None:
    step = ws.compile(train_step)
    assert list(step.graphs) == []
    assert step.last is None
    assert list(step.recompiles) == []


def test_graphs_last_and_recompiles_tell_what_ran() -> None:
    run = small_run()
    step = ws.compile(run.step)
    step(*run.arguments(0))
    assert len(step.graphs) == 1
    first = step.last
    assert first is step.graphs[0]
    assert list(step.recompiles) == []
    step(*run.arguments(1))
    assert len(step.graphs) == 2
    assert step.last is step.graphs[1]
    assert len(step.recompiles) == 1
    assert "optimizer" in str(step.recompiles[0])
    step(*run.arguments(2))
    assert len(step.graphs) == 2
    assert step.last is step.graphs[1]
    assert all(isinstance(graph, ws.StepGraph) for graph in step.graphs)
    assert step.capture_seconds


def test_a_replay_runs_none_of_the_users_python() -> None:
    run = small_run()
    step = ws.compile(run.step)
    play(run, step, 2)
    entered: list[str] = []

    def watch(python_frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            entered.append(python_frame.f_code.co_filename + ":" + python_frame.f_code.co_name)

    arguments = run.arguments(2)
    sys.setprofile(watch)
    try:
        step(*arguments)
    finally:
        sys.setprofile(None)
    assert not [name for name in entered if name.endswith("parts.py:train_step")]
    assert not [name for name in entered if "torch/nn/modules" in name and name.endswith(":forward")]
    assert not [name for name in entered if "torch/optim" in name and name.endswith(":step")]


@pytest.mark.parametrize("options", [{"colour": "blue"}, {"max_recompile": 3}], ids=str)
def test_an_unknown_option_raises_and_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ws.errors.OptionError, match=r"\[WS-OPTION\]") as caught:
        ws.compile(train_step, **options)
    assert next(iter(options)) in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"lower": "fast"},
        {"lower_options": {"minimum": 3}},
        {"cuda_graph": "maybe"},
        {"passes": ["bucket"]},
        {"parallel": "everything"},
        {"verify": 99},
        {"verify": "yes"},
        {"max_recompiles": -1},
        {"dynamic": 3},
        {"dynamic": {"batch": 3}},
        {"hooks": "maybe"},
    ],
    ids=str,
)
def test_a_value_that_an_option_does_not_take_raises_a_clear_error(options: dict[str, Any]) -> None:
    with pytest.raises(ws.errors.OptionError, match=r"\[WS-OPTION\]") as caught:
        ws.compile(train_step, **options)
    assert next(iter(options)) in str(caught.value)
    assert caught.value.fix


def test_options_raise_before_the_decorated_function_is_known() -> None:
    with pytest.raises(ws.errors.OptionError):
        ws.compile(lower="fast")


@pytest.mark.parametrize(("low", "high"), [(5, 2), (-1, 4)])
def test_a_dimension_with_an_impossible_range_raises(low: int, high: int) -> None:
    with pytest.raises(ws.errors.WholestepError):
        ws.Dim(min=low, max=high)


@pytest.mark.parametrize("verify", [0, 1])
def test_every_level_of_verification_trains_alike(verify: int) -> None:
    torch.manual_seed(3)
    run = small_run()
    expected = play(run, run.step, 3)
    torch.manual_seed(3)
    run = small_run()
    assert_frames_equal(expected, play(run, ws.compile(run.step, verify=verify), 3))


class Everything(nn.Module):
    """Weights, a buffer that is written, a buffer that is rebound, random numbers, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        out = nn.functional.dropout(self.norm(self.inner(x)), 0.5)
        self.last = out.detach().mean(0)
        return out


def versions(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    return [(t._version, t.data_ptr()) for t in tensors]


def test_capture_executes_nothing_and_changes_nothing() -> None:
    model = Everything()
    optimizer = adamw(model)
    scaler = scaler_for(device())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    generator = torch.Generator().manual_seed(1)
    x = batch_of(device(), 0, 5, 6)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * torch.rand(8, generator=generator)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return loss

    watch = {"model": model, "optimizer": optimizer, "scaler": scaler, "schedule": schedule, "generator": generator}
    tensors = [x, *model.parameters(), *model.buffers()]
    before, counted = frame("before", None, watch, x), versions(*tensors)
    buffers = dict(model.named_buffers())
    graph = ws.capture(step, x)
    assert isinstance(graph, ws.StepGraph)
    assert_frames_equal([before], [frame("after", None, watch, x)])
    assert versions(*tensors) == counted
    assert len(optimizer.state) == 0
    assert all(p.grad is None for p in model.parameters())
    assert scaler.state_dict() == scaler_for(device()).state_dict()
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_capture_of_a_step_in_mid_training_changes_nothing() -> None:
    run = small_run()
    play(run, run.step, 2)
    model, optimizer = run.watch["model"], run.watch["optimizer"]
    model(batch_of(device(), 9, 5, 6)).sum().backward()
    state = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    before, counted = frame("before", None, run.watch), versions(*state)
    ws.capture(run.step, *run.arguments(2))
    assert_frames_equal([before], [frame("after", None, run.watch)])
    assert versions(*state) == counted


def test_capture_gives_the_graph_that_compile_runs() -> None:
    run = small_run()
    captured = ws.capture(run.step, *run.arguments(0))
    step = ws.compile(run.step)
    step(*run.arguments(0))
    assert captured.fingerprint() == step.graphs[0].fingerprint()


def test_the_graph_module_is_functional_but_for_one_epilogue_of_copies() -> None:
    run = small_run()
    play(run, run.step, 1)
    graph = ws.capture(run.step, *run.arguments(1))
    assert isinstance(graph.gm, fx.GraphModule)
    nodes = [node for node in graph.gm.graph.nodes if node.op == "call_function"]
    copies = [node for node in nodes if node.target is torch.ops.aten.copy_.default]
    assert copies
    assert nodes[-len(copies) :] == copies
    assert len(graph.signature.write_backs) == len(copies)
    written = [n for n in nodes if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]
    assert set(written) == set(copies)
    graph.gm.graph.lint()


def test_the_signature_says_what_every_input_is() -> None:
    run = small_run()
    play(run, run.step, 1)
    graph = ws.capture(run.step, *run.arguments(1))
    placeholders = [node.name for node in graph.gm.graph.nodes if node.op == "placeholder"]
    assert [spec.name for spec in graph.signature.inputs] == placeholders
    paths = {spec.kind.value: [] for spec in graph.signature.inputs}
    for spec in graph.signature.inputs:
        paths[spec.kind.value].append(spec.path)
    assert len(paths["parameter"]) == 4
    assert any("0.weight" in path or "[0].weight" in path for path in paths["parameter"])
    assert len(paths["optimizer_state"]) == 12
    assert any("exp_avg_sq" in path for path in paths["optimizer_state"])
    assert any("lr" in path for path in paths["hyper_parameter"])
    assert paths["batch"] == ["x"]
    assert "gradient" not in paths


def test_the_first_graph_creates_the_optimizer_state_and_the_second_writes_it() -> None:
    run = small_run()
    step = ws.compile(run.step)
    play(run, step, 2)
    created = [change for change in step.graphs[0].signature.state_changes if change.kind.value == "created"]
    assert any("exp_avg" in change.path for change in created)
    assert not [change for change in step.graphs[1].signature.state_changes if change.kind.value == "created"]


def forward_and_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(model(x)).mean()  # <- here


def test_readable_text_shows_the_users_line_and_the_path_of_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential()
    model.add_module("encoder", nn.Sequential(nn.Linear(6, 8), nn.Tanh()))
    model.add_module("head", nn.Linear(8, 2))
    text = ws.capture(forward_and_loss, model, batch_of(device(), 0, 5, 6)).print_readable()
    text = text or capsys.readouterr().out
    assert f"test_compiled_step.py:{marked_line(forward_and_loss)}" in text
    assert "encoder.0" in text
    assert "head" in text
    assert "def " in text


def input_values(graph: Any) -> list[Any]:
    """Something of the right kind for every input of a graph."""
    generator = torch.Generator().manual_seed(5)
    values: list[Any] = []
    for spec in graph.signature.inputs:
        if spec.tensor is None:
            values.append(0.5)
            continue
        dtype = getattr(torch, spec.tensor.dtype.removeprefix("torch."))
        if dtype.is_floating_point:
            values.append(torch.rand(spec.tensor.shape, generator=generator).to(dtype) + 0.1)
        else:
            values.append(torch.randint(3, spec.tensor.shape, generator=generator).to(dtype))
    return values


def graph_of_gpt2() -> Any:
    model = language_model("GPT2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(18).view(2, 9)
    batch = {"input_ids": ids, "labels": ids.clone()}
    hugging_face_step(model, optimizer, batch)
    return ws.capture(hugging_face_step, model, optimizer, batch)


def test_a_captured_gpt2_step_goes_through_json_and_runs_equal() -> None:
    graph = graph_of_gpt2()
    text = graph.to_json()
    json.loads(text)
    loaded = ws.StepGraph.from_json(text)
    assert loaded.to_json() == text
    assert loaded.fingerprint() == graph.fingerprint()
    assert loaded.signature == graph.signature
    ours, theirs = input_values(graph), input_values(graph)
    expected, actual = graph.gm(*ours), loaded.gm(*theirs)
    for want, got in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
        assert freeze(want) == freeze(got)
    for want, got in zip(ours, theirs, strict=True):
        assert freeze(want) == freeze(got)
    weight = next(i for i, spec in enumerate(graph.signature.inputs) if spec.kind.value == "parameter")
    assert bits_of(ours[weight]) != bits_of(input_values(graph)[weight])


def test_a_json_graph_that_names_another_function_is_not_read() -> None:
    run = small_run()
    text = ws.capture(run.step, *run.arguments(0)).to_json()
    assert "aten::addmm" in text
    with pytest.raises(ws.errors.GraphFormatError, match=r"\[WS-FORMAT\]"):
        ws.StepGraph.from_json(text.replace("aten::addmm", "os::system"))


def test_two_captures_of_one_step_have_one_fingerprint_and_another_step_has_another() -> None:
    run, other = small_run(), small_run()
    first = ws.capture(run.step, *run.arguments(0)).fingerprint()
    assert ws.capture(run.step, *run.arguments(1)).fingerprint() == first
    assert ws.capture(other.step, *other.arguments(0)).fingerprint() == first
    play(run, run.step, 1)
    assert ws.capture(run.step, *run.arguments(0)).fingerprint() != first
    model = mlp(device())
    assert ws.capture(train_step, model, adamw(model), batch_of(device(), 0, 5, 6)).fingerprint() != first


FINGERPRINT = """
import torch
import wholestep as ws
from cases.parts import adamw, train_step
torch.manual_seed(0)
model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
print(ws.capture(train_step, model, adamw(model), torch.ones(2, 3, 8)).fingerprint())
"""


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    said = subprocess.run(
        [sys.executable, "-c", FINGERPRINT],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    ).stdout.strip()
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert said == ws.capture(train_step, model, adamw(model), torch.ones(2, 3, 8)).fingerprint()


def test_the_public_names_are_there() -> None:
    for name in ("compile", "capture", "CompiledStep", "StepGraph", "Dim", "errors"):
        assert hasattr(ws, name), name
    assert isinstance(ws.compile(train_step), ws.CompiledStep)


@pytest.mark.compiles
def test_a_step_called_under_torch_compile_is_not_looked_into() -> None:
    model = nn.Linear(3, 1)
    step = ws.compile(lambda x: model(x).sum().detach(), lower="eager")
    outer = torch.compile(lambda x: step(x * 2) + 1, backend="eager")
    for x in (torch.ones(3), torch.randn(3)):
        torch.testing.assert_close(outer(x), model(x * 2).sum() + 1)
    assert len(step.recompiles) == 0


def test_a_step_inside_of_a_transform_is_refused() -> None:
    step = ws.compile(lambda x: x.sin().sum())
    with pytest.raises(ws.errors.UnsupportedError, match=r"x belongs to a torch.func transform"):
        torch.vmap(step)(torch.ones(2, 3))
    assert step(torch.ones(3)).shape == ()
