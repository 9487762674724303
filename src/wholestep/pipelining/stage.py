"""A stage on a rank: torch's `PipelineStage`, with everything that its schedules ask of a stage made right.

    stage = pipe.build_stage(i, device, group)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
    schedule.step(x, target=y)

This is the one place where torch's stage is subclassed. The schedules call: `clear_runtime_states` (a step begins),
`get_fwd_recv_ops` .. `get_bwd_send_ops` (messages; links.py), `set_local_*` and `get_local_bwd_output` (the neighbour
is on the same rank), `forward_one_chunk`, `backward_one_chunk` (all of it, or only as far as inputs need),
`backward_weight_one_chunk`, `perform_reduce_grad` (gradients.py). torch runs the whole model once to learn shapes;
here no such run is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from wholestep._torch_compat_running import let_graph_go
from wholestep.errors import OptionError, StageError
from wholestep.parallel.plan import Plan
from wholestep.pipelining.chunk_backward import Beginning, accumulate, add_passed, begin
from wholestep.pipelining.data_parallel import apply_plan
from wholestep.pipelining.gradients import Earlier, divide
from wholestep.pipelining.halves import Group, first_half, second_half
from wholestep.pipelining.links import Receiver, Sender, Wire
from wholestep.pipelining.messages import Size, check_values
from wholestep.pipelining.rank_step import RankStep
from wholestep.pipelining.shared import SharedParameter
from wholestep.pipelining.stage_module import StageModule, follow_device
from wholestep.pipelining.written_inputs import written_inputs
from wholestep.runtime.channel import Channel

Weights = Literal["rows", "equal"]


class Source(Protocol):
    """What a stage needs of a pipe."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""

    @property
    def shared(self) -> tuple[SharedParameter, ...]:
        """Parameters that several stages use."""

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of a stage."""

    def flatten_inputs(self, args: Sequence[Any], kwargs: Any) -> list[torch.Tensor]:
        """The tensors of a call."""

    def unflatten_outputs(self, flat: Sequence[torch.Tensor]) -> Any:
        """What the model returns."""


class Forwarded(NamedTuple):
    """A microbatch between its forward and its backward."""

    outputs: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]


class Stage(PipelineStage):
    """A stage of a pipe on this rank. Made by `pipe.build_stage`."""

    def __init__(
        self,
        source: Source,
        index: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        rank_step: RankStep,
        data_parallel: Plan | None,
        weights: Weights,
    ) -> None:
        module = source.get_stage_module(index).to(device)
        rank_step.own_copies(index, module)
        super().__init__(module, index, source.num_stages, device, group=group)
        self._source = source
        self.rank_step = rank_step
        self._weighted = weights == "rows"
        self._written = written_inputs(module)
        self._wire = Wire(group, device)
        self._sender = Sender(self._wire)
        self._receiver = Receiver(self._wire)
        self._forwarded: dict[int, Forwarded] = {}
        self._halfway: dict[int, list[Group] | Beginning] = {}
        """Between the two halves of a backward; a Beginning: nothing was done yet, the second half is all of it."""
        self._local_inputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self._local_gradients: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self._first_sizes: list[int] = []
        self._averaging = apply_plan(module, data_parallel)
        self.earlier = Earlier()
        self.copies = rank_step.copies_in(self)
        rank_step.join(self)

    @property
    def own_loss(self) -> Any:
        """The loss function of a pipe that was told which result is its loss; else None."""
        return self._source.own_loss if getattr(self._source, "call_runs_backward", False) else None  # type: ignore[attr-defined]

    @property
    def local_stages(self) -> int:
        """How many stages of the pipeline are on this rank."""
        return sum(rank == self.group_rank for rank in self.stage_index_to_group_rank.values())

    def global_rank(self, group_rank: int) -> int:
        """The number in the world of a rank of the pipeline's group."""
        return group_rank if self.group is None else dist.get_global_rank(self.group, group_rank)

    def counted_parameters(self) -> list[nn.Parameter]:
        """The parameters of this stage that are counted here: of copies, the one of the first stage."""
        elsewhere = {id(copy.parameter) for copy in self.copies if copy.stage != copy.stages[0]}
        return [parameter for parameter in self.submod.parameters() if id(parameter) not in elsewhere]

    def check_call(self, args: Sequence[Any], kwargs: Any) -> None:
        """Raise if the model cannot be called so."""
        self._source.flatten_inputs(args, kwargs)

    # What a schedule does once.

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """Nothing is run ahead to learn shapes: messages tell them."""
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.act_send_info = {}
        self._make_side_group()
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """One message each way to neighbours on other ranks: backends connect when they first meet."""
        operations = []
        for stage in (self.stage_index - 1, self.stage_index + 1):
            rank = self.stage_index_to_group_rank.get(stage, self.group_rank)
            if rank != self.group_rank:
                here, there = torch.zeros(2, 1, device=self.device)
                operations += self._wire.receives([here], self.global_rank(rank))
                operations += self._wire.sends([there], self.global_rank(rank))
        return operations

    def _make_side_group(self) -> None:
        """Backends without tags need a second group for messages that were not expected. All ranks come here once."""
        together = self.rank_step
        if not together.prepared:
            together.prepared = True
            if self._needs_side_group():
                ranks = [self.global_rank(rank) for rank in range(self.group_size)]
                together.side = dist.new_group(ranks, use_local_synchronization=True)
        self._wire.side = together.side

    def _needs_side_group(self) -> bool:
        return self.device.type != "cpu"

    # A step begins and ends.

    def clear_runtime_states(self) -> None:
        """A schedule begins a step."""
        self._wire.finish()
        self._forwarded.clear()
        self.bwd_cache.clear()
        self._halfway.clear()
        self.output_chunks.clear()
        self._sender.clear()
        self._receiver.clear()
        self._local_inputs.clear()
        self._local_gradients.clear()
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

    # Messages.

    def _peer(self, stage: int) -> int:
        return self.global_rank(self.stage_index_to_group_rank[stage])

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What receives the values of a microbatch."""
        if self.is_first:
            return []
        return self._receiver.receive(fwd_chunk_id, self.has_backward, self._peer(self.stage_index - 1))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What sends the values of a microbatch."""
        forwarded = self._forwarded[fwd_chunk_id]
        if not self.has_backward:
            del self._forwarded[fwd_chunk_id]
        if self.is_last:
            return []
        size = Size(self.rank_step.weights.get(fwd_chunk_id, 1.0), self.rank_step.rows.get(fwd_chunk_id, 0))
        peer = self._peer(self.stage_index + 1)
        return self._sender.send(fwd_chunk_id, forwarded.outputs, size, self.has_backward, peer)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What receives the gradients of a microbatch."""
        if not self.has_backward or self.is_last:
            return []
        return self._sender.receive_gradients(bwd_chunk_id, self._peer(self.stage_index + 1))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What sends the gradients of a microbatch."""
        if not self.has_backward or self.is_first:
            return []
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        return self._receiver.send_gradients(bwd_chunk_id, gradients, self._peer(self.stage_index - 1))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """The stage before is on this rank: its values come without a message."""
        values = (prev_stage_outputs,) if isinstance(prev_stage_outputs, torch.Tensor) else tuple(prev_stage_outputs)
        grad = self.has_backward
        self._local_inputs[mb_index] = tuple([_leaf(value, grad and value.requires_grad) for value in values])

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """The stage behind is on this rank: its gradients come without a message."""
        self._local_gradients[mb_index] = tuple(next_stage_bwd_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """The gradients for a stage before on this rank; none in an evaluation, which runs the same actions."""
        return self.bwd_cache.pop(mb_index, ())

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
        if chunk in self._local_inputs:
            return self._local_inputs.pop(chunk)
        values, layout = self._receiver.take(chunk, self._peer(self.stage_index - 1))
        self.rank_step.weights[chunk], self.rank_step.rows[chunk] = layout.size
        grad = torch.is_grad_enabled()
        return tuple(
            [_leaf(value, grad and form.requires_grad) for value, form in zip(values, layout.forms, strict=True)]
        )

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
            local = self._local_gradients.pop(chunk, None)
            return begin(outputs, self._sender.take_gradients(chunk) if local is None else local, inputs)
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


def _leaf(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A value of another stage: autograd ends here."""
    return value.detach().requires_grad_(requires_grad)


def _describe(loss: object) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"


def build_stage(
    pipe: Source,
    stage_index: int,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
    *,
    data_parallel: Plan | None = None,
    weights: Weights = "rows",
) -> Stage:
    """The stage of a pipe on this rank, for any schedule of torch.

    `weights`: how microbatches of different sizes count. "rows": by their size, so that the gradient of a mean loss is
    that of the whole batch. "equal": all the same, as torch does; for losses that are sums.
    """
    if weights not in ("rows", "equal"):
        raise OptionError(f"weights={weights!r} is not known.", fix='use "rows" or "equal".')
    if not 0 <= stage_index < pipe.num_stages:
        raise StageError(
            f"there is no stage {stage_index}: the pipe has {pipe.num_stages}.", fix="count stages from 0."
        )
    module = pipe.get_stage_module(stage_index)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    empty = next((name for name, tensor in tensors if tensor.is_meta), None)
    if empty is not None and torch.device(device).type != "meta":
        raise StageError(
            f"{empty} of stage {stage_index} is on the meta device: it has no values.",
            fix=f"give the stage its tensors first: pipe.materialize_stage({stage_index}, device, state_dict).",
        )
    if isinstance(module, StageModule) and empty is None:
        follow_device(module, device)  # a stage without tensors, of a model on the meta device
    steps: dict[Any, RankStep] = pipe.__dict__.setdefault("_rank_steps", {})
    rank_step = steps.get(group)
    if rank_step is None:
        rank_step = steps[group] = RankStep(group, pipe.shared)
        Channel.current()  # this rank gives signs of life from now on: others may wait for it
    return Stage(pipe, stage_index, torch.device(device), group, rank_step, data_parallel, weights)


def own_stages(stages: Stage | Sequence[Stage], who: str) -> list[Stage]:
    """The stages of this rank, from what a user gives."""
    given: list[Any] = list(stages) if isinstance(stages, list | tuple) else [stages]
    if not given or not all(isinstance(stage, Stage) for stage in given):
        raise StageError(
            f"{who} takes stages of pipe.build_stage.", fix="pass the stage of this rank, or the list of all of them."
        )
    return given
