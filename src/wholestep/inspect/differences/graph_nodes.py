"""The nodes of a graph as records that can be compared with those of another graph, read in one walk.

    operator        the target of a call, the path of an input, the hash of a constant
    constants       its arguments without nodes: scalars, sizes, dtypes, reduce op; groups by number, devices by kind
    value           dtype, shape and strides of what it computes
    whole           hash of all of this, of module and phase, and of all that the node is computed from
    form            the same without constants, values and module
    meaning         the same without module and phase: nodes with the same meaning compute the same

Names of nodes are in none of them: one more operator renumbers all that follow.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.errors import GraphFormatError
from wholestep.ir.effects import is_collective, is_wait
from wholestep.ir.groups import GroupNumbers, group_of, group_table, replace_group
from wholestep.ir.io.arguments import describe_target
from wholestep.ir.io.node_values import is_packed
from wholestep.ir.io.tensor_file import constant_bytes, find_constant
from wholestep.ir.meta import module_path, node_meta, phase
from wholestep.ir.readable import describe_value
from wholestep.ir.signature import Signature
from wholestep.torch_private.fx_graphs import NODE_SOURCES
from wholestep.torch_private.operators import OpOverload, op_name

_DEVICE = re.compile(r"\b(cuda|xpu|mtia|mps|npu|hpu):\d+")


@dataclass(frozen=True, eq=False, slots=True)
class ComparedNode:
    """A node, and what it is compared by."""

    i: int
    node: fx.Node
    operator: str
    constants: str
    value: str
    sources: tuple[int, ...]
    phase: str
    module: str
    recomputed: bool
    communicates: bool
    whole: bytes
    form: bytes
    meaning: bytes

    @property
    def short(self) -> str:
        """The operator without its namespace and overload."""
        if self.node.op == "get_attr":
            return "constant"
        namespace, _, name = self.operator.rpartition("::")
        return name.split(".")[0] if namespace else name.rpartition(".")[2]


class ComparedGraph:
    """The nodes of a graph in order."""

    def __init__(self, gm: fx.GraphModule, signature: Signature) -> None:
        self.gm = gm
        self.signature = signature
        self.paths = {spec.name: spec.path for spec in signature.inputs}
        self._groups = GroupNumbers((*group_table(gm), *signature.groups))
        self._targets: dict[Any, str] = {}
        self.nodes: list[ComparedNode] = []
        number: dict[fx.Node, int] = {}
        for i, node in enumerate(gm.graph.nodes):
            self.nodes.append(self._read(i, node, tuple(number[source] for source in NODE_SOURCES(node))))
            number[node] = i
        self.number = number

    def _read(self, i: int, node: fx.Node, sources: tuple[int, ...]) -> ComparedNode:
        operator, constants, value = self._operator(node), self._constants(node), value_text(node.meta.get("val"))
        found, where, meta = self.nodes, module_path(node), node_meta(node)
        recomputed = meta.recompute
        stage = phase(node)
        if node.op == "output":
            value = ""
        return ComparedNode(
            i,
            node,
            operator,
            constants,
            value,
            sources,
            stage,
            where,
            recomputed,
            node.op == "call_function" and (is_collective(node.target) or is_wait(node.target)),
            _digest((operator, constants, value, stage, where, str(recomputed)), (found[s].whole for s in sources)),
            _digest((operator, stage), (found[s].form for s in sources)),
            _digest((operator, constants, value), (found[s].meaning for s in sources)),
        )

    def _operator(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return self.paths.get(node.name, node.name)
        if node.op == "get_attr":
            return _contents(self.gm, str(node.target))
        if node.op != "call_function":
            return node.op if node.op == "output" else f"{node.op} {node.target}"
        name = self._targets.get(node.target)
        if name is None:
            target = node.target
            name = op_name(target) if isinstance(target, OpOverload) else describe_target(target)
            self._targets[target] = name
        return name

    def _constants(self, node: fx.Node) -> str:
        if node.op != "call_function":
            return ""
        group = group_of(node)
        args, kwargs = (node.args, node.kwargs) if group is None else replace_group(node, _group(self._groups, group))
        given = [constant_text(arg) for arg in args]
        given += [f"{key}={constant_text(arg)}" for key, arg in kwargs.items()]
        return ", ".join(given)


def _group(numbers: GroupNumbers, name: str) -> str:
    number, axis, size = numbers.write(name)
    return f"{axis or f'group {number}'} of {size or '?'}"


def constant_text(value: Any) -> str:
    """An argument as text; a node is `%`."""
    if isinstance(value, fx.Node):
        return "%"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(constant_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {constant_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"{constant_text(value.start)}:{constant_text(value.stop)}:{constant_text(value.step)}"
    if isinstance(value, torch.device):
        return value.type
    return str(value)


def value_text(value: Any) -> str:
    """What a node computes: dtype and shape, and strides where they are not those of a new tensor."""
    if isinstance(value, Tensor):
        text = describe_value(value)
        plain = value.layout is torch.strided and not is_packed(value)
        return f"{text} stride {tuple(value.stride())}" if plain and value.dim() else text
    if isinstance(value, list | tuple):
        return f"({', '.join(map(value_text, value))})"
    return describe_value(value)


def _contents(gm: fx.GraphModule, name: str) -> str:
    """A constant by its contents; one that cannot be read as bytes by its name."""
    try:
        return f"constant {hashlib.sha256(constant_bytes(find_constant(gm, name))).hexdigest()[:16]}"
    except (GraphFormatError, RuntimeError):  # a generator, or a tensor without data
        return f"constant {name}"


def _digest(own: Iterable[str], sources: Iterable[bytes]) -> bytes:
    found = hashlib.blake2b("\0".join(own).encode(), digest_size=12)
    for source in sources:
        found.update(source)
    return found.digest()


def without_device_index(text: str) -> str:
    """Text in which devices are named by their kind: rank 0 is on cuda:0 and rank 1 on cuda:1."""
    return _DEVICE.sub(r"\1", text)
