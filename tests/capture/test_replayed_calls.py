"""What a step prints, logs and writes into lists and dicts happens after each run, as in eager."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from docs.rows.page import refused, run_of, same, train
from harness import Case, Run, assert_parity, batch_of, device

log = logging.getLogger("tests.replayed")
LOSSES: list[float] = []


class Holder:
    """Containers that outlive the step, in attributes of one object."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.logs: dict[str, Any] = {"step": 0}
        self.by_name: defaultdict[str, list[Any]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.names: set[str] = set()
        self.last: deque[Any] = deque(maxlen=2)
        self.ordered: OrderedDict[str, Any] = OrderedDict()
        self.cell = [0]
        self.nested: dict[str, dict[str, Any]] = {"train": {}}
        self.best = 0.0

    def everything(self) -> list[Any]:
        plain = [list(self.last), sorted(self.names), dict(self.counts)]
        return [self.losses, self.logs, dict(self.by_name), self.ordered, self.cell, self.nested, *plain]


def writes(holder: Holder, loss: Tensor, x: Tensor) -> None:
    value = loss.item()
    holder.losses.append(value)
    holder.losses.extend([loss.detach(), x.mean()])
    holder.logs["loss"] = value
    holder.logs["step"] += 1
    holder.logs.update(mean=x.mean(), pair=(value, [loss.detach()]))
    holder.by_name["loss"].append(value)
    holder.counts["calls"] += 1
    holder.counts.update(["calls", "more"])
    holder.names.add("loss")
    holder.last.append(value)
    holder.ordered["loss"] = {"value": value, "text": f"{value:.4f} of {loss}"}
    holder.cell[0] += 2
    holder.nested["train"]["loss"] = value
    holder.nested.setdefault("test", {})["loss"] = loss.detach()


def run_with(holder: Holder, effect: Callable[[Holder, Tensor, Tensor], Any]) -> Run:
    run = run_of(lambda model, optimizer, x: None)
    model, optimizer = run.watch["model"], run.watch["optimizer"]

    def step(x: Tensor) -> Any:
        loss = train(model, optimizer, x)
        return loss, effect(holder, loss, x)

    seen = Everything(holder)
    return Run(step, lambda i: (batch_of(device(), i, 5, 6),), {"model": model, "held": seen})


class Everything:
    """What a holder holds, to be compared after each call."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    def state_dict(self) -> dict[str, Any]:
        return {"all": self._holder.everything()}


def holds(effect: Callable[[Holder, Tensor, Tensor], Any], *, steps: int = 6, graphs: int | None = 3) -> Any:
    return assert_parity(Case("held", lambda where: run_with(Holder(), effect), steps=steps, graphs=graphs), device())


def test_lists_dicts_sets_and_deques_hold_what_they_hold_in_eager() -> None:
    holds(writes, graphs=4)


def test_a_container_of_the_step_stays_one_object() -> None:
    def effect(holder: Holder, loss: Tensor, x: Tensor) -> bool:
        record: dict[str, Any] = {}
        holder.losses.append(record)
        holder.logs["last"] = record
        record["loss"] = loss.item()
        return True

    holder = Holder()
    run = run_with(holder, effect)
    step = ws.compile(run.step)
    for i in range(3):
        step(*run.arguments(i))
    assert holder.logs["last"] is holder.losses[-1]
    assert len({id(record) for record in holder.losses}) == 3
    assert all(type(record["loss"]) is float for record in holder.losses)


def test_a_dict_of_averages_is_read_and_written() -> None:
    def make(where: torch.device) -> Run:
        run = run_of(lambda model, optimizer, x: None)
        model, optimizer = run.watch["model"], run.watch["optimizer"]
        averages = {name: p.detach().clone() for name, p in model.named_parameters()}

        def step(x: Tensor) -> Tensor:
            loss = train(model, optimizer, x)
            for name, p in model.named_parameters():
                averages[name] = averages[name] * 0.9 + p.detach() * 0.1
            return loss

        return Run(step, run.arguments, {"model": model, "averages": averages})

    assert_parity(Case("averages", make, steps=6, graphs=2), device())


def test_a_dict_with_parameters_as_keys_is_read_and_written() -> None:
    def make(where: torch.device) -> Run:
        run = run_of(lambda model, optimizer, x: None)
        model, optimizer = run.watch["model"], run.watch["optimizer"]
        averages = {p: p.detach().clone() for p in model.parameters()}
        counts: dict[Any, int] = {}

        def step(x: Tensor) -> Tensor:
            loss = train(model, optimizer, x)
            for p in model.parameters():
                averages[p] = averages[p] * 0.9 + p.detach() * 0.1
                counts[p] = counts.get(p, 0) + 1
            return loss

        seen = Everything(Holder())
        seen.state_dict = lambda: {"values": [*averages.values()], "counts": [*counts.values()]}  # type: ignore[method-assign]
        return Run(step, run.arguments, {"model": model, "held": seen})

    assert_parity(Case("by parameter", make, steps=6, graphs=4), device())


def test_contents_that_the_step_made_may_be_read() -> None:
    def effect(holder: Holder, loss: Tensor, x: Tensor) -> Any:
        holder.losses.clear()
        for part in x:
            holder.losses.append(part.sum())
        holder.logs["parts"] = torch.stack(holder.losses).mean()
        return holder.logs["parts"] * len(holder.losses), max(len(holder.losses), 2), holder.losses[0]

    holds(effect)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_list_that_the_step_empties_may_be_read(at_the_end: bool) -> None:
    features: list[Tensor] = []

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        if not at_the_end:
            features.clear()
        features.append(model[0](x))  # type: ignore[index]
        loss = train(model, optimizer, x) + features[0].detach().sum() * len(features)
        if at_the_end:
            features.clear()
        return loss

    same(body, watch={"features": features})


def test_a_list_that_the_step_reads_and_makes_longer_is_refused_with_the_line() -> None:
    def effect(holder: Holder, loss: Tensor, x: Tensor) -> int:
        holder.losses.append(loss.item())
        return len(holder.losses)

    holder = Holder()
    holder.losses.append(0.0)
    with pytest.raises(ws.errors.SideEffectError, match=r"reads holder\.losses and makes it longer") as caught:
        ws.compile(run_with(holder, effect).step)(batch_of(device(), 0, 5, 6))
    assert "len(holder.losses)" in str(caught.value)
    assert holder.losses == [0.0]


GROWING: dict[str, Callable[[Holder, Tensor], Any]] = {
    "length": lambda holder, loss: (holder.losses.append(loss), loss * len(holder.losses)),
    "sum": lambda holder, loss: (holder.losses.append(loss.item()), sum(holder.losses)),
    "before": lambda holder, loss: (loss * len(holder.losses), holder.losses.append(1.0)),
    "stack": lambda holder, loss: (holder.losses.append(loss), torch.stack(holder.losses)),
    "truth": lambda holder, loss: (loss * 2 if holder.losses else loss, holder.losses.append(1)),
    "deque": lambda holder, loss: (holder.last.append(loss), sum(holder.last)),
    "key": lambda holder, loss: holder.ordered.__setitem__(str(len(holder.ordered)), loss),
    "new list": lambda holder, loss: (holder.by_name["a"].append(loss), len(holder.by_name["a"])),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_list_that_is_empty_at_first_read_and_grows_is_refused_at_the_first_call(name: str) -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        loss = train(model, optimizer, x).detach()
        return GROWING[name](holder, loss)

    holder = Holder()
    refused("WS-SIDE-EFFECT", body, watch={"held": Everything(holder)})
    assert not holder.losses
    assert not holder.last
    assert not holder.by_name
    assert not holder.ordered


def test_ordered_dicts_keep_their_order_where_the_step_copies_them_and_makes_new_ones() -> None:
    def effect(holder: Holder, loss: Tensor, x: Tensor) -> Any:
        holder.ordered["b"] = loss.detach()
        holder.ordered["a"] = x.mean()
        holder.logs["made"] = OrderedDict(z=loss.detach(), y=OrderedDict(x=1.0))
        read = [*holder.ordered.values()], [*holder.ordered.items()], [*holder.ordered.keys()]
        return read, dict(holder.ordered), holder.ordered.copy(), list(reversed(holder.ordered))

    holds(effect)


def test_containers_that_are_filled_once_are_captured() -> None:
    def effect(holder: Holder, loss: Tensor, x: Tensor) -> Any:
        if not holder.losses:
            holder.losses.extend([x.mean(), 2.0])
        holder.names.add("a")
        holder.ordered["a"] = loss.detach()
        holder.by_name["a"] = [loss.detach()]
        return sum(holder.losses), len(holder.names), sum(holder.ordered.values()), len(holder.by_name)

    holds(effect)


def test_a_list_that_the_step_writes_and_returns_is_refused_by_its_name() -> None:
    holder = Holder()

    def step(x: Tensor) -> Any:
        holder.losses.append(x.sum())
        return holder.losses

    with pytest.raises(ws.errors.SideEffectError, match=r"result is holder\.losses, which the step also writes"):
        ws.compile(step, lower="eager")(torch.ones(2))


def test_a_write_past_the_name_of_the_list_is_refused() -> None:
    values: list[float] = []
    append = values.append

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        append(1.0)
        return train(model, optimizer, x)

    def both(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        values.append(1.0)
        return body(model, optimizer, x)

    refused("WS-SIDE-EFFECT", both)
    assert values == []


def test_another_list_in_its_place_is_written() -> None:
    holder = Holder()
    run = run_with(holder, lambda holder, loss, x: holder.losses.append(loss.item()))
    step = ws.compile(run.step)
    for i in range(3):
        step(*run.arguments(i))
    first, holder.losses = holder.losses, []
    for i in range(2):
        step(*run.arguments(i))
    assert (len(first), len(holder.losses)) == (3, 2)


def test_an_argument_that_is_a_list_is_refused() -> None:
    def step(values: list[Any], x: Tensor) -> Tensor:
        values.append(x.sum())
        return x * 2

    with pytest.raises(ws.errors.SideEffectError):
        ws.compile(step)([], torch.ones(2))


# Printing and logging.


def prints(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    loss = train(model, optimizer, x)
    rate = optimizer.param_groups[0]["lr"]
    print("loss", loss.item(), loss, x[0], {"loss": [loss.detach()]}, sep=" | ")
    print(f"{loss.item():8.3f} {loss:.2f} {rate} {x.mean()!r}", str(loss.item()).rjust(30), end="!\n")
    print("%.3f of %d, %s" % (loss.item(), 3, x[0, 0]), f"{loss.item():.1f}", ", ".join(map(str, [loss.item()])))  # noqa: UP031
    print(model[0].bias)  # type: ignore[index]
    sys.stdout.write(f"{loss.item()}\n")
    log.info("loss %.4f at %s", loss.item(), {"rate": rate})
    log.debug("not shown %s", loss)
    logging.getLogger("tests.replayed").warning(f"{loss.item():.2f}")
    logging.LoggerAdapter(log, {}).info("adapted %s", loss)
    return f"{loss.item():.3f}", {"text": "%.2e" % loss.item()}  # noqa: UP031


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """What is printed and logged."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(filename)s:%(lineno)d %(funcName)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield stream
    log.removeHandler(handler)


def shown(run: Run, step: Any, output: io.StringIO, calls: int = 4) -> tuple[str, list[Any]]:
    start = output.tell()
    with contextlib.redirect_stdout(output):
        results = [step(*run.arguments(i)) for i in range(calls)]
    return output.getvalue()[start:], results


def test_what_is_printed_and_logged_is_that_of_eager(output: io.StringIO) -> None:
    eager = run_of(prints)
    expected = shown(eager, eager.step, output)
    compiled = run_of(prints)
    assert shown(compiled, ws.compile(compiled.step), output) == expected
    assert expected[0].count("adapted") == 4


def test_a_log_level_counts_at_each_call(output: io.StringIO) -> None:
    run = run_of(prints)
    step = ws.compile(run.step)
    assert "not shown" not in shown(run, step, output)[0]
    log.setLevel(logging.DEBUG)
    text, _ = shown(run, step, output)
    assert text.count("not shown tensor(") == 4
    assert len(step.graphs) == 2


def test_a_tensor_is_shown_as_it_is_at_that_line(output: io.StringIO) -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        y = x[0].clone()
        print(y, model[0].bias[:2])  # type: ignore[index]
        y.zero_()
        loss = train(model, optimizer, x)
        print(y, model[0].bias[:2])  # type: ignore[index]
        return loss

    eager, compiled = run_of(body), run_of(body)
    assert shown(eager, eager.step, output)[0] == shown(compiled, ws.compile(compiled.step), output)[0]


def test_text_that_the_step_puts_together_by_print_is_a_result() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        loss = train(model, optimizer, x)
        one, other = io.StringIO(), io.StringIO()
        print("loss", loss.item(), file=one)
        with contextlib.redirect_stdout(other):
            print(loss.detach())
        return one.getvalue(), other.getvalue()

    same(body)


def test_a_refused_step_prints_nothing(output: io.StringIO) -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        print("before")
        return x if train(model, optimizer, x) > 0.5 else x * 2

    refused("WS-CONTROL-FLOW", body)
    assert output.getvalue() == ""


def test_the_order_is_that_of_the_program(output: io.StringIO) -> None:
    seen: list[str] = []

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        print(len("a"), "first")
        seen.append("x")
        print(seen)
        return train(model, optimizer, x)

    run = run_of(body)
    text, _ = shown(run, ws.compile(run.step), output, 3)
    assert text == "1 first\n['x']\n1 first\n['x', 'x']\n1 first\n['x', 'x', 'x']\n"


def test_a_warning_with_a_value_comes_from_the_users_line() -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = train(model, optimizer, x)
        warnings.warn(f"loss is {loss.item():.3f}", stacklevel=1)
        return loss

    run = run_of(body)
    step = ws.compile(run.step)
    with pytest.warns(UserWarning, match=r"loss is 0\.\d{3}$") as caught:
        step(*run.arguments(0))
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "take",
    [
        lambda text: len(text),
        lambda text: text == "nan",
        lambda text: {text: 1},
        lambda text: "n" in text,
        lambda text: text[:3],
        lambda text: text.startswith("0"),
    ],
)
def test_what_asks_for_the_text_of_a_value_is_refused(take: Callable[[str], Any]) -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        return take(f"{train(model, optimizer, x).item():.3f}")

    refused("WS-ITEM", body)


@pytest.mark.parametrize("take", [lambda text: text.ljust(60), len])
def test_a_text_around_a_value_is_plain_and_a_second_trace_finds_what_asks_for_it(take: Callable[[str], Any]) -> None:
    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        return take(f"loss {train(model, optimizer, x).item():.3f}")

    run = run_of(body)
    with pytest.raises(ws.errors.ItemError, match="WS-ITEM"):
        ws.compile(run.step)(*run.arguments(0))


def test_a_step_without_such_calls_makes_none() -> None:
    step = same(train)
    assert all(not executable.executor._effects for executable in step._entries)
