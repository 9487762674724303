"""Rows of "Python around the tensors": what a step prints, logs and writes into lists and dicts."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from docs.rows.page import network, refused, row, run_of, same, same_function, train

SEEN: list[float] = []


@row("the same of a tensor that is computed from no input")
def rates() -> None:
    same_function(lambda x: x * torch.linspace(0, 0.3, 12).tolist()[3])


@row("`.numpy()`")
def values_as_arrays() -> None:
    refused("WS-ITEM", lambda model, optimizer, x: train(model, optimizer, x).detach().numpy())


@row("`print`, `logging`, `sys.stdout.write`, progress bars")
def values_that_are_shown() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train(model, optimizer, x)
        print("loss", loss, loss.item())
        sys.stdout.write(f"{loss.item():.3f}")
        return loss

    def output_of(step: Any, run: Any) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            for i in range(6):
                step(*run.arguments(i))
        return stream.getvalue()

    eager, compiled = run_of(body), run_of(body)
    assert output_of(eager.step, eager) == output_of(ws.compile(compiled.step), compiled)


@row("text of a tensor or of a value that is filled in")
def values_as_text() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        loss = train(model, optimizer, x).detach()
        return f"{loss.item():.4f} {loss}", str(loss), "%.3f" % loss.item(), "{:.2f}".format(loss)  # noqa: UP031, UP032

    same(body, steps=6)


@row("such a text that is compared, measured")
def texts_that_are_needed() -> None:
    for take in (lambda text: len(text), lambda text: text == "nan", lambda text: f"{text}."[:4]):

        def body(model: nn.Module, optimizer: Optimizer, x: Tensor, take: Any = take) -> Any:
            return take(str(train(model, optimizer, x).item()))

        refused("WS-ITEM", body)


@row("appending to a list, writing to a dict, set")
def containers_that_are_changed() -> None:
    def appends(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train(model, optimizer, x)
        SEEN.append(loss.item())
        return loss

    def build() -> nn.Module:
        model = network()
        model.log = {"calls": 0}
        return model

    def writes(model: Any, optimizer: Optimizer, x: Tensor) -> Tensor:
        model.log["calls"] += 1
        return train(model, optimizer, x)

    same(appends, steps=6)
    assert len(SEEN) == 12
    assert SEEN[:6] == SEEN[6:]
    same(writes, model=build, steps=6, graphs=3)
    SEEN.clear()


@row("reading a list whose length the step changes")
def containers_that_are_read() -> None:
    values = [0.0]
    append = values.append

    def grows(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        values.append(1.0)
        return train(model, optimizer, x * len(values))

    def past_the_name(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        values.append(1.0)
        append(2.0)
        return train(model, optimizer, x)

    for body in (grows, past_the_name):
        refused("WS-SIDE-EFFECT", body)
    assert values == [0.0]


@row("a distribution of `torch.distributions`")
def distributions() -> None:
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model, optimizer, x) + prior.log_prob(model(x)).mean()

    same(body)
