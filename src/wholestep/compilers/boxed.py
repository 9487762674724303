"""What every compiler here takes and returns: a graph and its inputs, and a function in AOTAutograd's convention.

    compiled = nop(gm, inputs)
    compiled([a, b])         boxed: one list, which is emptied so that the inputs can be freed while the graph runs
    compiled(a, b)           the same, called directly

A graph is an `fx.GraphModule` (a forward, a backward, any other) or a `StepGraph`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from wholestep.ir.step_graph import StepGraph
from wholestep.torch_private.aot import mark_boxed

Compiled = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


def boxed(run: Callable[..., Any]) -> Compiled:
    """A function that calls `run` with the items of one list, or with its arguments."""

    def call(*args: Any) -> Any:
        if len(args) == 1 and type(args[0]) is list:
            box = args[0]
            args = tuple(box)
            box.clear()
        return run(*args)

    return mark_boxed(call)


def graph_module(graph: fx.GraphModule | StepGraph) -> fx.GraphModule:
    """The graph module of whatever was given to a compiler."""
    return graph.gm if isinstance(graph, StepGraph) else graph
