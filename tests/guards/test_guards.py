"""Each condition that a captured graph relies on is noticed when it breaks, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 1)
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.gain


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, scale: float) -> torch.Tensor:
    loss = model(x).square().mean() * scale
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def replace_head(model: Net) -> None:
    model.head = nn.Linear(4, 1)


CHANGES: dict[str, tuple[Callable[[Net, torch.optim.Optimizer], Any], str]] = {
    "eval": (lambda m, o: m.eval(), "training"),
    "attribute": (lambda m, o: setattr(m, "gain", 2.0), r"model\.gain was 1\.0 and is 2\.0"),
    "dropout": (lambda m, o: setattr(m.body[1], "p", 0.1), r"body\.1\.p"),
    "submodule": (lambda m, o: replace_head(m), "submodule|another parameter"),
    "frozen": (lambda m, o: m.head.weight.requires_grad_(False), "requires_grad"),
    "dtype": (lambda m, o: m.double(), "dtype"),
    "buffer": (lambda m, o: m.register_buffer("extra", torch.ones(1)), "registered"),
    "group": (lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "param groups"),
    "option": (lambda m, o: o.param_groups[0].update(nesterov=True), "nesterov was False and is True"),
    "state": (lambda m, o: o.state.clear(), "state for 0 parameters"),
    "gradient": (lambda m, o: setattr(m.head.bias, "grad", torch.ones(1)), r"head\.bias\.grad is set"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_to_the_users_objects_is_noticed_and_named(name: str) -> None:
    change, reason = CHANGES[name]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = ws.compile(train_step)
    x = torch.randn(5, 3)
    for _ in range(3):
        step(model, optimizer, x, 1.0)
    assert len(step.graphs) == 2
    change(model, optimizer)
    step(model, optimizer, x.double() if name == "dtype" else x, 1.0)
    if name == "state":
        assert len(step.graphs) == 2, "the graph that creates state serves again"
        return
    assert len(step.graphs) == 3
    import re

    assert re.search(reason, step.recompiles[-1].reason), step.recompiles[-1].reason


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((torch.randn(6, 3), 1.0), "size"),
        ((torch.randn(5, 3), 2.0), "scale was 1.0 and is 2.0"),
        ((torch.randn(3, 5).t(), 1.0), "stride"),
    ],
    ids=["shape", "number", "stride"],
)
def test_another_batch_is_noticed_and_named(arguments: tuple[Any, ...], reason: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ws.compile(train_step)
    step(model, optimizer, torch.randn(5, 3), 1.0)
    step(model, optimizer, *arguments)
    assert reason in step.recompiles[-1].reason


def test_what_does_not_matter_needs_no_new_graph() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = ws.compile(train_step)
    for i in range(6):
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        optimizer.param_groups[0]["momentum"] = 0.9 - 0.01 * i
        if i == 3:
            optimizer.load_state_dict(optimizer.state_dict())
            model.load_state_dict(model.state_dict())
        step(model, optimizer, torch.randn(5, 3), 1.0)
    assert len(step.graphs) == 2


def test_the_first_use_of_torch_compile_in_a_process_needs_no_new_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ws.compile(train_step, lower="eager")
    step(model, optimizer, torch.randn(5, 3), 1.0)
    disable: Any = torch._dynamo.disable  # what Dynamo does to methods of modules and optimizers, once in a process
    monkeypatch.setattr(nn.Linear, "forward", disable(nn.Linear.forward))
    monkeypatch.setattr(torch.optim.SGD, "_init_group", disable(vars(torch.optim.SGD)["_init_group"]))
    step(model, optimizer, torch.randn(5, 3), 1.0)
    assert len(step.graphs) == 1
    monkeypatch.setattr(nn.Linear, "forward", disable(lambda self, x: x @ self.weight.T))
    step(model, optimizer, torch.randn(5, 3), 1.0)
    assert len(step.graphs) == 2
    assert "Linear.forward is another object" in step.recompiles[-1].reason
