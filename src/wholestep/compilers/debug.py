"""`debug_nop`: the compiler whose compiled graph is a `DebugInterpreter`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from wholestep.compilers.boxed import Compiled, boxed, graph_module
from wholestep.compilers.debug_interpreter import DebugInterpreter
from wholestep.ir.step_graph import StepGraph


def debug_nop(fx_g: fx.GraphModule | StepGraph, _: Sequence[Any] = (), **options: bool) -> Compiled:
    """Run the graph node by node and check each value against the graph's metadata.

    `options` are those of `DebugInterpreter`: stop, raise_error, check_nan, check_inf, check_aliasing.
    """
    return boxed(checked_program(graph_module(fx_g), **options))


def checked_program(gm: fx.GraphModule, **options: bool) -> Callable[..., Any]:
    """The function that runs a graph under a `DebugInterpreter`, a new one for each call."""

    def run(*args: Any) -> Any:
        return DebugInterpreter(gm, True, None, **options).run(*args)

    return run
