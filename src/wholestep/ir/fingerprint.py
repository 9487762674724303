"""A hash of what a step computes, for caches and for agreement between ranks.

    covered     operators, edges (by position), every scalar argument (reduce op, dims, ..), groups, dtypes, shapes
                and strides of values, bytes of constants, inputs and outputs, write-backs, state changes
    not covered names of nodes, module paths, files and lines, values of hyper-parameters, guards

Devices are numbered in the order in which they appear (`cuda#0`), so that rank 0 on cuda:0 and rank 1 on cuda:1 agree.
So are process groups, whose names differ between ranks; axis and size come from the signature's table (groups.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.graph_functions import SIDE_EFFECTS
from wholestep.ir.groups import GroupNumbers, group_of, replace_group
from wholestep.ir.io.arguments import ArgumentWriter, target_name
from wholestep.ir.io.node_values import SymbolWriter, kind_of, tensor_key
from wholestep.ir.io.serialize import write_record
from wholestep.ir.io.tensor_file import constant_bytes, find_constant
from wholestep.ir.signature import GroupSpec, Signature

VERSION = 2
"""Changes whenever equal steps get another fingerprint than before."""

_INDEXED_DEVICE = re.compile(r"\b(cuda|xpu|hpu|mtia|mps|npu):(\d+)\b", re.ASCII)


def fingerprint(gm: fx.GraphModule, signature: Signature) -> str:
    """The hexadecimal sha256 of a step."""
    digester = _Digester(gm, signature.groups)
    whole = hashlib.sha256(f"wholestep.fingerprint {VERSION}".encode())
    for node in gm.graph.nodes:
        whole.update(digester.digest(node))
    whole.update(_encode(digester.signature(signature)))
    return whole.hexdigest()


def node_digests(gm: fx.GraphModule, groups: Iterable[GroupSpec] = ()) -> list[str]:
    """One digest per node, in order: where two lists first differ, two ranks first disagree.

    `groups` is the signature's table; without it, only the number of a group counts.
    """
    digester = _Digester(gm, groups)
    return [digester.digest(node).hex() for node in gm.graph.nodes]


class _Digester:
    def __init__(self, gm: fx.GraphModule, groups: Iterable[GroupSpec]) -> None:
        self._gm = gm
        self._groups = GroupNumbers(groups)
        self._index: dict[fx.Node, int] = {}
        self._position: dict[str, int] = {}
        self._devices: dict[str, str] = {}
        self._per_type: dict[str, int] = {}
        self._arguments = ArgumentWriter(self._index.__getitem__, lambda device: self._device(str(device)))
        self._symbols = SymbolWriter()
        self._values: dict[Any, Any] = {}
        self._names: dict[Any, str] = {}

    def digest(self, node: fx.Node) -> bytes:
        """The digest of one node; nodes must come in order."""
        content: list[Any] = [node.op]
        if node.op == "call_function":
            content.append(self._target(node.target))
        elif node.op == "get_attr":
            content.append(hashlib.sha256(constant_bytes(find_constant(self._gm, str(node.target)))).hexdigest())
        write = self._arguments.write
        group = group_of(node)
        given: Any = (node.args, node.kwargs) if group is None else replace_group(node, self._groups.write(group))
        args = [write(arg) for arg in given[0]]
        if node.target in SIDE_EFFECTS:
            args = [self._device(arg) if isinstance(arg, str) else arg for arg in args]
        content.append(args)
        if given[1]:
            content.append({key: write(arg) for key, arg in given[1].items()})
        content.append(self._value(node.meta.get("val")))
        self._position[node.name] = self._index[node] = len(self._index)
        return hashlib.sha256(_encode(content)).digest()

    def signature(self, signature: Signature) -> dict[str, Any]:
        """The part of a signature that says what the step does, without names of nodes."""
        data: dict[str, Any] = self._without_devices(write_record(signature))
        data.pop("guards", None)
        data.pop("groups", None)  # the nodes have what matters of it
        for spec in data.get("inputs", []):
            spec.pop("name", None)
        for write in data.get("write_backs", []):
            write["target"] = self._position.get(write["target"])
            write["value"] = self._position.get(write["value"])
        return data

    def _target(self, target: Any) -> str:
        name = self._names.get(target)
        if name is None:
            name = self._names[target] = target_name(target)
        return name

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            key = tensor_key(value)
            found = self._values.get(key) if key is not None else None
            if found is None:
                found = [
                    str(value.dtype),
                    self._device(str(value.device)),
                    [self._dim(d) for d in value.shape],
                    [self._dim(d) for d in value.stride()],
                ]
                if key is not None:
                    self._values[key] = found
            return found
        if isinstance(value, tuple | list):
            return [self._value(item) for item in value]
        return None if value is None else kind_of(value)

    def _dim(self, dim: Any) -> Any:
        return dim if type(dim) is int else self._symbols.write(dim)

    def _device(self, name: str) -> str:
        found = self._devices.get(name)
        if found is None:
            kind = torch.device(name).type
            number = self._per_type.get(kind, 0)
            self._per_type[kind] = number + 1
            found = self._devices[name] = f"{kind}#{number}"
        return found

    def _without_devices(self, data: Any) -> Any:
        if isinstance(data, str):
            return _INDEXED_DEVICE.sub(lambda match: self._device(match[0]), data)
        if isinstance(data, list):
            return [self._without_devices(item) for item in data]
        if isinstance(data, dict):
            return {key: self._without_devices(item) for key, item in data.items()}
        return data


def _encode(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
