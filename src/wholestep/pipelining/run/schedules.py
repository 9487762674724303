"""Schedules of torch over the stages of a pipe, with what a stage alone cannot do for them.

    schedule = ws.pipelining.schedule("1F1B", stage, 8, loss_fn)      Schedule1F1B(stage, 8, loss_fn), and also:

    loss          no loss_fn is needed if `pipeline` was told which result is the loss
    targets       a dict, tuple or list of tensors, not only a tensor; or None if the model computes its loss from its
                  inputs: loss_fn then gets the result and None
    results       non-tensor leaves among the results of the model: torch's `step` only merges tensors
    errors        a rank that raises or dies is named, also while the schedule waits
    arguments     None in a chunk spec passes the whole value to every microbatch; specs of keywords match by name
    rows          an argument or a target with fewer rows than the batch is refused, where torch would broadcast it
    ranks         before the first step ranks compare their schedules; a rank with another one, or a missing rank, is
                  named
    stages        a stage that the schedule runs on another rank is refused, where torch would wait for ever
    actions       a list that never reduces gradients is refused

Everything else is torch's: the order of the actions, and the loop that runs them. Arguments are split into microbatches
by torch's own function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks as _split
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from wholestep.errors import OptionError, PipelineInputError, ScheduleError, StageError, invalid_value
from wholestep.pipelining.run.build_stage import own_stages
from wholestep.pipelining.run.stage import Stage
from wholestep.torch_private.fx_graphs import pytree
from wholestep.torch_private.pipelining import (
    WholeValue,
    actions_that_run,
    chunk_specs,
    has_loss,
    has_merge_spec,
    is_single,
    quiet_masks,
    reduced_stages,
    stages_and_ranks,
    stages_of,
)

_OPTIONS = ("losses", "return_outputs", "loss_kwargs")
"""Keyword arguments of `step` that are not passed to the model."""


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

    `deadline`: seconds that ranks wait for each other before the first step, while some may still capture or load data.
    `options` are those of torch's class. Returns an instance of a subclass of it.
    """
    cls = _class_of(kind)
    if not deadline > 0:
        raise invalid_value("deadline", deadline, "use a number of seconds above 0.")
    given = own_stages(stages, "a schedule")
    loss_fn = loss_fn or given[0].own_loss
    whole = type(cls.__name__, (_ScheduleMixin, cls), {})
    made: _ScheduleMixin
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


