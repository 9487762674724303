"""The work of an operator from its shapes: torch's own counter is the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from wholestep.simulate.cost_model import flops_of, is_counted, timed, work_of, work_of_call
from wholestep.simulate.machine import CPU, GPU, Machine, Work, machine_of

aten = torch.ops.aten
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mm": (aten.mm.default, (torch.ones(3, 4), torch.ones(4, 5))),
    "addmm": (aten.addmm.default, (torch.ones(5), torch.ones(3, 4), torch.ones(4, 5))),
    "bmm": (aten.bmm.default, (torch.ones(2, 3, 4), torch.ones(2, 4, 5))),
    "linear": (aten.linear.default, (torch.ones(2, 3, 4), torch.ones(5, 4), torch.ones(5))),
    "matmul": (aten.matmul.default, (torch.ones(2, 3, 4), torch.ones(4, 5))),
    "convolution": (
        aten.convolution.default,
        (torch.ones(2, 4, 9, 9), torch.ones(6, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    ),
    "conv1d": (aten.conv1d.default, (torch.ones(2, 4, 9), torch.ones(6, 4, 3), None, [2])),
    "conv2d": (aten.conv2d.default, (torch.ones(2, 4, 9, 9), torch.ones(6, 4, 3, 3))),
    "conv2d, padded": (aten.conv2d.padding, (torch.ones(2, 4, 9, 9), torch.ones(6, 4, 3, 3), None, [1, 1], "same")),
    "transposed": (aten.conv_transpose2d.input, (torch.ones(2, 4, 5, 5), torch.ones(4, 6, 3, 3), None, [2, 2])),
    "gelu": (aten.gelu.default, (torch.ones(3, 4),)),
}


def without_data(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def node_of(target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A node with metadata."""
    graph = fx.Graph()
    inputs = []
    for arg in args:
        if isinstance(arg, Tensor):
            inputs.append(graph.placeholder("x"))
            inputs[-1].meta["val"] = without_data(arg)
        else:
            inputs.append(arg)
    node = graph.call_function(target, tuple(inputs))
    node.meta["val"] = target(*map(without_data, args))
    return node


@pytest.mark.parametrize("name", CALLS)
def test_flops_of_an_operator_are_those_that_torch_counts(name: str) -> None:
    target, args = CALLS[name]
    with FlopCounterMode(display=False) as counter:
        target(*args)
    assert flops_of(node_of(target, args)) == counter.get_total_flops()


def test_attention_counts_as_two_matmuls() -> None:
    queries, keys = torch.ones(2, 3, 7, 8), torch.ones(2, 3, 5, 8)
    node = node_of(aten.scaled_dot_product_attention.default, (queries, keys, keys))
    assert flops_of(node) == 2 * (2 * (2 * 3) * 7 * 5 * 8)


def test_traffic_counts_inputs_and_outputs_and_an_expanded_input_once() -> None:
    node = node_of(aten.add.Tensor, (torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(1).expand(3, 4)))
    assert work_of(node) == Work(0.0, 3 * 4 * 2 + 4 + 3 * 4 * 4)
    half = torch.ones(4, 4, dtype=torch.bfloat16)
    assert work_of(node_of(aten.mm.default, (half, half))) == Work(2.0 * 4 * 4 * 4, 3 * 32, half=True)


def test_the_work_of_a_call_is_that_of_its_node() -> None:
    for name in ("mm", "addmm", "convolution", "gelu"):
        target, args = CALLS[name]
        assert work_of_call(target, args, {}, target(*args)) == work_of(node_of(target, args))


def test_only_matmul_convolution_and_attention_are_counted() -> None:
    assert is_counted(aten.mm.default)
    assert not is_counted(aten.add.Tensor)
    assert not is_counted(torch.add)


def test_a_machine_takes_the_longer_of_arithmetic_and_traffic_or_both() -> None:
    machine = Machine(flops=10.0, memory=100.0, half_flops=20.0)
    assert machine.seconds(Work(40.0, 100)) == 4.0
    assert machine.seconds(Work(40.0, 900)) == 9.0
    assert machine.seconds_in_turn(Work(40.0, 900)) == 13.0
    assert machine.seconds(Work(40.0, 100, half=True)) == 2.0
    assert Machine(flops=10.0).seconds(Work(40.0, 0, half=True)) == 4.0
    assert machine_of(torch.device("cpu")) is CPU
    assert machine_of(torch.device("cuda")) is GPU


def test_timed_returns_the_result_of_the_function() -> None:
    seconds, result = timed(lambda: 7, torch.device("cpu"))
    assert seconds >= 0.0
    assert result == 7
