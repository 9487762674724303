"""Which values require a gradient: operators run once on fake tensors under autograd.

Rules about operators would have to know that `zeros_like(h)` requires no gradient, and that `h.add_(w)` makes `h`
require one. Layers repeat: an operator runs once for all nodes with the same shapes and requires_grad flags.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from wholestep.ir.effects import written_inputs
from wholestep.pipelining.build.context_regions import (
    FUNCTION_BEGIN,
    ContextRegion,
    is_function_mark,
    marked_tensors,
    regions_of,
)
from wholestep.pipelining.build.staged_graph import example_value, storage_of
from wholestep.torch_private.fake_tensors import new_fake_mode
from wholestep.torch_private.pytrees import pytree


def find_differentiable(
    graph: fx.Graph, requires_grad: Callable[[fx.Node], bool], submodules: Mapping[str, Any]
) -> set[fx.Node]:
    """The nodes whose tensors require a gradient at the end of the graph."""
    return _GradPropagation(requires_grad, submodules).run(graph)


class _GradFlags(NamedTuple):
    """The requires_grad flags after an operator."""

    results: Any
    """The structure of the results, with a flag for each tensor."""
    written: tuple[bool, ...]
    """A flag for each argument that it writes."""


class _GradPropagation:
    def __init__(self, requires_grad: Callable[[fx.Node], bool], submodules: Mapping[str, Any]) -> None:
        self._requires_grad = requires_grad
        self._submodules = submodules
        self._mode = new_fake_mode(None)
        self._flags: dict[fx.Node, Any] = {}
        self._geometry: dict[fx.Node, Any] = {}
        self._sharing: dict[Any, list[fx.Node]] = {}
        self._known: dict[Any, _GradFlags] = {}
        self._functions: dict[Any, bool] = {}

    def run(self, graph: fx.Graph) -> set[fx.Node]:
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op in ("placeholder", "get_attr"):
                can = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
                self._flags[node] = can and self._requires_grad(node)
            elif node.target is operator.getitem and isinstance(self._flags[node.args[0]], list | tuple):
                self._flags[node] = self._flags[node.args[0]][node.args[1]]
            elif is_function_mark(node):
                self._function(node)
            elif node.op == "call_function":
                self._call(node)
        return {node for node, flag in self._flags.items() if flag is True}

    def _function(self, node: fx.Node) -> None:
        """The results of a `torch.autograd.Function` require a gradient if an input does."""
        self._flags[node] = False
        number = node.args[0]
        if node.target is FUNCTION_BEGIN:
            enabled = next((r.settings[0] for r in reversed(regions_of(node)) if r.kind == "grad"), True)
            self._functions[number] = enabled and any(self._flags[arg] is True for arg in marked_tensors(node))
            return
        for result in marked_tensors(node):
            value = result.meta.get("val")
            can = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            self._flags[result] = can and self._functions[number]

    def _call(self, node: fx.Node) -> None:
        written = written_inputs(node)
        key = self._key(node)
        answer = self._known.get(key)
        if answer is None:
            answer = self._known[key] = self._ask(node, written)
        self._flags[node] = answer.results
        for argument, flag in zip(written, answer.written, strict=True):
            self._flags[argument] = flag
            if flag:
                for other in self._sharing_with(argument):
                    if other in self._flags:
                        self._flags[other] = True

    def _sharing_with(self, node: fx.Node) -> list[fx.Node]:
        """All tensors that share storage with this one."""
        if not self._sharing:
            for each in node.graph.nodes:
                self._sharing.setdefault(storage_of(each.meta.get("val")), []).append(each)
        memory = storage_of(node.meta.get("val"))
        return [] if memory is None else self._sharing[memory]

    def _key(self, node: fx.Node) -> Any:
        def described(arg: fx.Node) -> Any:
            return _Unquoted(f"{self._describe(arg)}{self._flags.get(arg)}")

        args = fx.map_arg((node.args, node.kwargs), described)
        modes = [str(region) for region in regions_of(node) if region.kind in ("autocast", "grad")]
        return f"{node.target} {args} {modes}"

    def _describe(self, node: fx.Node) -> str:
        found = self._geometry.get(node)
        if found is None:
            found = self._geometry[node] = _geometry(node)
        return str(found)

    def _ask(self, node: fx.Node, written: list[fx.Node]) -> _GradFlags:
        made: dict[fx.Node, Any] = {}

        def operand(arg: fx.Node) -> Any:
            if arg not in made:
                value = example_value(arg.meta.get("val"), self._mode)
                if value is None:
                    value = self._submodules.get(str(arg.target))
                made[arg] = pytree.tree_map(_require, value, self._flags[arg]) if self._any(arg) else value
                if arg in written:
                    made[arg] = made[arg].clone()  # a leaf cannot be written in place
            return made[arg]

        with torch.enable_grad(), self._mode:
            args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
            with _inside(regions_of(node)):
                try:
                    results = node.target(*args, **kwargs)  # type: ignore[operator]
                except Exception:
                    # An operator that only export can trace: assume that its results depend on all inputs.
                    given = any(self._any(arg) for arg in node.all_input_nodes) and torch.is_grad_enabled()
                    results = pytree.tree_map(lambda v: _require(v, given), example_value(node.meta["val"], self._mode))
        return _GradFlags(pytree.tree_map(_flag, results), tuple(_flag(made[argument]) for argument in written))

    def _any(self, node: fx.Node) -> bool:
        return any(flag is True for flag in pytree.tree_leaves(self._flags.get(node)))


class _Unquoted(str):
    """A string whose repr has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _geometry(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{value.dtype}{value.device}"
    if isinstance(value, list | tuple):
        return str([f"{tuple(item.shape)}{item.dtype}" for item in value if isinstance(item, torch.Tensor)])
    return f"{node.target}" if value is None else f"{value}"


def _require(value: Any, flag: Any) -> Any:
    can = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.requires_grad_(True) if can and flag is True else value


def _flag(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@contextmanager
def _inside(regions: tuple[ContextRegion, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for region in regions:
            if region.kind in ("autocast", "grad"):
                stack.enter_context(region.enter())
        yield
