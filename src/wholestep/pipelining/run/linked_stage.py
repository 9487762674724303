"""What a stage sends and receives, as the schedules of torch ask for it.

get_fwd_recv_ops .. get_bwd_send_ops        operations for the schedule to post (links.py)
set_local_*, get_local_bwd_output           the neighbour is on the same rank: values go without a message
_prepare_*, _get_init_p2p_neighbors_ops     once for a schedule. torch runs the whole model there to learn shapes;
                                            here messages tell them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from wholestep.pipelining.run.links import Receiver, Sender, Wire
from wholestep.pipelining.run.messages import Size
from wholestep.pipelining.run.rank_step import RankStep


class Forwarded(NamedTuple):
    """A microbatch between its forward and its backward."""

    outputs: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]


class LinkedStage(PipelineStage):
    """A stage as its neighbours see it."""

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
        """How many stages of the pipeline are on this rank."""
        return sum(rank == self.group_rank for rank in self.stage_index_to_group_rank.values())

    def global_rank(self, group_rank: int) -> int:
        """The number in the world of a rank of the pipeline's group."""
        return group_rank if self.group is None else dist.get_global_rank(self.group, group_rank)

    def _forget_messages(self) -> None:
        """A step begins."""
        self._wire.finish()
        self._forwarded.clear()
        self.bwd_cache.clear()
        self._sender.clear()
        self._receiver.clear()
        self._local_inputs.clear()
        self._local_gradients.clear()

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
                for group in (self.group, together.side):
                    self._connect(group)
        self._wire.side = together.side

    def _connect(self, group: dist.ProcessGroup | None) -> None:
        """Meet all neighbours of this rank once. NCCL connects two ranks when they first talk, and whoever talks first
        stands still until the other one does: an unexpected message would be waited for before it is announced."""
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

    def _received(self, chunk: int) -> tuple[torch.Tensor, ...]:
        """The values of a microbatch from the stage before: leaves of autograd."""
        if chunk in self._local_inputs:
            return self._local_inputs.pop(chunk)
        values, layout = self._receiver.take(chunk, self._peer(self.stage_index - 1))
        self.rank_step.weights[chunk], self.rank_step.rows[chunk] = layout.size
        grad = torch.is_grad_enabled()
        return tuple(
            [_leaf(value, grad and form.requires_grad) for value, form in zip(values, layout.forms, strict=True)]
        )

    def _gradients(self, chunk: int) -> Sequence[torch.Tensor | None]:
        """The gradients of a microbatch from the stage behind."""
        local = self._local_gradients.pop(chunk, None)
        return self._sender.take_gradients(chunk) if local is None else local


def _leaf(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A value of another stage: autograd ends here."""
    return value.detach().requires_grad_(requires_grad)
