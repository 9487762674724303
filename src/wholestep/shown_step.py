"""What a compiled step shows of itself: text, a page, memory over time, measured times.

The methods of `CompiledStep` that run no step for the user. Leaf packages that draw and print come with first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wholestep.ir.readable import html_in_notebooks
from wholestep.simulate.machine import Machine
from wholestep.simulate.measured_step import MeasuredStep
from wholestep.step import Executable, ResolvedOptions

if TYPE_CHECKING:
    from wholestep.inspect.memory_over_time import StepMemoryTimeline


class ShownStep:
    """A base class of `CompiledStep`, which has these attributes."""

    options: ResolvedOptions
    recompiles: list[Any]
    _fn: Callable[..., Any]
    _last: Executable | None
    _entries: list[Executable]

    _repr_html_ = html_in_notebooks

    @property
    def _name(self) -> str:  # the same in every process: no address of an object
        fn: Any = self._fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        return self.options.name or getattr(fn, "__qualname__", None) or type(fn).__qualname__

    def explain(self, machine: Machine | None = None) -> str:
        """What runs, as text: why there are several graphs, which passes ran, what was compiled, the memory, and which
        communication is not hidden and why, as simulated on `machine` (by default that of the graph's device)."""
        if self._last is None:
            return f"{self._name}: nothing was captured yet"
        return "\n".join([*self._graphs(), self._last.explain(machine)])

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write an HTML page about the graph that ran last; `options` are those of `ws.inspect.report`."""
        from wholestep.inspect import report

        return report(self, path, **options)

    def memory_timeline(self) -> StepMemoryTimeline:
        """What is in memory over the course of the graph that ran last, by kind; no memory budget is needed."""
        from wholestep.inspect import memory_timeline

        return memory_timeline(self)

    def profile(self, *args: Any, steps: int = 5, **kwargs: Any) -> MeasuredStep:
        """Measure `steps` real calls, node by node; all state is restored. `ws.simulate.calibrate` takes the result."""
        from wholestep.profile_step import profile_step

        return profile_step(self, self._fn, args, kwargs, steps)

    def _graphs(self) -> list[str]:
        count = "1 graph" if len(self._entries) == 1 else f"{len(self._entries)} graphs"
        return [f"{self._name}: {count}", *(f"  {recompile}" for recompile in self.recompiles)]

    def __str__(self) -> str:
        if self._last is None:
            return f"{self._name}: nothing was captured yet"
        return "\n".join([*self._graphs(), str(self._last.step_graph)])

    def __repr__(self) -> str:
        return f"CompiledStep({self._name}, {len(self._entries)} graphs)"
