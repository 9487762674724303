"""`save_stage` and `load_stage`: a stage as JSON and a safetensors file. Nothing is pickled.

    {"format": "wholestep.pipeline_stage", "version": 1, "index": 1, "inputs": ["h"], "outputs": ["y"],
     "mode": "train", "device": "cpu", "flags": {"": true, ..},
     "state": [{"name": "fc.weight", "tensor": "fc.weight", "parameter": true, ..}],      tied names have one tensor
     "values": [..], "symbols": [..],                                                     as in a StepGraph (ir/)
     "codes": {"train": [                                                                 one line for each node
       {"op": "call_function", "name": "linear", "target": "aten::linear", "args": [..], "val": 3},
       {"op": "block", "name": "autocast", "region": {"kind": "autocast", ..}, "args": [..], "body": [..]}]}}

Files are untrusted: names are checked before torch.fx generates code with them, functions come from the allow-list of
`ir/`, and invalid content raises GraphFormatError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from wholestep.errors import GraphFormatError
from wholestep.ir.io import tensor_file
from wholestep.ir.io.arguments import (
    ArgumentReader,
    ArgumentWriter,
    TargetReader,
    check_identifier,
    read_device,
    read_dtype,
    shown,
    target_name,
)
from wholestep.ir.io.node_values import ValueReader, ValueWriter
from wholestep.pipelining.build.context_regions import ContextRegion, RegionModule
from wholestep.pipelining.build.model_state import StateEntry
from wholestep.pipelining.build.stage_module import StageAbout, StageCode, StageModule, is_empty

FORMAT = "wholestep.pipeline_stage"
VERSION = 1
_MODES = ("train", "eval", "given")
_ATOM = re.compile(r"\w+", re.ASCII)
_SETTINGS = {"autocast": 4, "grad": 1, "checkpoint": 1}
_MAX_DEPTH = 20


def save_stage(stage: StageModule, folder: str | Path) -> None:
    """Write a stage as `stage.json` and `stage.safetensors` into a folder."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    text, tensors = write_stage(stage)
    (path / "stage.json").write_text(text, encoding="utf-8")
    tensor_file.write_tensors(path / "stage.safetensors", tensors)


def load_stage(folder: str | Path, *, allow_ops: Iterable[str] = ()) -> StageModule:
    """The stage that `save_stage` wrote. `allow_ops` names operators of libraries other than torch that it may call."""
    path = Path(folder)
    text = (path / "stage.json").read_text(encoding="utf-8")
    return read_stage(text, tensor_file.read_tensors(path / "stage.safetensors"), allow_ops=allow_ops)


def write_stage(stage: StageModule) -> tuple[str, dict[str, torch.Tensor]]:
    """The JSON text of a stage and its tensors. Of meta and fake tensors only the shapes are written."""
    values, arguments = ValueWriter(), ArgumentWriter()
    state, tensors = _write_state(stage)
    codes = {mode: _write_graph(code.graph, code.blocks, arguments, values) for mode, code in stage._codes.items()}
    about = stage._about
    document = {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "index": about.index,
        "inputs": list(about.inputs),
        "outputs": list(about.outputs),
        "missing": dict(about.missing),
        "mode": stage._mode if stage._mode in stage._codes else next(iter(stage._codes)),
        "device": str(stage._device),
        "flags": {path: module.training for path, module in stage.named_modules() if not _is_block(stage, path)},
        "state": state,
        "values": values.table,
        "symbols": list(values.symbols.symbols.values()),
        "codes": codes,
    }
    return json.dumps(document), tensors


