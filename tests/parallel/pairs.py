"""Train the same model twice on the same ranks, by torch's own wrapper and by a plan, and compare what each rank has.

    case       one model, optimizer, step and batches, all made anew for each side
    beside_ddp / beside_fully_shard     lines that say what differs after any step; none is what tests ask for
    beside_one_process                  the same against eager on all ranks' batches in one, within reassociation
    all_of     many cases in one set of ranks: what each of them says, by name

Nothing is sent between the sides: each rank compares its own shards, bit for bit, with their placements.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo  # DDP and fully_shard import it: here once, instead of on every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import wholestep as ws
from cases.parts import adamw, train_step
from harness import Frame, bits_of, differences
from ranks import run_ranks
from wholestep.ir.effects import is_collective

SEED = 1234


def numbers(i: int, rank: int, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What rank `rank` gets in call `i`, whoever asks."""
    generator = torch.Generator().manual_seed(1000 + 100 * i + rank)
    return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)


def net(bias: bool = True, rows: int = 7) -> nn.Module:
    """Matrices and vectors; seven rows divide by no number of ranks."""
    return nn.Sequential(nn.Linear(6, rows, bias=bias), nn.GELU(), nn.Linear(rows, 4, bias=bias))


@dataclass(frozen=True)
class Case:
    """One training. `batch(call, rank)` is the tuple of what the step takes after model and optimizer."""

    name: str
    model: Callable[[], nn.Module] = net
    optimizer: Callable[[nn.Module], Optimizer] = adamw
    step: Callable[..., Any] = train_step
    batch: Callable[[int, int], tuple[Any, ...]] = lambda i, rank: (numbers(i, rank, 5, 6),)
    after: Callable[[int, Optimizer], None] = lambda i, optimizer: None
    steps: int = 5
    graphs: int = 2
    """The most graphs: one that creates optimizer state and one for ever after."""
    compile: dict[str, Any] = field(default_factory=dict)


