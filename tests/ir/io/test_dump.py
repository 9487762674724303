"""Dumps hold what is needed to run a graph elsewhere, and reading one never runs or trusts what is in it."""

from __future__ import annotations

import functools
import json
import os
import pickle
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from wholestep.compilers import debug_compile, get_inputs, read_dump
from wholestep.errors import DumpError, GraphFormatError, WholestepError
from wholestep.ir.io.dump import GraphDump, new_folder, write_repro
from wholestep.ir.io.tensor_file import from_bytes, to_bytes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.drop = nn.Embedding(50, 8), nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.drop(self.head(self.words(ids)))


@pytest.fixture
def dumps(tmp_path: Path) -> tuple[list[Path], list[Any]]:
    """Folders of a forward and a backward, and what these gave."""
    model, ids = Net(), torch.randint(10, 40, (3, 7))
    given: list[Any] = []

    def noting(gm: fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            found = gm(*args)
            given.append(found)
            return found

        return ws.compilers.boxed(run)

    compiler = functools.partial(debug_compile, folder=tmp_path / "dumps", compiler=noting)
    torch.manual_seed(7)
    ws.compilers.aot(model, fw_compiler=compiler)(ids).sum().backward()
    folders = sorted((tmp_path / "dumps").iterdir(), key=lambda path: "backward" in path.name)
    return folders, given


def test_forward_and_backward_have_their_own_folders(dumps: tuple[list[Path], list[Any]]) -> None:
    folders, _ = dumps
    assert ["backward" in folder.name for folder in folders] == [False, True]
    for folder in folders:
        names = {path.name for path in folder.iterdir()}
        assert names == {"repro.py", "graph.py", "graph.json", "inputs.json", "inputs.safetensors"}


def test_a_repro_returns_the_same_bits_with_the_same_random_numbers(
    dumps: tuple[list[Path], list[Any]],
) -> None:
    for folder, expected in zip(*dumps, strict=True):
        torch.manual_seed(123)
        found = runpy.run_path(str(folder / "repro.py"))["run"]()
        for want, have in zip(expected, found, strict=True):
            assert (want is None and have is None) or (torch.equal(want, have) and want.stride() == have.stride())


def test_a_repro_needs_torch_and_nothing_of_ours(dumps: tuple[list[Path], list[Any]]) -> None:
    [forward, _], _ = dumps
    text = (forward / "repro.py").read_text(encoding="utf-8")
    assert "wholestep" not in text.split('"""', 2)[2]
    assert "pickle" not in text
    assert "torch.load" not in text
    made = subprocess.run(
        [sys.executable, str(forward / "repro.py"), "--made-up", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        cwd="/",
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "output 0: torch.float32 [3, 7, 4]" in made.stdout


def test_random_inputs_have_the_recorded_layout_and_range_of_integers(
    dumps: tuple[list[Path], list[Any]],
) -> None:
    [_, backward], _ = dumps
    records = read_dump(backward).records
    for record, value in zip(records, get_inputs(backward / "inputs.json"), strict=True):
        assert tuple(value.shape) == record.shape
        assert value.stride() == record.stride
        if record.dtype == "int64":
            assert 10 <= record.low <= int(value.min())
            assert int(value.max()) <= record.high < 40
    turned = [record for record in records if record.stride == (1, 8)]
    assert len(turned) == 1


def test_a_dump_reads_back_as_a_graph_that_computes_the_same(dumps: tuple[list[Path], list[Any]]) -> None:
    [_, backward], [_, expected] = dumps
    dump = read_dump(backward)
    assert dump.step_graph is not None
    for want, have in zip(expected, dump.step_graph.gm(*[v.detach() for v in dump.inputs]), strict=True):
        assert (want is None and have is None) or torch.equal(want, have)


def dumped(tmp_path: Path, function: Any, *inputs: Any) -> GraphDump:
    gm = make_fx(function)(*inputs)
    return GraphDump(new_folder(tmp_path, "graph"), gm, inputs, "graph")


def test_any_input_comes_back_as_it_was(tmp_path: Path) -> None:
    memory = torch.arange(40.0)
    inputs = [
        memory[3:23].view(4, 5).t(),
        memory[10:15],
        torch.tensor([1 + 2j, 3 - 1j]),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.randn(1, 3).expand(4, 3),
        torch.empty(0, 3),
        torch.tensor(True),
        torch.tensor(5, dtype=torch.uint8),
        torch.randn(2, dtype=torch.bfloat16),
    ]
    gm = fx.symbolic_trace(lambda a, b, c, d, e, f, g, h, i: (a + 1,))
    dump = GraphDump(tmp_path / "one", gm, inputs, "one")
    found = get_inputs(dump.folder, values=True)
    for want, have in zip(inputs, found, strict=True):
        assert want.dtype == have.dtype
        assert want.stride() == have.stride()
        if want.dtype is torch.float8_e4m3fn:  # has no comparison of its own
            want, have = want.view(torch.uint8), have.view(torch.uint8)
        assert torch.equal(want, have)
    found[0].fill_(-1)
    assert int((found[1] == -1).sum()) == 5  # they still share memory


def test_a_conjugate_view_comes_back_as_its_own_values(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    GraphDump(tmp_path / "one", fx.symbolic_trace(lambda a, b: (a + b,)), [numbers, numbers.conj()], "one")
    found = get_inputs(tmp_path / "one", values=True)
    assert torch.equal(found[0], numbers)
    assert torch.equal(found[1], numbers.conj())


def test_scalars_come_back_unchanged(tmp_path: Path) -> None:
    gm = fx.symbolic_trace(lambda x, n, f, b, o: (x,))
    GraphDump(tmp_path / "one", gm, [torch.ones(2), 7, 0.1, True, None], "one")
    assert get_inputs(tmp_path / "one")[1:] == [7, 0.1, True, None]


def test_a_graph_of_a_missing_device_runs_on_the_cpu(tmp_path: Path) -> None:
    gm = make_fx(lambda x: x + torch.full((2,), 3.0, device="cpu"))(torch.ones(2))
    full = next(node for node in gm.graph.nodes if "full" in node.name)
    full.kwargs = {**full.kwargs, "device": torch.device("cuda", 5)}
    gm.recompile()
    dump = GraphDump(tmp_path / "one", gm, [torch.ones(2)], "one")
    found = runpy.run_path(str(dump.folder / "repro.py"))["run"]()
    assert torch.equal((found[0] if isinstance(found, tuple | list) else found).cpu(), torch.full((2,), 4.0))


def test_constants_of_the_graph_are_in_the_dump(tmp_path: Path) -> None:
    constant = torch.tensor([1.0, 2.0])
    dump = dumped(tmp_path, lambda x: x * constant, torch.ones(2))
    assert torch.equal(runpy.run_path(str(dump.folder / "repro.py"))["run"](), constant)


def test_a_graph_without_a_form_in_json_still_has_a_repro(tmp_path: Path) -> None:
    gm = fx.symbolic_trace(lambda x: torch.sin(x))
    dump = GraphDump(tmp_path / "one", gm, [torch.ones(2)], "one")
    assert read_dump(dump.folder).step_graph is None
    assert "There is no graph.json" in (dump.folder / "repro.py").read_text(encoding="utf-8")
    assert torch.equal(runpy.run_path(str(dump.folder / "repro.py"))["run"](), torch.ones(2).sin())


class Branches(torch.nn.Module):
    """`where` is the name of a node, a constant is real while AOTAutograd compiles, and `cond` holds graphs."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.where(x > 0, torch.zeros(3, device=x.device), x) * torch.tensor([1.0, 2.0, 3.0])
        return torch.cond(y.sum() > 0, lambda y: y.sin() + 1, lambda y: y.cos(), (y,))


def test_repros_hold_constants_and_the_graphs_of_higher_order_operators(tmp_path: Path) -> None:
    torch._dynamo.reset()
    dump = functools.partial(ws.compilers.debug_compile, folder=tmp_path, name="graph")
    x = torch.randn(2, 3)
    result = torch.compile(Branches(), backend=ws.compilers.as_backend(dump))(x)
    [found] = runpy.run_path(str(tmp_path / "graph_0" / "repro.py"))["run"]()
    assert torch.equal(result, found)


def twice(x: Tensor) -> Tensor:
    return x * 2


def test_a_function_of_the_program_itself_is_in_the_repro(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twice, "__module__", "__main__")
    graph = fx.Graph()
    graph.output((graph.call_function(twice, (graph.placeholder("x"),)),))
    GraphDump(tmp_path / "one", fx.GraphModule({}, graph), [torch.ones(3)], "one")
    [found] = runpy.run_path(str(tmp_path / "one" / "repro.py"))["run"]()
    assert found.tolist() == [2.0, 2.0, 2.0]


def test_our_safetensors_are_those_of_the_package(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(2, 3),
        "b": torch.arange(3, dtype=torch.int16),
        "c": torch.tensor([True]),
        "d": torch.ones(0),
    }
    (tmp_path / "ours").write_bytes(to_bytes(tensors))
    save_file(tensors, tmp_path / "theirs")
    for found in (load_file(tmp_path / "ours"), from_bytes((tmp_path / "theirs").read_bytes(), "theirs")):
        assert found.keys() == tensors.keys()
        assert all(
            torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors
        )


class Shell:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_a_pickle_in_the_place_of_a_file_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = pickle.dumps([Shell()])
    dumped(tmp_path / "dumps", lambda x: x + 1, torch.ones(2))
    folder = tmp_path / "dumps" / "graph_0"
    for name in ("inputs.json", "inputs.safetensors", "graph.json"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(hostile)
        with pytest.raises((DumpError, GraphFormatError)):
            read_dump(folder)
        (folder / name).write_bytes(before)
    assert read_dump(folder).step_graph is not None
    assert not (tmp_path / "ran").exists()


def test_links_pipes_and_large_files_are_refused(tmp_path: Path) -> None:
    folder = dumped(tmp_path, lambda x: x + 1, torch.ones(2000)).folder
    with pytest.raises(DumpError, match=r"larger than|more than"):
        read_dump(folder, max_bytes=1000)
    inputs = folder / "inputs.json"
    text = inputs.read_text(encoding="utf-8")
    inputs.unlink()
    inputs.symlink_to("/etc/passwd")
    with pytest.raises(DumpError, match="link"):
        get_inputs(inputs)
    inputs.unlink()
    os.mkfifo(inputs)
    with pytest.raises(DumpError, match="not a file"):
        get_inputs(inputs)
    inputs.unlink()
    inputs.write_text(text.replace('"device": "cpu"', '"device": "hpu"'), encoding="utf-8")
    assert get_inputs(inputs)[0].device.type == "cpu"
    (folder / "graph.json").unlink()
    (folder / "graph.json").mkdir()
    with pytest.raises(DumpError, match="not a file"):
        read_dump(folder)
    inputs.write_text(text.replace('"version": 1', '"version": 2'), encoding="utf-8")
    with pytest.raises(DumpError, match="version 2"):
        get_inputs(inputs)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1 << 40], "stride": [1]},
        {"shape": [1 << 40], "stride": [0]},
        {"shape": [2, 2], "stride": [1]},
        {"shape": [-1], "stride": [1]},
        {"shape": [2], "stride": [-1]},
        {"dtype": "os.system"},
        {"dtype": None},
        {"kind": "pickle"},
        {"low": 5, "high": 1, "dtype": "int64"},
        {"low": 1 << 70},
        {"start": -3},
        {"start": 1 << 50},
        {"memory": "../../etc/passwd"},
        {"surprise": 1},
    ],
)
def test_a_record_that_is_invalid_or_too_large_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    folder = dumped(tmp_path, lambda x: x + 1, torch.ones(2)).folder
    document = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
    document["inputs"][0].update(change)
    (folder / "inputs.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(DumpError):
        get_inputs(folder, values=True)


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_bytes_are_read_or_refused_and_never_anything_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("dump")
    gm = make_fx(lambda x, i: x[i] * 2)(torch.randn(4, 3), torch.tensor([1, 2]))
    GraphDump(folder, gm, [torch.randn(4, 3), torch.tensor([1, 2])], "graph")
    name = data.draw(st.sampled_from(["inputs.json", "inputs.safetensors", "graph.json"]))
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        action = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if action == "set":
            content[place] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del content[place : place + data.draw(st.integers(1, 30))]
        else:
            content[place:place] = data.draw(st.sampled_from([b"9", b"null", b"[", b'"', b"\xff" * 8, b"-", b"{}"]))
        content = content or bytearray(b"0")
    (folder / name).write_bytes(bytes(content))
    try:
        dump = read_dump(folder, max_bytes=1 << 24)
    except WholestepError:
        return
    assert sum(value.untyped_storage().nbytes() for value in dump.inputs if isinstance(value, Tensor)) <= 1 << 24


def test_nothing_of_a_dump_is_a_pickle(dumps: tuple[list[Path], list[Any]]) -> None:
    folders, _ = dumps
    for path in (file for folder in folders for file in folder.iterdir()):
        content = path.read_bytes()
        assert content[:2] not in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05")
        if path.suffix in (".json", ".py"):
            content.decode("utf-8")


def test_a_minimised_graph_is_a_dump_like_any_other(tmp_path: Path) -> None:
    gm = make_fx(lambda x, y: (x.cos() - y).log())(torch.ones(40), torch.ones(40))
    found = ws.debug.minify(gm, [torch.ones(40), torch.ones(40)], has_nan, folder=tmp_path, shapes=False)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"repro.py", "graph.py", "graph.json", "inputs.json", "inputs.safetensors"}
    dump = read_dump(tmp_path)
    assert dump.step_graph is not None
    assert has_nan(dump.step_graph.gm, dump.inputs)
    assert [list(value.shape) for value in dump.inputs] == [list(value.shape) for value in found.inputs]


def has_nan(gm: fx.GraphModule, inputs: list[Any]) -> bool:
    found = gm(*inputs)
    return any(bool(value.isnan().any()) for value in (found if isinstance(found, tuple | list) else [found]))


def test_a_repro_of_small_inputs_needs_no_other_file(tmp_path: Path) -> None:
    gm = fx.symbolic_trace(lambda x, n, y: (x * n, y))
    inputs = [torch.tensor([[1.5, float("nan")]]), 3, torch.arange(6.0).reshape(2, 3).t().requires_grad_()]
    path, missing = write_repro(tmp_path / "all", gm, inputs, title="Small.", check="", setup="", seed=0)
    assert missing == ()
    alone = tmp_path / "alone.py"
    alone.write_bytes(path.read_bytes())
    product, turned = runpy.run_path(str(alone))["run"]()
    assert product[0, 0].item() == 4.5
    assert product[0, 1].isnan()
    assert torch.equal(turned, inputs[2])
    assert (turned.stride(), turned.requires_grad) == (inputs[2].stride(), True)


def test_a_repro_has_large_and_strided_tensors_shared_memory_and_modules(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            self.register_buffer("turned", torch.randn(8, 9).t())

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            x.add_(1)
            return self.layers(x) @ self.turned.t(), y

    model, memory = Net().eval(), torch.randn(80)
    gm = fx.symbolic_trace(model)
    inputs = [memory[:64].view(8, 8), memory[60:]]
    path, missing = write_repro(tmp_path, gm, inputs, title="Large.", check="", setup="", seed=0)
    assert missing == ()
    expected = model(*inputs)
    found = runpy.run_path(str(path))["run"]()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])  # `y` sees the write to `x`


def test_a_dump_of_the_first_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text(
        '{"format": "wholestep.inputs",\n"version": 1,\n"torch": "2.13.0",\n"title": "old",\n"seed": 7,\n'
        '"constants": [],\n"inputs": [\n'
        '{"name": "x", "kind": "tensor", "shape": [2], "stride": [1], "dtype": "float32", "device": "cpu", '
        '"memory": "0"},\n{"name": "n", "kind": "float", "value": {"float": "0x1.8000000000000p+1"}}]}\n'
    )
    header = b'{"0": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    header += b" " * (-len(header) % 8)
    data = torch.tensor([1.0, 2.0]).numpy().tobytes()
    (tmp_path / "inputs.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    dump = read_dump(tmp_path)
    assert dump.step_graph is None
    assert dump.inputs[0].tolist() == [1.0, 2.0]
    assert dump.inputs[1] == 3.0
