"""Schedules of torch, with what a stage alone cannot do for them.

    schedule = ws.pipelining.schedule("1F1B", stage, 8, loss_fn)      what Schedule1F1B(stage, 8, loss_fn) is, and also:

    loss          no loss_fn is needed if `pipeline` was told which result is the loss
    targets       a dict, tuple or list of tensors, not only a tensor: torch's `step` splits the target itself. None,
                  if the model computes its loss from its inputs: loss_fn gets the result and None
    results       numbers and None among what the model returns: torch's `step` joins microbatches itself
    errors        a rank that raises or dies is named, also where the schedule waits: the wait is in torch's `step`
    arguments     None in a chunk spec gives every microbatch the whole value; specs of keywords go by name
    rows          an argument or a target with fewer rows than the batch is refused, where torch would broadcast it
    ranks         before the first step they compare schedules; one that has another, or does not come, is named
    stages        one that the schedule runs on another rank is refused, where torch would wait for ever
    actions       a list that never reduces gradients is refused: a stage cannot know that nothing more will come

Everything else is torch's: the order of the actions, and the loop that runs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from wholestep.errors import OptionError, ScheduleError, StageError, invalid_value
from wholestep.pipelining.run.chunks import split_args_kwargs_into_chunks
from wholestep.pipelining.run.given import check_target, rows_of
from wholestep.pipelining.run.stage import Stage
from wholestep.pipelining.run.stage_building import own_stages
from wholestep.torch_private.pipelining import (
    actions_that_run,
    chunk_specs,
    has_loss,
    has_merge_spec,
    is_single,
    reduced_stages,
    stages_and_ranks,
    stages_of,
)
from wholestep.torch_private.pytrees import pytree

_OPTIONS = ("losses", "return_outputs", "loss_kwargs")
"""Arguments of `step` that are not the model's."""


def schedule(
    kind: str | type[Any],
    stages: Stage | Sequence[Stage],
    n_microbatches: int,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    deadline: float = 60.0,
    **options: Any,
) -> Any:
    """A schedule of torch over stages of `pipe.build_stage`. `kind`: "1F1B", "ZBVZeroBubble", ... or torch's class.

    `deadline`: seconds that ranks wait for each other before the first step: they may still capture or load data.
    `options` are those of torch's class. The result is an instance of it.
    """
    cls = _class_of(kind)
    if not deadline > 0:
        raise invalid_value("deadline", deadline, "use a number of seconds above 0.")
    given = own_stages(stages, "a schedule")
    loss_fn = loss_fn or given[0].own_loss
    whole = type(cls.__name__, (_Whole, cls), {})
    made: _Whole
    if not issubclass(cls, PipelineScheduleSingle):
        made = whole(given, n_microbatches, loss_fn, **options)
    elif len(given) == 1:
        made = whole(given[0], n_microbatches, loss_fn, **options)
    else:
        raise OptionError(
            f"{cls.__name__} has one stage on each rank; this rank has {len(given)}.",
            fix="use a schedule for several, such as Interleaved1F1B.",
        )
    made.deadline = deadline
    return made


def _class_of(kind: str | type[Any]) -> type[Any]:
    if isinstance(kind, str):
        try:
            found: type[Any] = torchs.get_schedule_class(kind)
        except ValueError as error:
            raise OptionError(f"there is no schedule {kind!r}.", fix=str(error)) from error
        return found
    if not issubclass(kind, PipelineScheduleSingle | PipelineScheduleMulti):
        raise OptionError(f"{kind.__name__} is not a schedule of torch.", fix='use a name such as "1F1B".')
    return kind


