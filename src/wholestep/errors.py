"""Errors for the person who reads them: a stable code, what happened, the node and the user's line, what to do.

Every code has a page in `docs/errors/`; the message ends with the command that prints it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Self


@dataclass(frozen=True)
class Location:
    """A line of code outside of torch and wholestep: the user's, or one of an installed package."""

    file: str
    line: int
    function: str = ""
    text: str = ""
    called_from: Location | None = None
    """The user's line that led here, if this one is in an installed package."""
    inside: Location | None = None
    """The line of an installed package that this one, the user's, led to: the other way round, as errors show it."""

    @property
    def users_first(self) -> Location:
        """The same place with the user's line first, and that of the package in `inside`."""
        if self.called_from is None:
            return self
        return replace(self.called_from, inside=replace(self, called_from=None))

    def __str__(self) -> str:
        where = f"{_short(self.file)}:{self.line}"
        return f"{where} in {self.function}" if self.function else where


class WholestepError(ValueError):
    """The root of everything wholestep raises on purpose. Subclasses carry the code."""

    code = "WS-ERROR"

    def __init__(
        self,
        what: str,
        *,
        fix: str = "",
        node: str = "",
        location: Location | None = None,
        around: Sequence[str] = (),
    ) -> None:
        self.what = what
        self.fix = fix
        self.node = node
        self.location = None if location is None else location.users_first
        self.around = tuple(around)
        self.effect: object = None
        """How a second trace detects the refused effect, to find its line (`capture/results/effect_line.py`)."""
        super().__init__(self._render())

    def at(self, location: Location | None) -> Self:
        """The same error with a line."""
        made = type(self)(self.what, fix=self.fix, node=self.node, location=location, around=self.around)
        made.effect = self.effect
        return made

    def seen_by(self, effect: object) -> Self:
        """The same error, with a way to detect the effect that it refuses."""
        self.effect = effect
        return self

    def _render(self) -> str:
        lines = [f"[{self.code}] {self.what}"]
        for word, place in (("at", self.location), ("in", self.location and self.location.inside)):
            if place is not None:
                lines.append(f"  {word}    {place}")
                lines += [f"            {place.text}"] if place.text else []
        if self.node:
            lines.append(f"  node  {self.node}")
        if self.around:
            lines.append("  near  " + "\n        ".join(self.around))
        if self.fix:
            lines.append(f"  fix   {self.fix}")
        lines.append(f"  docs  python -m wholestep explain {self.code}")
        return "\n".join(lines)


MADE_WHILE_TRACING: ContextVar[list[CaptureError] | None] = ContextVar("refusals of a step", default=None)
"""Refusals while user code is traced: one that user code swallows (`except Exception:`) is raised after it."""


class CaptureError(WholestepError):
    """The step could not be turned into a graph that replays like eager. No state of the user was changed."""

    code = "WS-CAPTURE"

    def __init__(
        self,
        what: str,
        *,
        fix: str = "",
        node: str = "",
        location: Location | None = None,
        around: Sequence[str] = (),
    ) -> None:
        super().__init__(what, fix=fix, node=node, location=location, around=around)
        made = MADE_WHILE_TRACING.get()
        if made is not None:
            made.append(self)


class ControlFlowError(CaptureError):
    """Python branched on the value of a tensor."""

    code = "WS-CONTROL-FLOW"


class ItemError(CaptureError):
    """The value of a tensor left the graph as a Python object."""

    code = "WS-ITEM"


class DataShapeError(CaptureError):
    """The shape of a result depends on the values of a tensor."""

    code = "WS-DATA-SHAPE"


class HookError(CaptureError):
    """A hook would run while tracing and never again."""

    code = "WS-HOOK"


class CapturedTensorError(CaptureError):
    """The step reads a tensor that no later call could find again."""

    code = "WS-CAPTURED-TENSOR"


class OptimizerClosureError(CaptureError):
    """`optimizer.step(closure)` re-evaluates the model an unknown number of times."""

    code = "WS-OPT-CLOSURE"


class OverlapError(CaptureError):
    """An in-place write goes through a view whose elements overlap."""

    code = "WS-OVERLAP"


class AliasError(CaptureError):
    """Two inputs share memory and the step writes to one of them."""

    code = "WS-ALIAS"


class SparseError(CaptureError):
    """A sparse gradient or tensor appeared in the step."""

    code = "WS-SPARSE"


class ParameterDataError(CaptureError):
    """The step replaces the storage of a parameter or puts another parameter in its place."""

    code = "WS-PARAM-DATA"


class SideEffectError(CaptureError):
    """The step changes Python state that a replay would not change."""

    code = "WS-SIDE-EFFECT"


