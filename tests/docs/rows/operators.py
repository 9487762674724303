"""Rows of "Hooks, functions, operators"."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.optim import Optimizer

import wholestep as ws
from cases.huggingface import language_model
from docs.rows.page import network, refused, row, run_of, same, same_function, train
from harness import batch_of, device
from ranks import run_ranks
from wholestep.capture.graph import tensor_values as values


@row("hooks on modules, parameters, optimizers, all modules")
def hooks() -> None:
    def on_module() -> nn.Module:
        model = network()
        model[0].register_forward_hook(lambda module, args, result: result * 2)
        return model

    def on_parameter() -> nn.Module:
        model = network()
        model[0].weight.register_hook(lambda grad: grad * 2)
        return model

    def on_optimizer(model: nn.Module) -> Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *args: None)
        return optimizer

    for build in ({"model": on_module}, {"model": on_parameter}, {"optimizer": on_optimizer}):
        same(train, **build)
    seen: list[float] = []

    def with_effects() -> nn.Module:
        seen.clear()
        model = network()
        model[0].register_forward_hook(lambda module, args, result: seen.append(result.mean().item()))
        return model

    same(train, steps=6, model=with_effects, watch={"seen": seen})


@row('the same with `hooks="refuse"`')
def refused_hooks() -> None:
    def on_module() -> nn.Module:
        model = network()
        model[0].register_forward_hook(lambda module, args, result: result * 2)
        return model

    refused("WS-HOOK", train, model=on_module, options={"hooks": "refuse"})
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        refused("WS-HOOK", train, options={"hooks": "refuse"})
    finally:
        handle.remove()


@row("`weight_norm` and `spectral_norm`")
def norms_of_weights() -> None:
    def build() -> nn.Module:
        model = network()
        parametrizations.weight_norm(model[0])
        parametrizations.spectral_norm(model[2])
        return model

    def old() -> nn.Module:
        model = network()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            weight_norm(model[0])
            spectral_norm(model[2])
        return model

    same(train, model=build)
    same(train, model=old)


@row("the hooks that a model of transformers adds in its first forward")
def hooks_of_transformers() -> None:
    def step(ids: Tensor) -> Tensor:
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        total: Tensor = sum(h.mean() for h in states)
        return total

    ids = torch.arange(8, device=device()).view(2, 4)
    model = language_model("GPT2").to(device()).eval()
    found = ws.compile(step, lower="eager")(ids)
    assert torch.equal(found, step(ids)), "the hooks of the first forward are there"


@row("hooks that the step itself puts on its tensors")
def hooks_of_the_step() -> None:
    def body(model: Any, optimizer: Optimizer, x: Tensor) -> Any:
        optimizer.zero_grad()
        hidden = model[0](x)
        hidden.register_hook(lambda grad: grad * 0.5)
        hidden.retain_grad()
        model[2](hidden.tanh()).square().mean().backward()
        optimizer.step()
        return hidden.grad

    same(body)


@row("a hook that the step leaves")
def hooks_left_by_the_step() -> None:
    def leaves(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        model[0].weight.register_hook(lambda grad: grad * 0.5)
        return train(model, optimizer, x)

    refused("WS-SIDE-EFFECT", leaves)


@row("state-dict hooks")
def state_dict_hooks() -> None:
    def build() -> nn.Module:
        model = network()
        model.register_state_dict_post_hook(lambda *args: None)
        return model

    same(train, model=build)


def _no_warning_of_torch_script() -> None:
    """Forward-mode differentiation scripts its decompositions when it is first used, and torch warns of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
        torch.func.jvp(torch.cos, (torch.ones(1),), (torch.ones(1),))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


@row("`autograd.Function`, `torch.vmap`")
def functions() -> None:
    same(lambda model, optimizer, x: train(model, optimizer, Doubled.apply(x.clone().requires_grad_())))

    _no_warning_of_torch_script()
    linear = nn.Linear(4, 4)

    def transforms(x: Tensor) -> Any:
        slope = torch.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)
        value, tangent = torch.func.jvp(torch.cos, (x,), (x,))
        return slope, value, tangent, torch.func.functional_call(linear, {"weight": x, "bias": x[0]}, (x,))

    same_function(transforms)


