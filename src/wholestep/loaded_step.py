"""`LoadedStep`: a step from a file. Its graphs are bound to the objects of a call, and nothing is ever traced.

A graph is bound at a call for which the guards of no bound one hold: the graph that creates optimizer state at the
first call, that of a trained step at the second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wholestep.artefact.addresses import Given
from wholestep.artefact.file_format import SavedStep, read_saved
from wholestep.artefact.saved_graph import OtherObjectsError
from wholestep.compiled_step import CompiledStep
from wholestep.errors import ArtefactError, OptionError, called
from wholestep.ir.io.arguments import ArgumentReader, TargetReader
from wholestep.options import Options
from wholestep.step import BoundGraph, Executable, StepCall, bound_graph, compile_step, within_budget
from wholestep.torch_private.inductor import load_kernels


class LoadedStep(CompiledStep[Any, Any]):
    """A training step that runs the graphs of a file. Call it like the function that was saved."""

    def __init__(
        self,
        saved: SavedStep,
        fn: Callable[..., Any] | Given,
        options: Options,
        allow_ops: Sequence[str] = (),
    ) -> None:
        self._saved = list(saved.graphs)
        self._allow_ops = tuple(allow_ops)
        self._given = fn if isinstance(fn, Given) else None
        super().__init__(_no_function(saved.name) if isinstance(fn, Given) else fn, options)

    def _new_executable(self, call: StepCall) -> Executable:
        graph = self._bind(call)
        return compile_step(graph, within_budget(graph, self.options), self._shared)

    def _bind(self, call: StepCall) -> BoundGraph:
        """The first graph of the file that fits a call."""
        reasons: list[OtherObjectsError] = []
        for saved in self._saved:
            try:
                return bound_graph(saved, call, self._given or call.fn, self._allow_ops, self.options.parallel)
            except OtherObjectsError as error:
                reasons.append(error)
        raise min(reasons, key=lambda error: len(error.reasons))

    def save(self, path: Any, *, kernels: bool = False) -> None:
        """Not of a loaded step: the file that it came from is the artefact."""
        raise ArtefactError(f"{self._name} was loaded from a file.", fix="copy that file.")


def _no_function(name: str) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        raise ArtefactError(
            f"{name} was loaded without its function, and cannot run in eager.", fix="give fn= to ws.load."
        )

    step.__qualname__ = step.__name__ = name
    return step


def load_step(
    path: str | os.PathLike[str],
    fn: Callable[..., Any] | None,
    given: Mapping[str, Any],
    *,
    lower: str | None,
    parallel: Any,
    trust_kernels: bool,
    allow_ops: Sequence[str],
) -> LoadedStep:
    """Read a file, check what can be checked before the first call, and make the step."""
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"ws.load got {called(path)}.", fix="give the path that step.save(path) wrote.")
    name = os.fspath(path)
    try:
        raw = Path(name).read_bytes()
    except OSError as error:
        raise ArtefactError(
            f"{name} cannot be read: {(error.strerror or str(error)).lower()}.",
            fix="give the path that step.save(path) wrote.",
        ) from error
    saved = read_saved(raw, name)
    options = _options(saved, lower, parallel, trust_kernels)
    if trust_kernels and saved.kernels:
        load_kernels(saved.kernels)
    step = LoadedStep(saved, getattr(fn, "__wholestep_function__", fn) or Given(given), options, allow_ops)
    return step


def _options(saved: SavedStep, lower: str | None, parallel: Any, trusted: bool) -> Options:
    found = dict(saved.options)
    if set(found) != {"plan", "lower", "cuda_graph", "lower_options"}:
        raise ArtefactError(f"the options of the file are {sorted(found)[:5]}.", fix="save the step again.")
    plan = getattr(parallel, "describe", str)() if parallel is not None else ""
    if plan != found["plan"]:
        raise ArtefactError(
            f"the step was captured with parallel={found['plan'] or None!s:.200}, and is loaded with {plan or None}.",
            fix="give ws.load a plan with the same axes and options.",
        )
    settings = ArgumentReader({}, TargetReader()).read(found["lower_options"])
    unsafe = [] if trusted else _unsafe(settings)
    if unsafe:
        raise ArtefactError(
            f"the file sets {', '.join(unsafe)} of Inductor; some of these name programs that Inductor runs.",
            fix="load it with trust_kernels=True if you trust where it comes from.",
        )
    chosen = {"lower": lower or found["lower"], "cuda_graph": found["cuda_graph"], "lower_options": settings}
    return Options.of(**chosen, parallel=parallel, name=saved.name, passes=None, cache=False)


def _unsafe(settings: Any) -> list[str]:
    """Settings of Inductor that are neither a bool nor a number."""
    each = [settings.get("config", {}), *settings.get("region_config", {}).values()]
    plain = (bool, int, type(None))
    return sorted({str(name) for config in each for name, value in config.items() if type(value) not in plain})
