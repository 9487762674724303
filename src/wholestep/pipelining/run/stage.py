"""A stage on a rank: a subclass of torch's `PipelineStage` for any of its schedules.

    stage = pipe.build_stage(i, device, group)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
    schedule.step(x, target=y)

`LinkedStage` implements the communication that schedules request:

    get_fwd_recv_ops .. get_bwd_send_ops        operations for the schedule to post (messages.py)
    set_local_*, get_local_bwd_output           the neighbour is on the same rank: values need no message
    _prepare_*, _get_init_p2p_neighbors_ops     once per schedule. torch runs the whole model there to learn shapes;
                                                here messages carry them

`Stage` implements the computation: `clear_runtime_states` (a step begins), `forward_one_chunk`, `backward_one_chunk`
(whole, or only for the inputs), `backward_weight_one_chunk`, `perform_reduce_grad` (gradient_reduction.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from wholestep.errors import StageError
from wholestep.ir.effects import aliased_inputs, written_roots
from wholestep.parallel.plan import Plan
from wholestep.pipelining.build.model_state import SharedParameter
from wholestep.pipelining.run.gradient_reduction import PreviousGradients, apply_plan, divide
from wholestep.pipelining.run.messages import MicrobatchSize, Receiver, Sender, Wire, check_values
from wholestep.pipelining.run.microbatch_backward import (
    BackwardStart,
    WeightGroup,
    accumulate,
    add_passed,
    backward_start,
    input_backward,
    weight_backward,
)
from wholestep.pipelining.run.rank_step import RankStep
from wholestep.torch_private.pipelining import release_graph


class StageSource(Protocol):
    """The part of a pipe that a stage uses."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""

    @property
    def shared(self) -> tuple[SharedParameter, ...]:
        """Parameters that several stages use."""

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of a stage."""

    def flatten_inputs(self, args: Sequence[Any], kwargs: Any) -> list[torch.Tensor]:
        """The tensors of a call."""

    def unflatten_outputs(self, flat: Sequence[torch.Tensor]) -> Any:
        """The results of the model."""


class Forwarded(NamedTuple):
    """A microbatch between its forward and its backward."""

    outputs: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]


class LinkedStage(PipelineStage):
    """A stage and its communication with neighbouring stages."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        rank_step: RankStep,
    ) -> None:
        super().__init__(module, index, stages, device, group=group)
        self.rank_step = rank_step
        self._wire = Wire(group, device)
        self._sender = Sender(self._wire)
        self._receiver = Receiver(self._wire)
        self._forwarded: dict[int, Forwarded] = {}
        self._local_inputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self._local_gradients: dict[int, tuple[torch.Tensor | None, ...]] = {}

    @property
    def local_stages(self) -> int:
        """The number of stages on this rank."""
        return sum(rank == self.group_rank for rank in self.stage_index_to_group_rank.values())

    def global_rank(self, group_rank: int) -> int:
        """The global rank of a rank of the pipeline's group."""
        return group_rank if self.group is None else dist.get_global_rank(self.group, group_rank)

    def _forget_messages(self) -> None:
        """Reset the communication state when a step begins."""
        self._wire.finish()
        self._forwarded.clear()
        self.bwd_cache.clear()
        self._sender.clear()
        self._receiver.clear()
        self._local_inputs.clear()
        self._local_gradients.clear()

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """Runs nothing: messages carry shapes."""
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.act_send_info = {}
        self._make_side_group()
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """One message each way to neighbours on other ranks, because backends connect lazily."""
        operations = []
        for stage in (self.stage_index - 1, self.stage_index + 1):
            rank = self.stage_index_to_group_rank.get(stage, self.group_rank)
            if rank != self.group_rank:
                here, there = torch.zeros(2, 1, device=self.device)
                operations += self._wire.receives([here], self.global_rank(rank))
                operations += self._wire.sends([there], self.global_rank(rank))
        return operations

    def _make_side_group(self) -> None:
        """Backends without tags need a second group for unexpected messages. All ranks call this once."""
        rank_step = self.rank_step
        if not rank_step.prepared:
            rank_step.prepared = True
            if self._needs_side_group():
                ranks = [self.global_rank(rank) for rank in range(self.group_size)]
                rank_step.side = dist.new_group(ranks, use_local_synchronization=True)
                for group in (self.group, rank_step.side):
                    self._connect(group)
        self._wire.side = rank_step.side

    def _connect(self, group: dist.ProcessGroup | None) -> None:
        """Exchange a message with all neighbours of this rank. NCCL connects two ranks at their first message, which
        blocks until both send or receive: an unexpected message would be waited for before it is announced."""
        mine = [stage for stage, rank in self.stage_index_to_group_rank.items() if rank == self.group_rank]
        near = {self.stage_index_to_group_rank.get(stage + way, self.group_rank) for stage in mine for way in (-1, 1)}
        peers = [self.global_rank(rank) for rank in sorted(near - {self.group_rank})]
        here, there = torch.zeros(2, max(len(peers), 1), device=self.device)
        operations = [dist.P2POp(dist.isend, there[i : i + 1], peer, group) for i, peer in enumerate(peers)]
        operations += [dist.P2POp(dist.irecv, here[i : i + 1], peer, group) for i, peer in enumerate(peers)]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def _needs_side_group(self) -> bool:
        return self.device.type != "cpu"

    def _peer(self, stage: int) -> int:
        return self.global_rank(self.stage_index_to_group_rank[stage])

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The operations that receive the values of a microbatch."""
        if self.is_first:
            return []
        return self._receiver.receive(fwd_chunk_id, self.has_backward, self._peer(self.stage_index - 1))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The operations that send the values of a microbatch."""
        forwarded = self._forwarded[fwd_chunk_id]
        if not self.has_backward:
            del self._forwarded[fwd_chunk_id]
        if self.is_last:
            return []
        size = MicrobatchSize(self.rank_step.weights.get(fwd_chunk_id, 1.0), self.rank_step.rows.get(fwd_chunk_id, 0))
        peer = self._peer(self.stage_index + 1)
        return self._sender.send(fwd_chunk_id, forwarded.outputs, size, self.has_backward, peer)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The operations that receive the gradients of a microbatch."""
        if not self.has_backward or self.is_last:
            return []
        return self._sender.receive_gradients(bwd_chunk_id, self._peer(self.stage_index + 1))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The operations that send the gradients of a microbatch."""
        if not self.has_backward or self.is_first:
            return []
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        return self._receiver.send_gradients(bwd_chunk_id, gradients, self._peer(self.stage_index - 1))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """The previous stage is on this rank: its values are passed without a message."""
        values = (prev_stage_outputs,) if isinstance(prev_stage_outputs, torch.Tensor) else tuple(prev_stage_outputs)
        grad = self.has_backward
        self._local_inputs[mb_index] = tuple([_leaf(value, grad and value.requires_grad) for value in values])

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """The next stage is on this rank: its gradients are passed without a message."""
        self._local_gradients[mb_index] = tuple(next_stage_bwd_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """The gradients for the previous stage on this rank; empty in an evaluation, which runs the same actions."""
        return self.bwd_cache.pop(mb_index, ())

    def _received(self, chunk: int) -> tuple[torch.Tensor, ...]:
        """The values of a microbatch from the previous stage, as leaves of autograd."""
        if chunk in self._local_inputs:
            return self._local_inputs.pop(chunk)
        values, layout = self._receiver.take(chunk, self._peer(self.stage_index - 1))
        self.rank_step.weights[chunk], self.rank_step.rows[chunk] = layout.size
        grad = torch.is_grad_enabled()
        return tuple(
            [_leaf(value, grad and form.requires_grad) for value, form in zip(values, layout.forms, strict=True)]
        )

    def _gradients(self, chunk: int) -> Sequence[torch.Tensor | None]:
        """The gradients of a microbatch from the next stage."""
        local = self._local_gradients.pop(chunk, None)
        return self._sender.take_gradients(chunk) if local is None else local


def _leaf(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A value of another stage, detached."""
    return value.detach().requires_grad_(requires_grad)


Weights = Literal["rows", "equal"]


class Stage(LinkedStage):
    """A stage of a pipe on this rank. Created by `pipe.build_stage`."""

    def __init__(
        self,
        source: StageSource,
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
        self._weight_backwards: dict[int, list[WeightGroup] | BackwardStart] = {}
        """Between input and weight backward; a BackwardStart if the input backward had nothing to do."""
        self._first_sizes: list[int] = []
        self._averaging = apply_plan(module, data_parallel)
        self.earlier = PreviousGradients()
        self.copies = rank_step.copies_in(self)
        rank_step.join(self)

    @property
    def own_loss(self) -> Any:
        """The loss function of a pipe with a loss spec; else None."""
        return self._source.own_loss if getattr(self._source, "call_runs_backward", False) else None  # type: ignore[attr-defined]

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the model, also if a wrapper renames them."""
        own = dict(self.submod.named_parameters(remove_duplicate=False))
        ids = {id(parameter) for parameter in own.values()}
        original = self._source.get_stage_module(self.stage_index).named_parameters(remove_duplicate=False)
        return {**{name: parameter for name, parameter in original if id(parameter) in ids}, **own}

    def remap_qualname(self, qualname: str) -> str:
        """The name in the model of a parameter, buffer or submodule of this stage, also if a wrapper renames it.

        As in PiPPy, for saving a stage under the names of the model.
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
                f"stage {self.stage_index} has no module or tensor named {qualname}.",
                fix="use a name of stage.submod.named_parameters(), named_buffers() or named_modules().",
            )
        return found

    def counted_parameters(self) -> list[nn.Parameter]:
        """The parameters that count in this stage's part of a norm: a replicated one only in its first stage."""
        elsewhere = {id(copy.parameter) for copy in self.copies if copy.stage != copy.stages[0]}
        return [parameter for parameter in self.submod.parameters() if id(parameter) not in elsewhere]

    def check_call(self, args: Sequence[Any], kwargs: Any) -> None:
        """Raise if the arguments do not match those of the captured call."""
        self._source.flatten_inputs(args, kwargs)

    def clear_runtime_states(self) -> None:
        """Called by the schedule when a step begins."""
        self._forget_messages()
        self._weight_backwards.clear()
        self.output_chunks.clear()
        self._first_sizes.clear()
        self.rank_step.begin(self)
        if self.has_backward:
            self._reshard()
            self.earlier.put_aside(self.submod.parameters())
            if self._averaging is not None:
                self._averaging.broadcast_buffers(self.submod)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Called when all microbatches of this stage are done: scale its gradients and reduce them."""
        try:
            if self.has_backward:
                super().perform_reduce_grad(1)  # reduce-scatter of fully_shard
                parameters = list(self.submod.parameters())
                divide(parameters, self._divisor(grad_scale_factor))
                if self._averaging is not None:
                    self._averaging.start(parameters)
            self.rank_step.end(self)
        except Exception as error:
            self.rank_step.failed(error)
            raise

    def _divisor(self, factor: int) -> float:
        """The number of microbatches, or the sum of their weights. 1 if losses are sums."""
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

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of one microbatch. The last stage returns the results of the model, others their outputs."""
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
                self.output_chunks.append(self._detached_result(outputs))
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
        """The size of a microbatch relative to the first one; inputs that are not split do not count."""
        sizes = [value.numel() for value in inputs]
        if not self._weighted:
            return 1.0
        if not self._first_sizes:
            self._first_sizes = sizes
        shares = [size / first for size, first in zip(sizes, self._first_sizes, strict=True) if first]
        return min(shares, default=1.0)

    def _detached_result(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The part of the result of `schedule.step`: detached, and scalars as tensors of one element."""
        values = [value.detach() if self.has_backward else value for value in outputs]
        return self._source.unflatten_outputs([value.reshape(1) if value.dim() == 0 else value for value in values])

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of one microbatch; with `full_backward=False` only for its inputs."""
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
                self._weight_backwards[bwd_chunk_id] = beginning
            else:
                self._before_backward()
                gradients, self._weight_backwards[bwd_chunk_id] = input_backward(
                    beginning.roots,
                    beginning.gradients,
                    [inputs[place] for place in wanted],
                    list(self.submod.parameters()),
                )
                release_graph(loss)
            for place, gradient in zip(wanted, gradients, strict=True):
                found[place] = gradient
            self.bwd_cache[bwd_chunk_id] = add_passed(found, beginning.passed)
        except Exception as error:
            self.rank_step.failed(error)
            raise

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the weight backward of one microbatch."""
        if not self.has_backward:
            return
        try:
            state = self._weight_backwards.pop(bwd_chunk_id)
            if isinstance(state, BackwardStart):
                self._whole(state, [], last_backward)
            else:
                self._before_backward()
                accumulate(weight_backward(state))
        except Exception as error:
            self.rank_step.failed(error)
            raise

    def _beginning(
        self, chunk: int, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], loss: torch.Tensor | None
    ) -> BackwardStart:
        if not self.is_last:
            return backward_start(outputs, self._gradients(chunk), inputs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise StageError(
                f"the loss of microbatch {chunk} is {_describe(loss)}.",
                fix="pass the schedule a loss_fn that returns a scalar tensor.",
            )
        weight = self.rank_step.weights.get(chunk, 1.0)
        return backward_start([loss], [torch.full_like(loss, weight)], inputs)

    def _whole(
        self, beginning: BackwardStart, inputs: Sequence[torch.Tensor], last: bool
    ) -> Sequence[torch.Tensor | None]:
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
        """For fully_shard: unshard parameters, and defer reduction to the end of the step."""
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
