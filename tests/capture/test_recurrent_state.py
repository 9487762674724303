"""Tuples, lists and dicts of tensors that a step replaces in each call: the state of a recurrent network."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from harness import Case, Run, assert_parity, batch_of, device
from selection import each_now


class Pair(NamedTuple):
    h: Tensor
    c: Tensor


class Trainer:
    """An LSTM cell, trained on one piece of a sequence after the other."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self.cell = nn.LSTMCell(4, 3).to(device())
        self.optimizer = torch.optim.SGD(self.cell.parameters(), lr=0.1)
        self.state = state()
        self.old: list[Any] = []

    def loss(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.cell(x, (h, c))
        loss = h.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), h.detach(), c.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "old": self.old, "model": self.cell.state_dict()}


def zeros() -> Tensor:
    return torch.zeros(2, 3, device=device())


def _of_a_tuple(t: Any, x: Tensor) -> Tensor:
    loss, *state = t.loss(x, *t.state)
    t.state = tuple(state)
    return loss


def _of_a_list(t: Any, x: Tensor) -> Tensor:
    loss, *t.state = t.loss(x, *t.state)
    return loss


def _of_a_dict(t: Any, x: Tensor) -> Tensor:
    loss, h, c = t.loss(x, t.state["h"], t.state["c"])
    t.state = {"h": h, "c": c, "name": "text"}
    return loss


def _of_a_pair(t: Any, x: Tensor) -> Tensor:
    loss, *state = t.loss(x, t.state.h, t.state.c)
    t.state = Pair(*state)
    return loss


def _of_layers(t: Any, x: Tensor) -> Tensor:
    losses = []
    states = []
    for h, c in t.state:
        loss, *state = t.loss(x, h, c)
        losses.append(loss)
        states.append(tuple(state))
    t.state = states
    return torch.stack(losses)


def _of_none(t: Any, x: Tensor) -> Tensor:
    loss, *state = t.loss(x, *(t.state or (x.new_zeros(2, 3), x.new_zeros(2, 3))))
    t.state = tuple(state)
    return loss


def _with_a_number(t: Any, x: Tensor) -> Tensor:
    h, c, n = t.state
    loss, h, c = t.loss(x * n, h, c)
    t.state = (h, c, n * 0.5 + 1)
    return loss


def _window(t: Any, x: Tensor) -> Tensor:
    """The newest goes in, the oldest out."""
    h, c = t.state
    loss, new, _ = t.loss(x, h, c)
    t.state = (c, new)
    return loss


def _one_stays(t: Any, x: Tensor) -> tuple[Tensor, Any]:
    loss, h, _ = t.loss(x, *t.state)
    t.state = (h, t.state[1])
    return loss, t.state


def _written_in_place(t: Any, x: Tensor) -> Tensor:
    h, c = t.state
    h.mul_(0.5)
    loss, *state = t.loss(x, h, c)
    t.state = tuple(state)
    return loss


def _of_values(t: Any, x: Tensor) -> Tensor:
    """What frameworks keep for their loggers."""
    loss, h, _ = t.loss(x, *(zeros(), zeros()) if t.state is None else (t.state["h"], zeros()))
    t.state = {
        "h": h,
        "loss": float(loss),
        "twice": loss.item() * 2,
        "calls": 1 if t.state is None else t.state["calls"] + 1,
    }
    return loss


STATES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], Any]]] = {
    "tuple": (_of_a_tuple, lambda: (zeros(), zeros())),
    "list": (_of_a_list, lambda: [zeros(), zeros()]),
    "dict": (_of_a_dict, lambda: {"h": zeros(), "c": zeros(), "name": "text"}),
    "pair": (_of_a_pair, lambda: Pair(zeros(), zeros())),
    "layers": (_of_layers, lambda: [(zeros(), zeros()), (zeros(), zeros())]),
    "none": (_of_none, lambda: None),
    "values": (_of_values, lambda: None),
    "number": (_with_a_number, lambda: (zeros(), zeros(), 1.0)),
    "window": (_window, lambda: (zeros(), zeros())),
    "one stays": (_one_stays, lambda: (zeros(), zeros())),
    "in place": (_written_in_place, lambda: (zeros(), zeros())),
}


def parity(body: Callable[[Any, Tensor], Any], state: Callable[[], Any], between: Any = None, graphs: int = 3) -> Any:
    def case(where: torch.device) -> Run:
        trainer = Trainer(state)

        def after(i: int, result: Any) -> None:
            trainer.old.append(trainer.state)  # what lay there before keeps its values
            if between is not None:
                between(trainer, i)

        return Run(lambda x: body(trainer, x), lambda i: (batch_of(where, i, 2, 4),), {"trainer": trainer}, after=after)

    return assert_parity(Case("state", case, steps=7, graphs=graphs), device())


