"""A StepGraph as versioned JSON, and back without pickle, eval or import; damaged text is refused.

    {"format": "wholestep.step_graph", "version": 1, "torch": "2.13.0",
     "signature": {..},        typed inputs, outputs, write-backs, state changes     (`write_record`)
     "symbols": [..],          symbolic dimensions                                   (node_values.py)
     "values": [..],           what nodes compute: shapes, dtypes, devices           (node_values.py)
     "origins": [..],          where nodes come from: module, line, phase            (`write_record` of NodeMeta)
     "constants": {..},        tensors held by the graph, bytes in base64            (tensor_file.py)
     "nodes": [                one line each; arguments as in arguments.py
       {"op": "call_function", "name": "add", "target": "aten::add.Tensor", "args": [{"node": "x"}, 1], "val": 3}]}

Frozen dataclasses are written by their type hints: a new field of a signature is written and read at once. Fields that
have their default are left out; keys that a dataclass does not have are refused.

Files are untrusted: torch.fx turns names into Python source, so every name is checked to be a plain identifier, every
function comes from an allow-list, and anything unexpected raises GraphFormatError.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from wholestep.errors import GraphFormatError
from wholestep.ir.io.arguments import (
    ArgumentReader,
    ArgumentWriter,
    TargetReader,
    check_identifier,
    read_float,
    shown,
    target_name,
)
from wholestep.ir.io.node_values import ValueReader, ValueWriter
from wholestep.ir.io.result_tree import check as check_result
from wholestep.ir.io.tensor_file import check_constant_name, find_constant, read_constant, write_constant
from wholestep.ir.meta import KEY, NodeMeta, set_node_meta
from wholestep.ir.signature import Signature
from wholestep.torch_private.operators import OpOverload

FORMAT = "wholestep.step_graph"
VERSION = 1

_OPS = ("placeholder", "get_attr", "call_function", "output")
_NODE_KEYS = frozenset({"op", "name", "target", "args", "kwargs", "val", "origin"})


def write_step_graph(gm: fx.GraphModule, signature: Signature) -> str:
    """The JSON text of a graph and its signature."""
    arguments, values = ArgumentWriter(), ValueWriter()
    origins: dict[NodeMeta, int] = {}
    constants: dict[str, Any] = {}
    nodes: list[str] = []
    for node in gm.graph.nodes:
        try:
            line = _write_node(node, arguments, values, origins)
            if node.op == "get_attr" and node.target not in constants:
                tensor = find_constant(gm, node.target)
                val = node.meta.get("val")
                constants[node.target] = write_constant(
                    tensor, val.device if isinstance(val, Tensor) else tensor.device
                )
        except GraphFormatError as error:
            raise GraphFormatError(error.what, fix=error.fix, node=node.format_node() or node.name) from None
        nodes.append(json.dumps(line))
    head = {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "signature": write_record(signature),
        "symbols": list(values.symbols.symbols.values()),
        "values": values.table,
        "origins": [write_record(origin) for origin in origins],
        "constants": constants,
    }
    parts = [f"{json.dumps(key)}: {json.dumps(content)}" for key, content in head.items()]
    parts.append('"nodes": [\n' + ",\n".join(nodes) + "]")
    return "{" + ",\n".join(parts) + "}\n"


def _write_node(
    node: fx.Node, arguments: ArgumentWriter, values: ValueWriter, origins: dict[NodeMeta, int]
) -> dict[str, Any]:
    if node.op not in _OPS:
        raise GraphFormatError(f"a {node.op} node has no form in the file.", fix="inline it into torch operators.")
    line: dict[str, Any] = {"op": node.op, "name": node.name}
    if node.op == "call_function":
        line["target"] = target_name(node.target)
    elif node.op == "get_attr":
        line["target"] = node.target
    if node.args:
        line["args"] = [arguments.write(arg) for arg in node.args]
    if node.kwargs:
        line["kwargs"] = {key: arguments.write(arg) for key, arg in node.kwargs.items()}
    if "val" in node.meta:
        line["val"] = values.write(node.meta["val"])
    origin = node.meta.get(KEY)
    if isinstance(origin, NodeMeta):
        line["origin"] = origins.setdefault(origin, len(origins))
    return line


def read_step_graph(text: str, *, allow_ops: Iterable[str] = ()) -> tuple[fx.GraphModule, Signature]:
    """The graph and signature that `write_step_graph` wrote; anything else raises GraphFormatError."""
    targets = TargetReader(allow_ops)
    try:
        return _StepGraphReader(_parse(text), targets).read()
    except GraphFormatError:
        raise
    except Exception as error:
        # torch and sympy raise many kinds of errors for a damaged file; the caller sees one.
        raise GraphFormatError(f"the file cannot be read: {type(error).__name__}: {str(error)[:300]}") from error


def _parse(text: object) -> dict[str, Any]:
    if not isinstance(text, str):
        raise GraphFormatError(f"expected the text of a StepGraph, found {type(text).__name__}.")
    try:
        document = json.loads(text, parse_constant=refuse_bare_number, parse_float=refuse_bare_number)
    except (ValueError, RecursionError) as error:
        raise GraphFormatError(f"the text is not JSON of a StepGraph: {str(error)[:200]}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise GraphFormatError(f"this is not a StepGraph: the key 'format' must be {FORMAT!r}.")
    if document.get("version") != VERSION or type(document["version"]) is not int:
        raise GraphFormatError(
            f"this wholestep reads version {VERSION} of the format, the file has {shown(document.get('version'))}.",
            fix="read it with the wholestep that wrote it, or write it again.",
        )
    return document


def refuse_bare_number(text: str) -> float:
    """The `parse_constant` and `parse_float` of files in which floats are hexadecimal text."""
    raise ValueError(f"a bare number {text[:40]!r}; floats are written in hexadecimal")


class _StepGraphReader:
    """One reading of one document."""

    def __init__(self, document: dict[str, Any], targets: TargetReader) -> None:
        self._document = document
        self._graph = fx.Graph()
        self._nodes: dict[str, fx.Node] = {}
        self._targets = targets
        self._arguments = ArgumentReader(self._nodes, targets)
        self._values = ValueReader(self._section("values", list), self._section("symbols", list))
        records = RecordReader(targets)
        self._origins = [
            records.read(NodeMeta, origin, f"origins[{i}]") for i, origin in enumerate(self._section("origins", list))
        ]
        self._signature = records.read(Signature, self._section("signature", dict), "signature")
        self._constants = {
            check_constant_name(name): read_constant(data, name)
            for name, data in self._section("constants", dict).items()
        }

    def _section(self, key: str, kind: type) -> Any:
        found = self._document.get(key)
        if not isinstance(found, kind):
            raise GraphFormatError(f"the key {key!r} must hold a {kind.__name__}, not {shown(found)}.")
        return found

    def read(self) -> tuple[fx.GraphModule, Signature]:
        lines = self._section("nodes", list)
        for number, line in enumerate(lines):
            try:
                self._read_node(line, last=number == len(lines) - 1)
            except GraphFormatError as error:
                name = line.get("name") if isinstance(line, dict) else None
                raise GraphFormatError(error.what, fix=error.fix, node=f"nodes[{number}], {shown(name)}") from error
        self._check_signature()
        gm = fx.GraphModule(self._constants, self._graph, class_name="StepGraph")
        self._graph.lint()
        return gm, self._signature

    def _read_node(self, line: Any, *, last: bool) -> None:
        if not isinstance(line, dict):
            raise GraphFormatError(f"expected a node, found {shown(line)}.")
        op, target = line.get("op"), line.get("target")
        if op not in _OPS or (op == "output") != last:
            raise GraphFormatError(f"the op {shown(op)} is not allowed here: there is one output, the last node.")
        unknown = line.keys() - _NODE_KEYS
        if unknown:
            raise GraphFormatError(f"unknown key {shown(min(unknown))}.")
        name = check_identifier(line.get("name"), "the name of a node")
        args = self._arguments.read(line.get("args", []))
        kwargs = self._arguments.read_kwargs(line.get("kwargs", {}))
        if not isinstance(args, list):
            raise GraphFormatError(f"expected a list of arguments, found {shown(line['args'])}.")
        if (kwargs and op != "call_function") or (args and op in ("placeholder", "get_attr")):
            raise GraphFormatError(f"a {op} node takes no such arguments.")
        if op == "placeholder":
            self._check_placeholder(target)
            target = name
        elif op == "output":
            self._check_output(target, args)
            target = "output"
        else:
            target = self._read_target(op, target)
        node = self._graph.create_node(op, target, tuple(args), kwargs, name=name)
        if node.name != name or name == "self":
            raise GraphFormatError(f"{shown(name)} is the name of another node, or one that Python code cannot use.")
        self._nodes[name] = node
        if "val" in line:
            node.meta["val"] = self._values.read(line["val"])
        if "origin" in line:
            set_node_meta(node, self._origin(line["origin"]))

    def _check_placeholder(self, target: Any) -> None:
        if target is not None:
            raise GraphFormatError("a placeholder has a name and no target.")
        if self._nodes and next(reversed(self._nodes.values())).op != "placeholder":
            raise GraphFormatError("placeholders come before all other nodes.")

    def _check_output(self, target: Any, args: list[Any]) -> None:
        if target is not None or not (len(args) == 1 and isinstance(args[0], tuple)):
            raise GraphFormatError("the output node must hold one flat tuple.")
        if not all(isinstance(item, fx.Node | int | float | str | None) for item in args[0]):
            raise GraphFormatError("the output node must hold one flat tuple of nodes and numbers.")

    def _read_target(self, op: str, target: Any) -> Any:
        if not isinstance(target, str):
            raise GraphFormatError(f"{shown(target)} is not a target.")
        if op == "call_function":
            return self._targets.read(target)
        if target not in self._constants:
            raise GraphFormatError(f"the constant {shown(target)} is not in the file.")
        return target

    def _origin(self, index: Any) -> NodeMeta:
        if type(index) is not int or not 0 <= index < len(self._origins):
            raise GraphFormatError(f"{shown(index)} is not an index into the table of origins.")
        return self._origins[index]

    def _check_signature(self) -> None:
        signature = self._signature
        if not self._nodes:
            raise GraphFormatError("the graph has no nodes.")
        names = [name for name, node in self._nodes.items() if node.op == "placeholder"]
        if names != [spec.name for spec in signature.inputs]:
            raise GraphFormatError("the inputs of the signature are not the placeholders of the graph.")
        outputs = len(signature.outputs)
        [results] = next(reversed(self._nodes.values())).args
        if not isinstance(results, tuple) or len(results) != outputs:
            raise GraphFormatError(f"the signature has {outputs} outputs, and the graph has not.")
        for write in signature.write_backs:
            if write.target not in self._nodes or write.value not in self._nodes:
                raise GraphFormatError(f"the write-back of {write.target!r} names a node that does not exist.")
        for change in signature.state_changes:
            for number in (change.output, change.unless):
                if number is not None and not 0 <= number < outputs:
                    raise GraphFormatError(f"the state change of {change.path!r} names an output that does not exist.")
        check_result(signature.result, outputs)


T = TypeVar("T")


def write_record(value: Any) -> Any:
    """A dataclass, or anything that one holds, as JSON."""
    if dataclasses.is_dataclass(value):
        plain: dict[str, Any] = {}
        kind: Any = type(value)
        for name, default in _defaults(kind).items():
            content = getattr(value, name)
            if default is dataclasses.MISSING or content != default or type(content) is not type(default):
                plain[name] = write_record(content)
        return plain
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, str | int | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [write_record(item) for item in value]
    if isinstance(value, dict):
        return {str(key): write_record(item) for key, item in value.items()}
    if isinstance(value, OpOverload):
        return {"op": target_name(value)}
    raise GraphFormatError(f"a value of type {type(value).__name__} has no form in the file.")


class RecordReader:
    """Reads dataclasses; `where` in messages says which part of the file is wrong."""

    def __init__(self, targets: TargetReader) -> None:
        self._targets = targets

    def read(self, cls: type[T], data: Any, where: str) -> T:
        """An instance of the dataclass `cls`."""
        if not isinstance(data, dict):
            raise GraphFormatError(f"{where}: expected an object, found {shown(data)}.")
        kind: Any = cls
        hints, defaults = _hints(kind), _defaults(kind)
        for key in data:
            if key not in hints:
                raise GraphFormatError(f"{where}: unknown key {shown(key)}.")
        for name, default in defaults.items():
            if default is dataclasses.MISSING and name not in data:
                raise GraphFormatError(f"{where}: the key {name!r} is missing.")
        return cls(**{key: self._value(hints[key], item, f"{where}.{key}") for key, item in data.items()})

    def _value(self, hint: Any, data: Any, where: str) -> Any:
        origin = typing.get_origin(hint)
        if origin in (types.UnionType, typing.Union):
            return self._union(typing.get_args(hint), data, where)
        if origin is tuple:
            return self._tuple(typing.get_args(hint), data, where)
        if origin is list and isinstance(data, list):
            return [self._value(typing.get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
        if origin is dict and isinstance(data, dict):
            item = typing.get_args(hint)[1]
            return {key: self._value(item, value, f"{where}[{shown(key)}]") for key, value in data.items()}
        if hint in (int, str, bool, type(None)) and type(data) is hint:
            return data
        if hint is float and isinstance(data, dict) and set(data) == {"float"}:
            return read_float(data["float"])
        if hint is OpOverload and isinstance(data, dict) and isinstance(data.get("op"), str):
            return self._targets.read_op(data["op"])
        if isinstance(hint, type) and issubclass(hint, Enum) and data in [member.value for member in hint]:
            return hint(data)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.read(hint, data, where)
        if hint in (object, Any):
            return _free(data)
        raise GraphFormatError(f"{where}: {shown(data)} is not of the kind expected there.")

    def _union(self, choices: tuple[Any, ...], data: Any, where: str) -> Any:
        if data is None and type(None) in choices:
            return None
        others = [choice for choice in choices if choice is not type(None)]
        if len(others) == 1:
            return self._value(others[0], data, where)
        for choice in others:
            try:
                return self._value(choice, data, where)
            except GraphFormatError:
                continue
        raise GraphFormatError(f"{where}: {shown(data)} is not of a kind expected there.")

    def _tuple(self, items: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
        if isinstance(data, list):
            if len(items) == 2 and items[1] is Ellipsis:
                return tuple(self._value(items[0], item, f"{where}[{i}]") for i, item in enumerate(data))
            if len(items) == len(data):
                return tuple(
                    self._value(h, d, f"{where}[{i}]") for i, (h, d) in enumerate(zip(items, data, strict=True))
                )
        raise GraphFormatError(f"{where}: {shown(data)} is not a list of the length expected there.")


def _free(data: Any) -> Any:
    """Data of no fixed type: JSON itself, with exact floats."""
    if isinstance(data, dict):
        if set(data) == {"float"}:
            return read_float(data["float"])
        return {key: _free(item) for key, item in data.items()}
    return [_free(item) for item in data] if isinstance(data, list) else data


@lru_cache(maxsize=64)
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@lru_cache(maxsize=64)
def _defaults(cls: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        made = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        found[spec.name] = made
    return found
