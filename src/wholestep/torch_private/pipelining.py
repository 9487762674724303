"""Private names of `torch.distributed.pipelining` and of export: stages, microbatches, and what a schedule does without
any rank. Tried on torch 2.11 and 2.13."""

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
"""In a chunk spec: every microbatch gets the whole value. The class itself stands there."""


def define_marker(name: str, schema: str) -> Any:
    """An operator that does nothing and that export keeps as a node, with its place among the others.

    `BackendSelect` is the key for operators without tensor inputs, the one that torch's own `pipe_split` uses.
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
    """torch's own split marks, if its pipelining was imported: the operator (`pippy::_pipe_split`) and the function."""
    module = sys.modules.get("torch.distributed.pipelining._IR")
    return () if module is None else (module.aten_pipe_split_alias, module.pipe_split)


@contextmanager
def checkpoints_replaced(around: Callable[[bool, Any], Any]) -> Iterator[None]:
    """Let `torch.utils.checkpoint.checkpoint` run its function within `around(preserve_rng_state, context_fn)`.

    Users hold the function itself, so what it calls is replaced: the generator of the way without reentrant autograd
    (`_checkpoint_without_reentrant_generator`) and the autograd function of the other (`CheckpointFunction`).
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
    """The higher-order operators that export makes of `autocast` and of `no_grad` blocks (`wrap_with_autocast`,
    `wrap_with_set_grad_enabled`): (device, dtype, enabled, cache, body, *operands) and (enabled, body, *operands)."""
    return torch.ops.higher_order.wrap_with_autocast, torch.ops.higher_order.wrap_with_set_grad_enabled


def checks_of_export() -> tuple[Any, ...]:
    """Operators by which export checks dtype, device and sizes again: of no use to a stage, and bound to a device."""
    names = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
    return tuple(getattr(torch.ops.aten, name).default for name in names)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Warnings that torch gives about itself while it exports are not the user's; those from user code are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        # About attributes such as the flat weights of an LSTM, which point to parameters: said from `contextlib`.
        warnings.filterwarnings("ignore", message=r"The tensor attribute")
        # When it fails, export prints the graph so far: a thousand lines, also where the next attempt succeeds.
        names: dict[str, Any] = importlib.import_module("torch.export._trace").__dict__
        before = names.get("print", print)
        names["print"] = lambda *_, **__: None
        try:
            yield
        finally:
            names["print"] = before


def define_tensor_marker(name: str) -> Any:
    """An operator that takes a number and tensors and does nothing; export keeps it."""
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
    """Let `SomeFunction.apply(*args)` of a user's `torch.autograd.Function` be `call(SomeFunction, apply, args)`.

    Classes inherit `apply`, so it is replaced on `Function` itself. torch's own private functions are left alone.
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
    """While it is on, calls of these operators go to `record` and do nothing else. For operators without tensors,
    which a symbolic trace does not see."""

    def __init__(self, operators: Container[Any], record: Callable[[], Any]) -> None:
        super().__init__()
        self._operators = operators
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operators:
            self._record()
            return None
        return func(*args, **(kwargs or {}))


