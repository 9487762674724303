"""What wholestep relies on in `torch_private/pipelining.py`."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.distributed.pipelining import microbatch, schedules

from torch_private.contract_table import contracts_of
from wholestep.torch_private import pipelining as own

of = contracts_of("pipelining")

_NUMBERS = count()


def stage(index: int, stages: int) -> Any:
    """What the constructors of torch's schedules read of a stage."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=2,
        group_rank=0,
        submod=None,
        is_first=index == 0,
        is_last=index == stages - 1,
        has_backward=True,
    )


def schedules_of_both_kinds(**settings: Any) -> list[Any]:
    single = schedules.ScheduleGPipe(stage(0, 2), 4, loss_fn=lambda *a: None, **settings)
    multi = schedules.ScheduleInterleaved1F1B([stage(0, 4), stage(2, 4)], 4, loss_fn=lambda *a: None, **settings)
    return [single, multi]


@of("WholeValue", "masks_minibatches", "mask_minibatches", "quiet_masks")
def a_batch_is_cut_with_whole_values_or_masked() -> None:
    x, y = torch.arange(4.0), torch.tensor([7.0])
    spec = (microbatch.TensorChunkSpec(0), own.WholeValue)
    parts, _ = microbatch.split_args_kwargs_into_chunks((x, y), {}, 2, spec)
    assert [(a.tolist(), b.tolist()) for a, b in parts] == [([0, 1], [7]), ([2, 3], [7])]
    assert not own.masks_minibatches()
    own.mask_minibatches(True)
    try:
        with own.quiet_masks():
            parts, _ = microbatch.split_args_kwargs_into_chunks((x,), {}, 2, spec[:1])
    finally:
        own.mask_minibatches(False)
    assert [a.tolist() for (a,) in parts] == [[0, 1, 0, 0], [0, 0, 2, 3]]


@of("define_marker", "define_tensor_marker", "RecordCalls")
def markers_stay_in_their_place_in_an_export() -> None:
    number = next(_NUMBERS)  # operators cannot be defined again
    mark = own.define_marker(f"wholestep_contract::here{number}", "(int number) -> ()")
    at = own.define_tensor_marker(f"wholestep_contract::at{number}")

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sin()
            mark(3)
            at(4, [x])
            return x.cos()

    exported = torch.export.export(Model(), (torch.ones(2),)).graph_module
    called = [str(node.target).split(".")[1] for node in exported.graph.nodes if node.op == "call_function"]
    assert called == ["sin", f"here{number}", f"at{number}", "cos"]
    exported.graph.eliminate_dead_code()
    assert len(exported.graph.find_nodes(op="call_function", target=mark)) == 1
    calls = list[int]()
    with own.RecordCalls([mark], lambda: calls.append(1)):
        mark(3)
        assert torch.ones(2).sum().item() == 2
    assert calls == [1]


@of("torchs_markers")
def torchs_split_marker_is_an_operator_and_a_function() -> None:
    from torch.distributed.pipelining import pipe_split

    operator, function = own.torchs_markers()
    assert function is pipe_split

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sin()
            pipe_split()
            return x.cos()

    exported = torch.export.export(Model(), (torch.ones(2),)).graph_module
    assert any(node.target is operator for node in exported.graph.nodes)


@of("checkpoints_replaced")
def both_kinds_of_checkpoint_pass_the_replaced_functions() -> None:
    seen = list[Any]()

    @contextmanager
    def around(preserves: bool, context: Any) -> Any:
        seen.append((preserves, context))
        yield

    x = torch.ones(2, requires_grad=True)
    checkpoint = torch.utils.checkpoint.checkpoint
    with own.checkpoints_replaced(around):
        assert torch.equal(checkpoint(torch.sin, x, use_reentrant=False), x.sin())
        assert torch.equal(checkpoint(torch.sin, x, use_reentrant=True, preserve_rng_state=False), x.sin())
    assert seen == [(True, None), (False, None)]
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2


@of("functions_replaced")
def apply_of_a_users_function_is_replaced() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    seen = list[Any]()

    def call(cls: Any, apply: Any, args: Any) -> Any:
        seen.append(cls)
        return apply(*args)

    with own.functions_replaced(call):
        assert Doubled.apply(torch.ones(1)).item() == 2
    Doubled.apply(torch.ones(1))
    assert seen == [Doubled]


