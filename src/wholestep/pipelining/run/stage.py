"""A stage on a rank: torch's `PipelineStage`, with everything that its schedules ask of a stage made right.

    stage = pipe.build_stage(i, device, group)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
    schedule.step(x, target=y)

Torch's stage is subclassed here and in linked_stage.py, which has its messages, and nowhere else. The schedules call:
`clear_runtime_states` (a step begins), `forward_one_chunk`, `backward_one_chunk` (all of it, or only as far as inputs
need), `backward_weight_one_chunk`, `perform_reduce_grad` (gradients.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from wholestep.errors import StageError
from wholestep.ir.effects import aliased_inputs, written_roots
from wholestep.parallel.plan import Plan
from wholestep.pipelining.run.chunk_backward import Beginning, accumulate, add_passed, begin
from wholestep.pipelining.run.data_parallel import apply_plan
from wholestep.pipelining.run.gradients import Earlier, divide
from wholestep.pipelining.run.halves import Group, first_half, second_half
from wholestep.pipelining.run.linked_stage import Forwarded, LinkedStage
from wholestep.pipelining.run.messages import check_values
from wholestep.pipelining.run.rank_step import RankStep
from wholestep.pipelining.run.stage_source import Source
from wholestep.torch_private.pipelining import let_graph_go

Weights = Literal["rows", "equal"]


class Stage(LinkedStage):
    """A stage of a pipe on this rank. Made by `pipe.build_stage`."""

    def __init__(
        self,
        source: Source,
        index: int,
        module: nn.Module,
        device: torch.device,
        group: dist.ProcessGroup | None,
        rank_step: RankStep,
        data_parallel: Plan | None,
        weights: Weights,
    ) -> None:
        module.to(device)
        rank_step.own_copies(index, module)
        super().__init__(module, index, source.num_stages, device, group, rank_step)
        self._source = source
        self._weighted = weights == "rows"
        self._written = _written_inputs(source.get_stage_module(index))
        self._halfway: dict[int, list[Group] | Beginning] = {}
        """Between the two halves of a backward; a Beginning: nothing was done yet, the second half is all of it."""
        self._first_sizes: list[int] = []
        self._averaging = apply_plan(module, data_parallel)
        self.earlier = Earlier()
        self.copies = rank_step.copies_in(self)
        rank_step.join(self)

    @property
    def own_loss(self) -> Any:
        """The loss function of a pipe that was told which result is its loss; else None."""
        return self._source.own_loss if getattr(self._source, "call_runs_backward", False) else None  # type: ignore[attr-defined]

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters under the model's names, also where a wrapper gives them others."""
        own = dict(self.submod.named_parameters(remove_duplicate=False))
        ids = {id(parameter) for parameter in own.values()}
        original = self._source.get_stage_module(self.stage_index).named_parameters(remove_duplicate=False)
        return {**{name: parameter for name, parameter in original if id(parameter) in ids}, **own}

    def remap_qualname(self, qualname: str) -> str:
        """The name in the model of a parameter, buffer or submodule of this stage, also where a wrapper renames it.

        As PiPPy's stages have it, for saving a stage under the names of the model.
        """
        name = qualname.removeprefix("submod.")
        tensors = {**dict(self.submod.named_parameters()), **dict(self.submod.named_buffers())}
        own = self._source.get_stage_module(self.stage_index)
        original: list[tuple[str, Any]] = [*own.named_parameters(), *own.named_buffers(), *own.named_modules()]
        wanted: Any = tensors.get(name)
        if wanted is None:
            wanted = dict(self.submod.named_modules()).get(name)
        found = next((old for old, each in original if each is wanted and old), None)
        if wanted is None or found is None:
            raise StageError(
                f"stage {self.stage_index} has nothing with the name {qualname}.",
                fix="use a name of stage.submod.named_parameters(), named_buffers() or named_modules().",
            )
        return found

    def counted_parameters(self) -> list[nn.Parameter]:
        """The parameters of this stage that are counted here: of copies, the one of the first stage."""
        elsewhere = {id(copy.parameter) for copy in self.copies if copy.stage != copy.stages[0]}
        return [parameter for parameter in self.submod.parameters() if id(parameter) not in elsewhere]

    def check_call(self, args: Sequence[Any], kwargs: Any) -> None:
        """Raise if the model cannot be called so."""
        self._source.flatten_inputs(args, kwargs)

    # A step begins and ends.

    def clear_runtime_states(self) -> None:
        """A schedule begins a step."""
        self._forget_messages()
        self._halfway.clear()
        self.output_chunks.clear()
        self._first_sizes.clear()
        self.rank_step.begin(self)
        if self.has_backward:
            self._reshard()
            self.earlier.put_aside(self.submod.parameters())
            if self._averaging is not None:
                self._averaging.take_buffers(self.submod)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """All microbatches of this stage are done: scale its gradients and reduce them."""
        try:
            if self.has_backward:
                super().perform_reduce_grad(1)  # the reduction of fully_shard
                parameters = list(self.submod.parameters())
                divide(parameters, self._divisor(grad_scale_factor))
                if self._averaging is not None:
                    self._averaging.start(parameters)
            self.rank_step.end(self)
        except Exception as error:
            self.rank_step.failed(error)
            raise

    def _divisor(self, factor: int) -> float:
        """The number of microbatches, or what they weigh together. 1: losses are sums, and nothing is divided."""
        weights = self.rank_step.weights.values()
        if not self._weighted or all(weight == 1.0 for weight in weights):
            return factor
        if factor == 1:
            raise StageError(
                "microbatches of different sizes were weighted by their rows, but the schedule has scale_grads=False: "
                "the losses are sums.",
                fix='use pipe.build_stage(..., weights="equal") with losses that are sums.',
            )
        return sum(weights)

    def finish_reduction(self) -> None:
        """Wait for the average over data-parallel ranks."""
        if self._averaging is not None:
            self._averaging.finish()

    def _reshard(self) -> None:
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # Forward.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run one microbatch. The last stage returns what the model returns, the others the tuple of their values."""
        try:
            inputs = self._inputs(fwd_chunk_id, args, kwargs)
            given = [value.clone() if i in self._written else value for i, value in enumerate(inputs)]
            if isinstance(self.submod, DistributedDataParallel):
                result = self.forward_maybe_with_nosync(*given)  # type: ignore[no-untyped-call]
            else:
                result = self.submod(*given)
            outputs = (result,) if isinstance(result, torch.Tensor) else tuple(result)
            if not self.is_last:
                check_values(outputs, self.stage_index)
                self._forwarded[fwd_chunk_id] = Forwarded(outputs, inputs)
                return outputs
            self._forwarded[fwd_chunk_id] = Forwarded((), inputs)
            if save_forward_output:
                self.output_chunks.append(self._kept_result(outputs))
            return self._source.unflatten_outputs(outputs)
        except Exception as error:
            self.rank_step.failed(error)
            raise

    def _inputs(self, chunk: int, args: Sequence[Any], kwargs: Any) -> tuple[torch.Tensor, ...]:
        if self.is_first:
            inputs = tuple(value.to(self.device) for value in self._source.flatten_inputs(args, kwargs or {}))
            self.rank_step.weights[chunk] = self._weigh(inputs)
            self.rank_step.rows[chunk] = min((value.shape[0] for value in inputs if value.dim()), default=0)
            return inputs
        return self._received(chunk)

    def _weigh(self, inputs: Sequence[torch.Tensor]) -> float:
        """The size of a microbatch in parts of the first: inputs that are not split do not count."""
        sizes = [value.numel() for value in inputs]
        if not self._weighted:
            return 1.0
        if not self._first_sizes:
            self._first_sizes = sizes
        shares = [size / first for size, first in zip(sizes, self._first_sizes, strict=True) if first]
        return min(shares, default=1.0)

    def _kept_result(self, outputs: Sequence[torch.Tensor]) -> Any:
        """What `schedule.step` returns in the end: without the graph, and a number as one element of a row."""
        kept = [value.detach() if self.has_backward else value for value in outputs]
        return self._source.unflatten_outputs([value.reshape(1) if value.dim() == 0 else value for value in kept])

    # Backward.

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """The backward of one microbatch; with `full_backward=False` only as far as its inputs need."""
        if not self.has_backward:
            return
        try:
            outputs, inputs = self._forwarded.pop(bwd_chunk_id)
            beginning = self._beginning(bwd_chunk_id, outputs, inputs, loss)
            accumulate(beginning.held)
            wanted = [place for place, value in enumerate(inputs) if value.requires_grad and not self.is_first]
            found: list[torch.Tensor | None] = [None] * len(inputs)
            if full_backward:
                gradients = self._whole(beginning, [inputs[place] for place in wanted], last_backward)
            elif not wanted:
                gradients = []
                self._halfway[bwd_chunk_id] = beginning
            else:
                self._before_backward()
                gradients, self._halfway[bwd_chunk_id] = first_half(
                    beginning.roots,
                    beginning.gradients,
                    [inputs[place] for place in wanted],
                    list(self.submod.parameters()),
                )
                let_graph_go(loss)
            for place, gradient in zip(wanted, gradients, strict=True):
                found[place] = gradient
            self.bwd_cache[bwd_chunk_id] = add_passed(found, beginning.passed)
        except Exception as error:
            self.rank_step.failed(error)
            raise

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The other half of a backward: gradients of parameters."""
        if not self.has_backward:
            return
        try:
            state = self._halfway.pop(bwd_chunk_id)
            if isinstance(state, Beginning):
                self._whole(state, [], last_backward)
            else:
                self._before_backward()
                accumulate(second_half(state))
        except Exception as error:
            self.rank_step.failed(error)
            raise

    def _beginning(
        self, chunk: int, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], loss: torch.Tensor | None
    ) -> Beginning:
        if not self.is_last:
            return begin(outputs, self._gradients(chunk), inputs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise StageError(
                f"the loss of microbatch {chunk} is {_describe(loss)}.",
                fix="give the schedule a loss_fn that returns one number, as a tensor.",
            )
        weight = self.rank_step.weights.get(chunk, 1.0)
        return begin([loss], [torch.full_like(loss, weight)], inputs)

    def _whole(self, beginning: Beginning, inputs: Sequence[torch.Tensor], last: bool) -> Sequence[torch.Tensor | None]:
        if not beginning.roots:
            return [None] * len(inputs)
        if isinstance(self.submod, DistributedDataParallel):
            arguments = {
                "stage_output": tuple(beginning.roots),
                "output_grads": tuple(beginning.gradients),
                "input_values": list(inputs),
            }
            return self.backward_maybe_with_nosync("full", arguments, last_backward=last)[0]
        self._before_backward()
        torch.autograd.backward(beginning.roots, beginning.gradients)
        gradients = [value.grad for value in inputs]
        for value in inputs:
            value.grad = None
        return gradients

    def _before_backward(self) -> None:
        """For fully_shard: parameters are whole, and are reduced with the end of the step, not before."""
        if isinstance(self.submod, FSDPModule):
            self.submod.unshard()
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)


def _describe(loss: object) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"


def _written_inputs(module: nn.Module) -> frozenset[int]:
    """Positions of the inputs that a stage writes to. It gets copies: a received tensor is a leaf of autograd."""
    if not isinstance(module, fx.GraphModule):
        return frozenset()
    nodes = list(module.graph.nodes)
    return frozenset(written_roots(nodes, [node for node in nodes if node.op == "placeholder"], aliased_inputs))
