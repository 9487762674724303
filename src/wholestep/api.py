"""`compile` and `capture`: the only place that knows the whole way of a step."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, overload

from wholestep.capture.captured import Captured
from wholestep.capture.trace import find_models, is_tracing, trace_step
from wholestep.capture.tree import leaves_of
from wholestep.errors import OptionError, RecompileWarning
from wholestep.ir.step_graph import StepGraph
from wholestep.ir.verify import verify
from wholestep.options import Options
from wholestep.passes.dedup_collectives import dedup_collectives
from wholestep.passes.drop_dead_collectives import drop_dead_collectives
from wholestep.passes.dump import Dump
from wholestep.passes.manager import run_passes
from wholestep.runtime.executor import Entry
from wholestep.runtime.ranks import Ranks

P = ParamSpec("P")
R = TypeVar("R")

_MOST_GRAPHS = 128

log = logging.getLogger("wholestep")


@dataclass(frozen=True)
class Recompile:
    """Why a step was captured again."""

    call: int
    """The number of the call, from 1."""
    reason: str

    def __str__(self) -> str:
        return f"call {self.call}: {self.reason}"


class CompiledStep(Generic[P, R]):
    """A training step that runs as one graph. Call it like the function it was made from."""

    def __init__(self, fn: Callable[P, R], options: Options) -> None:
        if not callable(fn):
            raise OptionError(f"ws.compile got a {type(fn).__name__}.", fix="pass the function that does one step.")
        functools.update_wrapper(self, fn)
        self._fn = fn
        self.options = options
        self.recompiles: list[Recompile] = []
        """Why each capture after the first happened."""
        self.capture_seconds = 0.0
        """Time spent capturing, over all graphs."""
        self._entries: list[Entry] = []
        self._last: Entry | None = None
        self._calls = 0
        self._symbolic_numbers: frozenset[str] = frozenset()
        self._warned = False
        plan = options.parallel
        self._ranks = None if plan is None else Ranks(self._name, plan.deadline)

    @property
    def __wholestep_function__(self) -> Callable[P, R]:
        return self._fn

    @property
    def graphs(self) -> list[StepGraph]:
        """One StepGraph per guard key, in the order of capture."""
        return [entry.step_graph for entry in self._entries]

    @property
    def last(self) -> StepGraph | None:
        """The graph that ran last."""
        return self._last.step_graph if self._last is not None else None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._run(self._fn, args, kwargs)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return _BoundStep(self, instance)

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_tracing():
            return fn(*args, **kwargs)  # a compiled step inside of another is a part of it
        self._calls += 1
        leaves, structure = leaves_of((args, kwargs))
        found = self._find(leaves, structure)
        if self._ranks is None:
            entry, state = found or self._capture(fn, args, kwargs, leaves, structure)
            return entry.run(state, leaves)
        if found is None:
            assert self.options.parallel is not None
            with self._ranks.compiling(self._calls):
                placing = find_models(fn, args, kwargs, self.options.parallel)
            self._ranks.agree_on_models(self._calls, placing.lines())
            with self._ranks.compiling(self._calls):
                placing.run()
                found = self._capture(fn, args, kwargs, leaves, structure)
            self._ranks.agree(self._calls, found[0])
        entry, state = found
        with self._ranks.running(self._calls, entry):
            return entry.run(state, leaves)

    def _find(self, leaves: list[Any], structure: Any) -> tuple[Entry, list[Any]] | None:
        """A graph that may run for this call, and its inputs."""
        last = self._last
        if last is not None:
            state = last.gather.read(leaves)
            if state is not None and last.guards.hold(leaves, structure, state):
                return last, state
        for entry in reversed(self._entries):
            if entry is not last:
                state = entry.gather.read(leaves)
                if state is not None and entry.guards.hold(leaves, structure, state):
                    self._last = entry
                    return entry, state
        return None

    def _capture(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        structure: Any,
    ) -> tuple[Entry, list[Any]]:
        reason = None
        if self._last is not None:
            state = self._last.gather.read(leaves)
            reason = self._last.guards.why_not(leaves, structure, state)
            number = self._last.guards.changed_number()
            if number is not None:
                self._symbolic_numbers |= {number}
        captured = _trace(fn, args, kwargs, self.options, self._symbolic_numbers)
        entry = Entry(captured)
        self._entries.append(entry)
        if len(self._entries) > _MOST_GRAPHS:
            del self._entries[0]  # the oldest; the warning about recompiles came long before
        self.capture_seconds += captured.seconds
        log.info("%s: %d nodes captured in %.2f s", self._name, entry.step_graph.num_nodes, captured.seconds)
        if reason is not None:
            self.recompiles.append(Recompile(self._calls, reason))
            log.info("%s: captured again (%d graphs): %s", self._name, len(self._entries), reason)
            self._warn_if_many()
        state = entry.gather.read(leaves)
        assert state is not None, "what was just captured can be read"
        self._last = entry
        return entry, state

    @property
    def _name(self) -> str:
        """The same in every process: no address of an object."""
        fn: Any = self._fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        return self.options.name or getattr(fn, "__qualname__", None) or type(fn).__qualname__

    def _warn_if_many(self) -> None:
        if len(self.recompiles) > self.options.max_recompiles and not self._warned:
            self._warned = True
            reasons = "\n  ".join(str(r) for r in self.recompiles[-8:])
            warnings.warn(
                f"{self._name} was captured {len(self._entries)} times; the last reasons:\n  {reasons}\n"
                "Declare varying sizes with dynamic=..., or keep what varies out of the step.",
                RecompileWarning,
                stacklevel=5,
            )

    def reset(self) -> None:
        """Forget all graphs (and the models and optimizers they hold on to); the next call captures anew."""
        self._entries.clear()
        self._last = None
        self.recompiles.clear()
        self._symbolic_numbers = frozenset()

    def __reduce__(self) -> Any:
        # A copy, also in another process, captures for itself: graphs belong to the objects they were captured with.
        return CompiledStep, (self._fn, self.options)

    def __repr__(self) -> str:
        return f"CompiledStep({self._name}, {len(self._entries)} graphs)"


class _BoundStep:
    """A compiled method bound to its object; shares the graphs of the class's step."""

    def __init__(self, step: CompiledStep[Any, Any], instance: Any) -> None:
        self._step = step
        self._instance = instance

    @property
    def __wholestep_function__(self) -> Any:
        return self._step._fn.__get__(self._instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step._run(self._step._fn, (self._instance, *args), kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


@overload
def compile(fn: Callable[P, R], **options: Any) -> CompiledStep[P, R]: ...


@overload
def compile(fn: None = None, **options: Any) -> Callable[[Callable[P, R]], CompiledStep[P, R]]: ...


def compile(fn: Any = None, **options: Any) -> Any:
    """Turn a training step into one that runs as a single graph.

    Use it as a decorator, with or without options, or as a function. The options are the fields of
    `wholestep.options.Options`: lower, passes, parallel, dynamic, verify, max_recompiles, hooks, name.
    """
    chosen = Options.of(**options)
    if fn is None:
        return lambda function: CompiledStep(function, chosen)
    return CompiledStep(fn, chosen)


def capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> StepGraph:
    """The StepGraph of one call, with nothing executed and no state changed."""
    options = Options()
    step: Any = fn
    if isinstance(step, CompiledStep):
        options = step.options
    elif isinstance(step, _BoundStep):
        options = step._step.options
    function = getattr(step, "__wholestep_function__", step)
    if options.parallel is not None:
        find_models(function, args, kwargs, options.parallel).run()
    return _trace(function, args, kwargs, options).step_graph


def _trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    symbolic_numbers: frozenset[str] = frozenset(),
) -> Captured:
    """Capture, merge equal communication, check the graph, and run the passes."""
    captured = trace_step(fn, args, kwargs, options, symbolic_numbers)
    dedup_collectives(captured.step_graph.gm)
    drop_dead_collectives(captured.step_graph.gm)
    verify(captured.step_graph, min(options.verify, 2))
    dump = None if options.dump_passes is None else Dump(options.dump_passes)
    run_passes(captured.step_graph, options.passes, level=options.verify, dump=dump)
    return captured
