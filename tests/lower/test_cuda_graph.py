"""A lowered graph is split into a host part and a device part that a GPU can replay; what prevents it is named.

The graphs have fake tensors on a GPU that need not exist.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

import wholestep as ws
from wholestep.lower.cuda_graph import GraphPool, NotRecordableError, cuda_graph_step, split_host_and_device
from wholestep.lower.scalar_inputs import pack_scalars
from wholestep.runtime.python_program import program

aten = torch.ops.aten
MODE = FakeTensorMode()


def fake(*shape: int, device: str = "cuda") -> torch.Tensor:
    with MODE:
        return torch.empty(shape, device=device)


class Builder:
    """A graph whose nodes say what they are."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str, val: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = val
        return node

    def call(self, target: Any, *args: Any, val: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        return node

    def done(self, *results: Any) -> fx.GraphModule:
        self.graph.output(tuple(results))
        return fx.GraphModule(torch.nn.Module(), self.graph)


def step_counts() -> fx.GraphModule:
    """x on the GPU, a step count on the CPU, a number computed from it that a kernel reads."""
    made = Builder()
    x, count = made.input("x", fake(4)), made.input("count", fake(device="cpu"))
    more = made.call(aten.add.Tensor, count, 1, val=fake(device="cpu"))
    number = made.call(aten._local_scalar_dense.default, more, val=2.0)
    rate = made.call(operator.truediv, 1.0, number, val=0.5)
    pack = made.call(pack_scalars, [rate], torch.float32, torch.device("cuda"), val=fake(1))
    result = made.call(aten.mul.Tensor, x, pack, val=fake(4))
    return made.done(result, more, x)


def test_host_work_comes_first_and_scalars_are_passed_in_a_tensor() -> None:
    split = split_host_and_device(step_counts())
    lists, scalars, uploads, results = program(split.host)(torch.tensor(3.0))
    assert lists == ([0.25],)
    assert scalars == uploads == ()
    assert results[0].item() == 4.0
    assert split.packs == ((torch.float32, torch.device("cuda"), 1),)
    assert split.outputs == (("device", 0), ("host", 0), ("input", 0))
    (made,) = program(split.device)(torch.ones(4), torch.tensor([0.25]))
    assert made.tolist() == [0.25] * 4


def test_a_scalar_argument_of_a_kernel_is_a_constant_of_the_recording() -> None:
    made = Builder()
    x, decay = made.input("x", fake(4)), made.input("decay", 0.1)
    split = split_host_and_device(made.done(made.call(aten.mul.Tensor, x, decay, val=fake(4))))
    assert split.scalars == ("decay",)
    assert program(split.host)(0.3)[1] == (0.3,)


def test_a_batch_on_the_cpu_is_copied_by_the_host_part() -> None:
    made = Builder()
    x = made.input("x", fake(4, device="cpu"))
    sent = made.call(aten._to_copy.default, x, device=torch.device("cuda"), val=fake(4))
    split = split_host_and_device(made.done(made.call(aten.relu.default, sent, val=fake(4))))
    assert split.uploads == 1
    assert [node.name for node in split.device.graph.find_nodes(op="placeholder")] == [sent.name]


def test_a_fused_optimizer_reads_its_learning_rate_from_a_tensor() -> None:
    made = Builder()
    state = [made.input(name, fake(4)) for name in ("p", "g", "m", "v")]
    count, lr = made.input("count", fake()), made.input("lr", 0.1)
    lists = [[each] for each in state]
    settings = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    made.call(aten._fused_adamw_.default, *lists, [], [count], lr=lr, **settings, val=None)
    split = split_host_and_device(made.done(state[0]))
    (update,) = (node for node in split.device.graph.nodes if node.op == "call_function")
    assert update.target is aten._fused_adamw_.tensor_lr
    assert program(split.host)(0.5)[0] == ([0.5],)
    assert split.scalars == ()


def not_recordable(kind: str) -> fx.GraphModule:
    made = Builder()
    x = made.input("x", fake(4))
    if kind == "item":
        return made.done(made.call(aten._local_scalar_dense.default, x, val=1.0))
    if kind == "back to the host":
        return made.done(made.call(aten._to_copy.default, x, device=torch.device("cpu"), val=fake(4, device="cpu")))
    if kind == "shape from data":
        return made.done(made.call(aten.nonzero.default, x, val=fake(4, 1)))
    if kind == "communication":
        comm = torch.ops._c10d_functional
        return made.done(made.call(comm.all_reduce.default, x, "sum", "0", val=fake(4)))
    other = made.input("other", fake(4, device="cpu"))
    return made.done(made.call(aten.add.Tensor, x, other, val=fake(4)))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("item", "reads a scalar from the GPU"),
        ("back to the host", "copies a value from the GPU to the CPU"),
        ("shape from data", "depends on data"),
        ("communication", "communicates"),
        ("cpu operand", "which is on the CPU"),
    ],
)
def test_what_cannot_be_recorded_is_named(kind: str, said: str) -> None:
    with pytest.raises(NotRecordableError, match=said):
        split_host_and_device(not_recordable(kind))
    with pytest.raises(ws.errors.CudaGraphError, match="WS-CUDAGRAPH"):
        cuda_graph_step(not_recordable(kind), [], GraphPool(), program, must=True)
    with pytest.warns(ws.CudaGraphWarning):
        assert cuda_graph_step(not_recordable(kind), [], GraphPool(), program, must=False) is None


def test_a_step_on_the_cpu_warns_only_if_it_must_be_recorded() -> None:
    def graph() -> fx.GraphModule:
        made = Builder()
        x = made.input("x", fake(4, device="cpu"))
        return made.done(made.call(aten.relu.default, x, val=fake(4, device="cpu")))

    assert cuda_graph_step(graph(), [0], GraphPool(), program, must=False) is None
    with pytest.raises(ws.errors.CudaGraphError, match="does nothing on a CUDA device"):
        cuda_graph_step(graph(), [0], GraphPool(), program, must=True)
