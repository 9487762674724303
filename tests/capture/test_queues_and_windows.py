"""Lists and deques that a step reads and moves: each element is followed from where it was before the step."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from harness import Case, Run, assert_parity, batch_of, device

# Each returns a number that reaches the loss; the list has three numbers before every call.
ON_BOTH: dict[str, Callable[[Any], Any]] = {
    "pop and append": lambda c: (c.pop(0) if isinstance(c, list) else c.popleft(), c.append(c[-1] * 0.5 + 0.25))[0],
    "pop the last": lambda c: (c.pop(), c.insert(0, c[0] + 0.5))[0],
    "reverse": lambda c: (c.reverse(), c[0])[1],
    "delete": lambda c: (c.append(c[0] + 1.0), c.__delitem__(0), c[1])[2],
    "swap": lambda c: (c.__setitem__(0, c[1] + 1.0), c.__setitem__(1, c[2]), c[0])[2],
}
ON_LISTS: dict[str, Callable[[Any], Any]] = {
    "last": lambda c: (c.append(c[-1] + 1.0), c.pop(0), c[-1])[2],
    "index": lambda c: (c.append(c[0] + 1.0), c.pop(0), float(c.index(c[-1])))[2],
    "largest": lambda c: (c.append(min(c) + max(c)), c.pop(0), max(c))[2],
    "sum": lambda c: (c.append(sum(c) / len(c) + 0.1), c.pop(0), sum(c))[2],
    "add": lambda c: (c.__iadd__([c[0] + 1.0]), c.pop(0), c[0])[2],
    "slice": lambda c: (c.__setitem__(slice(0, 2), [c[1], c[0] + 1.0]), c[0])[1],
    "sort": lambda c: (c.__setitem__(0, c[0] + 1.5), c.sort(), c[0])[2],
    "remove": lambda c: (c.append(c[0] + 1.5), c.remove(c[1]), c[1])[2],
    "insort": lambda c: (bisect.insort(c, c[0] + 0.7), c.pop(0), c[1])[2],
}
ON_DEQUES: dict[str, Callable[[Any], Any]] = {
    "rotate": lambda c: (c.rotate(1), c[0])[1],
    "rotate and add": lambda c: (c.rotate(1), c.__setitem__(0, c[0] + 1.0), c[0])[2],
    "popleft twice": lambda c: (c.append(c.popleft() + 0.5), c.append(c.popleft() + 0.25), c[0])[2],
}
NUMBERS = [
    *((f"list: {name}", list, use) for name, use in {**ON_BOTH, **ON_LISTS}.items()),
    *((f"deque: {name}", deque, use) for name, use in {**ON_BOTH, **ON_DEQUES}.items()),
]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device())
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize(("kind", "use"), [case[1:] for case in NUMBERS], ids=[case[0] for case in NUMBERS])
def test_numbers_that_a_step_moves_are_those_of_eager(kind: type, use: Callable[[Any], Any]) -> None:
    def make(where: torch.device) -> Run:
        model, optimizer = model_and_optimizer()
        numbers = kind([1.0, 2.0, 3.0])

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean() * (1 + 0.1 * use(numbers))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def between(i: int, result: Any) -> None:
            if i == 3:
                numbers[0], numbers[1] = 7.5, 0.5

        return Run(step, lambda i: (batch_of(where, i, 4, 4),), {"model": model, "numbers": numbers}, after=between)

    assert_parity(Case("numbers", make, steps=7, graphs=5), device())


TENSORS: dict[str, Callable[[Any, Tensor], Any]] = {
    "first": lambda recent, new: (recent[0], recent.append(new))[0],
    "all": lambda recent, new: (torch.stack(list(recent)).mean(0), recent.append(new))[0],
    "sum": lambda recent, new: (sum(recent), recent.append(new))[0],
    "both ends": lambda recent, new: (recent[-1] + recent[0], recent.append(new))[0],
    "taken": lambda recent, new: (recent.popleft(), recent.append(new))[0],
    "rotated": lambda recent, new: (recent.rotate(1), recent[0], recent.append(new))[1],
    "set": lambda recent, new: (recent.__setitem__(1, new), recent[0] + recent[2], recent.append(new * 2))[1],
    "after": lambda recent, new: (recent.append(new), recent[0] + len(recent))[1],
}


@pytest.mark.parametrize("use", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("is_one", [True, False], ids=["one tensor", "three tensors"])
def test_a_queue_of_tensors_is_that_of_eager(use: Callable[[Any, Tensor], Any], is_one: bool) -> None:
    def make(where: torch.device) -> Run:
        model, optimizer = model_and_optimizer()
        start = [torch.zeros(4, device=where)] * 3 if is_one else [torch.zeros(4, device=where) for _ in range(3)]
        recent = deque(start, maxlen=3)

        def step(x: Tensor) -> Tensor:
            out = model(x)
            loss = out.abs().sum() + (out.mean(0) - use(recent, out.detach().mean(0))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Run(step, lambda i: (batch_of(where, i, 4, 4),), {"model": model, "recent": list(recent)})

    assert_parity(Case("queue", make, steps=7, graphs=3), device())


def test_a_queue_needs_a_few_graphs_and_no_more() -> None:
    model, optimizer = model_and_optimizer()
    recent = deque([torch.zeros(4, device=device())] * 3, maxlen=3)

    def step(x: Tensor) -> None:
        out = model(x)
        (out.mean(0) - recent[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        recent.append(out.detach().mean(0))

    compiled = ws.compile(step, lower="eager")
    for i in range(12):
        compiled(batch_of(device(), i, 4, 4))
    assert len(compiled.graphs) <= 2
