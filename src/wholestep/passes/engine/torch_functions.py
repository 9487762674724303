"""Replace Python functions of torch that a pass inserted by the operators that they run.

    before                                after
    s = torch.add(a, b)                   s = aten.add.Tensor(a, b)
    g = torch.nn.functional.silu(s)       g = aten.silu.default(s)
    t = g.t()               (a method)    t = aten.t.default(g)

A StepGraph has operators only: the verifier, the lowering, files and the comparison of ranks know no other functions.
The function runs once on fake tensors and is replaced by what it dispatches. A function that fails, that returns other
than tensors, or that does not use its arguments stays, and the code that needs its metadata reports it. Cost: none
without such functions (torch.fx has an index of targets); otherwise a walk over the graph, and one run of each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

from wholestep.ir.io.arguments import PYTHON_FUNCTIONS
from wholestep.ir.propagate_metadata import fakes_for
from wholestep.ir.rewrite_rules import replace_node
from wholestep.torch_private.fake_tensors import DispatchMode
from wholestep.torch_private.fx_graphs import call_targets, pytree
from wholestep.torch_private.operators import HigherOrderOperator, OpOverload

_KNOWN = frozenset(PYTHON_FUNCTIONS.values())


def replace_torch_functions(gm: fx.GraphModule) -> None:
    """Replace each function of torch by the operators that it runs."""
    graph = gm.graph
    functions = {target for target in call_targets(graph) if _is_function(target)}
    if not functions and not graph.find_nodes(op="call_method", sort=False):
        return
    for node in list(graph.nodes):
        calls = node.op == "call_method" or (node.op == "call_function" and node.target in functions)
        if calls and all("val" in source.meta for source in node.all_input_nodes):
            _expand(gm, node)


def _is_function(target: Any) -> bool:
    if isinstance(target, OpOverload | HigherOrderOperator):
        return False
    module = getattr(target, "__module__", None) or ""
    return target not in _KNOWN and not module.startswith("wholestep")


class _Recorder(DispatchMode):
    """Records operators; a result of one is found among the arguments of the next by its identity."""

    def __init__(self, graph: fx.Graph, known: dict[int, fx.Node]) -> None:
        super().__init__()
        self._graph = graph
        self._known = known
        self._alive: list[Any] = []
        """Keeps the objects alive: an id is unique only while its object lives."""
        self.made: list[fx.Node] = []

    def node_of(self, value: Tensor) -> fx.Node | None:
        return self._known.get(id(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        unknown = [
            x for x in pytree.tree_leaves((args, kwargs or {})) if isinstance(x, Tensor) and id(x) not in self._known
        ]
        if unknown:
            raise _NotRecordedError
        given_args, given_kwargs = pytree.tree_map_only(Tensor, lambda x: self._known[id(x)], (args, kwargs or {}))
        self._note(self._call(func, tuple(given_args), given_kwargs, result), result)
        return result

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        self.made.append(node)
        return node

    def _note(self, node: fx.Node, result: Any) -> None:
        self._alive.append(result)
        if isinstance(result, Tensor):
            self._known.setdefault(id(result), node)
        elif isinstance(result, list | tuple):
            for i, part in enumerate(result):
                self._note(self._call(operator.getitem, (node, i), {}, part), part)


class _NotRecordedError(Exception):
    """The function used a tensor that is not an argument."""


def _expand(gm: fx.GraphModule, node: fx.Node) -> None:
    mode, values = fakes_for(gm, node.all_input_nodes)
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    tensors = {id(value): source for source, value in values.items() if isinstance(value, Tensor)}
    target: Any = node.target
    if node.op == "call_method":
        target, args, kwargs = operator.methodcaller(str(target), *args[1:], **kwargs), args[:1], {}
    with gm.graph.inserting_before(node):
        recorder = _Recorder(gm.graph, tensors)
        try:
            with torch.no_grad(), mode, recorder:
                result = target(*args, **kwargs)
        except Exception:
            _erase(recorder.made)  # the error is raised where its metadata is computed
            return
    if isinstance(result, Tensor):
        found = recorder.node_of(result)
        if found is not None:
            replace_node(node, found, recorder.made)
            return
    elif isinstance(result, list | tuple) and all(user.target is operator.getitem for user in node.users):
        parts = [recorder.node_of(part) if isinstance(part, Tensor) else None for part in result]
        if all(parts[user.args[1]] is not None for user in node.users):  # type: ignore[index]
            replace_node(node, cast("list[fx.Node]", parts), recorder.made)
            return
    _erase(recorder.made)


def _erase(made: list[fx.Node]) -> None:
    for node in reversed(made):
        node.graph.erase_node(node)