class _Whole:
    """What is put before a class of torch."""

    deadline: float
    _targets: list[Any] | None = None
    _met: frozenset[bool] = frozenset()
    """What the ranks have compared: with and without a backward."""
    _n_microbatches: int
    _loss_fn: Callable[..., torch.Tensor] | None

    def step(self, *args: Any, target: Any = None, **named: Any) -> Any:
        """One step; see torch's class."""
        rank_step = stages_of(self)[0].rank_step
        trains = has_loss(self)
        first = trains not in self._met
        with rank_step.watch.meeting(self._lines(), self.deadline) if first else rank_step.watch.preparing():
            self._check_places()
            self._check_actions()
            self._check_given(args, {name: named[name] for name in named if name not in _OPTIONS}, target)
        self._met |= {trains}
        try:
            self._targets = self._split_target(target)
            result = super().step(*args, **named)  # type: ignore[misc]
            rank_step.end_all()
            return result
        except Exception as error:
            rank_step.failed(error)
            raise

    def _lines(self) -> list[str]:
        """What all ranks of the pipeline have in common."""
        stages, _ = stages_and_ranks(self)
        lists = "" if is_single(self) else repr(actions_that_run(self))  # type: ignore[arg-type]
        return [
            type(self).__name__,
            f"{self._n_microbatches} microbatches",
            f"{stages} stages",
            "forward and backward" if has_loss(self) else "only forward",
            f"actions {hashlib.sha256(lists.encode()).hexdigest()[:16]}",
        ]

    def _check_given(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> None:
        """Of the whole batch, what this rank can see."""
        first = next((stage for stage in stages_of(self) if stage.is_first), None)
        if first is None:
            return
        if not args and not kwargs:
            first.check_call((), {})
        by_position, by_name = chunk_specs(self)
        rows = rows_of(() if by_position else args, {} if by_name else kwargs)
        if any(stage.is_last for stage in stages_of(self)):
            check_target(target, rows)

    def _maybe_compute_loss(self, stage: Any, output: Any, targets: Any, chunk: int, *rest: Any, **named: Any) -> None:
        if not stage.is_last or self._loss_fn is None:
            return
        target = targets[chunk]
        check_target(target, stage.rank_step.rows.get(chunk, 0))
        try:
            super()._maybe_compute_loss(stage, output, targets, chunk, *rest, **named)  # type: ignore[misc]
        except (AttributeError, TypeError) as error:
            if target is not None:
                raise
            raise StageError(
                f"loss_fn got no target and raised {type(error).__name__}: {error}.",
                fix="give the rank of the last stage the target: step(target=...).",
            ) from error

    def _split_target(self, target: Any) -> list[Any] | None:
        if target is not None:
            return split(target, self._n_microbatches)
        return None if self._loss_fn is None else [None] * self._n_microbatches

    def _split_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if not args and not kwargs:
            return super()._split_inputs(args, kwargs)  # type: ignore[misc]
        positional, named = split_args_kwargs_into_chunks(args, kwargs, self._n_microbatches, *chunk_specs(self))
        rows, wanted = len(positional), self._n_microbatches
        if rows < wanted:
            raise OptionError(
                f"an argument of {rows} rows cannot be split into {wanted} microbatches.",
                fix="use fewer microbatches; or, if every microbatch gets the whole argument, put None in its place in "
                "args_chunk_spec or kwargs_chunk_spec of the schedule.",
            )
        return positional, named

    def _step_microbatches(self, args: Any, kwargs: Any, targets: Any = None, *rest: Any, **named: Any) -> Any:
        return super()._step_microbatches(args, kwargs, self._targets, *rest, **named)  # type: ignore[misc]

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        if has_merge_spec(self):
            return super()._merge_outputs(output_chunks)  # type: ignore[misc]
        return join(output_chunks)

    def _check_places(self) -> None:
        for stage in stages_of(self):
            wanted = stage.stage_index_to_group_rank.get(stage.stage_index)
            if wanted != stage.group_rank:
                raise StageError(
                    f"{type(self).__name__} runs stage {stage.stage_index} on rank {wanted}; this is rank "
                    f"{stage.group_rank}.",
                    fix="build on each rank the stages that the schedule has there: "
                    f"here {[i for i, rank in stage.stage_index_to_group_rank.items() if rank == stage.group_rank]}.",
                )

    def _check_actions(self) -> None:
        reduced = reduced_stages(self)
        missing = [] if reduced is None else [s.stage_index for s in stages_of(self) if s.stage_index not in reduced]
        if missing:
            raise ScheduleError(
                f"the schedule never reduces the gradients of stage {missing[0]}.",
                fix=f"end its actions with {missing[0]}REDUCE_GRAD.",
            )


def split(batch: Any, chunks: int) -> list[Any]:
    """Microbatches of a structure of tensors, along their first dim, as torch splits a tensor. Others go to all."""
    leaves, spec = pytree.tree_flatten(batch)
    columns = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            columns.append([leaf] * chunks)
            continue
        if leaf.size(0) < chunks:
            raise OptionError(
                f"a target of {leaf.size(0)} rows cannot be split into {chunks} microbatches.",
                fix="use fewer microbatches.",
            )
        columns.append(list(torch.tensor_split(leaf, chunks)))
    return [pytree.tree_unflatten([column[chunk] for column in columns], spec) for chunk in range(chunks)]


def join(chunks: Sequence[Any]) -> Any:
    """One result from those of microbatches: tensors along their first dim; anything else as the first has it."""
    flat = [pytree.tree_flatten(chunk) for chunk in chunks]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    joined = [torch.cat(column) if isinstance(column[0], torch.Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(joined, flat[0][1])
