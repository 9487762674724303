"""Parameters keep their strides under a plan (channels last, transposed): the kernels and the bits are those of DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from cases.parts import train_step
from parallel.pairs import Case, Compiled, Side, all_of, apart, beside_ddp, numbers, world_mesh
from ranks import run_ranks
from selection import some_now

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


def planes(i: int, rank: int) -> tuple[Any, ...]:
    return (numbers(i, rank, 2, 6, 5, 5).contiguous(memory_format=LAST),)


def volumes(i: int, rank: int) -> tuple[Any, ...]:
    return (numbers(i, rank, 2, 3, 4, 4, 4).contiguous(memory_format=LAST_3D),)


class Turned(nn.Module):
    """Weights whose dimensions lie in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(6, 7).t())
        self.deep = nn.Parameter(torch.randn(4, 7, 5).permute(1, 2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("br,rcd->bcd", x @ self.flat.t(), self.deep)


class Mixed(nn.Module):
    """Channels last beside contiguous, a Linear on top, one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(6, 6, 3, padding=1).to(memory_format=LAST)
        self.second = nn.Conv2d(6, 5, 1)
        self.norm = nn.BatchNorm2d(5).to(memory_format=LAST)
        self.head = nn.Linear(5, 3)
        self.head.weight.data = self.head.weight.data.t().contiguous().t()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.first(x)).relu()
        return self.head(self.norm(self.second(x)).mean((2, 3)))


CASES = [
    Case("conv2d", lambda: nn.Conv2d(6, 5, 3).to(memory_format=LAST), batch=planes, steps=4),
    Case("conv2d 1x1", lambda: nn.Conv2d(6, 5, 1).to(memory_format=LAST), batch=planes, steps=3),
    Case("depthwise", lambda: nn.Conv2d(6, 6, 3, groups=6).to(memory_format=LAST), batch=planes, steps=3),
    Case("grouped", lambda: nn.Conv2d(6, 8, 3, groups=2).to(memory_format=LAST), batch=planes, steps=3),
    Case("transposed conv", lambda: nn.ConvTranspose2d(6, 5, 3).to(memory_format=LAST), batch=planes, steps=3),
    Case("conv3d", lambda: nn.Conv3d(3, 5, 2).to(memory_format=LAST_3D), batch=volumes, steps=3),
    Case("turned", Turned, steps=4),
    Case("mixed", Mixed, batch=planes, steps=4),
]
LOCAL = [case for case in CASES if case.name != "mixed"]
"""BatchNorm's buffers are DDP's business (see test_buffers)."""


def strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: p.stride() for name, p in model.named_parameters()}


def gathered_strides(side: Compiled) -> dict[str, set[tuple[int, ...]]]:
    """The strides with which operators that compute see each parameter."""
    found: dict[str, set[tuple[int, ...]]] = {}
    graph = side.step.last.gm.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        path = node.meta["wholestep"].parameter
        if path is not None:
            found.setdefault(path.partition(".")[2], set()).add(tuple(node.meta["val"].stride()))
    return found


def as_in_ddp(case: Case, **options: Any) -> list[str]:
    """Bits of parameters and optimizer state, and the strides of gathered parameters."""
    torchs, ours = Side(case, DistributedDataParallel), Compiled(case, ws.FullyShard(world_mesh(), **options))
    before = strides(ours.model)
    torchs.run_all()
    ours.run_all()
    lines = apart(torchs, ours, 0 if dist.get_world_size() < 3 else 1e-6)  # three addends: DDP has another order
    contiguous = {name: torch.empty(p.shape).stride() for name, p in ours.model.named_parameters()}
    expected = {name: {stride} for name, stride in before.items() if stride != contiguous[name]}
    found = gathered_strides(ours)
    return lines if found == expected else [*lines, f"strides {found} instead of {expected}"]


@pytest.mark.parametrize("cases", some_now(LOCAL, "conv2d", "grouped", "transposed conv", "turned"))
def test_gathered_weights_have_the_strides_of_the_parameters_and_the_bits_of_ddp(cases: list[Case]) -> None:
    """Rows do not divide by the number of ranks in most cases."""
    all_of(as_in_ddp, cases)


@pytest.mark.long  # two ranks, above
@pytest.mark.parametrize("ranks", [1, 3])
def test_gathered_weights_have_their_strides_on_any_number_of_ranks(ranks: int) -> None:
    all_of(as_in_ddp, LOCAL, ranks=ranks)


@pytest.mark.parametrize("cases", some_now(LOCAL, "conv2d"))
def test_weights_that_are_kept_for_the_backward_have_their_strides(cases: list[Case]) -> None:
    all_of(lambda case: as_in_ddp(case, reshard_after_forward=False), cases)


@pytest.mark.parametrize("cases", some_now(CASES, "turned", "mixed"))
def test_replicas_keep_the_strides_of_parameters_and_gradients(cases: list[Case]) -> None:
    def check(case: Case) -> list[str]:
        lines = beside_ddp(case)
        side = Compiled(case, ws.Replicate(world_mesh()))
        before = strides(side.model)
        side.run_all()
        return lines if strides(side.model) == before else [*lines, "other strides"]

    all_of(check, cases)


class Strides(fx.Interpreter):
    """Runs a graph and compares the strides of what operators give with what the graph says."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.other: list[str] = []
        self.compared = 0

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.op == "call_function" and value.numel():
            self.compared += 1
            if value.stride() != n.meta["val"].stride():
                self.other.append(f"{n.format_node()}: {value.stride()} instead of {n.meta['val'].stride()}")
        return value


@pytest.mark.parametrize("cases", some_now(LOCAL, "conv2d 1x1", "depthwise", "conv3d", "turned"))
def test_values_have_the_strides_that_the_graph_says(cases: list[Case]) -> None:
    def check(case: Case) -> list[str]:
        side = Compiled(case, ws.FullyShard(world_mesh()))
        side.run_all()
        entry = side.step._last
        inputs = entry.gather.read([side.model, side.optimizer, *case.batch(0, dist.get_rank())])
        with torch.no_grad():
            strides = Strides(entry.step_graph.gm)
            strides.run(*inputs)
        return strides.other if strides.compared > 20 else ["nothing was compared"]

    all_of(check, cases)


def test_two_axes_keep_strides() -> None:
    def check(case: Case) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        one, other = Compiled(case, ws.FullyShard(mesh)), Compiled(case, ws.Replicate(world_mesh()))
        one.run_all()
        other.run_all()
        # Four gradients are added in another order.
        return apart(other, one, 1e-6)

    all_of(check, LOCAL[-1:], ranks=4)


def lower_precision(rank: int) -> tuple[Any, ...]:
    case = LOCAL[0]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    side = Compiled(case, ws.FullyShard(world_mesh(), mp_policy=policy))
    before = side.model.weight.stride()
    side.run_all()
    return before, gathered_strides(side)["weight"]


def test_a_weight_that_is_gathered_in_another_dtype_keeps_its_strides() -> None:
    for before, found in run_ranks(lower_precision, 2, deadline=60):
        assert found == {before}


def loaded(rank: int) -> bool:
    """A state_dict loaded between calls goes on in the same layout."""
    case = CASES[0]
    side, other = (Compiled(case, ws.FullyShard(world_mesh())) for _ in range(2))
    side.run_all()
    other.call(0)
    other.model.load_state_dict(side.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    for i in range(3):
        side.call(i)
        other.call(i)
    pairs = zip(side.model.parameters(), other.model.parameters(), strict=True)
    same = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    whole = side.model.weight.full_tensor()
    return same and gathered_strides(other) == gathered_strides(side) and whole.shape == (5, 6, 3, 3)


def test_a_checkpoint_is_loaded_into_the_same_layout() -> None:
    assert run_ranks(loaded, 2, deadline=60) == [True, True]


def states_before_placing(rank: int) -> bool:
    """Optimizer state that exists before the model is placed is sharded by rows, whatever its strides."""
    torch.manual_seed(0)
    model = nn.Conv2d(6, 5, 3).to(memory_format=LAST)
    optimizer = torch.optim.Adam(model.parameters())
    x = planes(0, 0)[0]

    alone = copy.deepcopy(model)
    alone_optimizer = torch.optim.Adam(alone.parameters())
    train_step(model, optimizer, x)
    step = ws.compile(train_step, parallel=ws.FullyShard(world_mesh()))
    step(model, optimizer, x)
    for _ in range(2):
        train_step(alone, alone_optimizer, x)
    state = [o.state[m.weight]["exp_avg"] for m, o in ((model, optimizer), (alone, alone_optimizer))]
    return torch.equal(state[0].full_tensor(), state[1]) and torch.equal(model.weight.full_tensor(), alone.weight)


def test_optimizer_state_made_before_placing_survives() -> None:
    assert run_ranks(states_before_placing, 2, deadline=60) == [True, True]
