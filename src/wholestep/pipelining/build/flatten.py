"""One flat graph from an exported program: state by its name, blocks opened, checks of export left out.

    exported                                             flat
    p_fc_weight, x                                       x
    body = get_attr submod_1                             linear(x, get_attr fc.weight)      regions: (autocast,)
    y = wrap_with_autocast("cpu", .., body, x, ..)[0]

The result of an in-place operator is the tensor that it wrote, so its users read that tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from wholestep.ir.effects import returned_position
from wholestep.pipelining.build import functions
from wholestep.pipelining.build.regions import BEGIN, END, KEY, Region
from wholestep.torch_private.operators import OpOverload
from wholestep.torch_private.pipelining import checks_of_export, region_operators


class Flattener:
    """Copies one exported program into one graph."""

    def __init__(self, exported: torch.export.ExportedProgram, checkpoints: Mapping[int, Region]) -> None:
        self.graph = fx.Graph()
        self.submodules: dict[str, torch.nn.Module] = {}
        """Bodies of higher-order operators that stay in the graph (`torch.cond`), by the name of their get_attr."""
        self._exported = exported
        self._checkpoints = checkpoints
        self._checks = checks_of_export()
        self._autocast, self._grad = region_operators()
        self._stack: list[Region] = []
        self._blocks = len(checkpoints)
        self._state = {
            spec.arg.name: str(spec.target)
            for spec in exported.graph_signature.input_specs
            if spec.target is not None and hasattr(spec.arg, "name")
        }

    def flatten(self) -> fx.Graph:
        """The flat graph."""
        results = self._body(self._exported.graph_module, None)
        self.graph.output(results)
        drop_unused(self.graph)
        return self.graph

    def _body(self, gm: fx.GraphModule, operands: list[Any] | None) -> Any:
        """Copy the nodes of a graph; `operands` are its inputs, None for the program itself."""
        new: dict[fx.Node, Any] = {}
        given = iter(operands or ())
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                new[node] = self._input(node) if operands is None else next(given)
            elif node.op == "output":
                return fx.map_arg(node.args[0], new.__getitem__)
            elif node.op == "get_attr":
                new[node] = (gm, node)  # looked at where it is used
            elif node.target in (BEGIN, END):
                self._mark(node)
            elif functions.is_mark(node):
                self._function_mark(node, new)
            elif node.target in (self._autocast, self._grad):
                new[node] = self._block(node, new)
            elif node.target is operator.getitem and isinstance(new[node.args[0]], tuple):
                new[node] = new[node.args[0]][node.args[1]]
            elif node.target not in self._checks:
                new[node] = self._copy(node, new)
        raise AssertionError("a graph without an output")

    def _input(self, node: fx.Node) -> fx.Node | None:
        if node.name in self._state:
            new = self.graph.create_node("get_attr", self._state[node.name], name=node.name)
        elif isinstance(node.meta.get("val"), torch.Tensor):
            new = self.graph.placeholder(node.name)
        else:
            return None  # a constant of the call
        new.meta = dict(node.meta)
        return new

    def _mark(self, node: fx.Node) -> None:
        region = self._checkpoints[node.args[0]]  # type: ignore[index]
        if node.target is BEGIN:
            self._stack.append(region)
        else:
            assert self._stack.pop() is region, "blocks that overlap"

    def _function_mark(self, node: fx.Node, new: Mapping[fx.Node, Any]) -> None:
        """Marks of functions stay: what they name counts as used."""
        region = self._checkpoints[node.args[0]]  # type: ignore[index]
        if node.target is functions.BEGIN:
            self._stack.append(region)
        self._copy(node, new)
        if node.target is functions.END:
            assert self._stack.pop() is region, "blocks that overlap"

    def _block(self, node: fx.Node, new: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
        settings = 4 if node.target is self._autocast else 1
        gm, body = new[node.args[settings]]  # type: ignore[index]
        operands = [fx.map_arg(arg, new.__getitem__) for arg in node.args[settings + 1 :]]
        kind: Any = "autocast" if settings == 4 else "grad"
        self._stack.append(Region(kind, tuple(node.args[:settings]), self._blocks))
        self._blocks += 1
        results = self._body(getattr(gm, str(body.target)), operands)
        self._stack.pop()
        return tuple(results)

    def _copy(self, node: fx.Node, new: Mapping[fx.Node, Any]) -> Any:
        copied = self.graph.node_copy(node, lambda arg: self._lookup(arg, new))
        if self._stack:
            copied.meta[KEY] = tuple(self._stack)
        return written_argument(copied) or copied

    def _lookup(self, arg: fx.Node, new: Mapping[fx.Node, Any]) -> Any:
        found = new[arg]
        if not isinstance(found, tuple):
            return found
        gm, node = found
        name = f"{node.target}"
        while self.submodules.get(name, getattr(gm, str(node.target))) is not getattr(gm, str(node.target)):
            name += "_"
        self.submodules[name] = getattr(gm, str(node.target))
        return self.graph.get_attr(name)


def written_argument(node: fx.Node) -> fx.Node | None:
    """The argument that an in-place operator writes and returns, if that is all it returns."""
    if not isinstance(node.target, OpOverload):
        return None
    written = returned_position(node.target)
    argument = node.args[written] if written is not None and written < len(node.args) else None
    same = isinstance(argument, fx.Node) and _same_geometry(node.meta.get("val"), argument.meta.get("val"))
    return argument if same else None  # type: ignore[return-value]


def _same_geometry(a: Any, b: Any) -> bool:
    """Whether two fake tensors are one view of one memory: `t_()` and `resize_()` change their argument's own shape."""
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and a.dtype == b.dtype and str((a.shape, a.stride())) == str((b.shape, b.stride()))


def drop_unused(graph: fx.Graph) -> None:
    """Take out state that nothing reads, and arithmetic on sizes that only checks of export had used."""
    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        is_number = isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat | int | bool | float)
        unused = node.op == "get_attr" or (node.op == "call_function" and is_number)
        if unused and not node.users:
            graph.erase_node(node)
