"""Code generation: a graph becomes one Python function that calls each operator directly.

The code of an `fx.GraphModule` looks up `torch.ops.aten.add.Tensor` at each call and reaches the kernel through another
Python frame. Here each operator, and each constant that is not written as a literal, is bound once to a short name:

    def program(p, x):
        mm = _aten_mm(p, x)  # self.head, train.py:12
        add = _aten_add_Tensor(mm, 1.5); mm = None
        return (add,)

Values are dropped after their last use, as an `fx.GraphModule` does.
"""

from __future__ import annotations

import itertools
import linecache
import math
import operator
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from wholestep.ir.meta import node_meta
from wholestep.simulate.measured_step import RANGE
from wholestep.torch_private.operators import OpOverload, kernel_call, op_name

_programs = itertools.count()


def program(gm: fx.GraphModule) -> Callable[..., Any]:
    """The function that runs a graph: it takes the placeholders in order and returns the value of the output node."""
    return _ProgramWriter(gm).build()


def timed_program(gm: fx.GraphModule, stamps: list[int]) -> Callable[..., Any]:
    """The same, which appends the clock in nanoseconds to `stamps`: at its start, and after each node that runs."""
    return _ProgramWriter(gm, {"_now": time.perf_counter_ns, "_stamp": stamps.append}).build()


def annotated_program(gm: fx.GraphModule) -> Callable[..., Any]:
    """The same, with a named range of the profiler around each node that runs: `wholestep node mm_3`."""
    return _ProgramWriter(gm, {"_range": torch.profiler.record_function}).build()


def timed_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that run, in order: those that `timed_program` has a stamp for."""
    return [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]


class _ProgramWriter:
    def __init__(self, gm: fx.GraphModule, measure: Mapping[str, Any] | None = None) -> None:
        self._gm = gm
        self._bound: dict[str, Any] = dict(measure or {})
        self._names: dict[int, str] = {}
        """The name to which an object is bound, by its id; `_bound` keeps the object alive."""
        self._node_names: dict[fx.Node, str] = {}
        self._last_uses: dict[fx.Node, list[fx.Node]] = _last_uses(gm.graph)

    def build(self) -> Callable[..., Any]:
        arguments, lines = [], []
        for i, node in enumerate(self._gm.graph.nodes):
            self._node_names[node] = f"v{i}_{_identifier(node.name)}"
            if node.op == "placeholder":
                arguments.append(self._node_names[node])
            elif node.op == "output":
                lines.append(f"    return {self._argument(node.args[0])}")
            else:
                lines += self._measured(self._line(node), node)
        if "_stamp" in self._bound:
            lines.insert(0, "    _stamp(_now())")
        unused = [n for n in self._gm.graph.nodes if n.op == "placeholder" and not n.users]
        drops = [f"    {' = '.join(self._node_names[n] for n in unused)} = None"] if unused else []
        source = "\n".join([f"def program({', '.join(arguments)}):", *drops, *lines, ""])
        file = f"<wholestep program {next(_programs)}>"
        exec(compile(source, file, "exec"), self._bound)
        # Tracebacks then show the line of the program, and its comment with the module and the user's line.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        found: Callable[..., Any] = self._bound["program"]
        weakref.finalize(found, linecache.cache.pop, file, None)
        return found

    def _measured(self, line: str, node: fx.Node) -> list[str]:
        """A line with what measures it."""
        if "_stamp" in self._bound:
            return [line, "    _stamp(_now())"]
        return [f"    with _range({RANGE + node.name!r}): {line.lstrip()}" if "_range" in self._bound else line]

    def _line(self, node: fx.Node) -> str:
        if node.op == "call_module" and getattr(self._gm.get_submodule(str(node.target)), "boxed", False):
            return self._boxed_line(node)
        call = self._call(node)
        drops = [self._node_names[dead] for dead in self._last_uses.get(node, ())]
        target = f"{self._node_names[node]} = " if node.users else ""
        drop = f"; {' = '.join(drops)} = None" if drops else ""
        return f"    {target}{call}{drop}{_comment(node)}"

    def _boxed_line(self, node: fx.Node) -> str:
        """A compiled region takes its arguments in one list and empties it; our own references end before the call."""
        function = self._bind(self._gm.get_submodule(str(node.target)).call_boxed, "region")
        arguments = ", ".join(self._argument(a) for a in node.args)
        drops = [self._node_names[dead] for dead in self._last_uses.get(node, ())]
        drop = f"; {' = '.join(drops)} = None" if drops else ""
        target = f"{self._node_names[node]} = " if node.users else ""
        return f"    box = [{arguments}]{drop}; {target}{function}(box)"

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._bind(operator.attrgetter(str(node.target))(self._gm), "attr")
        if node.op == "call_module":
            function = self._bind(self._gm.get_submodule(str(node.target)), "module")
        elif node.op == "call_function":
            if node.target is operator.getitem and not node.kwargs:
                return f"{self._argument(node.args[0])}[{self._argument(node.args[1])}]"
            function = self._function(node.target)
        else:
            raise AssertionError(f"{node.op} nodes do not occur in a StepGraph")
        arguments = [self._argument(a) for a in node.args]
        arguments += [f"{key}={self._argument(value)}" for key, value in node.kwargs.items()]
        return f"{function}({', '.join(arguments)})"

    def _function(self, target: Any) -> str:
        if isinstance(target, OpOverload):
            return self._bind(kernel_call(target), _identifier(op_name(target)))
        return self._bind(target, getattr(target, "__name__", "call"))

    def _bind(self, value: Any, hint: str) -> str:
        name = self._names.get(id(value))
        if name is None:
            name = f"_{_identifier(hint)}_{len(self._names)}"
            self._names[id(value)] = name
            self._bound[name] = value
        return name

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._node_names[value]
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return repr(value)
        if kind is tuple:
            inner = ", ".join(map(self._argument, value))
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, tuple):  # an fx immutable container of another kind, or a named tuple
            return f"({''.join(self._argument(v) + ', ' for v in value)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._argument(v)}" for k, v in value.items()) + "}"
        if kind is slice:
            return f"slice({self._argument(value.start)}, {self._argument(value.stop)}, {self._argument(value.step)})"
        return self._bind(value, kind.__name__)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that it uses last."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        fresh = [value for value in node.all_input_nodes if value not in seen]
        seen.update(fresh)
        if node.op not in ("output", "placeholder") and fresh:
            found[node] = fresh
    return found


def _comment(node: fx.Node) -> str:
    meta = node_meta(node)
    where = ", ".join(str(part) for part in (meta.module_path, meta.location) if part)
    return f"  # {where}".replace("\n", " ") if where else ""


def _identifier(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in text)
