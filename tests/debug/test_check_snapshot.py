"""A snapshot finds what a step can reach, however it is held, and puts it back in place."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import OrderedDict, UserDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from harness import bits_of
from wholestep.ir.user_objects.reachable import Part, reach
from wholestep.ir.user_objects.snapshot import Snapshot

GLOBAL_MODEL = nn.Linear(2, 2)
GLOBAL_NUMBERS = {"n": 1}


def helper(x: Tensor) -> Tensor:
    GLOBAL_NUMBERS["n"] += 1
    found: Tensor = GLOBAL_MODEL(x)
    return found


class Pair(NamedTuple):
    left: Tensor
    right: list[Any]


class Slotted:
    __slots__ = ("__weakref__", "_hidden", "empty", "filled")

    def __init__(self) -> None:
        self.filled = torch.zeros(2)
        self._hidden = {"a": 1}

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("no attribute of the user's is asked for")


class Surprising(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("no method of the user's is called")

    def clear(self) -> None:
        raise AssertionError("no method of the user's is called")


class Counter:
    made = 0
    registry: dict[str, int] = {}  # noqa: RUF012

    @classmethod
    def count(cls) -> None:
        cls.made += 1
        cls.registry["x"] = cls.made


def paths(value: Any, name: str = "it") -> set[str]:
    found = reach([(name, value)])
    return {seen.path for seen in found.tensors} | set(found.values)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda t: [[[[[[[[t]]]]]]]], "it[0][0][0][0][0][0][0][0]"),
        (lambda t: {"a": {"b": (1, t)}}, "it['a']['b'][1]"),
        (lambda t: Pair(t, []), "it.left"),
        (lambda t: SimpleNamespace(x=SimpleNamespace(y=t)), "it.x.y"),
        (lambda t: UserDict({"k": t}), "it.data['k']"),
        (lambda t: deque([0, t]), "it[1]"),
        (lambda t: OrderedDict(k=t), "it['k']"),
        (lambda t: defaultdict(list, k=[t]), "it['k'][0]"),
        (lambda t: functools.partial(max, t), "it.args[0]"),
        (lambda t: {3: t, None: 1}, "it[3]"),
        (lambda t: nn.ParameterList([nn.Parameter(t)]), "it.0"),
        (lambda t: nn.Sequential(nn.Module(), nn.BatchNorm1d(2)), "it.1.running_mean"),
    ],
)
def test_a_tensor_has_the_path_that_a_user_would_write(make: Any, path: str) -> None:
    assert path in paths(make(torch.zeros(2)))


def test_globals_of_helpers_closures_and_defaults_are_reached() -> None:
    inside = torch.zeros(1)

    def step(x: Tensor, more: Any = SimpleNamespace(t=torch.ones(1))) -> Tensor:  # noqa: B008
        return helper(x) + inside + more.t

    found = {seen.path for seen in reach([("", step)]).tensors}
    assert {"GLOBAL_MODEL.weight", "inside", ".defaults[0].t"} <= found


def test_each_value_is_assigned_to_its_row() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    roots = [("model", model), ("optimizer", optimizer), ("scheduler", scheduler), ("x", {"a": torch.ones(1)})]
    found = {seen.path: seen.part for seen in reach([*roots, ("g", torch.Generator())]).tensors}
    assert found["model.0.weight"] is Part.PARAMETERS
    assert found["model.0.weight.grad"] is Part.GRADIENTS
    assert found["model.1.running_var"] is Part.BUFFERS
    assert found["optimizer.state[model.0.weight].exp_avg"] is Part.OPTIMIZER
    assert found["x['a']"] is Part.BATCH
    values = reach(roots).values
    assert values["optimizer.param_groups[0].lr"] == (Part.OPTIMIZER, 1e-3)
    assert values["scheduler.last_epoch"] == (Part.SCHEDULE, 0)


def test_views_and_tied_tensors_are_preserved() -> None:
    base = torch.arange(12.0).view(3, 4)
    held = {"column": base[:, 1], "row": base[2], "expanded": base[0, :1].expand(5), "base": base}
    before = {name: bits_of(t) for name, t in held.items()}
    snapshot = Snapshot([("held", held)])
    held["row"].mul_(-1)
    held["column"].zero_()
    held["expanded"] = torch.ones(5)
    base.data = torch.zeros(7)
    snapshot.restore()
    assert {name: bits_of(t) for name, t in held.items()} == before
    assert held["base"] is base
    assert held["row"].data_ptr() == base[2].data_ptr()


def test_memory_that_is_not_reachable_is_neither_copied_nor_written() -> None:
    large = torch.zeros(1000)
    part = large[10:20]
    snapshot = Snapshot([("part", part)])
    assert snapshot.nbytes == 40
    part.fill_(1)
    large[30] = 5
    snapshot.restore()
    assert float(large.sum()) == 5


def test_gradients_versions_and_flags_are_restored() -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = grad = torch.ones(2)
    saved_by_autograd = (p * p).sum()
    snapshot = Snapshot([("p", p)])
    with torch.no_grad():
        p.add_(1)
    p.grad = None
    p.requires_grad_(False)
    p.tag = 1  # type: ignore[attr-defined]
    snapshot.restore()
    assert p.grad is grad
    assert p.requires_grad
    assert not hasattr(p, "tag")
    saved_by_autograd.backward()  # raises if the version of p were another one


def test_slots_classes_and_dicts_are_restored_without_running_user_code() -> None:
    slotted, strange, array = Slotted(), Surprising(), np.arange(3)
    dict.__setitem__(strange, "k", [1])
    Counter.registry.clear()
    Counter.made = 0
    roots: list[tuple[str, Any]] = [("s", slotted), ("d", strange), ("a", array), ("", Counter.count)]
    snapshot = Snapshot(roots)
    slotted.filled = torch.ones(2)
    slotted.empty = 3
    slotted._hidden["a"] = 2
    dict.__getitem__(strange, "k").append(2)
    dict.__delitem__(strange, "k")
    array[:] = 9
    Counter.count()
    snapshot.restore()
    assert bits_of(slotted.filled) == bits_of(torch.zeros(2))
    with pytest.raises(AssertionError):
        _ = slotted.empty
    assert slotted._hidden == {"a": 1}
    assert dict(strange) == {"k": [1]}
    assert array.tolist() == [0, 1, 2]
    assert (Counter.made, Counter.registry) == (0, {})


def test_variables_that_are_bound_later_are_unbound_again() -> None:
    namespace: dict[str, Any] = {"__name__": "users_script"}
    exec("def step():\n    global late, early\n    late = 1\n    early = 2\nearly = 1", namespace)
    snapshot = Snapshot([("", namespace["step"])])
    namespace["step"]()
    snapshot.restore()
    assert "late" not in namespace
    assert namespace["early"] == 1


@pytest.mark.parametrize("make", [lambda: iter([1, 2, 3]), lambda: iter((1, 2, 3)), lambda: iter(range(5))])
def test_iterators_over_lists_tuples_and_ranges_are_rewound(make: Any) -> None:
    iterator = make()
    next(iterator)
    snapshot = Snapshot([("it", iterator)])
    following = next(iterator)
    assert snapshot.advanced_iterators() == []
    assert next(iterator) == following


@pytest.mark.parametrize(
    "make",
    [
        itertools.count,
        lambda: (i for i in range(5)),
        lambda: zip([1, 2], [3, 4], strict=True),
        lambda: enumerate("abc"),
        lambda: map(abs, [1, 2]),
    ],
)
def test_other_iterators_that_were_advanced_are_named(make: Any) -> None:
    iterator = make()
    snapshot = Snapshot([("it", iterator)])
    assert snapshot.advanced_iterators() == []
    next(iterator)
    assert snapshot.advanced_iterators() == ["it"]


def test_objects_that_cannot_be_restored_are_not_entered_and_are_named() -> None:
    class Data(torch.utils.data.Dataset[Any]):
        rows = torch.zeros(3)

    held = SimpleNamespace(
        log=logging.getLogger("x"), lock=threading.Lock(), data=Data(), sparse=torch.eye(2).to_sparse()
    )
    snapshot = Snapshot([("it", held)])
    assert snapshot.reached.shared == {"it.log": "Logger", "it.lock": "lock", "it.data": Data.__qualname__}
    assert snapshot.unsaved == {"it.sparse": "torch.sparse_coo tensor"}


def test_a_step_that_reads_a_generator_is_refused_and_training_continues() -> None:
    numbers = iter([1.0, 2.0, 3.0])

    def step(x: Tensor) -> Tensor:
        return x * next(numbers)

    with pytest.raises(ws.WholestepError):
        ws.check(step, torch.ones(2))
    assert list(numbers) == [1.0, 2.0, 3.0]


def test_a_shared_object_is_listed_in_the_report() -> None:
    log = logging.getLogger("wholestep.test")

    def step(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            log.debug("three")
        return x.sum()

    report = ws.check(step, torch.ones(2))
    assert report.ok
    assert report.shared == {"log": "Logger"}
    assert "log (Logger)" in str(report)


def test_operator_tables_of_torch_are_not_entered() -> None:
    aten = torch.ops.aten

    def step(x: Tensor) -> Tensor:
        found: Tensor = aten.logaddexp2.default(x, x)
        return found

    assert ws.check(step, torch.ones(2), steps=1).exact
    assert reach([("", step)]).holders == []
    assert "logaddexp2" in vars(aten)