class LostError(CaptureError):
    """Something that the step did while it was traced is not in its graph."""

    code = "WS-LOST"


class RandomStateError(CaptureError):
    """The step uses randomness that the graph cannot replay."""

    code = "WS-RNG"


class ClockError(CaptureError):
    """The step computes with the time of day, or keeps it."""

    code = "WS-CLOCK"


class UnsupportedError(CaptureError):
    """An operator, tensor type or mode that wholestep does not capture."""

    code = "WS-UNSUPPORTED"


class DynamicShapeError(CaptureError):
    """A dimension was declared dynamic and cannot be."""

    code = "WS-DYNAMIC"
    fixed: Sequence[tuple[int, int]] = ()
    """The (batch leaf, dimension) places that the step fixed to one size."""

    def at(self, location: Location | None) -> Self:
        """The same error with a line."""
        made = super().at(location)
        made.fixed = self.fixed
        return made


class NoGraphError(WholestepError, RuntimeError):
    """backward() was called on a result of a compiled step. Its text is raised as RuntimeError, out of torch's C++."""

    code = "WS-NO-GRAPH"


class OptionError(WholestepError, TypeError):
    """An option that does not exist, or a value that it does not take."""

    code = "WS-OPTION"


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The fix for a name that does not exist: the most similar of the known ones; `otherwise` if none is similar."""
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def called(value: object) -> str:
    """What a wrong argument is, for a message: "the function train_step", "an object of type Linear"."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, FunctionType | MethodType | BuiltinFunctionType):
        return f"the function {value.__name__}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def invalid_value(name: str, value: object, fix: str) -> OptionError:
    """The error for an option that exists and does not take a value. `fix`: the values that it takes."""
    near = get_close_matches(value, re.findall(r'"([^"]+)"', fix), 1) if isinstance(value, str) else []
    hint = f'did you mean "{near[0]}"? Otherwise ' if near else ""
    return OptionError(f"{name}={value!r} is not a value that {name}= takes.", fix=hint + fix)


class MeshError(WholestepError):
    """A mesh, an axis or a process group that does not fit, or none at all."""

    code = "WS-MESH"


class PlanError(WholestepError):
    """A plan for parallelism that says something impossible, or that does not fit the model."""

    code = "WS-PLAN"


class WrappedError(WholestepError):
    """A model that something else has already made parallel."""

    code = "WS-WRAPPED"


class ShardedOptimizerError(WholestepError):
    """An optimizer that cannot work on shards."""

    code = "WS-SHARD-OPT"


class GraphFormatError(WholestepError):
    """A file or string that is not a StepGraph wholestep can read."""

    code = "WS-FORMAT"


class VerifyError(WholestepError):
    """A graph broke a rule that every StepGraph obeys."""

    code = "WS-VERIFY"


class DesyncError(WholestepError, RuntimeError):
    """Ranks came to different graphs, or one of them did not come at all."""

    code = "WS-DESYNC"


class PeerFailedError(WholestepError, RuntimeError):
    """Another rank raised, died or left, so that this rank cannot continue. `rank`, `step` and `call` say where."""

    code = "WS-PEER-FAILED"

    def __init__(
        self,
        what: str,
        *,
        fix: str = "",
        node: str = "",
        location: Location | None = None,
        around: Sequence[str] = (),
        rank: int | None = None,
        step: str = "",
        call: int = 0,
    ) -> None:
        super().__init__(what, fix=fix, node=node, location=location, around=around)
        self.rank = rank
        self.step = step
        self.call = call


class PassOrderError(WholestepError, AssertionError):
    """A pass was applied before what it needs, after what must follow it, or twice."""

    code = "WS-PASS-ORDER"


class PassError(WholestepError):
    """A pass raised, or left a graph that breaks a rule or its own contract. The graph is as it was before the pass."""

    code = "WS-PASS"


class IterMoveError(WholestepError, RuntimeError):
    """Nodes cannot run in the next iteration: something needs them earlier."""

    code = "WS-ITER-MOVE"


class PendingError(WholestepError, RuntimeError):
    """State was changed while an update of it was pending."""

    code = "WS-PENDING"


class AssumedError(WholestepError, RuntimeError):
    """A branch that the graph assumes to go one way (`assume=True`) would go the other. Nothing was written."""

    code = "WS-ASSUMED"


class GuardError(WholestepError, RuntimeError):
    """An executable was called for which its guards do not hold."""

    code = "WS-GUARD"


class ArtefactError(WholestepError):
    """A saved step cannot be written, read, or used with the objects of this process."""

    code = "WS-ARTEFACT"


