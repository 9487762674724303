"""An optimizer that keeps its state in tensors made of other tensors, as torchao's low-bit optimizers do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SCALES = torch.linspace(0.5, 1.0, 3)


class Halves(Tensor):
    """A float tensor kept as bfloat16 numbers and one scale."""

    low: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, low: Tensor, scale: Tensor, signed: bool) -> Halves:
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: Halves = make(cls, low.shape, dtype=torch.float32, device=low.device)
        return made

    def __init__(self, low: Tensor, scale: Tensor, signed: bool) -> None:
        assert low.dtype is torch.bfloat16
        self.low, self.scale, self.signed = low, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["low", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any = None, stride: Any = None) -> Any:
        return cls(inner["low"], inner["scale"], *context)

    def plain(self) -> Tensor:
        found = self.low.float() * self.scale
        return found if self.signed else found.abs()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Halves):
            scale = args[1].abs().amax().clamp_min(1e-6)
            args[0].scale.copy_(scale)
            args[0].low.copy_(args[1] / scale)
            return args[0]
        if func is torch.ops.aten.lerp.Scalar:
            return func(*(each.plain() if isinstance(each, Halves) else each for each in args), **(kwargs or {}))
        if func is torch.ops.aten.detach.default:
            return Halves(args[0].low, args[0].scale, args[0].signed)
        raise NotImplementedError(str(func))


class HalfMomentum(torch.optim.Optimizer):
    """Momentum in `Halves`, alone or in a list."""

    def __init__(self, params: Any, *, listed: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.listed = listed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        scale = SCALES.tolist()[-1] * torch.linspace(0.5, 1.0, 3).tolist()[2]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    made = Halves(torch.zeros_like(p, dtype=torch.bfloat16), torch.ones(()), True)
                    state["average"] = [made] if self.listed else made
                held = state["average"][0] if self.listed else state["average"]
                average = held.lerp(p.grad, 0.1)
                held.copy_(average)
                p.sub_(average * scale, alpha=group["lr"])


def world(listed: bool = False) -> tuple[nn.Module, HalfMomentum, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = HalfMomentum(model.parameters(), listed=listed)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, train


def batch(i: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(i))


def everything(model: nn.Module, optimizer: HalfMomentum) -> list[Tensor]:
    found = [p.detach() for p in model.parameters()]
    for p in model.parameters():
        held = optimizer.state[p]["average"]
        held = held[0] if isinstance(held, list) else held
        assert type(held) is Halves
        found += [held.low, held.scale]
    return found


def assert_same(first: Any, second: Any) -> None:
    for a, b in zip(everything(*first[:2]), everything(*second[:2]), strict=True):
        assert torch.equal(a, b)
