"""Operators of `torch.library` of every kind of alias, whose kernels count their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAME = "wholestep_test_custom"
ran: Counter[str] = Counter()
"""How often each kernel ran."""
order: list[str] = []
"""In which order."""
library = torch.library.Library(NAME, "FRAGMENT")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An operator whose kernel counts its calls."""
    name = schema.split("(")[0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        ran[name] += 1
        order.append(name)
        return kernel(*args, **kwargs)

    library.define(schema)
    library.impl(name, counted, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAME}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAME), name)


def write_one(x: Tensor) -> None:
    x.add_(1.0)


def write_and_return(x: Tensor) -> Tensor:
    return x.mul_(0.5)


def write_all(xs: list[Tensor]) -> None:
    for x in xs:
        x.mul_(0.5)


def nothing(*args: Any) -> None:
    return None


returns_input = define("returns_input(Tensor x) -> Tensor", lambda x: x, lambda x: x)
declared_input = define("declared_input(Tensor(a) x) -> Tensor(a)", lambda x: x, lambda x: x)
sketched = define("sketched(Tensor x) -> Tensor", lambda x: x * 3.0, lambda x: x)
returns_view = define("returns_view(Tensor(a) x) -> Tensor(a)", lambda x: x[1:], lambda x: x[1:])
hidden_view = define("hidden_view(Tensor x) -> Tensor", lambda x: x.t(), lambda x: x.t())
writes_one = define("writes_one(Tensor(a!) x) -> ()", write_one, nothing)
writes_and_returns = define("writes_and_returns(Tensor(a!) x) -> Tensor(a!)", write_and_return, lambda x: x)
writes_list = define("writes_list(Tensor(a!)[] xs) -> ()", write_all, nothing)
writes_and_adds = define(
    "writes_and_adds(Tensor(a!) x, Tensor y) -> Tensor", lambda x, y: x.add_(y) + y, lambda x, y: torch.empty_like(y)
)
effect = define("effect(Tensor x) -> ()", nothing, nothing)
tick = define("tick() -> ()", nothing, nothing)
make = define("make(int n) -> Tensor", lambda n: torch.arange(float(n)), lambda n: torch.empty(n))
pieces = define(
    "pieces(Tensor x) -> Tensor[]", lambda x: [x * 2, x + 1], lambda x: [torch.empty_like(x), torch.empty_like(x)]
)
mixed = define("mixed(Tensor x) -> (Tensor, Tensor)", lambda x: (x, x + 1), lambda x: (x, torch.empty_like(x)))
rows = define("rows(Tensor(a) x) -> Tensor(a)[]", lambda x: list(x.unbind(0)), lambda x: list(x.unbind(0)))
doubled = define("doubled(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
twin_ = define("twin_(Tensor(a!) x) -> ()", write_one, nothing)
twin = define("twin(Tensor x) -> Tensor", lambda x: x + 100, torch.empty_like)

scaled_ran: Counter[str] = Counter()


@torch.library.custom_op(f"{NAME}::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    scaled_ran["forward"] += 1
    return x * by


@scaled.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return x  # a sketch: shape and dtype are right


@torch.library.custom_op(f"{NAME}::scaled_backward", mutates_args=())
def scaled_backward(grad: Tensor, by: float) -> Tensor:
    scaled_ran["backward"] += 1
    return grad * by


@scaled_backward.register_fake
def _(grad: Tensor, by: float) -> Tensor:
    return torch.empty_like(grad)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.by = inputs[1]


scaled.register_autograd(lambda ctx, grad: (scaled_backward(grad, ctx.by), None), setup_context=_save)


@torch.library.custom_op(f"{NAME}::composed", mutates_args=())
def composed(x: Tensor) -> Tensor:
    return x.sin() + 1


library.define("implicit(Tensor x) -> Tensor")
library.impl("implicit", lambda x: (x * 2).tanh(), "CompositeImplicitAutograd")
implicit = getattr(torch.ops, NAME).implicit
