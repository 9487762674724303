"""Waits as late as possible, and never behind a write into what is still being sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.ir.effects import is_collective, is_wait
from wholestep.passes import comm_fusion_with_concat, schedule_comm_wait

aten = torch.ops.aten
comm = torch.ops._c10d_functional


class SentUntilWaited(fx.Interpreter):
    """The network takes its time: operands are read when somebody waits, results are not there before."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self._sending: dict[int, tuple[Tensor, Tensor]] = {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_collective(target):
            result = args[0] if target is comm.all_reduce_.default else torch.full_like(args[0], torch.nan)
            self._sending[result.data_ptr()] = (args[0], result)
            return result
        if is_wait(target):
            operand, result = self._sending.pop(args[0].data_ptr())
            result.copy_(operand * 3)
            return args[0]
        return super().call_function(target, args, kwargs)


def written_after(x: Tensor) -> Tensor:
    h = x * 2
    done = comm.wait_tensor(comm.all_reduce(h, "sum", "0"))
    h.zero_()
    y = x + 5
    return done + y


def a_view_is_written_after(x: Tensor) -> Tensor:
    h = x * 2
    done = comm.wait_tensor(comm.all_reduce(h.view(-1), "sum", "0"))
    h[0].fill_(7.0)
    return done * 2


def a_view_of_the_result_is_taken_before_a_write(x: Tensor) -> tuple[Tensor, Tensor]:
    done = comm.wait_tensor(comm.all_reduce(x * 2, "sum", "0"))
    rows = done.t().reshape(-1)
    done.add_(1.0)
    return rows * 2, done


def the_collective_works_in_place(x: Tensor) -> Tensor:
    h = x * 2
    done = comm.wait_tensor(comm.all_reduce_(h, "sum", "0"))
    y = h + 1
    return y + done


@pytest.mark.parametrize(
    "step",
    [
        written_after,
        a_view_is_written_after,
        a_view_of_the_result_is_taken_before_a_write,
        the_collective_works_in_place,
    ],
)
def test_a_wait_does_not_move_behind_a_write_into_what_is_being_sent(step: Callable[..., Any]) -> None:
    x = torch.randn(3, 2)
    gm = make_fx(step, tracing_mode="fake")(x)
    expected = SentUntilWaited(gm).run(x.clone())
    comm_fusion_with_concat(gm)
    schedule_comm_wait(gm)
    found = SentUntilWaited(copy.deepcopy(gm)).run(x.clone())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_without_writes_a_wait_stands_right_before_its_first_use() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    done = graph.call_function(
        comm.wait_tensor.default, (graph.call_function(comm.all_reduce.default, (x, "sum", "0")),)
    )
    flat = graph.call_function(aten.view.default, (done, [-1]))
    other = graph.call_function(aten.mm.default, (x, x))
    graph.output((graph.call_function(aten.add.Tensor, (flat, 1)), other))
    gm = fx.GraphModule(nn.Module(), graph)
    comm_fusion_with_concat(gm)
    schedule_comm_wait(gm)
    assert [node.name for node in gm.graph.nodes][-5:] == [
        "mm_default",
        "wait_tensor_default",
        "view_default",
        "add_tensor",
        "output",
    ]