class PartitionError(WholestepError):
    """A graph that cannot be cut: it is malformed, or a function that says how to cut it gave something unusable."""

    code = "WS-PARTITION"


class CutError(PartitionError):
    """No cut of a graph has as many parts, or parts as small, as was asked for."""

    code = "WS-CUT"


class SplitError(WholestepError):
    """A graph or a callback that `split_module` cannot work with. The graph is as it was."""

    code = "WS-SPLIT"


class SplitCycleError(SplitError, RuntimeError):
    """Partitions need each other's results. Catchable as the RuntimeError that torch raises."""

    code = "WS-SPLIT-CYCLE"


class SplitOrderError(SplitError, RuntimeError):
    """No order of the partitions keeps writes, random draws and side effects in the order of the graph."""

    code = "WS-SPLIT-ORDER"


class LowerError(WholestepError, RuntimeError):
    """A graph, or a region of it, cannot be handed to Inductor."""

    code = "WS-LOWER"


class MemoryBudgetError(WholestepError, RuntimeError):
    """No choice of what to recompute brings the peak of a step down to its memory budget."""

    code = "WS-MEMORY"


class CudaGraphError(WholestepError, RuntimeError):
    """A step cannot be replayed as one CUDA graph."""

    code = "WS-CUDAGRAPH"


class DebugError(WholestepError, RuntimeError):
    """A value is not what its node's metadata says. `mismatches` has all that were found."""

    code = "WS-DEBUG"
    mismatches: tuple[object, ...] = ()


class DumpError(WholestepError):
    """A file of a dump that is damaged, hostile or of another version."""

    code = "WS-DUMP"


class MinifyError(WholestepError):
    """A graph that cannot be made smaller: it does not fail, or not in the way that was named."""

    code = "WS-MINIFY"


class BisectError(WholestepError):
    """Nothing to compare or to search: not a compiled step, or arguments that its graph cannot run on."""

    code = "WS-BISECT"


class CheckError(WholestepError, RuntimeError):
    """A compiled step does something else than eager, or the two cannot be compared. The state is as before the call.

    `report` has all that was compared, where it came so far (a `CheckReport`).
    """

    code = "WS-CHECK"
    report: object = None


class ScheduleError(WholestepError):
    """A pipeline schedule that no pipeline can run: malformed, deadlocking, or too large for the memory.

    `timeline` has what was simulated, where it came so far.
    """

    code = "WS-SCHEDULE"
    timeline: object = None


class PipelineError(WholestepError):
    """A model cannot be cut into stages as asked."""

    code = "WS-PIPELINE"


class NoSuchModuleError(PipelineError, AttributeError):
    """A split spec names a submodule that the model does not have."""


class PipelineCaptureError(PipelineError):
    """`torch.export` cannot turn the model into one graph."""

    code = "WS-PIPELINE-CAPTURE"


class PipelineInputError(PipelineError):
    """A pipe is called otherwise than the model was when it was captured."""

    code = "WS-PIPELINE-INPUT"


class PipelineCallError(PipelineInputError, TypeError):
    """A pipe is called with arguments that the model does not take, or without some that it needs."""


class PipelineLossError(PipelineError, RuntimeError):
    """The loss spec of a pipe does not fit what the model returns."""

    code = "WS-PIPELINE-LOSS"


class PipelineModeError(PipelineError):
    """A stage is asked for a mode (training or evaluation) that it has no graph of."""

    code = "WS-PIPELINE-MODE"


class PipelineStateError(PipelineError):
    """State that one stage writes is read or written by another, in an order that no pipeline keeps."""

    code = "WS-PIPELINE-STATE"


class StageError(WholestepError, RuntimeError):
    """A stage of a pipeline cannot be built, or cannot run what the schedule asks of it."""

    code = "WS-STAGE"


class LowerWarning(UserWarning):
    """A region did not compile and runs operator by operator."""


class MemoryPolicyWarning(UserWarning):
    """A policy for memory budgets says something that has no effect."""


class CudaGraphWarning(UserWarning):
    """A step runs without a CUDA graph, and why."""


class EagerWarning(UserWarning):
    """A compiled step runs as the plain function: because of a mode around the call, or because it cannot be captured
    and `on_refusal="eager"`."""


class RecompileWarning(UserWarning):
    """A step was captured more often than `max_recompiles`."""


def all_error_types() -> list[type[WholestepError]]:
    """Every error class that carries a code of its own, in the order of definition."""
    found: list[type[WholestepError]] = []
    queue: list[type[WholestepError]] = [WholestepError]
    while queue:
        cls = queue.pop(0)
        if "code" in vars(cls):
            found.append(cls)
        queue.extend(cls.__subclasses__())
    return found


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
