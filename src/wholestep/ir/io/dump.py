"""A graph and its inputs as a folder that can be sent to someone else: the one format of dumps and of minimised graphs.

    repro.py             a program that runs the graph on these inputs, with torch and nothing else (`repro.py`)
    graph.py             the graph as Python text, with shapes and the user's lines
    graph.json           the graph as data: `StepGraph.from_json`; missing where the graph has no such form
    inputs.json          the layout of each input and constant: `get_inputs` ("wholestep.inputs", version 1)
    inputs.safetensors   values of inputs and constants, and RNG states, where they are known

While AOTAutograd compiles, inputs have no data; the first run then adds what only a run knows. Files are untrusted:
reading executes nothing, follows no links out of the folder, opens regular files only, and reads no more bytes than
allowed.

Inputs of a graph as data: enough to make inputs like them, and where their values lie if they were saved.

    {"name": "primals_3", "path": "fc.weight", "kind": "tensor", "shape": [4, 8], "stride": [1, 4], "dtype": "float32",
     "device": "cpu", "low": null, "high": null, "memory": "0", "start": 0}

Integers record the range of their values, so that random inputs still index an embedding that exists. Values are saved
in a safetensors file, one tensor for each piece of memory: a contiguous input lies there in its own shape, for other
readers of the format; anything else as the flat memory that it spans. Inputs that overlap name the same `memory`, and
`start` in it.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import DumpError, GraphFormatError
from wholestep.ir.graph_walks import copy_graph_module
from wholestep.ir.io.arguments import DTYPES, TargetReader
from wholestep.ir.io.node_values import hint_of, tensor_spec
from wholestep.ir.io.repro import constants_of, repro_script
from wholestep.ir.io.serialize import RecordReader, refuse_bare_number, write_record
from wholestep.ir.io.tensor_file import can_write, from_bytes, to_bytes
from wholestep.ir.signature import InputKind, InputSpec, OutputKind, OutputSpec, Signature
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.tensor_copies import spanned
from wholestep.torch_private.fake_tensors import FakeTensor, storage_key, without_modes

LARGEST = 1 << 32
"""Bytes that random or saved inputs may take, unless the caller allows more."""
_DIMENSIONS = 64
_LIMIT = 1 << 62
_NUMBERS = {"int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class InputRecord:
    """One input. Scalars have a `value`; tensors a layout, and a range if they hold integers."""

    name: str
    kind: str
    path: str = ""
    """What the user calls it: a parameter's name."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    requires_grad: bool = False
    low: int | None = None
    high: int | None = None
    value: int | float | bool | None = None
    memory: str = ""
    start: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of a tensor."""
        return DTYPES[self.dtype]

    @property
    def extent(self) -> int:
        """How many elements of memory a tensor spans."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


def record_of(value: Any, name: str, path: str = "") -> InputRecord:
    """The record of one input, real or fake. Symbolic sizes are those that the trace had."""
    if isinstance(value, Tensor):
        return _tensor_record(value, name, path)
    hint = hint_of(value)
    for kind, types in (("bool", bool | torch.SymBool), ("int", int | torch.SymInt), ("float", float | torch.SymFloat)):
        if isinstance(value, types):
            return InputRecord(name, kind, path, value=hint if hint is None else _NUMBERS[kind](hint))
    return InputRecord(name, "none" if value is None else "other", path)


