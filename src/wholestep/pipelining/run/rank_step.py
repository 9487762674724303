"""What the stages of one rank do together: begin a step, end it, and reduce what they share with other ranks.

A schedule tells each stage when its own microbatches are done. The last of them on a rank ends the step for all: by
then every message of the pipeline has been sent and received here, so that waiting for others cannot hold anybody up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from wholestep.pipelining.build.shared import MultiUseParameterConfig, SharedParameter
from wholestep.pipelining.run.faults import StepWatch
from wholestep.pipelining.run.gradients import Copy, exchange_over, sum_copies

if TYPE_CHECKING:
    from wholestep.pipelining.run.stage import Stage


class RankStep:
    """The stages of one pipe on this rank, and the step that they are in."""

    def __init__(self, group: dist.ProcessGroup | None, shared: Sequence[SharedParameter]) -> None:
        name, ranks = _named(group)
        self.group = group
        self.watch = StepWatch(name, ranks)
        self.weights: dict[int, float] = {}
        """The size of each microbatch of this step, in parts of the first."""
        self.rows: dict[int, int] = {}
        """The rows of each microbatch of this step, where they are known."""
        self.side: dist.ProcessGroup | None = None
        self.prepared = False
        self._shared = tuple(shared)
        self._stages: dict[int, Stage] = {}
        self._begun: set[int] = set()
        self._over: set[int] = set()

    def join(self, stage: Stage) -> None:
        """A stage of this rank; one that was built again replaces the one before."""
        self._stages[stage.stage_index] = stage

    def own_copies(self, stage: int, module: nn.Module) -> None:
        """Give a stage parameters of its own where another stage of this rank has the same tensor.

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
        """A stage begins a step; the first of them begins it for the rank."""
        if not self._begun or stage.stage_index in self._begun:
            self._begun, self._over = set(), set()
            self.weights.clear()
            self.rows.clear()
            self.watch.begin()
        self._begun.add(stage.stage_index)

    def end(self, stage: Stage) -> None:
        """A stage is done with its microbatches; the last of them ends the step for the rank."""
        if stage.stage_index not in self._begun:
            return  # the step is over already
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
        """The schedule has returned. One that only runs forward does not tell its stages."""
        self._begun, self._over = set(), set()
        self.watch.end()

    def failed(self, error: BaseException) -> None:
        """A step ends by an error: gradients are as before it; raises the error of the rank that is the cause."""
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

    def copies_in(self, stage: Stage) -> list[Copy]:
        """The parameters of a stage of which other stages have copies."""
        names = stage.named()
        found = []
        for number, shared in enumerate(self._shared):
            if shared.mode is not MultiUseParameterConfig.REPLICATE or stage.stage_index not in shared.stages:
                continue
            parameter = next((names[name] for name in shared.names if name in names), None)
            if parameter is not None:
                found.append(Copy(number, stage.stage_index, parameter, tuple(sorted(shared.stages))))
        return found


def _named(group: dist.ProcessGroup | None) -> tuple[str, list[int]]:
    """What the pipeline of a group is called in messages, and its ranks."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    everyone = len(ranks) == dist.get_world_size()
    return "pipeline" if everyone else f"pipeline of ranks {', '.join(map(str, ranks))}", ranks