@pytest.mark.parametrize("kind", each_now(STATES, "tuple", "list", "layers", "none", "number", "one stays"))
def test_a_container_of_tensors_that_the_step_replaces_is_followed(kind: str) -> None:
    parity(*STATES[kind])


def _reset(trainer: Any, i: int) -> None:
    if i == 1:
        trainer.state = (zeros() + 1, zeros())
    if i == 2:
        trainer.state = [zeros(), zeros() - 1]
    if i == 3:
        trainer.state = (zeros().double().float(), zeros().t().contiguous().t())  # other strides
    if i == 4:
        same = zeros() + 0.5
        trainer.state = (same, same)


def test_what_lies_in_the_place_may_change_between_calls() -> None:
    parity(*STATES["tuple"], between=_reset, graphs=6)


def _reads(t: Any, x: Tensor) -> Tensor:
    loss: Tensor = t.loss(x, t.state[0], t.state[1])[0]
    return loss


def _replace(trainer: Any, i: int) -> None:
    trainer.state = type(trainer.state)((zeros() + i, zeros() - i))


@pytest.mark.parametrize("kind", [tuple, list])
def test_what_the_user_replaces_and_the_step_reads_is_an_input(kind: type) -> None:
    parity(_reads, lambda: kind((zeros(), zeros() + 1)), between=_replace, graphs=2)


def test_tensors_with_a_history_that_lie_where_the_step_does_not_read_are_no_inputs() -> None:
    module: Any = nn.Linear(4, 4).to(device())
    module.last = (zeros(), 1)
    compiled = ws.compile(lambda x: module(x).detach())
    for i in range(4):
        x = batch_of(device(), i, 2, 4)
        assert torch.equal(compiled(x), module(x))
        module.last = (module(x), i)


def test_a_tensor_that_another_place_held_too_is_read_from_there() -> None:
    """At the first call two places hold one tensor; later the step has replaced one of them."""

    def body(t: Any, x: Tensor) -> Tensor:
        h, c = t.state
        loss, *state = t.loss(x, h + t.first * 2, c)
        t.state = tuple(state)
        return loss + t.first.sum()

    def case(where: torch.device) -> Run:
        trainer: Any = Trainer(lambda: (zeros() + 1, zeros()))
        trainer.first = trainer.state[0]
        return Run(lambda x: body(trainer, x), lambda i: (batch_of(where, i, 2, 4),), {"trainer": trainer})

    assert_parity(Case("shared", case, steps=5, graphs=3), device())


def test_state_in_a_module_a_closure_and_slots_is_followed() -> None:
    class Slotted:
        __slots__ = ("state",)

    def case(where: torch.device) -> Run:
        module: Any = nn.Linear(4, 4).to(where)
        module.state = (torch.zeros(2, 4, device=where),)
        slotted, kept = Slotted(), {"a": torch.zeros(2, 4, device=where)}
        slotted.state = [torch.ones(2, 4, device=where)]

        def step(x: Tensor) -> Tensor:
            nonlocal kept
            y: Tensor = module(x + module.state[0] * slotted.state[0] + kept["a"]).detach()
            module.state, slotted.state, kept = (y,), [y * 2], {"a": y.neg()}
            return y

        seen = SimpleNamespace(state_dict=lambda: {"all": [module.state, slotted.state, kept]})
        return Run(step, lambda i: (batch_of(where, i, 2, 4),), {"seen": seen})

    assert_parity(Case("places", case, steps=4, graphs=1), device())


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a tensor of the user's": (lambda t, x: setattr(t, "state", (t.own, x * 2)), "sets t.state to a tuple"),
    "an argument": (lambda t, x: setattr(t, "state", (x, x * 2)), "sets t.state to a tuple"),
    "a list in a tuple": (lambda t, x: setattr(t, "state", ([x * 2], x * 3)), "sets t.state to a tuple"),
    "an object": (lambda t, x: setattr(t, "state", (x * 2, object())), "sets t.state to a tuple"),
    "one list in two places": (lambda t, x: _in_two_places(t, x), "t.other and t.state are the same list|and t.other"),
}


def _in_two_places(t: Any, x: Tensor) -> None:
    t.state = t.other = [x * 2]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_replay_could_not_leave_in_a_container_is_refused(kind: str) -> None:
    body, match = REFUSED[kind]
    t = SimpleNamespace(state=(zeros(), zeros()), other=[], own=zeros())
    before = dict(vars(t))

    def step(x: Tensor) -> Tensor:
        body(t, x)
        return x * 2

    with pytest.raises(ws.errors.WholestepError, match=match) as caught:
        ws.compile(step)(zeros())
    assert caught.value.location is not None
    assert all(vars(t)[name] is value for name, value in before.items())