def hooks_around(module: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """The forward hooks of a module: before and after (`_forward_pre_hooks`, `_forward_hooks`)."""
    return list(module._forward_pre_hooks.values()), list(module._forward_hooks.values())


Actions = dict[int, list[Any]]
"""Per rank a list of torch's `_Action`, or None for a step of waiting."""


class _StandIn:
    """What a schedule reads of a stage when it is made: its place among the others, and no module."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index = index
        self.num_stages = stages
        self.group_size = ranks
        self.group_rank = 0
        self.submod = None
        self.is_first = index == 0
        self.is_last = index == stages - 1


def _stand_ins(ranks: int, stages_per_rank: int) -> list[Any]:
    return [_StandIn(index * ranks, ranks * stages_per_rank, ranks) for index in range(stages_per_rank)]


def schedule_class(name: str) -> type[Any]:
    """torch's class of a name (`get_schedule_class`); raises ValueError for an unknown one."""
    found: type[Any] = torch_schedules.get_schedule_class(name)
    return found


def is_single(schedule: Any) -> bool:
    """Whether a schedule, or a class of them, has one stage per rank: a loop and not a list of actions."""
    cls = schedule if isinstance(schedule, type) else type(schedule)
    return issubclass(cls, PipelineScheduleSingle)


def class_of_loop(schedule: Any) -> type[Any]:
    """The class whose loop a schedule with one stage per rank runs (`_step_microbatches`); ours call torch's."""
    having = (cls for cls in type(schedule).__mro__ if "_step_microbatches" in vars(cls))
    return next(cls for cls in having if not cls.__module__.startswith("wholestep."))


def listed_actions(cls: type[Any], ranks: int, microbatches: int, stages_per_rank: int) -> Actions:
    """The lists of a schedule with several stages per rank, computation alone (`pipeline_order`).

    A subclass leaves out what `_prepare_schedule_with_comms` does, which takes time quadratic in microbatches.
    """
    quick = type(cls.__name__, (cls,), {"_prepare_schedule_with_comms": lambda self, actions, format="": None})
    lists: Actions = quick(_stand_ins(ranks, stages_per_rank), microbatches).pipeline_order
    return lists


def with_torchs_communication(lists: Actions, stages: int, microbatches: int, sharded: bool) -> Actions:
    """What torch's runtime makes of lists of computation (the steps of `_prepare_schedule_with_comms`).

    UNSHARD and RESHARD stay only where asked for; they are added in any case, since torch always runs the lists that
    have them and they decide where a receive stands. Raises AssertionError where torch finds the lists wrong.
    """
    rank_of = torch_schedules._validate_schedule(lists, len(lists), stages, microbatches)
    add_shards: Any = torch_schedules._add_unshard_reshard
    add_sums: Any = torch_schedules._add_reduce_grad
    add_travel: Any = torch_schedules._add_send_recv
    per_rank = max(Counter(rank_of.values()).values())
    # At most 3 stages are prefetched; asking for no more than there are gives the same, without a quadratic search.
    listed = {rank: add_shards(row, min(3, per_rank)) for rank, row in lists.items()}
    summed = {rank: add_sums(row, microbatches) for rank, row in listed.items()}
    lowered: Actions = add_travel(summed, stage_to_rank=rank_of.__getitem__, num_stages=stages)
    if sharded:
        return lowered
    left_out = (torch_schedules.UNSHARD, torch_schedules.RESHARD)
    return {rank: [a for a in row if a.computation_type not in left_out] for rank, row in lowered.items()}


def torchs_action(text: str) -> Any:
    """(`_Action.from_str`)"""
    read: Any = torch_schedules._Action.from_str
    return read(text)


def microbatches_of(schedule: Any) -> int:
    """(`_n_microbatches`)"""
    return int(schedule._n_microbatches)


def stages_and_ranks(schedule: Any) -> tuple[int, int]:
    """How many stages there are in all, and how many ranks (`_num_stages`, `_stage`)."""
    if is_single(schedule):
        return int(schedule._num_stages), int(schedule._stage.group_size)
    return int(schedule._num_stages), int(schedule.pp_group_size)


def actions_that_run(schedule: PipelineScheduleMulti) -> Mapping[int, Sequence[Any]]:
    """The lists of a schedule object as it will run them; computation alone where it has nothing else."""
    return getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order


def has_loss(schedule: Any) -> bool:
    """Whether `step` runs the backward (`_has_backward`)."""
    return bool(schedule._has_backward)


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank that a schedule runs."""
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else list(schedule._stages)


def has_merge_spec(schedule: Any) -> bool:
    """Whether the user said how results of microbatches become one."""
    return schedule._output_merge_spec is not None


def chunk_specs(schedule: Any) -> tuple[Any, Any]:
    """How the user said that positional and keyword arguments become microbatches."""
    return schedule._args_chunk_spec, schedule._kwargs_chunk_spec


def reduced_stages(schedule: Any) -> set[int] | None:
    """The stages of this rank whose gradients the list of actions reduces; None if there is no list or no backward."""
    actions = getattr(schedule, "pipeline_order_with_comms", None)
    if not actions or not schedule._has_backward:
        return None
    return {action.stage_index for action in actions[schedule.rank] if action.computation_type.name == "REDUCE_GRAD"}


def let_graph_go(loss: torch.Tensor | None) -> None:
    """After the first half of a backward: the schedule keeps each loss until the step ends, and its graph with it.

    A full backward frees what the graph keeps; halves cannot, as both use it. The second half has what it needs. A loss
    that is a view, which torch cannot detach, keeps its graph.
    """
    if loss is not None and loss.grad_fn is not None and not loss._is_view():
        loss.detach_()


def masks_minibatches() -> bool:
    """Whether microbatches are the whole batch with zeros in the place of the other rows
    (`microbatch._debug_mask_minibatches`, a switch of the process)."""
    return bool(_microbatch._debug_mask_minibatches)


def mask_minibatches(on: bool) -> None:
    """Set `masks_minibatches`."""
    _microbatch._debug_mask_minibatches = bool(on)


@contextmanager
def quiet_masks() -> Iterator[None]:
    """torch warns of its own indexing where it masks minibatches."""
    with warnings.catch_warnings():
        if masks_minibatches():
            warnings.filterwarnings("ignore", message="Using a non-tuple sequence for multidimensional indexing")
        yield