@of("region_operators", "checks_of_export", "quiet_torch")
def exports_have_regions_and_checks_as_operators() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = x @ x
            with torch.no_grad():
                z = x.sin()
            return y.to(torch.float32) + z

    with own.quiet_torch():
        exported = torch.export.export(Model(), (torch.ones(2, 2),))
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    autocast, grad = own.region_operators()
    (cast,) = (node for node in calls if node.target is autocast)
    assert cast.args[:3] == ("cpu", torch.bfloat16, True)
    assert cast.args[4].op == "get_attr"
    (switched,) = (node for node in calls if node.target is grad)
    assert switched.args[0] is False
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    targets = {node.target for graph in graphs for node in graph.nodes}
    assert targets & set(own.checks_of_export())


@of("torch_schedules", "schedule_class", "is_single", "class_of_loop")
def schedules_are_found_by_name_and_kind() -> None:
    assert own.schedule_class("1F1B") is own.torch_schedules.Schedule1F1B
    with pytest.raises(ValueError, match="no such schedule"):
        own.schedule_class("no such schedule")
    single, multi = schedules_of_both_kinds()
    assert [own.is_single(each) for each in (single, multi)] == [True, False]
    assert own.class_of_loop(single) is schedules.ScheduleGPipe


@of(
    "microbatches_of",
    "stages_and_ranks",
    "actions_that_run",
    "has_loss",
    "stages_of",
    "has_merge_spec",
    "chunk_specs",
    "reduced_stages",
)
def a_schedule_object_says_what_it_runs() -> None:
    spec = (microbatch.TensorChunkSpec(0),)
    single, multi = schedules_of_both_kinds(args_chunk_spec=spec)
    assert [own.microbatches_of(each) for each in (single, multi)] == [4, 4]
    assert own.stages_and_ranks(single) == (2, 2)
    assert own.stages_and_ranks(multi) == (4, 2)
    assert [len(own.stages_of(each)) for each in (single, multi)] == [1, 2]
    for each in (single, multi):
        assert own.has_loss(each)
        assert not own.has_merge_spec(each)
        assert own.chunk_specs(each) == (spec, None)
    assert own.reduced_stages(single) is None
    multi.pipeline_order_with_comms = own.with_torchs_communication(multi.pipeline_order, 4, 4, sharded=True)
    multi.rank = 0
    assert own.reduced_stages(multi) == {0, 2}
    assert set(own.actions_that_run(multi)) == {0, 1}
    assert all(action is not None for action in own.actions_that_run(multi)[0])


@of(
    "stage_infos",
    "listed_actions",
    "with_torchs_communication",
    "torchs_action",
    "schedules_have_waits",
    "without_waits",
)
def action_lists_are_made_without_ranks() -> None:
    lists = own.listed_actions(own.schedule_class("Interleaved1F1B"), 2, 4, 2)
    assert [str(each) for each in lists[0][:3]] == ["0F0", "0F1", "2F0"]
    both = own.with_torchs_communication(lists, 4, 4, sharded=False)
    kinds = {action.computation_type for row in both.values() for action in row}
    assert {schedules.SEND_F, schedules.RECV_F, schedules.SEND_B, schedules.RECV_B} <= kinds
    assert schedules.UNSHARD not in kinds
    sharded = own.with_torchs_communication(lists, 4, 4, sharded=True)
    assert sharded[0][0].computation_type is schedules.UNSHARD
    for row in sharded.values():
        assert [own.torchs_action(str(action)) for action in row] == row
        assert own.without_waits(row) == row
    if own.schedules_have_waits():
        assert own.without_waits([own.torchs_action("0WAIT_SEND_F0")]) == []


@of("release_graph")
def a_loss_is_detached_unless_it_is_a_view() -> None:
    x = torch.ones(2, requires_grad=True)
    loss, view = x.sum(), x.mul(2)[0]
    own.release_graph(loss)
    own.release_graph(view)
    own.release_graph(None)
    assert loss.grad_fn is None
    assert view.grad_fn is not None