def _write_state(stage: StageModule) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    saved = stage.state_dict().keys()
    lines: list[dict[str, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    named = [
        *((name, parameter, True) for name, parameter in stage.named_parameters(remove_duplicate=False)),
        *((name, buffer, False) for name, buffer in stage.named_buffers(remove_duplicate=False)),
    ]
    for name, tensor, is_parameter in named:
        key = first.setdefault(id(tensor), name)
        if not is_empty(tensor):
            tensors[key] = tensor.detach()
        lines.append(
            {
                "name": name,
                "tensor": key,
                "parameter": is_parameter,
                "persistent": name in saved,
                "requires_grad": tensor.requires_grad,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
        )
    return lines, tensors


def _is_block(stage: StageModule, path: str) -> bool:
    return any(path.split(".")[0] in code.blocks for code in stage._codes.values())


def _write_graph(
    graph: fx.Graph, blocks: Mapping[str, torch.nn.Module], arguments: ArgumentWriter, values: ValueWriter
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for node in graph.nodes:
        line: dict[str, Any] = {"op": node.op, "name": node.name}
        if node.op == "call_function":
            line["target"] = target_name(node.target)
        elif node.op == "get_attr":
            line["target"] = node.target
        elif node.op == "call_module":
            line |= {"op": "block", **_write_block(blocks[str(node.target)], arguments, values)}
        if node.args:
            line["args"] = [arguments.write(arg) for arg in node.args]
        if node.kwargs:
            line["kwargs"] = {key: arguments.write(arg) for key, arg in node.kwargs.items()}
        if node.op != "call_module" and node.meta.get("val") is not None:
            line["val"] = values.write(node.meta["val"])
        lines.append(line)
    return lines


def _write_block(block: torch.nn.Module, arguments: ArgumentWriter, values: ValueWriter) -> dict[str, Any]:
    if not isinstance(block, RegionModule):
        raise GraphFormatError(
            f"a torch.autograd.Function ({block.extra_repr()}) cannot be serialized.",
            fix="register it as a torch.library operator with an autograd formula",
        )
    region = block.region
    if region.context_fn is not None:
        raise GraphFormatError(
            "a checkpoint with a context_fn cannot be serialized.", fix="checkpoint without a context_fn"
        )
    inner = dict(block.body.named_children())
    return {
        "region": {"kind": region.kind, "settings": [arguments.write(each) for each in region.settings]},
        "number": region.number,
        "held": block.held,
        "body": _write_graph(block.body.graph, inner, arguments, values),
    }


def read_stage(text: str, tensors: Mapping[str, torch.Tensor], *, allow_ops: Iterable[str] = ()) -> StageModule:
    """Inverse of `write_stage`; invalid content raises GraphFormatError."""
    targets = TargetReader(allow_ops)
    try:
        return _StageReader(_parse(text), tensors, targets).read()
    except GraphFormatError:
        raise
    except Exception as error:
        raise GraphFormatError(f"the file cannot be read: {type(error).__name__}: {str(error)[:300]}") from error


def _parse(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GraphFormatError(f"the text is not valid JSON: {str(error)[:200]}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise GraphFormatError(f"this is not a stage: the key 'format' must be {FORMAT!r}.")
    if document.get("version") != VERSION:
        raise GraphFormatError(
            f"this version of wholestep reads format {VERSION}, the file has {shown(document.get('version'))}."
        )
    return document


class _StageReader:
    def __init__(self, document: dict[str, Any], tensors: Mapping[str, torch.Tensor], targets: TargetReader) -> None:
        self._document = document
        self._tensors = tensors
        self._targets = targets
        self._values = ValueReader(document["values"], document["symbols"])
        self._names: set[str] = set()
        self._blocks = 0

    def read(self) -> StageModule:
        document = self._document
        about = StageAbout(
            int(document["index"]),
            tuple(check_identifier(name, "an input") for name in document["inputs"]),
            tuple(check_identifier(name, "an output") for name in document["outputs"]),
            {str(mode): str(reason) for mode, reason in document["missing"].items()},
        )
        entries = self._state()
        codes = {_one_of(mode, _MODES): self._code(mode, lines) for mode, lines in document["codes"].items()}
        flags = {str(path): bool(flag) for path, flag in document["flags"].items()}
        device = read_device(document["device"])
        return StageModule(about, codes, _one_of(document["mode"], tuple(codes)), entries, flags, device)

    def _state(self) -> list[StateEntry]:
        made: dict[str, torch.Tensor] = {}
        entries = []
        for line in self._document["state"]:
            name, key = _path(line["name"]), str(line["tensor"])
            if key not in made:
                made[key] = self._tensor(key, line)
            self._names.add(name)
            entries.append(StateEntry(name, made[key], line["parameter"] is True, line["persistent"] is True))
        return entries

    def _tensor(self, key: str, line: Mapping[str, Any]) -> torch.Tensor:
        if key in self._tensors:
            tensor = self._tensors[key]
        else:
            shape = [int(size) for size in line["shape"]]
            tensor = torch.empty(shape, dtype=read_dtype(line["dtype"]), device="meta")
        return torch.nn.Parameter(tensor, line["requires_grad"] is True) if line["parameter"] is True else tensor

    def _code(self, mode: str, lines: Any) -> StageCode:
        blocks: dict[str, torch.nn.Module] = {}
        return StageCode(self._graph(lines, blocks, mode, 0), blocks)

    def _graph(self, lines: Any, blocks: dict[str, torch.nn.Module], mode: str, depth: int) -> fx.Graph:
        if depth > _MAX_DEPTH:
            raise GraphFormatError("regions are nested too deeply.")
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        arguments = ArgumentReader(nodes, self._targets)
        for line in lines:
            name = check_identifier(line["name"], "the name of a node")
            args = tuple(arguments.read(line.get("args", [])))
            kwargs = arguments.read_kwargs(line.get("kwargs", {}))
            op, target = self._op(line, name, blocks, mode, depth)
            node = graph.create_node(op, target, args, kwargs, name=name)
            if node.name != name:
                raise GraphFormatError(f"{shown(name)} is the name of another node, or not usable in Python.")
            nodes[name] = node
            if "val" in line:
                node.meta["val"] = self._values.read(line["val"])
        return graph

    def _op(
        self, line: Mapping[str, Any], name: str, blocks: dict[str, torch.nn.Module], mode: str, depth: int
    ) -> tuple[str, Any]:
        op = line["op"]
        if op == "placeholder":
            return op, name
        if op == "output":
            return op, "output"
        if op == "call_function":
            return op, self._targets.read(str(line["target"]))
        if op == "get_attr" and line["target"] in self._names and depth == 0:
            return op, line["target"]
        if op == "block":
            inner: dict[str, torch.nn.Module] = {}
            body = self._graph(line["body"], inner, mode, depth + 1)
            holder = torch.nn.Module()
            for inner_name, block in inner.items():
                holder.add_module(inner_name, block)
            module = fx.GraphModule(holder, body, class_name="Block")
            target = f"_{mode}_block_{len(blocks)}"
            blocks[target] = RegionModule(self._region(line), module, int(line["held"]))
            return "call_module", target
        raise GraphFormatError(f"the op {shown(op)} is not allowed here.")

    def _region(self, line: Mapping[str, Any]) -> ContextRegion:
        kind = _one_of(line["region"]["kind"], tuple(_SETTINGS))
        settings = tuple(ArgumentReader({}, self._targets).read(line["region"]["settings"]))
        if len(settings) != _SETTINGS[kind]:
            raise GraphFormatError(f"a {kind} region has {_SETTINGS[kind]} settings, not {len(settings)}.")
        return ContextRegion(kind, settings, int(line["number"]))  # type: ignore[arg-type]


def _one_of(value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise GraphFormatError(f"{shown(value)} is not one of {', '.join(known)}.")
    return str(value)


def _path(name: Any) -> str:
    if not isinstance(name, str) or not all(_ATOM.fullmatch(atom) for atom in name.split(".")):
        raise GraphFormatError(f"{shown(name)} is not the name of a parameter or buffer.")
    return name
