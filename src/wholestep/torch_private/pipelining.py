"""`torch.distributed.pipelining` and `torch.export`: stages, microbatches, the actions of a schedule without ranks.
Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch.distributed.pipelining import microbatch as _microbatch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from wholestep.torch_private.fake_tensors import DispatchMode

WholeValue: Any = _microbatch._Replicate
"""Entry of a chunk spec for a value that every microbatch gets whole; the class itself, not an instance."""


def define_marker(name: str, schema: str) -> Any:
    """Define an operator without effect that export keeps as a node in its position.

    `BackendSelect` is the dispatch key for operators without tensor inputs; torch's `pipe_split` uses it, too.
    """
    namespace, short = name.split("::")
    torch.library.define(name, schema)

    def nothing(*args: Any) -> None:
        return None

    torch.library.impl(name, "BackendSelect")(nothing)
    torch.library.register_fake(name)(nothing)
    op = getattr(getattr(torch.ops, namespace), short).default
    fx.node.has_side_effect(op)
    return op


def torchs_markers() -> tuple[Any, ...]:
    """torch's split markers, if its pipelining was imported: the operator (`pippy::_pipe_split`) and the function."""
    module = sys.modules.get("torch.distributed.pipelining._IR")
    return () if module is None else (module.aten_pipe_split_alias, module.pipe_split)