class _ScheduleMixin:
    """Methods that take precedence over those of torch's schedule class."""

    deadline: float
    _targets: list[Any] | None = None
    _met: frozenset[bool] = frozenset()
    """Contains True after the ranks agreed on a step with a backward, False after one without."""
    _n_microbatches: int
    _loss_fn: Callable[..., torch.Tensor] | None

    def step(self, *args: Any, target: Any = None, **named: Any) -> Any:
        """Run one step; see torch's class."""
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
        """The properties that all ranks of the pipeline must share."""
        stages, _ = stages_and_ranks(self)
        lists = "" if is_single(self) else repr(actions_that_run(self))  # type: ignore[arg-type]
        return [
            type(self).__name__,
            f"{self._n_microbatches} microbatches",
            f"{stages} stages",
            "forward and backward" if has_loss(self) else "forward only",
            f"actions {hashlib.sha256(lists.encode()).hexdigest()[:16]}",
        ]

    def _check_given(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> None:
        """Check the arguments and the target of the whole batch, as far as this rank has them."""
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
                fix="pass the target on the rank of the last stage: step(target=...).",
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
                    fix="build on each rank the stages that the schedule runs there: "
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
    """Split a pytree into microbatches: tensors along dim 0, as torch splits them; other leaves are passed to all."""
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
    """Merge the results of microbatches: tensors along dim 0; other leaves are those of the first microbatch."""
    flat = [pytree.tree_flatten(chunk) for chunk in chunks]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    joined = [torch.cat(column) if isinstance(column[0], torch.Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(joined, flat[0][1])


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The positional and the keyword arguments of each microbatch.

    Specs have the structure of the arguments, with a `TensorChunkSpec(dim)`, or None or `Replicate` to pass the whole
    value to every microbatch, as in PiPPy. A spec belongs to the argument of its name, in any order of keywords and
    dictionary keys (torch matches by position). Without a spec, tensors are split along dim 0 and other values are
    passed whole.
    """
    named = dict(kwargs or {})
    positional = None if args_chunk_spec is None else _fitted(args_chunk_spec, args, "args_chunk_spec")
    by_name = None if kwargs_chunk_spec is None else _fitted(dict(kwargs_chunk_spec), named, "kwargs_chunk_spec")
    with quiet_masks():
        return _split(args, named, chunks, positional, by_name)


def _fitted(spec: Any, values: Any, name: str) -> Any:
    """A spec in the order of the values, with torch's marker for a whole value in place of None."""
    if _is_whole(spec):
        return pytree.tree_map(lambda leaf: WholeValue, values)
    if isinstance(values, Mapping):
        if not isinstance(spec, Mapping) or set(spec) != set(values):
            raise _misfit(spec, values, name)
        return type(values)({key: _fitted(spec[key], value, f"{name}[{key!r}]") for key, value in values.items()})  # type: ignore[call-arg]
    if isinstance(values, tuple | list):
        if not isinstance(spec, tuple | list) or len(spec) != len(values):
            raise _misfit(spec, values, name)
        fitted = [
            _fitted(each, value, f"{name}[{i}]") for i, (each, value) in enumerate(zip(spec, values, strict=True))
        ]
        return type(values)(*fitted) if hasattr(values, "_fields") else type(values)(fitted)
    if isinstance(spec, Mapping | tuple | list):
        raise _misfit(spec, values, name)
    return spec


def _is_whole(spec: Any) -> bool:
    """True if every microbatch gets the whole value: None, or `Replicate`, the class or an instance."""
    return spec is None or spec is WholeValue or isinstance(spec, WholeValue)


def _misfit(spec: Any, values: Any, name: str) -> PipelineInputError:
    wanted = pytree.tree_map(lambda leaf: _ShownChunkSpec(0) if hasattr(leaf, "shape") else None, values)
    return PipelineInputError(
        f"{name} is {_shown(spec)}, which is not the structure of the arguments.",
        fix=f"write for example {_shown(wanted)}",
    )


def _shown(spec: Any) -> str:
    return repr(pytree.tree_map_only(TensorChunkSpec, lambda each: _ShownChunkSpec(each.split_dim), spec))


class _ShownChunkSpec:
    """A chunk spec whose repr is the code that creates it."""

    def __init__(self, dim: int) -> None:
        self._dim = dim

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self._dim})"


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The rows of a batch whose tensors are all split along dim 0; 0 without tensors.

    Raises if they differ: a tensor with fewer rows would be split into smaller microbatches, and broadcast silently.
    """
    named = {f"argument {place}": value for place, value in enumerate(args)}
    named |= {f"{name}=": value for name, value in kwargs.items()}
    rows: dict[str, int] = {}
    for name, value in named.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                rows.setdefault(name, leaf.shape[0])
                rows[name] = min(rows[name], leaf.shape[0])
    if not rows:
        return 0
    most, fewest = max(rows, key=rows.__getitem__), min(rows, key=rows.__getitem__)
    if rows[most] != rows[fewest]:
        raise PipelineInputError(
            f"{fewest} has {rows[fewest]} rows and {most} has {rows[most]}: their microbatches would not match.",
            fix="give both the rows of the batch; or set args_chunk_spec and kwargs_chunk_spec of the schedule, with "
            "None for an argument that is passed whole to every microbatch.",
        )
    return rows[most]


def check_target(target: Any, rows: int) -> None:
    """Raise if a target has fewer rows than its batch or microbatch: it would be broadcast silently."""
    for leaf in [target] if isinstance(target, torch.Tensor) else pytree.tree_leaves(target):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] < rows:
            raise PipelineInputError(
                f"the target has {leaf.shape[0]} rows for {rows} rows of input: it would be broadcast.",
                fix="pass a target with one row for each row of the batch.",
            )
