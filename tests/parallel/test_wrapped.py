"""Models that are DistributedDataParallel or were given to fully_shard: the step communicates as they do in eager."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP and fully_shard import it: here once, instead of on every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from ranks import run_ranks
from selection import each_now
from wholestep import errors
from wholestep.step import with_plan_of_models

Step = Callable[..., Any]
Recipe = Callable[[int], tuple[nn.Module, Step]]
"""Makes a model and its step on a rank."""


class Net(nn.Module):
    """Batch norm has buffers that differ from rank to rank; `late` and `never` are not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.late, self.never = nn.Linear(8, 4), nn.Linear(3, 3)

    def forward(self, x: Tensor, late: bool = False) -> Tensor:
        hidden = self.norm(self.first(x)).tanh()
        found: Tensor = self.late(hidden) if late else self.last(hidden)
        return found


def batches(rank: int, calls: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(calls):
        yield torch.randn(4, 6, generator=generator), torch.randn(4, 4, generator=generator)


def bits(model: nn.Module) -> list[Any]:
    """Parameters and buffers, whole."""
    found = []
    for tensor in (*model.parameters(), *model.buffers()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.append(whole.detach().tolist())
    return found


def play(recipe: Recipe, rank: int, compiled: bool, **options: Any) -> tuple[list[Any], Any]:
    """What a rank has after each call, and the step."""
    torch.manual_seed(7 + rank)
    model, step = recipe(rank)
    if compiled:
        step = ws.compile(step, **options)
    seen = []
    for call, (x, y) in enumerate(batches(rank)):
        result = step(x, y, call)
        seen.append(([value.tolist() for value in result], bits(model)))
    return seen, step


def collectives(graph: ws.StepGraph) -> dict[str, int]:
    targets = [str(node.target) for node in graph.gm.graph.nodes]
    return dict(Counter(t.split(".")[1] for t in targets if "_c10d_functional" in t and "wait_tensor" not in t))


def equal_on_ranks(recipe: Recipe, **options: Any) -> list[list[dict[str, int]]]:
    """The compiled step has the bits of eager after every call, on two ranks. Returns its graphs' collectives."""

    def code(rank: int) -> list[dict[str, int]]:
        expected, _ = play(recipe, rank, False)
        actual, step = play(recipe, rank, True, **options)
        for call, (want, got) in enumerate(zip(expected, actual, strict=True), 1):
            assert want[0] == got[0], f"results of call {call}"
            assert want[1] == got[1], f"state after call {call}"
        return [collectives(graph) for graph in step.graphs]

    found: list[list[dict[str, int]]] = run_ranks(code, 2, deadline=90)
    return found


def ddp(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model or Net(), find_unused_parameters=True, **options)


def clipped_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def plain(rank: int) -> tuple[nn.Module, Step]:
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor, call: int) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach(), clipped_update(model, optimizer)

    return model, step


@pytest.mark.parametrize("passes", each_now(["default", None], "default"))
def test_a_model_in_ddp_trains_as_in_eager(passes: Any) -> None:
    (graphs, _) = equal_on_ranks(plain, passes=passes)
    assert graphs[-1]["all_reduce"] == (1 if passes else 6)  # of two layers and a norm; unused layers send nothing
    assert graphs[-1]["broadcast"] == 3  # the buffers of the norm


def test_micro_batches_under_no_sync_are_reduced_with_the_last() -> None:
    """`late` has a gradient of a micro-batch under no_sync only; DDP reduces it with the last one."""

    def recipe(rank: int) -> tuple[nn.Module, Step]:
        model = ddp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor, call: int) -> Any:
            with model.no_sync():
                F.mse_loss(model(x[:2], late=True), y[:2]).backward()
            loss = F.mse_loss(model(x[2:]), y[2:])
            loss.backward()
            return loss.detach(), clipped_update(model, optimizer)

        return model, step

    equal_on_ranks(recipe)


def test_no_sync_around_calls_and_gradients_of_earlier_calls_are_as_in_eager() -> None:
    def recipe(rank: int) -> tuple[nn.Module, Step]:
        model = ddp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor, y: Tensor, call: int) -> Any:
            is_last = call % 2 == 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = F.mse_loss(model(x, late=call % 4 == 0), y)
                loss.backward()
            return (loss.detach(), clipped_update(model, optimizer)) if is_last else (loss.detach(),)

        return model, step

    (graphs, _) = equal_on_ranks(recipe)
    assert {"all_reduce" in graph for graph in graphs} == {True, False}


def test_each_backward_that_synchronises_is_reduced_as_ddp_does() -> None:
    def recipe(rank: int) -> tuple[nn.Module, Step]:
        model = ddp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor, call: int) -> Any:
            first = F.mse_loss(model(x[:2]), y[:2])
            first.backward()
            second = F.mse_loss(model(x[2:]), y[2:])
            second.backward()
            with model.no_sync():
                F.mse_loss(model(x), y).backward()  # what it adds stays on the rank, and is used
            return first.detach(), second.detach(), clipped_update(model, optimizer)

        return model, step

    equal_on_ranks(recipe)


