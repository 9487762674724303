"""Tables of numbers at an index that changes between calls (schedules): one graph, and what eager reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from capture.followed import assert_follows
from cases.parts import mlp
from harness import Case, Run, assert_parity, batch_of, device
from selection import each_now

VALUES = [0.9**k for k in range(20)]
TABLES: dict[str, Callable[[], Any]] = {
    "list": lambda: list(VALUES),
    "tuple": lambda: tuple(VALUES),
    "array": lambda: np.array(VALUES),
    "whole": lambda: [k * k % 7 for k in range(20)],
    "mixed": lambda: [0.5, 1, 2.5, True, 0.25] * 4,
    "single": lambda: np.array(VALUES, dtype=np.float32),
}
READS: dict[str, Callable[[Any, int], Any]] = {
    "item": lambda t, it: t[it],
    "float": lambda t, it: float(t[it]),
    "computed": lambda t, it: t[(it + 3) // 2] * t[-it - 1] + t[it % 3],
    "last": lambda t, it: t[min(it, 2)],
    "arithmetic": lambda t, it: (1 - t[it]) ** 2 / (t[it] + 1) - abs(-t[it]) % 0.3,
    "others": lambda t, it: t[it] * float(t[2]) * float(sum(t)) * len(t) + float(t[-1]) + float(max(t[1:3])),
}


@pytest.mark.parametrize("read", each_now(READS, "float", "computed", "others"))
@pytest.mark.parametrize("kind", ["list", "tuple", "array"])
def test_a_table_at_an_index_that_changes_is_one_graph(kind: str, read: str) -> None:
    def case(where: torch.device) -> Run:
        table, model = TABLES[kind](), mlp(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(it: int, x: Tensor) -> Any:
            value = READS[read](table, it)
            loss = model(x).square().mean() * value
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss, value

        return Run(step, lambda i: (i + 1, batch_of(where, i, 5, 6)), {"model": model, "optimizer": optimizer})

    assert_parity(Case(f"{kind} {read}", case, steps=6, graphs=4 if read == "last" else 3), device())


PLACES: dict[str, Callable[[Any], tuple[Callable[[int], Any], Any]]] = {}


def _place(make: Callable[[Any], tuple[Callable[[int], Any], Any]]) -> None:
    PLACES[make.__name__] = make


@_place
def attribute(table: Any) -> Any:
    config = SimpleNamespace(table=table)
    return lambda it: config.table[it], config


@_place
def deep(table: Any) -> Any:
    config = {"a": [SimpleNamespace(schedules={"beta": table})]}
    return lambda it: config["a"][0].schedules["beta"][it], config  # type: ignore[attr-defined]


@_place
def module(table: Any) -> Any:
    holder: Any = nn.Linear(1, 1)
    holder.table = table
    return lambda it: holder.table[it], holder


@pytest.mark.parametrize("kind", each_now(TABLES, "list", "array"))
@pytest.mark.parametrize("place", each_now(PLACES, "deep", "module"))
def test_a_counter_of_the_step_reads_tables_in_every_place(place: str, kind: str) -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None], Callable[[], Any]]:
        read, _ = PLACES[place](TABLES[kind]())
        state = SimpleNamespace(it=0)

        def value() -> Any:
            state.it += 1
            return float(read(state.it))

        return value, lambda i: None, lambda: state.it

    assert_follows(case, graphs=None if kind in ("mixed", "single") else 2)


USES: dict[str, Callable[[Any, int], Any]] = {
    "branch": lambda t, it: 2.0 if t[it] > 0.7 else t[it],
    "text": lambda t, it: len(str(t[it])) + len(f"{t[it]:.3f}"),
    "slice": lambda t, it: float(sum(t[it : it + 2])),
    "numpy": lambda t, it: float(np.sqrt(t[it])),
    "index of another": lambda t, it: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0][int(t[it] * 4) + it % 2],
    "type": lambda t, it: 2.0 if type(t) in (list, np.ndarray) and type(t[it]) in (float, np.float64) else 3.0,
    "json": lambda t, it: len(json.dumps(list(t))) + float(t[it]),
    "copy": lambda t, it: float(t.copy()[it]),
    "method": lambda t, it: float(np.asarray(t).mean()) + float(t[it]),
    "enumerate": lambda t, it: float(sum(v for k, v in enumerate(t) if k == it)),
}


@pytest.mark.parametrize("use", each_now(USES, "branch", "index of another", "type"))
@pytest.mark.parametrize("kind", ["list", "array"])
def test_other_uses_of_a_table_are_those_of_eager(kind: str, use: str) -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        table, state = TABLES[kind](), SimpleNamespace(it=0)
        return lambda: USES[use](table, state.it), lambda i: setattr(state, "it", i + 1)

    assert_follows(case)


@pytest.mark.parametrize("kind", ["list", "array"])
def test_a_table_that_is_changed_or_replaced_is_read_as_it_is(kind: str) -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None]]:
        state = SimpleNamespace(it=0, table=TABLES[kind]())

        def change(i: int) -> None:
            state.it = i + 1
            if i == 2:
                state.table[4] = 7.0
            if i == 4:
                state.table = TABLES[kind]() * 2

        return lambda: state.table[state.it], change

    assert_follows(case, steps=8)


def test_schedules_of_an_optimizer_and_of_averaged_weights_are_one_graph() -> None:
    """As DINO does: arrays of the learning rate, the weight decay and the momentum of the teacher, by iteration."""

    def case(where: torch.device) -> Run:
        student, teacher = mlp(where), mlp(where)
        optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
        rates, decays, momenta = np.linspace(0.1, 0.001, 30), np.linspace(0.04, 0.4, 30), np.linspace(0.9, 1, 30)

        def step(it: int, x: Tensor) -> Tensor:
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = rates[it], decays[it]
            loss = (student(x) - teacher(x).detach()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                m = momenta[it]
                for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
                    q.data.mul_(m).add_((1 - m) * p.detach().data)
            return loss

        watch = {"student": student, "teacher": teacher, "optimizer": optimizer}
        return Run(step, lambda i: (i, batch_of(where, i, 5, 6)), watch)

    assert_parity(Case("schedules", case, steps=6, graphs=2), device())


def test_an_element_of_an_array_that_is_returned_has_the_type_that_it_has_in_eager() -> None:
    table = np.array(VALUES)
    compiled = ws.compile(lambda it, x: (x * table[it], table[it], 1 - table[it], float(table[it])))
    for it in range(4):
        _, *values = compiled(it, torch.ones(2, device=device()))
        assert [type(value) for value in values] == [np.float64, np.float64, float]
        assert values == [table[it], 1 - table[it], table[it]]
    assert len(compiled.graphs) == 2


def test_a_step_that_writes_to_its_table_does_as_eager() -> None:
    def case() -> tuple[Callable[[], Any], Callable[[int], None], Callable[[], Any]]:
        table, state = list(VALUES), SimpleNamespace(it=0)

        def read() -> Any:
            value = table[state.it]
            table[5] = value * 0.5
            return value + table[5]

        return read, lambda i: setattr(state, "it", i + 3), lambda: list(table)

    assert_follows(case)


def test_an_index_out_of_range_raises_what_eager_raises_and_the_table_is_plain_again() -> None:
    holder = SimpleNamespace(table=[0.5, 0.25, 0.125])

    def step(it: int, x: Tensor) -> Tensor:
        return x * holder.table[it]

    compiled = ws.compile(step)
    x = torch.ones(2, device=device())
    for it in (0, 1, 2, -1, 0):
        assert torch.equal(compiled(it, x), x * holder.table[it])
    for it in (3, -4):
        with pytest.raises(IndexError, match="list index out of range"):
            compiled(it, x)
    assert torch.equal(compiled(1, x), x * 0.25)
    assert type(holder.table) is list
    assert holder.table == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("kind", ["tuple", "array"])
def test_a_graph_that_reads_a_table_is_saved_and_loaded(kind: str, tmp_path: Any) -> None:
    table = TABLES[kind]()

    def step(it: int, x: Tensor) -> Tensor:
        return x * table[it // 2 + 1] if table[it] > 0.1 else -x

    x = torch.ones(2, device=device())
    compiled = ws.compile(step)
    for it in range(3):
        compiled(it, x)
    compiled.save(tmp_path / "step.ws")
    loaded = ws.load(tmp_path / "step.ws", step)
    for it in (5, 9, 12):
        assert torch.equal(loaded(it, x), step(it, x))
