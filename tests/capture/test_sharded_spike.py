"""The spike behind "parallelism is decided before tracing": one capture carries ranks that keep only shards.

Every rank holds half of each parameter (dim 0) and its own half of the batch. Reading a parameter gathers it, the
backward averages and scatters its gradient, clipping takes the norm over all shards, AdamW updates the shards.

    plain     shards are ordinary parameters; an autograd function and a clipping function call the collectives
    dtensor   the step is the user's own, with torch's clip_grad_norm_ and AdamW: a function around it puts DTensors
              over the local shards into model and optimizer, inside of the trace

Rows that do not divide are padded with zeros, which stay zero under AdamW and add nothing to a norm, so that all ranks
run the same graph; `uneven` leaves them to DTensor instead.

How equal: compiled and eager on the same ranks, to the last bit. Against a single process, to the last bit where the
sums have the same order: the loss is a mean over the two halves of the batch (a sum of two commutes, and dividing by
two is exact), and the norm is a maximum. The 2-norm of shards adds squares in another order than that of wholes, and
one product over the whole batch adds rows in another order than two over its halves, so those agree within rounding:
each element to 1e-12 in float64 (seen: 2e-14 where a gradient nearly cancels, 2 ulps for losses and norms).
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import pad
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

import wholestep as ws
from harness import batch_of, bits_of, device
from ranks import run_ranks
from wholestep.ir.effects import is_collective, is_wait
from wholestep.ir.signature import InputKind

WORLD = 2
STEPS = 5
MAX_NORM = 0.01
DIVISIBLE, INDIVISIBLE = (6, 8, 4), (6, 7, 3)
comm = torch.ops._c10d_functional


@dataclass(frozen=True)
class Case:
    """One way to shard one network, clipped by one norm."""

    way: str
    sizes: tuple[int, int, int]
    norm: float
    uneven: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.norm == torch.inf else torch.float64

    def __str__(self) -> str:
        rows = "divisible" if self.sizes == DIVISIBLE else "uneven" if self.uneven else "padded"
        return f"{self.way}-{rows}-norm {self.norm:g}"

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        first, hidden, last = self.sizes
        return nn.Sequential(nn.Linear(first, hidden), nn.GELU(), nn.Linear(hidden, last)).to(self.dtype)

    def halves(self, i: int) -> list[Tensor]:
        return [half.clone() for half in batch_of(device(), i, 8, self.sizes[0], dtype=self.dtype).chunk(WORLD)]


@dataclass
class Seen:
    """What is left after the steps: on a rank, of its shards; in a single process, of the wholes."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Parameters, gradients and optimizer state."""
    graphs: list[dict[str, Any]] = field(default_factory=list)

    def look(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Seen:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            self.tensors[name] = parameter.detach().clone()
            self.tensors[f"{name}.grad"] = parameter.grad.clone()
            for key, value in optimizer.state[parameter].items():
                self.tensors[f"{name}.{key}"] = value.clone()
        return self


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, eps=1e-3, foreach=False)