@row("`vmap(hessian(f))` where a gradient goes through")
def hessians() -> None:
    def with_form(second: Any) -> Any:
        def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = torch.vmap(second(lambda a: model(a).sum()))(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return body

    _no_warning_of_torch_script()
    refused("WS-UNSUPPORTED", with_form(torch.func.hessian))
    same(with_form(lambda f: torch.func.jacfwd(torch.func.grad(f))))


@torch.library.custom_op("ws_rows::halve_", mutates_args={"x"})
def halve_(x: Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("ws_rows::third", mutates_args=())
def third(x: Tensor) -> Tensor:
    return x / 3


@row("operators of `torch.library`")
def own_operators() -> None:
    def step(x: Tensor) -> Tensor:
        y = x.clone()
        halve_(y)
        return y

    same_function(step)
    refused("WS-UNSUPPORTED", lambda model, optimizer, x: third(x))


@row("a write through what such an operator returned")
def writes_through_results() -> None:
    library = torch.library.Library("ws_rows_views", "DEF")
    library.define("first(Tensor(a) x) -> Tensor(a)")
    library.impl("first", lambda x: x[:2], "CompositeExplicitAutograd")

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        torch.ops.ws_rows_views.first(x.clone()).mul_(2)
        return train(model, optimizer, x)

    try:
        refused("WS-ALIAS", body)
    finally:
        library._destroy()


@row("an `optimizer.step()`, `backward()`, write or call of a custom operator that tracing saw")
def lost() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values.Values, "write", lambda self, fake, new: None)  # a fault of ours
        refused("WS-LOST", train, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


@row("`x.prod()` and `x.cumprod()`")
def products() -> None:
    for take in (lambda y: y.prod(), lambda y: y.cumprod(0).sum()):

        def body(model: nn.Module, optimizer: Optimizer, x: Tensor, take: Any = take) -> Tensor:
            loss = take(model(x))
            loss.backward()
            optimizer.step()
            return loss

        refused("WS-UNSUPPORTED", body)


@row("a module or function from `torch.compile`")
def compiled_inside() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(torch.compile(model, backend="eager", fullgraph=True), optimizer, x)

    with torch.compiler.set_stance("force_eager"):  # the reference; a step is captured with or without it
        same(body)


@row("higher-order operators")
def higher_order() -> None:
    def cond(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    def attention(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        q = x[None, None].expand(1, 1, 5, 6).contiguous()
        return flex_attention(q, q, q)

    refused("WS-UNSUPPORTED", cond)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that flex_attention is slow without torch.compile
        refused("WS-UNSUPPORTED", attention)


@row("a compiled step called under `torch.vmap`")
def under_a_transform() -> None:
    step = ws.compile(lambda x: x * 2)
    with pytest.raises(ws.errors.UnsupportedError):
        torch.vmap(step)(torch.ones(3, 4))


@row("a compiled step called under `torch.compile`")
def under_torch_compile() -> None:
    step = ws.compile(lambda x: x * 2)
    outer = torch.compile(lambda x: step(x) + 1, backend="eager")
    for value in (1.0, 2.0, 3.0):
        assert torch.equal(outer(torch.full((3,), value)), torch.full((3,), value * 2 + 1))
    assert len(step.graphs) == 1


@row("lazy modules before their first forward")
def lazy_modules() -> None:
    run = run_of(lambda model, optimizer, x: model(x), model=lambda: nn.LazyLinear(4), optimizer=lambda model: None)
    with pytest.raises(ws.errors.UnsupportedError, match=r"has no shape yet"):
        ws.compile(run.step)(*run.arguments(0))


@row("TorchScript modules")
def scripted_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = run_of(train, model=lambda: torch.jit.script(network()))
        with pytest.raises(ws.errors.UnsupportedError, match="TorchScript"):
            ws.compile(run.step)(*run.arguments(0))


@row("`copy.deepcopy(model)` in the step")
def copied_models() -> None:
    same(lambda model, optimizer, x: copy.deepcopy(model)(x).sum().detach() + train(model, optimizer, x).detach())

    def kept(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.copied = copy.deepcopy(model)  # type: ignore[attr-defined]
        return train(model, optimizer, x)

    refused("WS-SIDE-EFFECT", kept)


@row("`DistributedDataParallel` (also")
def wrappers_that_are_captured() -> None:
    def code(rank: int) -> bool:
        same = []
        for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
            seen = []
            for step in (train, ws.compile(train)):
                wrapped = wrap(network())
                optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
                seen.append([step(wrapped, optimizer, batch_of(device(), i, 5, 6)).detach() for i in range(3)])
            same += [torch.equal(one, other) for one, other in zip(*seen, strict=True)]
        return all(same)

    assert run_ranks(code, 1) == [True]


@row("`FullyShardedDataParallel` (FSDP1)")
def wrappers_that_are_refused() -> None:
    def code(rank: int) -> str:
        wrapped = nn.parallel.DistributedDataParallel(network())
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        try:
            ws.compile(train)(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), batch_of(device(), 0, 5, 6))
        except ws.errors.WholestepError as error:
            return error.code
        return "nothing was raised"

    assert run_ranks(code, 1) == ["WS-WRAPPED"]


@row("a compiled step called in another compiled step")
def step_in_a_step() -> None:
    inner = ws.compile(train)
    run, eager = run_of(lambda model, optimizer, x: inner(model, optimizer, x) * 2), run_of(train)
    outer = ws.compile(run.step)
    for i in range(3):
        assert torch.equal(outer(*run.arguments(i)), eager.step(*eager.arguments(i)) * 2)
    assert inner.graphs == []
