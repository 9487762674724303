"""The public functions: `compile` a step, `capture` a call, `build` an executable, `check` a step against eager."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

from torch import fx

from wholestep.compiled_step import BoundStep, CompiledStep, has_parameter
from wholestep.cross_iteration import pending_updates
from wholestep.errors import OptionError, called
from wholestep.ir.step_graph import StepGraph
from wholestep.lower.options import LowerOptions
from wholestep.options import Dim, Options
from wholestep.parallel.plan import Plan
from wholestep.passes.engine.contract import BoundPass, GraphPass
from wholestep.remat.options import Budget
from wholestep.step import (
    BoundGraph,
    Executable,
    ResolvedOptions,
    Shared,
    capture_call,
    compile_step,
    resolve,
    with_plan_of_models,
)

if TYPE_CHECKING:
    from wholestep.debug.check.report import CheckReport

P = ParamSpec("P")
R = TypeVar("R")

DynamicOption = bool | Mapping[str, Mapping[int, Dim]] | None
ParallelOption = Plan | None
PassesOption = Literal["auto", "default"] | Iterable[GraphPass | BoundPass | str] | None
PolicyOption = Mapping[Any, str] | Callable[[fx.Node], str | None] | None


class CompileOptions(TypedDict, total=False):
    """The keywords of `ws.compile` and their types. Its docstring says what they mean."""

    lower: Literal["inductor", "eager", "debug"] | None
    lower_options: LowerOptions | Mapping[str, Any] | None
    cuda_graph: bool | Literal["auto"]
    memory_budget: int | float | str | Budget | None
    policy: PolicyOption
    passes: PassesOption
    disable_passes: Sequence[str]
    dump_passes: str | os.PathLike[str] | None
    parallel: ParallelOption
    dynamic: DynamicOption
    verify: Literal[0, 1, 2, 3]
    check_first: int
    max_recompiles: int
    hooks: Literal["auto", "refuse", "trace"]
    assume: bool
    on_refusal: Literal["raise", "eager"]
    progress: bool | None
    cache: str | bool | os.PathLike[str] | None
    name: str


@overload
def compile(fn: Callable[P, R], **options: Unpack[CompileOptions]) -> CompiledStep[P, R]: ...


@overload
def compile(fn: None = None, **options: Unpack[CompileOptions]) -> Callable[[Callable[P, R]], CompiledStep[P, R]]: ...


def compile(
    fn: Any = None,
    *,
    lower: Literal["inductor", "eager", "debug"] | None = None,
    lower_options: LowerOptions | Mapping[str, Any] | None = None,
    cuda_graph: bool | Literal["auto"] = "auto",
    memory_budget: int | float | str | Budget | None = None,
    policy: PolicyOption = None,
    passes: PassesOption = "auto",
    disable_passes: Sequence[str] = (),
    dump_passes: str | os.PathLike[str] | None = None,
    parallel: ParallelOption = None,
    dynamic: DynamicOption = None,
    verify: Literal[0, 1, 2, 3] = 1,
    check_first: int = 0,
    max_recompiles: int = 8,
    hooks: Literal["auto", "refuse", "trace"] = "auto",
    assume: bool = False,
    on_refusal: Literal["raise", "eager"] = "raise",
    progress: bool | None = None,
    cache: str | bool | os.PathLike[str] | None = None,
    name: str = "",
    **unknown: Any,
) -> Any:
    """Turn a training step into one that runs as a single graph.

    Use it as a decorator, with or without options, or as a function: `step = ws.compile(train_step, verify=2)`.

    Args:
        fn: The function that does one step: forward, backward, optimizer.
        lower: How the graph runs. "inductor": compile runs of operators. "eager": operator by operator, bit for bit
            like eager PyTorch. "debug": like "eager", and each value is checked against the graph's metadata
            (`ws.compilers.DebugInterpreter`). None: the environment variable WHOLESTEP_LOWER, or "inductor".
        lower_options: A `ws.lower.LowerOptions` or a mapping of its fields: min_aten_ops, strict, remat, exact, shed,
            config (settings of Inductor), region_config.
        cuda_graph: Replay the step as one CUDA graph: True, False, or "auto" (on CUDA, where it can be done).
        memory_budget: The peak memory of a step: bytes, a text such as "12GiB", or a fraction (0.0: the smallest peak
            that can be reached; 1.0: nothing is recomputed). Values are recomputed in the backward to stay within.
            None: Inductor's own choice.
        policy: With `memory_budget`, what is saved or recomputed in any case, by module path or operator:
            `{"model.blocks.*": "recompute", torch.ops.aten.mm: "save"}`, or a function of a node.
        passes: Rewrites of the graph. "auto": `overlap_communication` where `parallel` is given (with lower="eager" so
            that every bit stays), otherwise none. "default": buckets and late waits. None: no passes. A list: passes
            (`ws.passes...`) and their names, "default" among them.
        disable_passes: Names of passes that do not run.
        dump_passes: A folder for the graphs before and after each pass.
        parallel: `ws.Replicate(mesh)` or `ws.FullyShard(mesh)`: communication becomes nodes of the graph.
        dynamic: Sizes that may differ from call to call without another capture. A mapping from the path of a batch
            tensor (or of a part of the batch) to its dimensions: `{"batch": {0: ws.Dim(min=1, max=64)}}`. True: the
            first dimension of every contiguous batch tensor, where that is above 1; tensors with equal first
            dimensions vary together. None: a dimension whose size differs from that of an earlier capture varies from
            then on (not sizes 0 and 1), where the step does the same with it. False: each new size is captured once.
        verify: What is checked after capture and after each pass. 0: nothing. 1: the structure of the graph, and the
            metadata of what a pass changed. 2: the metadata of all nodes. 3: also replay the graph before and after
            each pass on real tensors.
        check_first: Run this many first calls in eager as well, from the same state, and raise WS-CHECK if they differ.
            Compiled regions then use eager's random numbers, also on a GPU.
        max_recompiles: Warn after this many captures beyond the first.
        hooks: "trace" captures hooks like the code of the step, what they write and print included. "refuse" refuses a
            step whose modules, parameters or optimizers have hooks. "auto": "trace", and "refuse" with `parallel=`.
        assume: Assume that a branch on a value which only the step computes (`if not torch.isfinite(loss): raise`) goes
            the way that it goes in the captured call. The graph checks that in every run before it writes anything, and
            raises WS-ASSUMED, with state as before the call, if it does not. Capture then runs the step's operators up
            to the branch once; each run waits for the condition as eager does, and is no CUDA graph.
        on_refusal: What happens to a call that cannot be captured. "raise": the error, with its code and line. "eager":
            it runs as the plain function, with one `EagerWarning` that has the code, the line and the fix; after three
            such calls no other capture is tried. On several ranks all of them run the plain function, or none; they
            then agree before every call.
        progress: Whether captures and compilations that take more than a second say on stderr what they do and how far
            they are: a line with a bar on a terminal, one line at the start and one at the end elsewhere. None: unless
            the environment variable WHOLESTEP_PROGRESS is 0.
        cache: A folder for prepared graphs: another process that runs the same step binds them instead of tracing, once
            code, objects and guards were compared. "auto": a folder of the user; False: none. None: the environment
            variable WHOLESTEP_CACHE, or no cache. The log `wholestep.cache` says why a graph was not used.
        name: What messages call this step; the name of its function by default.

    Raises:
        OptionError: An option does not exist, or does not take a value (WS-OPTION).
    """
    chosen = Options.of(
        lower=lower,
        lower_options=lower_options,
        cuda_graph=cuda_graph,
        memory_budget=memory_budget,
        policy=policy,
        passes=passes,
        disable_passes=disable_passes,
        dump_passes=dump_passes,
        parallel=parallel,
        dynamic=dynamic,
        verify=verify,
        check_first=check_first,
        max_recompiles=max_recompiles,
        hooks=hooks,
        assume=assume,
        on_refusal=on_refusal,
        progress=progress,
        cache=cache,
        name=name,
        **unknown,
    )
    kind: type[CompiledStep[Any, Any]] = CompiledStep
    if chosen.check_first:
        from wholestep.debug.check.check_calls import CheckedStep

        kind = CheckedStep
    resolved = resolve(chosen)
    return (lambda function: kind(function, resolved)) if fn is None else kind(fn, resolved)


def check(
    fn: Callable[..., Any],
    *args: Any,
    steps: int = 3,
    batches: Iterable[Any] | None = None,
    between: Callable[[], Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> CheckReport:
    """Run a step in eager and compiled side by side, and report what agrees. No state of the user changes.

    `fn`: a function, or what `ws.compile` returned (its options are used). `args`: those of one call. `batches`: one
    for each call, given behind `args`. `between`: what happens between two calls (`scheduler.step`). Keywords that are
    options of `ws.compile` are options; others, and `kwargs`, go to the step.
    """
    from wholestep.debug.check.check_calls import calls_of, check_calls

    known = {option.name for option in fields(Options)}
    named = {**{key: value for key, value in options.items() if key not in known}, **(kwargs or {})}
    chosen = {key: value for key, value in options.items() if key in known}
    function, given = _function_and_options(fn)
    if given is not None and chosen:
        raise OptionError(
            f"{', '.join(sorted(chosen))} for a step that is compiled already.", fix="pass its function instead."
        )
    unclear = sorted(key for key in chosen if has_parameter(function, key))
    if unclear:
        raise OptionError(
            f"{', '.join(unclear)}: an option of ws.compile, and a parameter of the step.",
            fix="check ws.compile(step, ...) for the option; give an argument of the step in kwargs={...}.",
        )
    found = given or resolve(Options.of(**chosen))
    exact = found.lower_options.with_eagers_random_numbers()
    found = replace(found, check_first=0, on_refusal="raise", lower_options=exact)
    if with_plan_of_models(function, args, named, found).parallel is not None:
        raise OptionError(
            "ws.check with parallel=: eager does not communicate, so it cannot serve as the reference.",
            fix="check the step without the plan; ws.debug.compare(train_step, step, args) compares on all ranks.",
        )
    pending_updates.flush_all()
    calls = calls_of(function, args, named, steps, batches)
    # What the step sets in context variables stays in the copy.
    return contextvars.copy_context().run(check_calls, CompiledStep(function, found), calls, between)


def _function_and_options(fn: Any) -> tuple[Callable[..., Any], ResolvedOptions | None]:
    """The plain function of a step, and its options if it is compiled."""
    options = fn.options if isinstance(fn, CompiledStep) else fn._step.options if isinstance(fn, BoundStep) else None
    return getattr(fn, "__wholestep_function__", fn), options


def capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> StepGraph:
    """The StepGraph of one call, with nothing executed and no state changed. `ws.build` makes an executable of it.

    `fn`: a function, or a step of `ws.compile`, whose options are used.
    """
    function, given = _function_and_options(fn)
    if not callable(function):
        raise OptionError(
            f"ws.capture got {called(fn)}, which cannot be called.",
            fix="pass the function that does one step, then its arguments: ws.capture(train_step, batch).",
        )
    return capture_call(function, args, kwargs, given or Options())


def build(
    step_graph: StepGraph,
    *,
    lower: str | None = None,
    lower_options: Any = None,
    memory_budget: Any = None,
    policy: Any = None,
    cuda_graph: bool | str = "auto",
    verify: int = 1,
) -> Executable:
    """An executable of a captured graph: `executable(*args)` runs it for calls that its guards allow, and raises
    WS-GUARD for others. It never captures again. `step_graph` stays as it is; `executable.step_graph` is its own copy.

    The options are those of `ws.compile`. Ranks do not compare their graphs as those of a compiled step do.
    """
    if not isinstance(step_graph, StepGraph):
        raise OptionError(
            f"ws.build got {called(step_graph)}.",
            fix="build a captured graph: ws.build(ws.capture(train_step, batch)).",
        )
    if not isinstance(step_graph, BoundGraph):
        raise OptionError(
            "ws.build got a StepGraph that is not bound to a model: it was read from a file, or made by hand.",
            fix="build what ws.capture(train_step, ...) returned; sg.gm is a plain graph module that can be called.",
        )
    chosen = {"lower_options": lower_options, "memory_budget": memory_budget, "policy": policy}
    given = Options.of(cuda_graph=cuda_graph, verify=verify, lower=lower, **chosen)
    shared = Shared.of(given, name="a captured graph")
    with shared.progress.compiling():
        return compile_step(step_graph.copy(), resolve(given), shared)


def load(
    path: str | os.PathLike[str],
    fn: Callable[..., Any] | None = None,
    *,
    lower: str | None = None,
    parallel: ParallelOption = None,
    trust_kernels: bool = False,
    allow_ops: Sequence[str] = (),
    **objects: Any,
) -> CompiledStep[..., Any]:
    """A step from a file that `step.save(path)` wrote: it runs without tracing.

    Args:
        path: The file.
        fn: The function of the step. Its code, and all code that it reaches by name, must be that of the capture.
            Without it that is checked of the classes of the objects only.
        lower: "eager" or "inductor"; None: as the step was compiled.
        parallel: The plan, for a step that was captured under one.
        trust_kernels: Load the compiled kernels of the file. They contain pickles: only for files that you trust.
            Without it, regions are compiled again.
        allow_ops: Operators outside of torch that the graph may call: "mylib::op", "mylib::*".
        objects: Without `fn`, the variables that it reads beside its arguments: `model=model, optimizer=optimizer`.

    Raises:
        ArtefactError: The file is damaged, foreign or of other versions; or, at a call, the objects or the code are not
            those that the step was captured with (WS-ARTEFACT).
    """
    from wholestep.loaded_step import load_step

    return load_step(
        path, fn, objects, lower=lower, parallel=parallel, trust_kernels=trust_kernels, allow_ops=allow_ops
    )
