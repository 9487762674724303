"""What wholestep relies on in `torch_private/distributed.py`, on one or two ranks of gloo."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ranks import run_ranks
from torch_private.contract_table import CONTRACTS, Line, contracts_of, lines_that_run
from wholestep.torch_private import distributed as own
from wholestep.torch_private.modules_and_optimizers import forward_hooks, is_fsdp_hook

of = contracts_of("distributed")


def on_ranks(size: int) -> Callable[[Callable[[int], None]], Callable[[], set[Line]]]:
    """A contract that runs on ranks; the lines that ran there count."""

    def of_ranks(check: Callable[[int], None]) -> Callable[[], set[Line]]:
        def on_all() -> set[Line]:
            return set().union(*run_ranks(_lines_on_rank, size, check))

        on_all.__name__ = check.__name__
        return on_all

    return of_ranks


def _lines_on_rank(rank: int, check: Callable[[int], None]) -> set[Line]:
    return set(lines_that_run(lambda: check(rank)))


@of("process_group_size", "process_group_rank", "process_group_ranks", "default_group", "flight_recording")
def without_a_group_there_is_nothing() -> None:
    assert own.process_group_size("0") == 0
    assert own.process_group_rank("0") == 0
    assert own.process_group_ranks("0") == ()
    assert own.default_group() is None
    with patch.dict(os.environ, {"TORCH_FR_BUFFER_SIZE": "0"}):
        assert own.flight_recording() is None


@of(
    "process_group_size",
    "process_group_rank",
    "process_group_ranks",
    "default_group",
    "default_store",
    "group_names",
    "is_gloo",
    "uses_accelerator",
    "store_under",
    "own_client",
    "gloo_addresses",
    "abort_nccl",
    "abort_groups",
    "flight_recording",
    "flight_recording_prefix",
)
@on_ranks(2)
def groups_are_found_by_name_and_aborted(rank: int) -> None:
    mine = dist.new_group([1, 0])
    name = own.group_names()[mine]
    assert own.default_group() in own.group_names()
    assert own.process_group_size(name) == 2
    assert own.process_group_rank(name) == rank
    assert sorted(own.process_group_ranks(name)) == [0, 1]
    assert own.process_group_size("no such group") == own.process_group_rank("no such group") == 0
    assert own.is_gloo(mine)
    assert not own.uses_accelerator(mine)
    store = own.store_under("contract", own.own_client(own.default_store()))
    store.set(str(rank), "here")
    assert store.get(str(1 - rank)) == b"here"
    with patch.dict(os.environ, {"TORCH_FR_BUFFER_SIZE": "10"}):
        assert isinstance(own.flight_recording(), bytes)
    assert own.flight_recording_prefix()
    dist.all_reduce(torch.ones(2), group=mine)
    listeners = own.gloo_addresses(own.default_store())
    assert listeners
    dist.barrier()
    own.abort_groups(listeners)
    with pytest.raises(RuntimeError):  # "Connection closed by peer"
        dist.all_reduce(torch.ones(2), group=mine)


def _ddp(**settings: Any) -> nn.parallel.DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers has another name since 2.13
        return nn.parallel.DistributedDataParallel(nn.BatchNorm1d(3), **settings)


@of("DDP_REDUCER", "ddp_parameters", "ddp_unusual", "ddp_sends_buffers", "ddp_buffers")
@on_ranks(1)
def ddp_says_what_it_reduces_and_what_is_unusual(rank: int) -> None:
    plain = _ddp()
    assert own.ddp_unusual(plain) is None
    assert [id(p) for p in own.ddp_parameters(plain)] == [id(p) for p in plain.module.parameters()]
    assert own.ddp_sends_buffers(plain)
    assert not own.ddp_sends_buffers(_ddp(broadcast_buffers=False))
    assert own.ddp_buffers(plain) == ["running_mean", "running_var", "num_batches_tracked"]
    assert "prepare_for_backward" in dir(vars(plain)[own.DDP_REDUCER])
    hooked = _ddp()
    hooked.register_comm_hook(None, lambda state, bucket: bucket.buffer())  # type: ignore[arg-type, return-value]
    assert "communication hook" in str(own.ddp_unusual(hooked))
    buffered = _ddp()
    buffered._register_buffer_comm_hook(None, lambda state, names: None)
    assert own.ddp_unusual(buffered) == "a buffer hook"
    mixed = torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)
    assert own.ddp_unusual(_ddp(mixed_precision=mixed))  # it is a communication hook, too
    called = list[str]()

    class StandIn:
        def __getattr__(self, name: str) -> Any:
            called.append(name)
            return lambda *args: None

    vars(plain)[own.DDP_REDUCER] = StandIn()
    plain(torch.ones(2, 3))
    assert "prepare_for_forward" in called


@of("ShardedGroup", "sharded_groups", "STATE_OF_FULLY_SHARD")
@on_ranks(1)
def a_unit_of_fully_shard_says_how_it_shards(rank: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].weight_again = model[1].weight
    before = set(dir(model))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=False)
    (group,) = own.sharded_groups(model)
    assert group.unit is model
    assert group.mesh.size() == 1
    assert group.policy.param_dtype is torch.bfloat16
    assert (group.reshards, group.divide_factor, group.unusual) == (False, None, None)
    sizes = [tuple(size) for _, size in group.parameters]
    assert sizes == [(3, 2), (3,), (2, 3), (2,)]
    holders = [[name for _, name in held] for held, _ in group.parameters]
    assert sorted(holders[2]) == ["weight", "weight_again"]
    assert {"reduce_grads", "all_reduce_grads"} <= set(group.flags)
    hooks = [hook for registry in forward_hooks(model) for hook in registry.values()]
    assert hooks
    assert all(map(is_fsdp_hook, hooks))
    added = {name for name in set(vars(model)) - before if name.startswith("__")}
    assert all(name.startswith(own.STATE_OF_FULLY_SHARD) for name in added)


@of(
    "sharding_propagator",
    "PROPAGATE_SHAPES",
    "is_dtensor",
    "local_of",
    "spec_of",
    "dtensor_over",
    "respec",
    "placement_form",
    "shard_spec",
    "describe_placement",
    "sharding_function",
)
@on_ranks(2)
def a_dtensor_is_a_local_tensor_and_a_spec(rank: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    whole = torch.arange(8.0).view(4, 2)
    kind, method = own.sharding_function()
    called = list[str]()
    _watch(kind, method, called)
    _watch(own.sharding_propagator(), own.PROPAGATE_SHAPES, called)
    sharded = distribute_tensor(whole, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
    assert (sharded * 2).shape == (4, 2)
    assert set(called) == {method, own.PROPAGATE_SHAPES}, called
    assert own.is_dtensor(sharded)
    assert not own.is_dtensor(whole)
    local, spec = own.local_of(sharded), own.spec_of(sharded)
    assert own.local_of(whole) is whole
    again = own.dtensor_over(local, spec, requires_grad=True)
    assert own.local_of(again) is local
    assert again.requires_grad
    assert isinstance(again, DTensor)
    assert own.spec_of(again) == spec
    replicated = own.respec(spec, [Replicate()])
    assert (replicated.placements, replicated.shape) == ((Replicate(),), spec.shape)
    forms = [own.placement_form(each) for each in (Shard(1), Replicate(), Partial("avg"))]
    assert forms == [("shard", 1), ("replicate",), ("partial", "avg")]
    read = own.shard_spec(mesh, [("shard", 0)], (4, 2), (2, 1), torch.float32)
    assert read == spec
    assert read.tensor_meta == spec.tensor_meta
    for form in forms:
        assert form is not None
        made = own.shard_spec(mesh, [form], (4, 2), (2, 1), torch.float32)
        assert own.placement_form(made.placements[0]) == form
    assert own.shard_spec(mesh, [("shard", 5)], (4, 2), (2, 1), torch.float32) is None
    assert own.describe_placement(spec) == "S(0) of [4, 2] over data=2"


def _watch(kind: Any, name: str, called: list[str]) -> None:
    original = getattr(kind, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return original(*args, **kwargs)

    setattr(kind, name, watched)


CONTRACTS["modules_and_optimizers.is_fsdp_hook"] += CONTRACTS["distributed.sharded_groups"]
