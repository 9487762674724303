"""A job on its way to a worker process: targets by name, nodes by number, predicates as `module:name`.

A graph module's own pickle is Python code that is traced again, which gives nodes other names; here a name is who a
node is.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from wholestep.debug.minifier.case import Case, Edit
from wholestep.debug.minifier.trial import Job
from wholestep.ir.io.repro import importable
from wholestep.torch_private.fx_graphs import lazy_graph_module
from wholestep.torch_private.operators import OpOverload, op_name


@dataclass(frozen=True)
class _Ref:
    number: int


@dataclass(frozen=True)
class _Op:
    name: str


@dataclass(frozen=True)
class _Placed:
    tensor: Tensor
    device: str


@dataclass(frozen=True)
class Packed:
    """A job that can be sent."""

    nodes: list[tuple[Any, ...]]
    attributes: dict[str, Any]
    inputs: tuple[Any, ...]
    edit: Edit
    predicate: str | None
    values: str
    seed: int


def pack_job(job: Job) -> Packed:
    """A job without graph objects. Tensors travel by way of the CPU."""
    number: dict[fx.Node, int] = {}
    lines = []
    attributes: dict[str, Any] = {}
    for node in job.case.gm.graph.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: _Ref(number[n]))  # type: ignore[arg-type, return-value]
        target = _Op(op_name(node.target)) if isinstance(node.target, OpOverload) else node.target
        lines.append((node.op, target, _sent(args), _sent(kwargs), node.name))
        number[node] = len(number)
        if node.op in ("get_attr", "call_module"):
            attributes[str(node.target)] = _attribute(job.case.gm, str(node.target))
    predicate = None if job.predicate is None else importable(job.predicate)
    inputs = tuple(_down(value) for value in job.case.inputs)
    return Packed(lines, attributes, inputs, job.edit, predicate, str(job.values), job.seed)


def _down(value: Any) -> Any:
    """Memory of a GPU belongs to the process that has it, which may die: values go by way of the CPU."""
    on_device = isinstance(value, Tensor) and value.device.type != "cpu"
    return _Placed(value.detach().cpu(), str(value.device)) if on_device else value


def _up(value: Any) -> Any:
    return value.tensor.to(value.device) if isinstance(value, _Placed) else value


def _sent(value: Any) -> Any:
    if isinstance(value, OpOverload):
        return _Op(op_name(value))
    if isinstance(value, list | tuple):
        return type(value)(_sent(item) for item in value)
    return {key: _sent(item) for key, item in value.items()} if isinstance(value, dict) else value


def unpack_job(packed: Packed) -> Job:
    """The job again, in the process that runs it."""
    graph = fx.Graph()
    made: list[fx.Node] = []
    for op, target, args, kwargs, name in packed.nodes:
        target = _op(target.name) if isinstance(target, _Op) else target
        node = graph.create_node(op, target, _received(args, made), _received(kwargs, made), name)
        node.name = name
        made.append(node)
    root = nn.Module()
    for path, value in packed.attributes.items():
        _attach(root, path, value)
    case = Case(lazy_graph_module(root, graph, "Case"), tuple(_up(value) for value in packed.inputs))
    predicate = None if packed.predicate is None else imported(packed.predicate)
    return Job(case, packed.edit, predicate, Path(packed.values), packed.seed)


def imported(name: str) -> Any:
    """What `module:path` names."""
    module, path = name.split(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _received(value: Any, made: list[fx.Node]) -> Any:
    if isinstance(value, _Ref):
        return made[value.number]
    if isinstance(value, _Op):
        return _op(value.name)
    if isinstance(value, list | tuple):
        return type(value)(_received(item, made) for item in value)
    return {key: _received(item, made) for key, item in value.items()} if isinstance(value, dict) else value


def _op(name: str) -> OpOverload:
    namespace, base = name.split("::")
    base, _, overload = base.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    return found


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    found: Any = gm
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _attach(root: nn.Module, path: str, value: Any) -> None:
    *parts, last = path.split(".")
    holder: Any = root
    for part in parts:
        if not hasattr(holder, part):
            setattr(holder, part, nn.Module())
        holder = getattr(holder, part)
    setattr(holder, last, value)
