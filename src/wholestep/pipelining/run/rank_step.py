"""A step of all stages of one rank: begin, end, reduction of shared parameters, and failures.

A schedule tells each stage when its own microbatches are done. The last stage of a rank to finish ends the step for all
of them: by then every message of the pipeline has been sent and received here, so that waiting for other ranks cannot
block one of them.

Failures go through the failure channel (ranks/channel.py), so that other ranks name the rank that raised or died. A
step begins when the schedule clears its stages and ends when it has reduced their gradients, which are the only calls
that a stage gets from torch's schedules. An error inside a stage is posted at once. An error while the schedule itself
waits is only seen by `ws.pipelining.schedule`, which names the rank. Before the first step of such a schedule the ranks
compare what they are about to run; a rank that is missing, or has another schedule, is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from wholestep.pipelining.build.model_state import MultiUseParameterConfig, SharedParameter
from wholestep.pipelining.run.gradient_reduction import ReplicatedParameter, exchange_over, sum_copies
from wholestep.ranks.agreement import Agreement
from wholestep.ranks.agreement_records import TextDigest
from wholestep.ranks.channel import Channel

if TYPE_CHECKING:
    from wholestep.pipelining.run.stage import Stage


class StepWatch:
    """Reports the steps of one pipeline on one rank to the failure channel."""

    def __init__(self, name: str, ranks: Sequence[int] = ()) -> None:
        self._name = name
        self._ranks = tuple(ranks)
        """The global ranks of the pipeline."""
        self._call = 0
        self._phase: AbstractContextManager[None] | None = None

    def begin(self) -> None:
        """Begin the next step; raises if another rank has already failed."""
        self._phase = None
        self._call += 1
        channel = Channel.current()
        if channel is not None:
            failed = channel.peer_failure()
            if failed is not None:
                raise failed
            phase = channel.running(self._name, self._call, ranks=self._ranks)
            phase.__enter__()
            self._phase = phase

    @contextmanager
    def meeting(self, lines: Sequence[str], deadline: float) -> Iterator[None]:
        """Before the first step of a schedule: an error in the body fails the other ranks too; then all compare lines.

        Nothing has been sent yet, so the process groups are not aborted.
        """
        channel = Channel.current()
        if channel is None or len(self._ranks) < 2:
            yield
            return
        place = f"{self._name}, agreeing on its schedule"
        channel.meeting_counts[place] += 1
        number = channel.meeting_counts[place]
        try:
            yield
        except Exception as error:
            channel.fail(error, place, number, running=False)
            raise
        Agreement(channel, place, deadline, self._ranks).agree(number, TextDigest(list(lines), "schedule"))

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Before any later step: other ranks may already be in it, and an error in the body is posted to them."""
        try:
            yield
        except Exception as error:
            self.begin()
            self.failed(error)
            raise

    def __enter__(self) -> None:
        self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        else:
            self.failed(error)

    def end(self) -> None:
        """End the step; raises if its communication was aborted without an error of its own."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)

    def failed(self, error: BaseException) -> None:
        """Post an error of this rank, or raise the error that names the rank that caused it. Once per step."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(type(error), error, error.__traceback__)


class RankStep:
    """The stages of one pipe on this rank, and their current step."""

    def __init__(self, group: dist.ProcessGroup | None, shared: Sequence[SharedParameter]) -> None:
        name, ranks = _named(group)
        self.group = group
        self.watch = StepWatch(name, ranks)
        self.weights: dict[int, float] = {}
        """The size of each microbatch of this step relative to the first one."""
        self.rows: dict[int, int] = {}
        """The rows of each microbatch of this step, if known."""
        self.side: dist.ProcessGroup | None = None
        self.prepared = False
        self._shared = tuple(shared)
        self._stages: dict[int, Stage] = {}
        self._begun: set[int] = set()
        self._over: set[int] = set()

    def join(self, stage: Stage) -> None:
        """Add a stage of this rank; one that was built again replaces the earlier one."""
        self._stages[stage.stage_index] = stage

    def own_copies(self, stage: int, module: nn.Module) -> None:
        """Copy the parameters of a stage that another stage of this rank shares.

        Otherwise an optimizer over all stages of the rank would step them twice. Gradients of copies are summed, so
        that they stay equal.
        """
        others = [each for index, each in self._stages.items() if index != stage]
        taken = {id(parameter) for other in others for parameter in other.submod.parameters()}
        copies: dict[int, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if id(parameter) in taken:
                path, _, last = name.rpartition(".")
                fresh = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                module.get_submodule(path).register_parameter(last, copies.setdefault(id(parameter), fresh))

    def begin(self, stage: Stage) -> None:
        """A stage begins a step; the first one begins it for the rank."""
        if not self._begun or stage.stage_index in self._begun:
            self._begun, self._over = set(), set()
            self.weights.clear()
            self.rows.clear()
            self.watch.begin()
        self._begun.add(stage.stage_index)

    def end(self, stage: Stage) -> None:
        """A stage is done with its microbatches; the last one ends the step for the rank."""
        if stage.stage_index not in self._begun:
            return  # the step has already ended
        self._over.add(stage.stage_index)
        if len(self._over) < stage.local_stages:
            return
        stages = [self._stages[index] for index in sorted(self._over)]
        if stage.has_backward:
            for each in stages:
                each.finish_reduction()
            self._sum_shared(stages)
            for each in stages:
                each.earlier.add()
        self._begun, self._over = set(), set()
        self.watch.end()

    def end_all(self) -> None:
        """The schedule has returned. A forward-only schedule does not notify its stages."""
        self._begun, self._over = set(), set()
        self.watch.end()

    def failed(self, error: BaseException) -> None:
        """End a step that failed: restore gradients; raises the error that names the rank that caused it."""
        for stage in self._stages.values():
            stage.earlier.put_back()
        self._begun, self._over = set(), set()
        self.watch.failed(error)

    def _sum_shared(self, stages: Sequence[Stage]) -> None:
        copies = [copy for stage in stages for copy in stage.copies]
        if copies:
            first = stages[0]
            exchange = exchange_over(self.group, first.global_rank)
            sum_copies(copies, first.stage_index_to_group_rank, first.group_rank, exchange)

    def copies_in(self, stage: Stage) -> list[ReplicatedParameter]:
        """The parameters of a stage that other stages hold copies of."""
        names = stage.named()
        found = []
        for number, shared in enumerate(self._shared):
            if shared.mode is not MultiUseParameterConfig.REPLICATE or stage.stage_index not in shared.stages:
                continue
            parameter = next((names[name] for name in shared.names if name in names), None)
            if parameter is not None:
                found.append(ReplicatedParameter(number, stage.stage_index, parameter, tuple(sorted(shared.stages))))
        return found


def _named(group: dist.ProcessGroup | None) -> tuple[str, list[int]]:
    """The name of a group's pipeline in error messages, and its global ranks."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    everyone = len(ranks) == dist.get_world_size()
    return "pipeline" if everyone else f"pipeline of ranks {', '.join(map(str, ranks))}", ranks