def test_two_models_in_ddp_and_a_plain_one_train_as_in_eager() -> None:
    def recipe(rank: int) -> tuple[nn.Module, Step]:
        one, other, own = ddp(nn.Linear(6, 4)), ddp(nn.Linear(4, 4)), nn.Linear(4, 4)
        models = nn.ModuleList([one, other, own])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

        def step(x: Tensor, y: Tensor, call: int) -> Any:
            loss = F.mse_loss(own(other(one(x))), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return (loss.detach(),)

        return models, step

    (graphs, _) = equal_on_ranks(recipe, passes=None)
    assert graphs[-1] == {"all_reduce": 4}  # the plain model is each rank's own


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 9), nn.Sequential(nn.Linear(9, 9), nn.Tanh()), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.middle(self.first(x)))
        return found


def sharded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Stack()
    fully_shard(model.middle, **options)
    fully_shard(model, **options)
    return model


@pytest.mark.parametrize("dtype", each_now([None, torch.bfloat16], "torch.bfloat16"))
def test_a_model_given_to_fully_shard_trains_as_in_eager(dtype: Any) -> None:
    def recipe(rank: int) -> tuple[nn.Module, Step]:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        model = sharded(mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: Tensor, y: Tensor, call: int) -> Any:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (loss.detach(),)

        return model, step

    (graphs, _) = equal_on_ranks(recipe, passes=None)
    assert graphs[-1]["reduce_scatter_tensor"] == 6


@pytest.mark.parametrize("where", each_now(["in the step", "around the call"], "in the step"))
def test_fully_shard_without_gradient_sync_adds_gradients_up_as_in_eager(where: str) -> None:
    def recipe(rank: int) -> tuple[nn.Module, Step]:
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor, call: int) -> Any:
            if where == "in the step":
                model.set_requires_gradient_sync(call % 2 == 1)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if call % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            return (loss.detach(),)

        return model, step

    def around(rank: int) -> tuple[nn.Module, Step]:
        model, step = recipe(rank)

        class Around:
            """Sets the flag where the step's caller would."""

            def __init__(self, inner: Step) -> None:
                self.inner = inner

            def __call__(self, x: Tensor, y: Tensor, call: int) -> Any:
                model.set_requires_gradient_sync(call % 2 == 1)
                return self.inner(x, y, call)

        return model, Around(step)

    if where == "in the step":
        (graphs, _) = equal_on_ranks(recipe)
    else:

        def code(rank: int) -> list[dict[str, int]]:
            expected, _ = play(around, rank, False)
            model, outer = around(rank)
            outer.inner = ws.compile(outer.inner)  # type: ignore[attr-defined]
            actual, _ = play(lambda rank: (model, outer), rank, False)
            assert expected == actual
            return [collectives(graph) for graph in outer.inner.graphs]  # type: ignore[attr-defined]

        graphs, _ = run_ranks(code, 2, deadline=90)
    assert {"reduce_scatter_tensor" in graph for graph in graphs} == {True, False}


def test_what_a_plan_cannot_do_for_a_wrapper_is_refused() -> None:
    def code(rank: int) -> list[str]:
        def step(model: nn.Module, x: Tensor) -> None:
            model(x).sum().backward()

        x = torch.randn(4, 6)
        hooked, compresses = ddp(nn.Linear(6, 4)), ddp(nn.Linear(6, 4))
        hooked.register_comm_hook(None, allreduce_hook)
        compresses._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        given = ws.compile(step, parallel=ws.Replicate(dist.group.WORLD))
        found = []
        for compiled, model in (
            (given, ddp(nn.Linear(6, 4))),
            (ws.compile(step), hooked),
            (ws.compile(step), compresses),
        ):
            with pytest.raises(errors.WrappedError) as caught:
                compiled(model, x)
            found.append(str(caught.value))
        return found

    (texts, _) = run_ranks(code, 2)
    assert "already parallel" in texts[0]
    assert all("register_comm_hook" in text for text in texts[1:])


def test_a_capture_of_a_wrapped_model_shows_its_collectives() -> None:
    def code(rank: int) -> tuple[dict[str, int], list[str], list[str]]:
        _, step = plain(rank)
        compiled = ws.compile(step, lower="inductor", disable_passes=["schedule_comm_wait"])
        x, y = next(batches(rank))
        shown = collectives(ws.capture(compiled, x, y, 0))
        mesh = init_device_mesh("cpu", (2,))
        chosen = with_plan_of_models(step, (x, y, 0), {}, compiled.options).passes
        given = ws.compile(step, lower="inductor", disable_passes=["schedule_comm_wait"], parallel=ws.Replicate(mesh))
        return shown, [each.name for each in chosen], [each.name for each in given.options.passes]

    (shown, chosen, given), _ = run_ranks(code, 2)
    assert shown == {"broadcast": 3, "all_reduce": 1}
    assert chosen == given  # passes="auto" chooses as with a plan that is given
