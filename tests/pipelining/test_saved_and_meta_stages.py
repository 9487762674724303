"""Stages without the model: in files, on other devices, and of meta or fake models."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from pipelining.models import CASES, UNet, gpt2, make, numbers, tokens
from pipelining.test_regions_and_modes import Blocks
from ranks import run_ranks
from wholestep.errors import GraphFormatError, PipelineError, StageError
from wholestep.ir.io.tensor_file import read_tensors
from wholestep.pipelining import Pipe, SplitPoint, load_stage, pipe_split, pipeline, save_stage
from wholestep.pipelining.run.save_stage import read_stage, write_stage
from wholestep.torch_private.fake_tensors import FakeTensorMode


def run(stages: list[Any], values: Any) -> Any:
    for stage in stages:
        result = stage(*values)
        values = result if isinstance(result, tuple) else (result,)
    return values


def loaded(pipe: Pipe, folder: Any) -> list[Any]:
    for i, stage in enumerate(pipe.stages):
        save_stage(stage, folder / str(i))
    return [load_stage(folder / str(i)) for i in range(pipe.num_stages)]


def assert_same_stages(stages: list[Any], pipe: Pipe, flat: list[torch.Tensor]) -> None:
    for training in (False, True):
        for stage in (*stages, *pipe.stages):
            stage.train(training)
        torch.manual_seed(1)
        wanted = run(pipe.stages, flat)
        torch.manual_seed(1)
        found = run(stages, flat)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["unet", "in_place"])
def test_a_saved_stage_loads_with_both_modes(name, tmp_path):
    model, args, kwargs = make(name)
    pipe = pipeline(model, args, kwargs, split_spec=CASES[name].split)
    stages = loaded(pipe, tmp_path)
    for mine, theirs in zip(stages, pipe.stages, strict=True):
        assert list(mine.state_dict()) == list(theirs.state_dict())
        assert mine.print_readable(print_output=False).count("aten") > 0
    assert_same_stages(stages, pipe, pipe.flatten_inputs(args, kwargs))
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["stage.json", "stage.safetensors"]


def test_regions_tied_names_and_non_persistent_buffers_round_trip(tmp_path):
    model = Blocks()
    model.a.weight = model.b.weight
    model.register_buffer("shift", torch.ones(8), persistent=False)
    x = numbers(4, 8)
    pipe = pipeline(model, (x,))
    stages = loaded(pipe, tmp_path)
    assert_same_stages(stages, pipe, [x])
    named = dict(stages[0].named_parameters(remove_duplicate=False))
    assert named["a.weight"] is named["b.weight"]
    assert "shift" not in stages[0].state_dict()
    assert "shift" in dict(stages[0].named_buffers())
    assert len(read_tensors(tmp_path / "0" / "stage.safetensors")) == 3


def test_a_stage_refuses_pickling_and_a_pipe_can_be_copied():
    model, args, kwargs = make("unet")
    pipe = pipeline(model, args, kwargs, split_spec=CASES["unet"].split)
    with pytest.raises(PipelineError, match="stage 1 cannot be pickled"):
        pickle.dumps(pipe.get_stage_module(1))
    other = copy.deepcopy(pipe)
    assert torch.equal(other.eval()(*args)[0], model.eval()(*args))
    assert {id(p) for p in other.parameters()}.isdisjoint({id(p) for p in model.parameters()})


def test_a_file_with_invalid_content_is_refused():
    model = nn.Linear(4, 4)
    text, tensors = write_stage(pipeline(model, (numbers(2, 4),)).get_stage_module(0))
    good = json.loads(text)

    def changed(**parts: Any) -> str:
        return json.dumps({**good, **parts})

    nodes = good["codes"]["train"]
    call = next(line for line in nodes if line["op"] == "call_function")
    bad_name = [{**line, "name": "x; import os"} if line is call else line for line in nodes]
    bad_target = [{**line, "target": "os.system"} if line is call else line for line in nodes]
    bad_state = [{**good["state"][0], "name": 'a"); import os; ("'}, *good["state"][1:]]
    for broken in (
        "not json",
        changed(format="other"),
        changed(version=9),
        changed(codes={"train": bad_name}),
        changed(codes={"train": bad_target}),
        changed(codes={"sleep": nodes}),
        changed(state=bad_state),
        changed(state=good["state"][1:]),
        changed(inputs=["a b"]),
    ):
        with pytest.raises(GraphFormatError):
            read_stage(broken, tensors)
    assert read_stage(text, tensors)(numbers(2, 4)).shape == (2, 4)


class Factories(nn.Module):
    """Makes tensors where its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        h = self.fc(x)
        pipe_split()
        with torch.autocast("cpu", torch.bfloat16):
            h = h + torch.ones(8, device=h.device)
        return h + torch.arange(8, device=x.device).to(x.device) + torch.zeros_like(h)


