"""Compilers that run the graph unchanged: `nop`, `print_compile` and `draw_graph_compile`, which show it first.

draw_graph_compile("forward")        a compiler that writes forward.svg and forward.dot
draw_graph(gm, "step.svg")           just the drawing, with the arguments of functorch's `draw_graph`

What every compiler here takes and returns: a graph and its inputs, and a function in AOTAutograd's convention.

    compiled = nop(gm, inputs)
    compiled([a, b])         boxed: one list, which is emptied so that the inputs can be freed while the graph runs
    compiled(a, b)           the same, called directly

A graph is an `fx.GraphModule` (a forward, a backward, any other) or a `StepGraph`.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from wholestep.inspect.drawing import SUFFIXES, draw
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


def nop(fx_g: fx.GraphModule | StepGraph, _: Sequence[Any] = ()) -> Compiled:
    """Run the graph operator by operator; a difference from eager is then not the fault of a compiler."""
    return boxed(graph_module(fx_g))


def print_compile(fx_g: fx.GraphModule | StepGraph, _: Sequence[Any] = ()) -> Compiled:
    """Print the graph as Python with shapes and the user's lines, then run it unchanged."""
    if isinstance(fx_g, StepGraph):
        fx_g.print_readable()
    else:
        print(fx_g.print_readable(print_output=False))
    return nop(fx_g)


def draw_graph_compile(name: str, *, collapse: bool | int | str = "auto") -> Compiler:
    """A compiler that draws each graph it is given: `name`.svg and `name`.dot, then `name`_1.svg and so on.

    A name that ends in .svg, .dot or .png gives only that file. `collapse` is that of `ws.inspect.draw`.
    """
    path = Path(name)
    numbers = itertools.count()

    def compiler(fx_g: fx.GraphModule | StepGraph, _: Sequence[Any] = ()) -> Compiled:
        number = next(numbers)
        suffix = path.suffix if path.suffix in SUFFIXES else ""
        base = path.with_suffix("") if suffix else path
        target = base.with_name(f"{base.name}_{number}" if number else base.name)
        if suffix:
            draw(fx_g, target.with_name(target.name + suffix), collapse=collapse)
        else:
            for each in SUFFIXES[: 3 if shutil.which("dot") else 2]:
                draw(fx_g, target.with_name(target.name + each), collapse=collapse)
        return nop(fx_g)

    return compiler


def draw_graph(
    traced: fx.GraphModule | StepGraph,
    fname: str | Path,
    figname: str = "fx_graph",
    clear_meta: bool = False,
    prog: str | Sequence[str] | None = None,
    parse_stack_trace: bool = False,
    dot_graph_shape: str | None = None,
    *,
    collapse: bool | int | str = "auto",
) -> Path:
    """`ws.inspect.draw` with the argument names of functorch's `draw_graph`.

    `figname`: the title inside of the file. `clear_meta`: leave shapes and dtypes out. `prog`: the graphviz program
    that renders a PNG, `dot` by default. `parse_stack_trace`: show the line of code of each node. `dot_graph_shape`:
    graphviz's shape of a node, in DOT and PNG.
    """
    return draw(
        traced,
        fname,
        collapse=collapse,
        title=figname,
        shapes=not clear_meta,
        program=prog or "dot",
        source_lines=parse_stack_trace,
        node_shape=dot_graph_shape or "box",
    )