class Side:
    """A model in training: torch's or ours. `through` is what is called, `model` what is looked at."""

    def __init__(self, case: Case, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        torch.manual_seed(SEED)
        self.case = case
        self.model = case.model()
        self.through = wrap(self.model)
        self.optimizer = case.optimizer(self.model)
        self.step = case.step
        self.results: list[Any] = []

    def run(self, i: int, *batch: Any) -> Frame:
        """One step; all that can be seen after it."""
        frame = look(self.model, self.optimizer, f"call {i + 1}", self.call(i, *batch))
        self.case.after(i, self.optimizer)
        return frame

    def call(self, i: int, *batch: Any) -> Any:
        """One step, without a read of the state: that would complete what it left pending."""
        torch.manual_seed(SEED + i)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
            result = self.step(self.through, self.optimizer, *(batch or self.case.batch(i, dist.get_rank())))
        self.results.append(result)
        return result

    def run_all(self) -> list[Frame]:
        return [self.run(i) for i in range(self.case.steps)]


class Compiled(Side):
    """Ours. Other options of ws.compile than `parallel` are the case's."""

    def __init__(self, case: Case, plan: Any) -> None:
        super().__init__(case)
        self.step: Any = ws.compile(case.step, parallel=plan, **case.compile)

    @property
    def collectives(self) -> Counter[str]:
        return collectives(self.step)


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def look(model: nn.Module, optimizer: Optimizer, label: str = "look", result: Any = None) -> Frame:
    """What this rank has of a model, its gradients and its optimizer: bits of local tensors, and placements."""
    seen: dict[str, Any] = {}
    for i, leaf in enumerate(torch.utils._pytree.tree_leaves(result)):
        _piece(seen, f"result[{i}]", leaf)
    for name, param in model.named_parameters(remove_duplicate=False):
        _piece(seen, name, param)
        _piece(seen, f"{name}.grad", param.grad)
        seen[f"{name}.requires_grad"] = param.requires_grad
    for name, buffer in model.named_buffers(remove_duplicate=False):
        _piece(seen, name, buffer)
    names = {param: name for name, param in model.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        seen[f"groups[{g}]"] = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for param in group["params"]:
            seen[f"groups[{g}].{names[param]}"] = True
    for param, entries in optimizer.state.items():
        for key, value in entries.items():
            _piece(seen, f"state[{names[param]}].{key}", value)
    return Frame(label, seen)


def _piece(seen: dict[str, Any], path: str, value: Any) -> None:
    if isinstance(value, DTensor):
        seen[f"{path}.placements"] = (value.placements, value.shape, value.device_mesh)
        value = value._local_tensor
    seen[path] = bits_of(value) if isinstance(value, Tensor) else value


def compare(expected: list[Frame], actual: list[Frame]) -> list[str]:
    """What differs at the first point where anything does."""
    for want, got in zip(expected, actual, strict=True):
        lines = differences(want, got)
        if lines:
            return [f"{want.label}: {line}" for line in lines]
    return []


def too_many_graphs(side: Compiled) -> list[str]:
    allowed, found = side.case.graphs, side.step.graphs
    return [] if len(found) <= allowed else [f"{len(found)} graphs, allowed {allowed}: {side.step.recompiles}"]


def beside(torchs: Side, ours: Compiled) -> list[str]:
    return compare(torchs.run_all(), ours.run_all()) + too_many_graphs(ours)


def beside_ddp(case: Case, **options: Any) -> list[str]:
    mesh = world_mesh()
    return beside(
        Side(case, lambda model: DistributedDataParallel(model)), Compiled(case, ws.Replicate(mesh, **options))
    )


def beside_fully_shard(
    case: Case, mesh: DeviceMesh | None = None, plan: dict[str, Any] | None = None, **both: Any
) -> list[str]:
    """`both` goes to fully_shard and to FullyShard; `plan` only to ours."""
    mesh = mesh or world_mesh()
    torchs = Side(case, lambda model: fully_shard(model, mesh=mesh, **both))
    return beside(torchs, Compiled(case, ws.FullyShard(mesh, **both, **(plan or {}))))


def sharded_beside_ddp(case: Case, rtol: float = 0, **options: Any) -> list[str]:
    """For what torch cannot do on DTensors: whole tensors of ours against those of DDP, bit for bit."""
    torchs, ours = Side(case, DistributedDataParallel), Compiled(case, ws.FullyShard(world_mesh(), **options))
    torchs.run_all()
    ours.run_all()
    return [*apart(torchs, ours, rtol), *too_many_graphs(ours)]


def in_float64(case: Case) -> Case:
    def batch(i: int, rank: int) -> tuple[Any, ...]:
        return tuple(x.double() for x in case.batch(i, rank))

    return replace(case, model=lambda: case.model().double(), batch=batch)


def beside_one_process(case: Case, plan: Any, rtol: float = 1e-9) -> list[str]:
    """Against eager on the concatenated batch, in float64: sums have another order there."""
    case = in_float64(case)
    alone, ours = Side(case), Compiled(case, plan)
    for i in range(case.steps):
        batches = [case.batch(i, rank) for rank in range(dist.get_world_size())]
        alone.run(i, *(torch.cat(parts) for parts in zip(*batches, strict=True)))
        ours.run(i)
    return [*apart(alone, ours, rtol), *too_many_graphs(ours)]


def apart(alone: Side, ours: Side, rtol: float) -> list[str]:
    """Parameters and optimizer state, gathered, that are further apart than rounding."""
    lines = []
    for (name, want), (_, got) in zip(whole_state(alone), whole_state(ours), strict=True):
        if not torch.allclose(want, got, rtol=rtol, atol=rtol):
            lines.append(f"{name}: {(want - got).abs().max():.3g} apart")
    return lines


def whole_state(side: Side) -> list[tuple[str, Tensor]]:
    names = {param: name for name, param in side.model.named_parameters()}
    found = [(name, whole(param)) for param, name in names.items()]
    for param, name in names.items():
        entries = side.optimizer.state.get(param, {})
        found += [
            (f"{name}.{key}", whole(value)) for key, value in sorted(entries.items()) if isinstance(value, Tensor)
        ]
    return found


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def collectives(step: Any) -> Counter[str]:
    """How often the graph that ran last calls each collective."""
    nodes = step.last.gm.graph.nodes
    return Counter(str(n.target._opname) for n in nodes if n.op == "call_function" and is_collective(n.target))


def all_of(check: Callable[[Case], list[str]], cases: Iterable[Case], ranks: int = 2, deadline: float = 120.0) -> None:
    """Run a check for every case in one set of ranks; fail with what each of them says."""
    cases = list(cases)

    def code(rank: int) -> dict[str, list[str]]:
        said = {}
        for case in cases:
            try:
                lines = check(case)
            except Exception:
                lines = traceback.format_exc().splitlines()[-6:]
            if lines:
                said[case.name] = lines[:8]
        return said

    said: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(run_ranks(code, ranks, deadline=deadline)):
        for name, lines in of_rank.items():
            for line in lines:
                said.setdefault(f"{name}: {line}", []).append(rank)
    assert not said, "\n" + "\n".join(f"{line}  (ranks {who})" for line, who in said.items())