def test_constants_of_a_stage_follow_its_device():
    pipe = pipeline(Factories(), (numbers(4, 8),))
    stage = pipe.get_stage_module(1).to("meta")
    result = stage(*(torch.empty_like(value, device="meta") for value in run(pipe.stages[:1], [numbers(4, 8)])))
    assert result.device.type == "meta"
    devices = {str(node.kwargs["device"]) for node in stage.graph.nodes if "device" in node.kwargs}
    assert devices == {"meta"}
    assert all(node.meta["val"].device.type == "meta" for node in stage.graph.nodes if node.op == "placeholder")
    [block] = [module for _, module in stage.named_children() if hasattr(module, "region")]
    assert block.region.settings[0] == "cpu"  # there is no autocast for tensors without data
    assert block.region.on_device("cpu", "cuda").settings[0] == "cuda"
    assert block.region.on_device("cuda", "cpu").settings[0] == "cpu"


def test_a_meta_model_is_cut_and_one_stage_materialized():
    with torch.device("meta"):
        model = Factories()
        x = torch.empty(4, 8)
    pipe = pipeline(model, (x,))
    with pytest.raises(StageError, match=r"stage 0 is on the meta device.*\n.*pipe\.materialize_stage\(0, "):
        pipe.build_stage(0, "cpu")
    real = Factories()
    stages = [pipe.materialize_stage(i, "cpu", real.state_dict()) for i in range(2)]
    assert torch.equal(run(stages, [numbers(4, 8)])[0], real(numbers(4, 8)))
    assert all(parameter.is_meta for parameter in model.parameters())


class Angles(nn.Module):
    """A buffer that is not saved, as rotary embeddings have it, and a stage without any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("angles", torch.arange(8) / 8, persistent=False)

    def forward(self, x):
        x = self.linear(x) * self.angles.cos()
        pipe_split()
        return x + torch.ones(8, device=x.device)


def test_non_persistent_buffers_come_from_another_module_or_a_function():
    real = Angles()
    for source in (real, lambda name: {"angles": real.angles}[name]):
        with torch.device("meta"):
            pipe = pipeline(Angles(), (torch.empty(4, 8),))
        with pytest.raises(PipelineError, match=r"the buffer angles has no data.*\n.*buffers_from="):
            pipe.materialize_stage(0, "cpu", real.state_dict())
        for i in range(2):
            pipe.materialize_stage(i, "cpu", real.state_dict(), buffers_from=source)
        assert torch.equal(run(pipe.stages, [numbers(4, 8)])[0], real(numbers(4, 8)))


def built(rank: int) -> torch.Tensor:
    with torch.device("meta"):
        pipe = pipeline(Angles(), (torch.empty(4, 8),))
    stage = pipe.build_stage(1, "cpu")
    return stage.submod(torch.zeros(4, 8))


def test_a_stage_without_tensors_of_a_meta_model_is_built():
    assert torch.equal(run_ranks(built, 1)[0], torch.ones(4, 8))


def test_a_model_under_a_fake_mode_is_cut(tmp_path):
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(1 << 16, 1 << 16), nn.BatchNorm1d(1 << 16), nn.Linear(1 << 16, 8))
        x = torch.empty(4, 1 << 16)
    pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    assert pipe.routing.crossing_bytes(0) == 4 * 4 * (1 << 16)
    save_stage(pipe.get_stage_module(1), tmp_path)
    stage = load_stage(tmp_path)
    assert all(parameter.is_meta for parameter in stage.parameters())
    with pytest.raises(PipelineError, match=r"2\.weight has no data"):
        pipe.materialize_stage(1, "cpu", {})


def test_a_large_gpt2_on_the_meta_device_is_balanced():
    with torch.device("meta"):
        model = gpt2(n_layer=2, n_embd=4096, n_head=32, vocab_size=8192, n_positions=64)
    pipe = pipeline(model, (tokens(batch=2, length=32).to("meta"),), stages=3)
    sizes = [sum(p.numel() for p in stage.parameters()) for stage in pipe.stages]
    assert sum(sizes) >= sum(p.numel() for p in model.parameters())
    assert max(sizes) < 0.6 * sum(sizes)


def test_a_stage_moves_with_nn_module_methods_and_keeps_its_graph():
    model = UNet()
    pipe = pipeline(model, (numbers(2, 3, 8, 8),), split_spec=CASES["unet"].split)
    stage = pipe.get_stage_module(0).double()
    assert stage(numbers(2, 3, 8, 8).double())[0].dtype == torch.float64
