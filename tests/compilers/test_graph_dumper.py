"""The dumper writes joint, forward and backward graph of everything that is compiled, with the user's names."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from compilers.networks import assert_trains_as_in_eager, mlp
from wholestep.compilers import get_inputs, graph_dumper_aot, read_dump, read_index
from wholestep.errors import DumpError, OptionError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids)) * self.scale


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training step and an inference, dumped."""
    parent = tmp_path_factory.mktemp("dumps")
    model, ids = Net(), torch.randint(10, 40, (3, 7))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=graph_dumper_aot("net", str(parent)))
    expected = model(ids)
    found = compiled(ids)
    assert torch.equal(found, expected)
    found.sum().backward()
    with torch.no_grad():
        assert torch.equal(compiled(ids), expected)
    return parent / "net"


def test_there_is_a_folder_for_each_graph_and_an_index(folder: Path) -> None:
    assert [path.name for path in read_index(folder)] == [
        "net_joint_0",
        "net_forward_0",
        "net_backward_0",
        "net_forward_1",
    ]
    entries = json.loads((folder / "index.json").read_text(encoding="utf-8"))["graphs"]
    assert [(entry["kind"], entry["graph"]) for entry in entries] == [
        ("joint", 0),
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
    ]
    assert all(entry["nodes"] > 3 for entry in entries)


def test_parameters_have_the_names_that_the_user_gave_them(folder: Path) -> None:
    for path in read_index(folder):
        names = {record.path for record in read_dump(path).records}
        if "backward" not in path.name:
            assert {"words.weight", "head.weight", "head.bias", "scale", "ids"} <= names


def test_each_graph_runs_on_random_inputs_of_its_records(folder: Path) -> None:
    for path in read_index(folder):
        dump = read_dump(path)
        assert dump.step_graph is not None
        assert not (path / "inputs.safetensors").exists()
        inputs = get_inputs(path / "inputs.json")
        with torch.no_grad():
            results = dump.step_graph.gm(*inputs)
        assert len(results) == len(dump.step_graph.signature.outputs)
        ids = next(value for value, record in zip(inputs, dump.records, strict=True) if record.dtype == "int64")
        assert int(ids.min()) >= 10
        assert int(ids.max()) < 40


def test_values_are_saved_on_request(tmp_path: Path) -> None:
    model, inputs = mlp()
    dumper = graph_dumper_aot("net", str(tmp_path), dump_example_input=True)
    assert_trains_as_in_eager(model, lambda m: ws.compilers.aot(m, **dumper.hooks(m)), inputs)
    forward = tmp_path / "net" / "net_forward_0"
    dump = read_dump(forward)
    by_path = {record.path: value for record, value in zip(dump.records, dump.inputs, strict=True)}
    assert torch.equal(by_path["0.weight"], model[0].weight)
    assert any(isinstance(v, Tensor) and torch.equal(v, inputs["input"]) for v in dump.inputs)


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".."])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        graph_dumper_aot(name, str(tmp_path))


@pytest.mark.parametrize("entry", [{"folder": "../other"}, {"folder": "/etc"}, {"folder": 3}, 7, {}])
def test_an_index_that_leads_out_of_its_folder_is_refused(entry: Any, tmp_path: Path) -> None:
    document = {"format": "wholestep.graph_index", "version": 1, "graphs": [entry]}
    (tmp_path / "index.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(DumpError):
        read_index(tmp_path)


def test_a_dumper_may_be_copied_with_the_arguments_of_torch_compile(tmp_path: Path) -> None:
    dumper = graph_dumper_aot("net", str(tmp_path))
    assert copy.deepcopy({"backend": dumper})["backend"] is dumper