@contextmanager
def checkpoints_replaced(around: Callable[[bool, Any], Any]) -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint` run its function within `around(preserve_rng_state, context_fn)`.

    User code has references to `checkpoint` itself, so the functions that it calls are replaced: the generator for
    non-reentrant autograd (`_checkpoint_without_reentrant_generator`) and the autograd function for reentrant autograd
    (`CheckpointFunction`).
    """
    module: Any = torch.utils.checkpoint
    generator, function_class = module._checkpoint_without_reentrant_generator, module.CheckpointFunction

    def marked(fn: Any, preserve_rng_state: bool = True, context_fn: Any = None, *rest: Any, **kwargs: Any) -> Any:
        with around(preserve_rng_state, None if context_fn is module.noop_context_fn else context_fn):
            yield

    def apply(fn: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        with around(preserve_rng_state, None):
            return fn(*args)

    module._checkpoint_without_reentrant_generator = marked
    module.CheckpointFunction = SimpleNamespace(apply=apply)
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = generator
        module.CheckpointFunction = function_class


def region_operators() -> tuple[Any, Any]:
    """The higher-order operators of export for `autocast` and `no_grad` blocks: `wrap_with_autocast(device, dtype,
    enabled, cache, body, *operands)` and `wrap_with_set_grad_enabled(enabled, body, *operands)`."""
    return torch.ops.higher_order.wrap_with_autocast, torch.ops.higher_order.wrap_with_set_grad_enabled


def checks_of_export() -> tuple[Any, ...]:
    """Operators with which export asserts dtype, device and sizes; a stage drops them, as they fix the device."""
    names = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
    return tuple(getattr(torch.ops.aten, name).default for name in names)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Ignore warnings that torch raises about its own code during an export; warnings from user code pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        # About attributes that refer to parameters, such as the flat weights of an LSTM; raised from `contextlib`.
        warnings.filterwarnings("ignore", message=r"The tensor attribute")
        # If export fails it prints the graph so far, even if the next attempt succeeds.
        names: dict[str, Any] = importlib.import_module("torch.export._trace").__dict__
        before = names.get("print", print)
        names["print"] = lambda *_, **__: None
        try:
            yield
        finally:
            names["print"] = before


def define_tensor_marker(name: str) -> Any:
    """Define an operator without effect that takes an int and tensors, and that export keeps."""
    namespace, short = name.split("::")
    torch.library.define(name, "(int number, Tensor[] tensors) -> ()")

    def nothing(*args: Any) -> None:
        return None

    torch.library.impl(name, "CompositeExplicitAutograd")(nothing)
    torch.library.register_fake(name)(nothing)
    op = getattr(getattr(torch.ops, namespace), short).default
    fx.node.has_side_effect(op)
    return op


@contextmanager
def functions_replaced(call: Callable[..., Any]) -> Iterator[None]:
    """Make `SomeFunction.apply(*args)` of a user's `torch.autograd.Function` call `call(SomeFunction, apply, args)`.

    Classes inherit `apply`, so it is replaced on `Function` itself. torch's private functions keep the original.
    """
    base: Any = torch.autograd.Function
    original = vars(base)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        if cls.__module__.startswith("torch._") or kwargs:
            return bound(*args, **kwargs)
        return call(cls, bound, args)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = original


class RecordCalls(DispatchMode):
    """Dispatch mode in which calls of some operators only call `record`. For operators without tensor arguments, which
    a symbolic trace does not record."""

    def __init__(self, operators: Container[Any], record: Callable[[], Any]) -> None:
        super().__init__()
        self._operators = operators
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operators:
            self._record()
            return None
        return func(*args, **(kwargs or {}))


Actions = dict[int, list[Any]]
"""Per rank a list of torch's `_Action`, or None for an idle step."""


class _StageInfo:
    """The attributes of a stage that the constructor of a schedule reads; it has no module."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index = index
        self.num_stages = stages
        self.group_size = ranks
        self.group_rank = 0
        self.submod = None
        self.is_first = index == 0
        self.is_last = index == stages - 1


def stage_infos(ranks: int, stages_per_rank: int) -> list[Any]:
    """The stages of rank 0 of a schedule, without modules."""
    return [_StageInfo(index * ranks, ranks * stages_per_rank, ranks) for index in range(stages_per_rank)]


def schedule_class(name: str) -> type[Any]:
    """torch's schedule class of a name (`get_schedule_class`); raises ValueError for an unknown name."""
    found: type[Any] = torch_schedules.get_schedule_class(name)
    return found


def is_single(schedule: Any) -> bool:
    """Whether a schedule or schedule class has one stage per rank, so that it runs a loop and has no action list."""
    cls = schedule if isinstance(schedule, type) else type(schedule)
    return issubclass(cls, PipelineScheduleSingle)


def class_of_loop(schedule: Any) -> type[Any]:
    """torch's class whose loop a schedule with one stage per rank runs (`_step_microbatches`); ours call that one."""
    having = (cls for cls in type(schedule).__mro__ if "_step_microbatches" in vars(cls))
    return next(cls for cls in having if not cls.__module__.startswith("wholestep."))


def listed_actions(cls: type[Any], ranks: int, microbatches: int, stages_per_rank: int) -> Actions:
    """The action lists of a schedule with several stages per rank, without communication (`pipeline_order`).

    A subclass skips `_prepare_schedule_with_comms`, whose time is quadratic in microbatches.
    """
    quick = type(cls.__name__, (cls,), {"_prepare_schedule_with_comms": lambda self, actions, format="": None})
    lists: Actions = quick(stage_infos(ranks, stages_per_rank), microbatches).pipeline_order
    return lists


def with_torchs_communication(lists: Actions, stages: int, microbatches: int, sharded: bool) -> Actions:
    """Add communication to lists of computation as torch's runtime does (the steps of `_prepare_schedule_with_comms`).

    UNSHARD and RESHARD stay only if `sharded`; they are added in any case, because torch always runs the lists that
    have them and the position of a receive depends on them. Raises AssertionError if torch rejects the lists.
    """
    rank_of = torch_schedules._validate_schedule(lists, len(lists), stages, microbatches)
    add_shards: Any = torch_schedules._add_unshard_reshard
    add_sums: Any = torch_schedules._add_reduce_grad
    add_travel: Any = torch_schedules._add_send_recv
    per_rank = max(Counter(rank_of.values()).values())
    # At most 3 stages are prefetched; a lower limit for fewer stages gives the same without a quadratic search.
    listed = {rank: add_shards(row, min(3, per_rank)) for rank, row in lists.items()}
    summed = {rank: add_sums(row, microbatches) for rank, row in listed.items()}
    travelling: Actions = add_travel(summed, stage_to_rank=rank_of.__getitem__, num_stages=stages)
    lowered = {rank: without_waits(row) for rank, row in travelling.items()}
    if sharded:
        return lowered
    left_out = (torch_schedules.UNSHARD, torch_schedules.RESHARD)
    return {rank: [a for a in row if a.computation_type not in left_out] for rank, row in lowered.items()}


def torchs_action(text: str) -> Any:
    """An action of torch from its text (`_Action.from_str`)."""
    read: Any = torch_schedules._Action.from_str
    return read(text)


def microbatches_of(schedule: Any) -> int:
    """The number of microbatches of a schedule (`_n_microbatches`)."""
    return int(schedule._n_microbatches)


def stages_and_ranks(schedule: Any) -> tuple[int, int]:
    """The number of stages in all, and of ranks (`_num_stages`, `_stage`)."""
    if is_single(schedule):
        return int(schedule._num_stages), int(schedule._stage.group_size)
    return int(schedule._num_stages), int(schedule.pp_group_size)


def actions_that_run(schedule: PipelineScheduleMulti) -> Mapping[int, Sequence[Any]]:
    """The action lists that a schedule object runs; those without communication if it has no others."""
    lists: Actions = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    return {rank: without_waits(row) for rank, row in lists.items()}


def schedules_have_waits() -> bool:
    """Whether torch's action lists say where sends and reductions are waited for. 2.11, 2.13: no; 2.15: yes."""
    return hasattr(torch_schedules, "WAIT_SEND_F")


def without_waits(row: Sequence[Any]) -> list[Any]:
    """A list without the actions that only end what an earlier one began (`WAIT_SEND_F`, `WAIT_SEND_B`,
    `WAIT_REDUCE_GRAD`): torch has them since 2.15, and before that the runtime waited by itself."""
    return [action for action in row if action is None or not action.computation_type.name.startswith("WAIT_")]


def has_loss(schedule: Any) -> bool:
    """Whether `step` runs the backward (`_has_backward`)."""
    return bool(schedule._has_backward)


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank that a schedule runs."""
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else list(schedule._stages)


def has_merge_spec(schedule: Any) -> bool:
    """Whether the user set how results of microbatches are merged (`_output_merge_spec`)."""
    return schedule._output_merge_spec is not None


def chunk_specs(schedule: Any) -> tuple[Any, Any]:
    """The user's specs for splitting positional and keyword arguments into microbatches."""
    return schedule._args_chunk_spec, schedule._kwargs_chunk_spec


def reduced_stages(schedule: Any) -> set[int] | None:
    """The stages of this rank whose gradients the action list reduces; None without a list or without a backward."""
    actions = getattr(schedule, "pipeline_order_with_comms", None)
    if not actions or not schedule._has_backward:
        return None
    return {action.stage_index for action in actions[schedule.rank] if action.computation_type.name == "REDUCE_GRAD"}


def release_graph(loss: torch.Tensor | None) -> None:
    """Detach a loss after the first half of its backward: the schedule keeps each loss until the step ends.

    A full backward frees the saved tensors of the graph; a half cannot, because the other half uses them. The second
    half has its own references. A loss that is a view, which torch cannot detach, keeps its graph.
    """
    if loss is not None and loss.grad_fn is not None and not loss._is_view():
        loss.detach_()


def masks_minibatches() -> bool:
    """Whether a microbatch is the whole batch with all other rows set to zero
    (`microbatch._debug_mask_minibatches`, which is global)."""
    return bool(_microbatch._debug_mask_minibatches)


def mask_minibatches(on: bool) -> None:
    """Set `masks_minibatches`."""
    _microbatch._debug_mask_minibatches = bool(on)


@contextmanager
def quiet_masks() -> Iterator[None]:
    """Ignore torch's warning about its own indexing when it masks minibatches."""
    with warnings.catch_warnings():
        if masks_minibatches():
            warnings.filterwarnings("ignore", message="Using a non-tuple sequence for multidimensional indexing")
        yield