def _tensor_record(tensor: Tensor, name: str, path: str) -> InputRecord:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return InputRecord(name, "other", path)
    found = InputRecord(
        name,
        "tensor",
        path,
        tuple(_size(size) for size in tensor.shape),
        tuple(_size(step) for step in tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        tensor.requires_grad,
    )
    is_whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    if is_whole and not isinstance(tensor, FakeTensor) and tensor.device.type != "meta" and tensor.numel():
        low, high = torch.aminmax(tensor.detach().cpu().to(torch.int64))
        found = replace(found, low=int(low), high=int(high))
    return found


def _size(size: Any) -> int:
    hint = hint_of(size)
    return 2 if hint is None else int(hint)


def check_record(record: InputRecord) -> None:
    """Raise DumpError unless a record that was read describes something that can be made."""
    if record.kind not in ("tensor", "none", "other", *_NUMBERS):
        raise DumpError(f"the input {record.name[:60]!r} is of an unknown kind, {record.kind[:60]!r}.")
    if record.kind != "tensor":
        return
    dims = (*record.shape, *record.stride, record.start)
    whole = (record.low, record.high)
    if record.dtype not in DTYPES:
        raise DumpError(f"the input {record.name[:60]!r} has an unknown dtype, {record.dtype[:60]!r}.")
    if len(record.shape) != len(record.stride) or len(record.shape) > _DIMENSIONS:
        raise DumpError(f"the input {record.name[:60]!r} has a shape and a stride that do not fit each other.")
    if not all(0 <= dim < _LIMIT for dim in dims) or not all(x is None or abs(x) < _LIMIT for x in whole):
        raise DumpError(f"the input {record.name[:60]!r} has a size, stride or range that is out of bounds.")
    if record.low is not None and record.high is not None and record.low > record.high:
        raise DumpError(f"the input {record.name[:60]!r} has an empty range.")


def check_size(records: Sequence[InputRecord], max_bytes: int) -> None:
    """Raise DumpError if such inputs would take too much memory, or repeat their memory too often."""
    total = 0
    for record in records:
        if record.kind == "tensor":
            total += record.extent * record.torch_dtype.itemsize
            if math.prod(record.shape) > max(1 << 20, 64 * record.extent) and 0 not in record.shape:
                raise DumpError(f"the input {record.name[:60]!r} repeats its memory too often.")
    if total > max_bytes:
        raise DumpError(
            f"the inputs take {total} bytes, more than {max_bytes}.", fix="pass max_bytes= if you trust the file."
        )


def random_input(record: InputRecord, device: torch.device | None, generator: torch.Generator) -> Any:
    """An input like the recorded one: the same scalars, integers in their range, floats between 0 and 1."""
    if record.kind != "tensor":
        return _NUMBERS[record.kind]() if record.value is None and record.kind in _NUMBERS else record.value
    dtype, extent = record.torch_dtype, record.extent
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
        memory = torch.rand(extent, generator=generator, dtype=wide).to(dtype)
    else:
        low = 0 if record.low is None else record.low
        high = max(low, 1) if record.high is None else record.high
        memory = torch.randint(low, high + 1, (extent,), generator=generator, dtype=torch.int64).to(dtype)
    return placed(memory, record, device)


def placed(memory: Tensor, record: InputRecord, device: torch.device | None) -> Tensor:
    """The tensor of a record over its memory, on the given device, the recorded one, or the CPU."""
    where = device if device is not None else _device_here(record.device)
    found = memory.to(where).as_strided(record.shape, record.stride, record.start)
    return found.requires_grad_() if record.requires_grad and found.is_floating_point() else found


def _device_here(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "meta":
            return torch.device("cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        return torch.device("cpu")
    return device


def save_values(
    path: Path, values: Sequence[Any], records: Sequence[InputRecord], extra: dict[str, Tensor]
) -> list[InputRecord]:
    """Write the values of tensors, and `extra` ones under their names; the records with their places in the file."""
    found = list(records)
    by_memory: dict[tuple[Any, ...], list[int]] = {}
    for i, (value, record) in enumerate(zip(values, records, strict=True)):
        if isinstance(value, Tensor) and record.kind == "tensor":
            # A conjugate view shares memory, but a file has resolved values: it gets its own.
            key = (storage_key(value), value.dtype, value.is_conj(), value.is_neg())
            by_memory.setdefault(key, []).append(i)
    tensors: dict[str, Tensor] = {name: _storable(tensor.detach().cpu().clone()) for name, tensor in extra.items()}
    for places in by_memory.values():
        label = str(places[0])
        tensors[label] = _memory([values[i] for i in places])
        first = min(int(values[i].storage_offset()) for i in places)
        for i in places:
            found[i] = replace(found[i], memory=label, start=int(values[i].storage_offset()) - first)
    path.write_bytes(to_bytes(tensors))
    return found


def _memory(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return _storable(tensors[0].detach().resolve_conj().resolve_neg().cpu().clone())
    flat, _ = spanned(tensors)
    return _storable(flat.resolve_conj().resolve_neg().cpu())


def _storable(tensor: Tensor) -> Tensor:
    """A dtype that the format does not have is written as bytes."""
    return tensor.contiguous() if can_write(tensor) else tensor.contiguous().reshape(-1).view(torch.uint8)


def value_of(record: InputRecord, tensors: dict[str, Tensor], device: torch.device | None) -> Any:
    """The value of an input out of the memory that its record names."""
    memory = tensors.get(record.memory)
    if memory is None:
        raise DumpError(f"the value of {record.name[:60]!r} is not in the file.")
    dtype = record.torch_dtype
    flat = memory.reshape(-1)
    if flat.dtype is not dtype:
        if flat.dtype is not torch.uint8 or flat.numel() % dtype.itemsize:
            raise DumpError(f"the value of {record.name[:60]!r} is of {flat.dtype}, its record says {dtype}.")
        flat = flat.clone().view(dtype)
    if record.start + record.extent > flat.numel():
        raise DumpError(f"the value of {record.name[:60]!r} is longer than its memory.")
    return placed(flat, record, device)


FORMAT = "wholestep.inputs"
VERSION = 1
_CONSTANT = "constant."
_RANDOM = "random."


@dataclass(frozen=True)
class Dump:
    """What a folder holds. `inputs` are saved values, or random ones; `step_graph` is None without a form in JSON."""

    step_graph: StepGraph | None
    inputs: list[Any]
    records: tuple[InputRecord, ...]


class GraphDump:
    """The folder of one graph, written now and completed at the first run."""

    def __init__(
        self,
        folder: Path,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        title: str,
        names: Mapping[str, str] | None = None,
        *,
        script: Mapping[str, str] | None = None,
        seed: int | None = None,
    ) -> None:
        """`names`: what placeholders are to the user, by the name of their node.

        `script`: `check` and `setup` lines of `repro.py`, where the inputs are final: small ones become literals in it.
        `seed`: of the run that is to be reproduced, by default that of this process.
        """
        self.folder = folder
        self._gm = copy_graph_module(gm)
        self._title = title
        self._names = dict(names or {})
        self._seed = torch.initial_seed() if seed is None else seed
        self._placeholders = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        self.complete = False
        self.records: list[InputRecord] = []
        self.missing: tuple[str, ...] = ()
        """What `repro.py` could not be given: modules and functions that have no form as text."""
        with without_modes():  # AOTAutograd compiles inside of a fake mode, and constants are real
            self._constants = constants_of(self._gm)
            self._write(inputs, script)

    def _write(self, inputs: Sequence[Any], script: Mapping[str, str] | None) -> None:
        given = list(inputs) if len(inputs) == len(self._placeholders) else self._from_metadata()
        records = self._records(given)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "graph.py").write_text(self._gm.print_readable(print_output=False) + "\n", encoding="utf-8")
        why = self._write_json()
        self._write_inputs(given, records)
        note = f"There is no graph.json: {why}" if why else ""
        literals = None if script is None else given
        made = repro_script(self._gm, self._title, literals, seed=self._seed, note=note, **(script or {}))
        self.missing = made.missing
        (self.folder / "repro.py").write_text(made.text, encoding="utf-8")

    def _records(self, inputs: Sequence[Any]) -> list[InputRecord]:
        pairs = zip(inputs, self._placeholders, strict=True)
        return [record_of(value, name, self._names.get(name, "")) for value, name in pairs]

    def _from_metadata(self) -> list[Any]:
        return [node.meta.get("val") for node in self._gm.graph.find_nodes(op="placeholder")]

    def _write_json(self) -> str:
        """graph.json; or why the graph has no such form: higher-order operators, functions of the user."""
        try:
            text = step_graph_of(self._gm, self._names).to_json()
        except GraphFormatError as error:
            return error.what
        (self.folder / "graph.json").write_text(text, encoding="utf-8")
        return ""

    def add_values(self, inputs: Sequence[Any]) -> None:
        """Add the inputs of a run: values, ranges of integers, RNG states."""
        self.complete = True
        self._write_inputs(inputs, self._records(inputs))

    def add_ranges(self, inputs: Sequence[Any]) -> None:
        """Add ranges and sizes of a run, but no values."""
        self.complete = True
        self._write_records(self._records(inputs))

    def take_ranges(self, other: GraphDump) -> None:
        """Add what another graph of the same trace recorded of inputs that both have."""
        known = {record.name: record for record in other.records}
        fields = ("shape", "stride", "low", "high", "value")
        self._write_records(
            [
                replace(record, **{each: getattr(known[record.name], each) for each in fields})
                if record.name in known and not record.memory
                else record
                for record in self.records
            ]
        )

    def _write_inputs(self, inputs: Sequence[Any], records: list[InputRecord]) -> None:
        extra = {_CONSTANT + name: value for name, value in self._constants.items()}
        values = [value if _has_data(value) else None for value in inputs]
        if self.complete:
            extra |= {_RANDOM + name: state for name, state in _random_states().items()}
        if extra or any(isinstance(value, Tensor) for value in values):
            records = save_values(self.folder / "inputs.safetensors", values, records, extra)
        self._write_records(records)

    def _write_records(self, records: list[InputRecord]) -> None:
        self.records = records
        head: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "torch": torch.__version__,
            "title": self._title,
            "seed": self._seed,
            "constants": [write_record(record_of(value, name)) for name, value in self._constants.items()],
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        listed = ",\n".join(json.dumps(write_record(record)) for record in records)
        lines.append(f'"inputs": [\n{listed}]')
        write_atomically(self.folder / "inputs.json", "{" + ",\n".join(lines) + "}\n")


def write_repro(
    folder: str | Path, gm: fx.GraphModule, inputs: Sequence[Any], *, title: str, check: str, setup: str, seed: int
) -> tuple[Path, tuple[str, ...]]:
    """Dump a graph with its final inputs; `repro.py` runs the lines `check` on `module` and `inputs`.

    Returns the path of that program and what it could not be given.
    """
    dump = GraphDump(Path(folder), gm, inputs, title, script={"check": check, "setup": setup}, seed=seed)
    return dump.folder / "repro.py", dump.missing


def step_graph_of(gm: fx.GraphModule, names: Mapping[str, str]) -> StepGraph:
    """Any flat graph as a StepGraph: its inputs are parameters where they have a name, and batch otherwise."""
    copy = copy_graph_module(gm)
    output = copy.graph.output_node()
    given: Any = output.args[0]
    results = tuple(given) if isinstance(given, list | tuple) else (given,)
    output.args = (results,)
    inputs = []
    for node in copy.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        kind = InputKind.PARAMETER if node.name in names else InputKind.BATCH
        spec = tensor_spec(value) if isinstance(value, Tensor) and value.layout is torch.strided else None
        node.target, node.args = node.name, ()
        inputs.append(InputSpec(node.name, kind, names.get(node.name, node.name), spec))
    outputs = tuple(OutputSpec(OutputKind.RESULT, f"out{i}") for i in range(len(results)))
    return StepGraph(copy, Signature(tuple(inputs), outputs))


def new_folder(parent: Path, name: str) -> Path:
    """A folder that did not exist: `name`_0, `name`_1 and so on. Concurrent processes get different ones."""
    parent.mkdir(parents=True, exist_ok=True)
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._") or "graph"
    number = 0
    while True:
        folder = parent / f"{plain}_{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def read_dump(
    folder: str | Path,
    *,
    device: str | torch.device | None = None,
    allow_ops: Iterable[str] = (),
    max_bytes: int = LARGEST,
) -> Dump:
    """Read a folder: graph and inputs, with saved values where there are any, and random ones. Nothing is executed."""
    path = Path(folder)
    inputs = get_inputs(path / "inputs.json", values=True, device=device, max_bytes=max_bytes)
    records = _read_records(path / "inputs.json")
    graph = path / "graph.json"
    if not graph.exists() and not graph.is_symlink():
        return Dump(None, inputs, records)
    text = read_bytes(graph, MOST_JSON)
    try:
        step_graph = StepGraph.from_json(text.decode("utf-8"), allow_ops=allow_ops)
    except UnicodeDecodeError as error:
        raise DumpError("graph.json is not text.") from error
    return Dump(step_graph, inputs, records)


def get_inputs(
    input_data_path: str | Path,
    *,
    values: bool = False,
    device: str | torch.device | None = None,
    seed: int = 0,
    max_bytes: int = LARGEST,
) -> list[Any]:
    """Inputs like those of a dumped graph, from its `inputs.json` (or its folder).

    Sizes, strides, dtypes and scalars are those recorded, integers are in their range; devices too, where this machine
    has them. `values=True` returns saved values instead of random ones, where there are any.
    """
    path = Path(input_data_path)
    path = path / "inputs.json" if path.is_dir() else path
    records = _read_records(path)
    check_size(records, max_bytes)
    saved: dict[str, Tensor] = {}
    stored = path.with_name("inputs.safetensors")
    if values and (stored.exists() or stored.is_symlink()):
        saved = _read_values(stored, max_bytes)
    where = None if device is None else torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for record in records:
        try:
            if record.kind == "tensor" and record.memory and saved:
                found.append(value_of(record, saved, where))
            else:
                plain = InputRecord(**{**vars(record), "start": 0})
                found.append(random_input(plain, where, generator))
        except (RuntimeError, ValueError, OverflowError, TypeError) as error:
            if isinstance(error, DumpError):
                raise
            raise DumpError(f"the input {record.name[:60]!r} cannot be made: {str(error)[:200]}.") from error
    return found


def _read_records(path: Path) -> tuple[InputRecord, ...]:
    document = read_json(path, FORMAT, VERSION)
    reader = RecordReader(TargetReader())
    listed = document.get("inputs")
    if not isinstance(listed, list):
        raise DumpError(f"{path.name} has no list of inputs.")
    try:
        records = tuple(reader.read(InputRecord, item, f"inputs[{i}]") for i, item in enumerate(listed))
    except (GraphFormatError, RecursionError) as error:
        raise DumpError(f"{path.name} is damaged: {getattr(error, 'what', error)}") from error
    for record in records:
        check_record(record)
    return records


def _read_values(path: Path, max_bytes: int) -> dict[str, Tensor]:
    """All tensors of a file that `save_values` wrote."""
    try:
        return from_bytes(read_bytes(path, max_bytes), path.name)
    except GraphFormatError as error:
        raise DumpError(error.what) from error


def _has_data(value: Any) -> bool:
    return not isinstance(value, Tensor) or not (isinstance(value, FakeTensor) or value.device.type == "meta")


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.device_count():
        states |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


MOST_JSON = 1 << 28


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The contents of a regular file in its own folder, if it is not larger than allowed."""
    if path.is_symlink():
        raise DumpError(f"{path.name} is a link, which a dump does not have.")
    try:
        # Non-blocking: opening a named pipe would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DumpError(f"{path.name} is not a file.")
    with os.fdopen(handle, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise DumpError(f"{path.name} is larger than {max_bytes} bytes.", fix="pass max_bytes= if you trust the file.")
    return data


def read_json(path: Path, format_name: str, version: int) -> dict[str, Any]:
    """The document of a wholestep file of this format and version."""
    try:
        document = json.loads(
            read_bytes(path, MOST_JSON), parse_constant=refuse_bare_number, parse_float=refuse_bare_number
        )
    except DumpError:
        raise
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path.name} is not JSON of wholestep: {str(error)[:200]}.") from error
    if not isinstance(document, dict) or document.get("format") != format_name:
        raise DumpError(f"{path.name} is not a {format_name}: the key 'format' must say so.")
    if type(document.get("version")) is not int or document["version"] != version:
        raise DumpError(
            f"{path.name} has version {str(document.get('version'))[:20]}, this wholestep reads {version}.",
            fix="read it with the wholestep that wrote it, or write it again.",
        )
    return document


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