def decay(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.8


def single_process(case: Case, halves: bool) -> Seen:
    """Eager, on the whole batch or on a loss that takes its halves one by one."""
    model, seen = case.network(), Seen()
    optimizer = adamw(model)
    for i in range(STEPS):
        parts = case.halves(i) if halves else [torch.cat(case.halves(i))]
        optimizer.zero_grad()
        loss = torch.stack([model(part).square().mean() for part in parts]).mean()
        loss.backward()
        seen.norms.append(clip_grad_norm_(model.parameters(), MAX_NORM, case.norm))
        optimizer.step()
        decay(optimizer)
        seen.losses.append(loss.detach())
    return seen.look(model, optimizer)


# Shards at rest, gathered on use.


def shard_of(whole: Tensor, rank: int, uneven: bool) -> nn.Parameter:
    rows = -(-whole.shape[0] // WORLD)
    mine = whole.detach()[rank * rows : (rank + 1) * rows]
    return nn.Parameter((mine if uneven else padded(mine, rows)).clone())


def padded(tensor: Tensor, rows: int) -> Tensor:
    return pad(tensor, (*[0, 0] * (tensor.dim() - 1), 0, rows - tensor.shape[0]))


def shard(model: nn.Module, rank: int, uneven: bool, gather: Callable[[Tensor, int], Tensor]) -> dict[str, int]:
    """Leave one rank's shards in a model; reading `layer.weight` gathers. Returns how many rows each whole has."""
    whole_rows = {name: parameter.shape[0] for name, parameter in model.named_parameters()}
    for module in model.modules():
        uses = {}
        for name, parameter in module._parameters.items():
            assert parameter is not None
            uses[name] = gathered(name, parameter.shape[0], gather)
            module._parameters[name] = shard_of(parameter, rank, uneven)
        if uses:
            module.__class__ = type(type(module).__name__, (type(module),), uses)
    return whole_rows


def gathered(name: str, rows: int, gather: Callable[[Tensor, int], Tensor]) -> property:
    return property(lambda module: gather(module._parameters[name], rows))


# The plain way.


class Gather(torch.autograd.Function):
    """All shards, one under the other, without the padding; the gradient is averaged over ranks and scattered."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, rows: int) -> Tensor:
        ctx.padded_rows = WORLD * mine.shape[0]
        return comm.wait_tensor(comm.all_gather_into_tensor(mine, WORLD, dist.group.WORLD.group_name))[:rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = padded(gradient, ctx.padded_rows).contiguous()
        mine = comm.reduce_scatter_tensor(whole, "avg", WORLD, dist.group.WORLD.group_name)
        return comm.wait_tensor(mine), None


def all_reduced(value: Tensor, how: str) -> Tensor:
    return comm.wait_tensor(comm.all_reduce(value, how, dist.group.WORLD.group_name))


def clip_shards(parameters: Iterable[Tensor], max_norm: float, norm: float) -> Tensor:
    """clip_grad_norm_ where every rank has a part of each gradient."""
    shards = list(parameters)
    norms = torch.stack([torch.linalg.vector_norm(each.grad, norm) for each in shards])
    if norm == torch.inf:
        total = all_reduced(norms.max(), "max")
    else:
        total = all_reduced(norms.pow(norm).sum(), "sum").pow(1 / norm)
    clip_grads_with_norm_(shards, max_norm, total)
    return total


# The way of the design.


def gather_dtensor(mine: Tensor, rows: int) -> Tensor:
    assert isinstance(mine, DTensor)
    return mine.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])[:rows]


@dataclass(frozen=True)
class OnDTensors:
    """Runs a step on DTensors over the local shards that model and optimizer hold before and after."""

    mesh: DeviceMesh
    rows: dict[str, int]
    """Of the wholes, padding included."""

    def __call__(
        self, step: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
    ) -> Any:
        over = {}
        for name, local in model.named_parameters():
            over[local] = nn.Parameter(self._wrap(local, self.rows[name]))
            if local.grad is not None:
                over[local].grad = self._wrap(local.grad, self.rows[name])
        with self._held(model, optimizer, over):
            result = step(model, optimizer, batch)
        for local, wrapped in over.items():
            local.grad = local_of(wrapped.grad)
        return tuple(map(local_of, result))

    def _wrap(self, local: Tensor, rows: int) -> DTensor:
        shape = torch.Size((rows, *local.shape[1:]))
        return DTensor.from_local(
            local.detach(), self.mesh, [Shard(0)], run_check=False, shape=shape, stride=local.stride()
        )

    @contextmanager
    def _held(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, over: dict[Any, nn.Parameter]
    ) -> Iterator[None]:
        modules = [(module._parameters, dict(module._parameters)) for module in model.modules()]
        groups, state = [group["params"] for group in optimizer.param_groups], optimizer.state
        for parameters, before in modules:
            parameters.update({name: over[local] for name, local in before.items()})
        for group in optimizer.param_groups:
            group["params"] = [over[local] for local in group["params"]]
        optimizer.state = defaultdict(dict)
        for local, entries in state.items():
            whole = over[local]
            optimizer.state[whole] = {
                key: self._wrap(value, whole.shape[0]) if value.shape == local.shape else value
                for key, value in entries.items()
            }
        try:
            yield
        finally:
            after, optimizer.state = optimizer.state, state
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = before
            for parameters, before in modules:
                parameters.update(before)
        for local, whole in over.items():
            for key, value in after[whole].items():
                state[local].setdefault(key, local_of(value))  # what was there is updated in place


def local_of(value: Any) -> Any:
    """What one rank holds of a DTensor; all of it where that is a single number that is not yet summed up."""
    if not isinstance(value, DTensor):
        return value
    return value.to_local() if value.placements[0].is_shard() else value.full_tensor()


# One rank.


def sharded_step(case: Case, rank: int) -> tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer]:
    model = case.network()
    gather = Gather.apply if case.way == "plain" else gather_dtensor
    rows = shard(model, rank, case.uneven, gather)
    clip = clip_shards if case.way == "plain" else clip_grad_norm_

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        norm = clip(model.parameters(), MAX_NORM, case.norm)
        optimizer.step()
        return all_reduced(loss.detach(), "avg"), norm

    if case.way == "plain":
        return train_step, model, adamw(model)
    if not case.uneven:
        rows = {name: WORLD * parameter.shape[0] for name, parameter in model.named_parameters()}
    on_dtensors = OnDTensors(init_device_mesh("cpu", (WORLD,)), rows)
    return lambda *arguments: on_dtensors(train_step, *arguments), model, adamw(model)


def run_steps(case: Case, rank: int, compiled: bool) -> Seen:
    step, model, optimizer = sharded_step(case, rank)
    if compiled:
        step = ws.compile(step)
    seen = Seen()
    for i in range(STEPS):
        loss, norm = step(model, optimizer, case.halves(i)[rank])
        seen.losses.append(loss.clone())
        seen.norms.append(norm.clone())
        decay(optimizer)
    for graph in step.graphs if compiled else []:
        assert ws.StepGraph.from_json(graph.to_json()).fingerprint() == graph.fingerprint()
        seen.graphs.append(described(graph))
    return seen.look(model, optimizer)


def described(graph: ws.StepGraph) -> dict[str, Any]:
    """What the parent asks about a graph, as plain values."""
    nodes = [node for node in graph.gm.graph.nodes if node.op == "call_function"]
    communication = [node for node in nodes if is_collective(node.target)]
    state = [spec for spec in graph.signature.inputs if spec.kind is not InputKind.BATCH]
    overloads = [node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    return {
        "fingerprint": graph.fingerprint(),
        "namespaces": {target.namespace for target in overloads},
        "functions": {node.target.__module__ for node in nodes if not isinstance(node.target, torch._ops.OpOverload)},
        "types": {type(node.meta["val"]).__name__ for node in nodes if isinstance(node.meta.get("val"), Tensor)},
        "collectives": Counter(str(node.target) for node in communication),
        "communication": [described_collective(node) for node in communication],
        "unwaited": [node.name for node in communication if [is_wait(user.target) for user in node.users] != [True]],
        "rows": {spec.path: spec.tensor.shape[0] for spec in state if spec.tensor is not None and spec.tensor.shape},
    }


def described_collective(node: fx.Node) -> tuple[Any, ...]:
    scalars = [arg for arg in node.args if not isinstance(arg, fx.Node)]
    return str(node.target), *scalars, tuple(node.meta["val"].shape)


def rank_code(rank: int, case: Case) -> Seen:
    eager, compiled = run_steps(case, rank, compiled=False), run_steps(case, rank, compiled=True)
    assert same_bits(eager.losses, compiled.losses)
    assert same_bits(eager.norms, compiled.norms)
    assert eager.tensors.keys() == compiled.tensors.keys()
    assert same_bits(list(eager.tensors.values()), list(compiled.tensors.values()))
    return compiled


# The comparison.


def same_bits(expected: list[Tensor], actual: list[Tensor]) -> bool:
    return list(map(bits_of, expected)) == list(map(bits_of, actual))


def wholes(ranks: list[Seen], like: Seen) -> dict[str, Tensor]:
    """The shards of all ranks put together, without the padding; a step count is no shard and the same everywhere."""
    found = {}
    for name, whole in like.tensors.items():
        shards = [rank.tensors[name] for rank in ranks]
        if whole.dim() == 0:
            assert same_bits(shards[:1] * WORLD, shards)
            found[name] = shards[0]
            continue
        assert all(each.shape[0] <= -(-whole.shape[0] // WORLD) for each in shards), "kept as shards"
        found[name] = torch.cat(shards)[: whole.shape[0]]
        assert not torch.cat(shards)[whole.shape[0] :].any(), "padding stays zero"
    return found


CASES = [
    Case(way, sizes, norm, uneven)
    for way, sizes, uneven in [
        ("plain", DIVISIBLE, False),
        ("plain", INDIVISIBLE, False),
        ("dtensor", DIVISIBLE, False),
        ("dtensor", INDIVISIBLE, False),
        ("dtensor", INDIVISIBLE, True),
    ]
    for norm in (torch.inf, 2.0)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sharded_step_is_one_graph_with_collectives_and_equals_a_single_process(case: Case) -> None:
    ranks = run_ranks(rank_code, WORLD, case)
    same_order, whole_batch = single_process(case, halves=True), single_process(case, halves=False)
    assert min(same_order.norms) > MAX_NORM, "every step is clipped"
    for seen in ranks:
        torch.testing.assert_close(seen.losses, whole_batch.losses, **tolerance(case))
        torch.testing.assert_close(seen.norms, whole_batch.norms, **tolerance(case))
    joined = wholes(ranks, same_order)
    if case.norm == torch.inf:
        assert all(same_bits(same_order.losses, seen.losses) for seen in ranks)
        assert all(same_bits(same_order.norms, seen.norms) for seen in ranks)
        assert [n for n, whole in same_order.tensors.items() if bits_of(whole) != bits_of(joined[n])] == []
    torch.testing.assert_close(joined, whole_batch.tensors, **tolerance(case))
    check_graphs(case, ranks)


def tolerance(case: Case) -> dict[str, float]:
    return {"rtol": 1e-3 if case.dtype is torch.float32 else 1e-12, "atol": 0.0}


def test_a_rank_captures_without_its_peers_and_communicates_only_when_it_runs() -> None:
    def code(rank: int) -> int:
        step, model, optimizer = sharded_step(Case("dtensor", DIVISIBLE, 2.0), rank)
        if rank == 0:
            return len(
                ws.capture(step, model, optimizer, batch_of(device(), 0, 4, 6, dtype=torch.float64)).gm.graph.nodes
            )
        return 0

    assert run_ranks(code, WORLD, deadline=20)[0] > 0


def test_a_branch_on_a_number_that_ranks_summed_up_is_refused_not_communicated() -> None:
    """It looks like a step count, which capture and guards may compute; a collective they may not."""

    def step(count: nn.Buffer) -> Tensor:
        return count * 2 if all_reduced(count, "sum").item() > 1 else count

    def code(rank: int) -> None:
        if rank == 0:
            with pytest.raises(ws.errors.ItemError):
                ws.capture(lambda module: step(module.count), counter)

    counter = nn.Module()
    counter.register_buffer("count", torch.zeros(()))
    run_ranks(code, WORLD, deadline=20)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_what_dtensor_runs_to_work_out_shapes_is_not_in_the_graph() -> None:
    """It does so for what it has not seen before: the second capture in a process, or on another rank, would differ."""

    def code(rank: int) -> list[list[str]]:
        mesh = init_device_mesh("cpu", (1,))

        def step(x: Tensor) -> Tensor:
            return nn.functional.dropout(DTensor.from_local(x, mesh, [Shard(0)], run_check=False)).to_local()

        captured = [ws.capture(step, torch.ones(4, 3)) for _ in range(2)]
        return [[str(node.target) for node in graph.gm.graph.nodes] for graph in captured]

    first, second = run_ranks(code, 1)[0]
    assert first == second
    assert sum("bernoulli" in target for target in first) == 1


def check_graphs(case: Case, ranks: list[Seen]) -> None:
    first, second = (seen.graphs for seen in ranks)
    assert len(first) == len(second) == 2, "one that creates the state, one for ever after"
    for ours, theirs in zip(first, second, strict=True):
        assert (ours["fingerprint"] == theirs["fingerprint"]) is (not case.uneven)
        assert ours["communication"] == theirs["communication"]
    for graph in first + second:
        assert graph["namespaces"] == {"aten", "_c10d_functional"}
        assert graph["functions"] <= {operator.__name__, "_operator", "math"}
        assert graph["types"] == {"FakeTensor"}, "no DTensor and no AsyncCollectiveTensor is left"
        assert graph["unwaited"] == []
        counts = graph["collectives"]
        assert counts["_c10d_functional.all_gather_into_tensor.default"] == 4
        assert counts["_c10d_functional.reduce_scatter_tensor.default"] == 4
        assert counts["_c10d_functional.all_reduce.default"] >= 2  # the norm and the loss
        assert max(graph["rows"].values()) <= 4, "the state that goes into the graph is shards"
