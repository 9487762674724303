"""Compilers that change nothing: `nop` runs the graph as it is, `print_compile` shows it first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from wholestep.compilers.boxed import Compiled, boxed, graph_module
from wholestep.ir.step_graph import StepGraph


def nop(fx_g: fx.GraphModule | StepGraph, _: Sequence[Any] = ()) -> Compiled:
    """Run the graph operator by operator; what differs from eager is then not the compiler's doing."""
    return boxed(graph_module(fx_g))


def print_compile(fx_g: fx.GraphModule | StepGraph, _: Sequence[Any] = ()) -> Compiled:
    """Print the graph as Python with shapes and the user's lines, then run it as it is."""
    if isinstance(fx_g, StepGraph):
        fx_g.print_readable()
    else:
        print(fx_g.print_readable(print_output=False))
    return nop(fx_g)
