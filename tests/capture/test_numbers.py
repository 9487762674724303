"""Python numbers that change between calls: every operation on them means what it means in eager, wherever they lie."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from harness import Run, assert_parity, assert_same_story, batch_of, case, device
from selection import each_now

VALUES = (1, 2, 3, 2, 1, 3, 3)
RATES = (0.5, 0.25, 0.75, 0.5, 0.125, 1.0, 0.3)


class Bank(nn.Module):
    """A linear layer and a buffer to write to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("bank", torch.zeros(6, 4))
        self.heads = nn.ModuleDict({f"head_{i}": nn.Linear(4, 4) for i in range(5)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def _number_of(x: Any) -> int:
    return int(x)


SIZES: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "slice-columns": lambda m, h, k: h[:, :k],
    "slice-negative": lambda m, h, k: h[-k:],
    "slice-window": lambda m, h, k: h[k : k + 2],
    "slice-step": lambda m, h, k: h[::k],
    "select": lambda m, h, k: h[k],
    "select-negative": lambda m, h, k: h[:, -k],
    "index-list": lambda m, h, k: h[[0, k]],
    "topk": lambda m, h, k: h.topk(k)[0],
    "kthvalue": lambda m, h, k: h.kthvalue(k)[0],
    "pad": lambda m, h, k: F.pad(h, (0, k)),
    "repeat": lambda m, h, k: h.repeat(k, 1),
    "expand": lambda m, h, k: h[None].expand(k, -1, -1),
    "view": lambda m, h, k: torch.cat([h] * 6).view(6 // k if 6 % k == 0 else 6, -1),
    "view-k": lambda m, h, k: torch.cat([h] * k).view(k, -1),
    "narrow": lambda m, h, k: h.narrow(0, k, 2),
    "narrow-length": lambda m, h, k: h.narrow(0, 0, k),
    "arange": lambda m, h, k: h[:, :1] * torch.arange(k),
    "linspace": lambda m, h, k: h[:, :1] * torch.linspace(0, 1, k),
    "full": lambda m, h, k: h[:, :k] * torch.full((k,), k),
    "ones": lambda m, h, k: h.sum() * torch.ones(k, 2),
    "chunk": lambda m, h, k: h.chunk(k)[0],
    "split": lambda m, h, k: h.split(k)[-1],
    "unfold": lambda m, h, k: h.unfold(0, k, 1),
    "roll": lambda m, h, k: h.roll(k, 0) * h,
    "tril": lambda m, h, k: h.tril(k),
    "diagonal": lambda m, h, k: h.diagonal(k - 2),
    "as-strided": lambda m, h, k: h.as_strided((2, 2), (4, 1), k),
    "softmax-dim": lambda m, h, k: h.softmax(k % 2),
    "unsqueeze": lambda m, h, k: h.unsqueeze(k - 1),
    "flatten": lambda m, h, k: h.reshape(1, 1, 5, 4).flatten(k - 1),
    "one-hot": lambda m, h, k: F.one_hot(torch.tensor([0, 1]), k + 1) * h.sum(),
    "interpolate": lambda m, h, k: F.interpolate(h[None], scale_factor=k),
    "max-pool": lambda m, h, k: F.max_pool1d(h[None], k),
    "randint": lambda m, h, k: h * torch.randint(k, (5, 4)),
    "shape-read-back": lambda m, h, k: h[:, :k] * h[:, :k].shape[1],
}

MEANINGS: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "isinstance": lambda m, h, k: h * (2 if isinstance(k, int) else 5),
    "isinstance-of-several": lambda m, h, k: h * (2 if isinstance(k, int | str) else 5),
    "type-is": lambda m, h, k: h * (2 if type(k) is int else 5),
    "type-name": lambda m, h, k: h * len(type(k).__name__),
    "type-in": lambda m, h, k: h * (2 if type(k) in (int, float) else 5),
    "class": lambda m, h, k: h * (2 if k.__class__ is int else 5),
    "dict": lambda m, h, k: h * {1: 2.0, 2: 3.0, 3: 4.0}[k],
    "dict-get": lambda m, h, k: h * {1: 2.0, 2: 3.0}.get(k, 7.0),
    "in-set": lambda m, h, k: h * (2 if k in {2, 3} else 5),
    "in-tuple": lambda m, h, k: h * (2 if k in (2, 3) else 5),
    "in-range": lambda m, h, k: h * (2 if k in range(2, 9) else 5),
    "str": lambda m, h, k: h * len(str(k) * k),
    "f-string": lambda m, h, k: m.heads[f"head_{k}"](h),
    "percent": lambda m, h, k: m.heads["head_%d" % k](h),  # noqa: UP031
    "bit-and": lambda m, h, k: h * (k & 1),
    "bit-branch": lambda m, h, k: h * 2 if k & 1 else h * 3,
    "shift": lambda m, h, k: h * (1 << k),
    "xor-or-invert": lambda m, h, k: h * ((k ^ 5) | 2) * ~k,
    "divmod": lambda m, h, k: h * divmod(7, k)[0] + divmod(k, 2)[1],
    "floordiv-mod": lambda m, h, k: h * (7 // k) + k % 2,
    "round": lambda m, h, k: h * round(k / 2) + round(k / 3, 1),
    "power-of-tensor": lambda m, h, k: h**k,
    "power-of-number": lambda m, h, k: h * 2**k + 0.5**k,
    "negative-power": lambda m, h, k: h * 2 ** (2 - k),
    "hash": lambda m, h, k: h * (hash(k) % 7),
    "range": lambda m, h, k: sum((h * i for i in range(k)), start=h),
    "list-index": lambda m, h, k: h * [3.0, 4.0, 5.0, 6.0][k],
    "list-slice": lambda m, h, k: h * sum([3.0, 4.0, 5.0, 6.0][:k]),
    "list-repeat": lambda m, h, k: h * len([0] * k),
    "string-repeat": lambda m, h, k: h * len("ab" * k),
    "module-list": lambda m, h, k: list(m.heads.values())[k](h),
    "bool": lambda m, h, k: h * (2 if k - 1 else 3),
    "not": lambda m, h, k: h * (2 if not (k - 2) else 3),
    "chained": lambda m, h, k: h * (2 if 1 < k < 3 else 3),
    "min-max": lambda m, h, k: h * min(k, 2) * max(k, 2),
    "sorted": lambda m, h, k: h * sorted([k, 2])[0],
    "sum": lambda m, h, k: h * sum([k, 1.5, k]),
    "abs-neg": lambda m, h, k: h * abs(2 - k) * -k,
    "int-float": lambda m, h, k: h * float(k) + int(k),
    "math": lambda m, h, k: h * math.sqrt(k) + math.log(k) + math.cos(k * math.pi) + math.factorial(k),
    "floor-ceil": lambda m, h, k: h * math.floor(k / 2) + math.ceil(k / 2) + math.trunc(k / 2),
    "numpy": lambda m, h, k: h * float(np.sin(k)) + int(np.arange(k).sum()),
    "numpy-scalar": lambda m, h, k: h * float(np.float32(0.1) * k),
    "fraction": lambda m, h, k: h * float(Fraction(k, 3)),
    "complex": lambda m, h, k: h * abs(complex(k, 1)),
    "json": lambda m, h, k: h * len(json.dumps({"k": k * 1000})),
    "bit-length": lambda m, h, k: h * k.bit_length() + k.real,
    "zero-division": lambda m, h, k: h * _divided(k - 2),
    "identity": lambda m, h, k: h * (1 if k is None else 2),
    "equality-with-others": lambda m, h, k: h * (1 if k == "a" or k == None or k == [1] else 2),  # noqa: E711
    "match": lambda m, h, k: h * _matched(k),
    "tensor-of": lambda m, h, k: h * torch.tensor(k) + torch.tensor([k, 1, k, 2]),
    "full-of": lambda m, h, k: h + torch.full((4,), k),
    "alpha": lambda m, h, k: torch.add(h, h, alpha=k),
    "compare-tensor": lambda m, h, k: (h > k).float() * h,
    "where": lambda m, h, k: torch.where(h > 0, h, k),
    "clamp": lambda m, h, k: h.clamp(-k, k),
    "lerp": lambda m, h, k: h.lerp(h * 2, 1 / k),
    "dropout": lambda m, h, k: F.dropout(h, 1 / (k + 1)),
    "seed": lambda m, h, k: h * (torch.manual_seed(k), torch.rand(4))[1],
    "while": lambda m, h, k: h * _counted_down(k),
    "star": lambda m, h, k: h * sum(range(*[1, k])),
    "key-of-result": lambda m, h, k: h * sum({k: 2, 9: 1}.values()),
    "helper": lambda m, h, k: h * _number_of(k),
}


def _divided(k: Any) -> float:
    try:
        return float(1 / k) if k > 5 else 1 / k
    except ZeroDivisionError:
        return 11.0


def _matched(k: Any) -> int:
    match k:
        case 1:
            return 3
        case int():
            return 4
        case _:
            return 5


def _counted_down(k: Any) -> int:
    turns = 0
    while k > 0:
        k -= 1
        turns += 2
    return turns


def _run(where: torch.device, use: Callable[[Any, torch.Tensor, Any], Any], values: tuple[Any, ...] = VALUES) -> Run:
    model = Bank().to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, x: torch.Tensor, k: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = use(model, model(x), k).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    arguments = lambda i: (model, batch_of(where, i, 5, 4), values[i])  # noqa: E731
    return Run(step, arguments, {"model": model, "optimizer": optimizer})


NOW = """
    slice-columns slice-window select index-list topk pad repeat view-k narrow arange full chunk unfold roll diagonal
    as-strided softmax-dim one-hot interpolate randint shape-read-back isinstance type-is type-in dict in-set in-range
    f-string bit-branch divmod round power-of-tensor power-of-number range list-index list-slice module-list bool
    chained min-max math numpy complex zero-division equality-with-others match tensor-of compare-tensor clamp dropout
    seed while helper
""".split()
"""One use of each kind; the others, and most of these, are in the fuzzer's programs too."""


@pytest.mark.parametrize("name", each_now([*SIZES, *MEANINGS], *NOW))
def test_an_int_argument_that_changes_means_what_it_means_in_eager(name: str) -> None:
    use = (SIZES | MEANINGS)[name]
    assert_parity(case(lambda where: _run(where, use), name=name, steps=len(VALUES), graphs=None), device())


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], Any]] = {
    "slice": lambda bank, x, k: bank.__setitem__(slice(k, k + 3), x[:3]),
    "slice-tail": lambda bank, x, k: bank.__setitem__(slice(k, None), 7.0),
    "index": lambda bank, x, k: bank.__setitem__(k, x[0]),
    "negative-index": lambda bank, x, k: bank.__setitem__(-k - 1, x[0]),
    "two-indices": lambda bank, x, k: bank.__setitem__((k, k), 3.0),
    "column": lambda bank, x, k: bank.__setitem__((slice(None), k), x[0, 0]),
    "narrow-copy": lambda bank, x, k: bank.narrow(0, k, 2).copy_(x[:2]),
    "flat": lambda bank, x, k: bank.view(-1).__setitem__(slice(k * 2, k * 2 + 4), x[0]),
    "select-mul": lambda bank, x, k: bank.select(0, k).add_(1).mul_(2),
    "as-strided": lambda bank, x, k: bank.as_strided((2, 2), (4, 1), k).add_(1),
    "slice-mul": lambda bank, x, k: bank[k : k + 1].add_(1).mul_(3),
    "view-of-view": lambda bank, x, k: bank[k:][0].add_(2),
    "transposed": lambda bank, x, k: bank.t()[:, k].add_(1),
    "index-copy": lambda bank, x, k: bank.index_copy_(0, torch.tensor([k]), x[:1]),
    "masked": lambda bank, x, k: bank[k].masked_fill_(x[0] > 0, 5.0),
    "zero": lambda bank, x, k: bank[k].zero_(),
    "fill-with-it": lambda bank, x, k: bank[k].fill_(k),
    "read-before-and-after": lambda bank, x, k: bank[k].add_(bank[k + 1]),
    "roll": lambda bank, x, k: bank.copy_(bank.roll(k, 0) + 1),
    "unbind": lambda bank, x, k: bank.unbind(0)[k].add_(1),
    "split": lambda bank, x, k: bank.split([k, 6 - k])[1].add_(1),
}


WRITTEN_NOW = "slice index two-indices narrow-copy flat as-strided view-of-view index-copy fill-with-it unbind".split()


@pytest.mark.parametrize("name", each_now(WRITES, *WRITTEN_NOW))
def test_a_write_at_a_changing_int_lands_where_eager_writes(name: str) -> None:
    def make(where: torch.device) -> Run:
        run = _run(where, lambda m, h, k: h)
        model = run.watch["model"]

        def step(x: torch.Tensor, k: int) -> torch.Tensor:
            with torch.no_grad():
                WRITES[name](model.bank, x, k)
            return (model(x) * model.bank.sum()).sum()

        return Run(step, lambda i: (batch_of(where, i, 5, 4), VALUES[i]), run.watch)

    assert_parity(case(make, name=name, steps=len(VALUES), graphs=None), device())


class Queue(nn.Module):
    """A ring buffer as MoCo keeps one: pointer in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(12, 4))
        self.pointer = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        score = h @ self.queue.clone().t()
        with torch.no_grad():
            self.queue[self.pointer : self.pointer + 3] = h[:3]
            self.pointer = (self.pointer + 3) % 12
        return score.sum() + h.sum()


def test_a_queue_with_a_pointer_needs_three_graphs_however_often_it_wraps() -> None:
    def make(where: torch.device) -> Run:
        model = Queue().to(where)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Run(step, lambda i: (batch_of(where, i, 5, 4),), {"model": model, "p": Pointer(model)})

    assert_parity(case(make, steps=14, graphs=3), device())


class Pointer:
    """Shows an attribute to the harness."""

    def __init__(self, model: Queue) -> None:
        self._model = model

    def state_dict(self) -> dict[str, int]:
        return {"pointer": self._model.pointer}


def test_a_bank_written_from_a_closure_variable_and_in_autograd() -> None:
    def make(where: torch.device) -> Run:
        model = Bank().to(where)
        ptr = 0

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal ptr
            h = model(x) * 1.5
            h[ptr].mul_(2)  # autograd records this write through a view
            h[ptr : ptr + 1] += 1
            with torch.no_grad():
                model.bank[ptr : ptr + 3] = h[:3]
            ptr = (ptr + 1) % 3
            loss = h.square().sum()
            loss.backward()
            return loss

        return Run(step, lambda i: (batch_of(where, i, 5, 4),), {"model": model})

    assert_parity(case(make, steps=8, graphs=None), device())


PLACES = ("argument", "keyword", "in-batch", "attribute", "module", "closure", "group", "optimizer")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("values", [VALUES, RATES], ids=["int", "float"])
def test_a_number_that_changes_is_an_input_wherever_it_lies(place: str, values: tuple[Any, ...]) -> None:
    assert_parity(case(lambda where: _placed(where, place, values), steps=len(values), graphs=2), device())


class Holder:
    k: Any = None


def _placed(where: torch.device, place: str, values: tuple[Any, ...]) -> Run:
    model = Bank().to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holder = Holder()
    holder.k = values[0]
    closed = values[0]

    def number(given: Any) -> Any:
        places: dict[str, Callable[[], Any]] = {
            "attribute": lambda: holder.k,
            "module": lambda: model.k,
            "closure": lambda: closed,
            "group": lambda: optimizer.param_groups[0]["k"],
            "optimizer": lambda: optimizer.k,  # type: ignore[attr-defined]
        }
        return places[place]() if place in places else given

    def step(x: torch.Tensor, k: Any = None, more: dict[str, Any] | None = None) -> torch.Tensor:
        k = number(more["k"] if more else k)
        optimizer.zero_grad()
        loss = (model(x) * k).square().mean() + k / 2
        loss.backward()
        optimizer.step()
        return loss

    def put(i: int) -> None:
        nonlocal closed
        holder.k = model.k = closed = optimizer.k = values[i]  # type: ignore[attr-defined]
        optimizer.param_groups[0]["k"] = values[i]

    def arguments(i: int) -> tuple[Any, ...]:
        return (batch_of(where, i, 5, 4), values[i]) if place == "argument" else (batch_of(where, i, 5, 4),)

    def keywords(i: int) -> dict[str, Any]:
        if place == "in-batch":
            return {"more": {"k": values[i]}}
        return {"k": values[i]} if place == "keyword" else {}

    put(0)
    watch = {"model": model, "optimizer": optimizer}
    return Run(step, arguments, watch, keywords, lambda i, result: put(min(i + 1, len(values) - 1)))


def test_an_annealed_float_and_a_step_number_need_few_graphs_in_many_calls() -> None:
    model = Bank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @ws.compile
    def step(it: int, x: torch.Tensor, beta: float) -> torch.Tensor:
        scale = min(1.0, (it + 1) / 100)
        optimizer.zero_grad()
        loss = (model(x) * beta).square().mean() * scale
        if it % 50 == 0:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        return loss

    for it in range(300):
        step(it, batch_of(device(), it % 4, 5, 4), 1.0 - it / 1000)
    assert len(step.graphs) <= 5, step.recompiles


def test_a_tensor_of_numbers_that_change_needs_one_graph() -> None:
    def make(where: torch.device) -> Run:
        def step(x: torch.Tensor, k: int, r: float) -> Any:
            weights = torch.tensor([r, 0.5, k * r], dtype=torch.float64)
            x = x.index_copy(0, torch.tensor([k]), x[:1] * torch.tensor([[r], [k]]).sum())
            return x, weights, torch.tensor((k, 2)), torch.as_tensor([r])

        return Run(step, lambda i: (batch_of(where, i, 5, 4), VALUES[i], RATES[i]), {})

    assert_parity(case(make, steps=len(VALUES), graphs=2), device())


def test_a_counter_needs_few_graphs_where_two_forms_of_arguments_take_turns() -> None:
    def make(where: torch.device) -> Run:
        def step(x: torch.Tensor, *, it: int, beta: float = 0.5) -> torch.Tensor:
            return x * it * beta

        keywords = lambda i: {"it": i} if i % 2 else {"it": i, "beta": 0.25 + i}  # noqa: E731
        return Run(step, lambda i: (batch_of(where, i, 5, 4),), {}, keywords)

    assert_parity(case(make, steps=12, graphs=4), device())


def test_variables_of_one_name_in_two_functions_are_two_numbers() -> None:
    def make(where: torch.device) -> Run:
        def first() -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
            scale = 1.0

            def use(x: Any) -> Any:
                return x * scale

            def put(value: Any) -> None:
                nonlocal scale
                scale = value

            return use, put

        (use_one, put_one), (use_two, put_two) = first(), first()

        def step(x: torch.Tensor) -> torch.Tensor:
            return use_one(x) + 2 * use_two(x)

        def after(i: int, result: Any) -> None:
            put_one(1.0 + i) if i < 3 else put_two(5.0 + i)

        return Run(step, lambda i: (batch_of(where, i, 3),), {}, after=after)

    assert_parity(case(make, steps=8, graphs=None), device())


def test_a_number_that_becomes_another_type_takes_the_branch_of_that_type() -> None:
    def make(where: torch.device) -> Run:
        def step(x: torch.Tensor, k: Any) -> torch.Tensor:
            if isinstance(k, bool):
                return x * 3
            if isinstance(k, int):
                return x * k + 1
            return x * k if k is not None else x

        values = (1, 2, 3, 2.0, 3.0, True, 4, None, 5, False, 0.0, -0.0)
        return Run(step, lambda i: (batch_of(where, i, 3), values[i]), {})

    assert_parity(case(make, steps=12, graphs=None), device())


def test_numbers_returned_from_a_step_are_plain_numbers() -> None:
    @ws.compile
    def step(x: torch.Tensor, k: int) -> Any:
        return {"k": k, "half": k / 2, k: x, "text": f"{k}"}

    for k in (1, 2, 3, 4):
        result = step(torch.ones(2), k)
        assert result["k"] == k
        assert type(result["k"]) is int
        assert type(result["half"]) is float
        assert [type(key) for key in result] == [str, str, int, str]
        assert result["text"] == str(k)


def test_a_recompile_names_the_line_that_fixed_a_number() -> None:
    @ws.compile
    def step(x: torch.Tensor, k: int) -> torch.Tensor:
        return x.topk(k)[0]

    for k in (1, 2, 3):
        step(torch.randn(5), k)
    assert "k" in step.recompiles[-1].reason


@pytest.mark.parametrize("values", [(0.5, 0.25, 0.1), (1, 2, 3)], ids=["float", "int"])
def test_a_number_that_the_step_counts_in_a_param_group_is_carried_on(values: tuple[Any, ...]) -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "k": 0, "weight_sum": 0.0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                k = group["k"]
                weight = (k + 1) ** 0.5
                group["weight_sum"] += weight
                try:
                    ratio = weight / group["weight_sum"]
                except ZeroDivisionError:
                    ratio = 0
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-group["lr"] * ratio)
                group["k"] = k + 1

    def make(where: torch.device) -> Run:
        model = nn.Linear(4, 4).to(where)
        optimizer = Counting(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def after(i: int, result: Any) -> None:
            optimizer.param_groups[0]["lr"] = values[i % 3]

        return Run(step, lambda i: (batch_of(where, i, 5, 4),), {"m": model, "o": optimizer}, after=after)

    assert_parity(case(make, steps=10, graphs=3), device())


def test_a_user_story_with_counters_reset_in_between() -> None:
    def make(where: torch.device) -> Run:
        model = Queue().to(where)
        return Run(lambda x: model(x), lambda i: (batch_of(where, i, 5, 4),), {"model": model})

    def story(told: Any) -> None:
        told.call(5)
        told.run.watch["model"].pointer = 6
        told.call(4)
        told.run.watch["model"].pointer = 0
        told.call(3)

    assert_same_story(make, story)


def test_a_graph_with_a_view_at_a_changing_int_is_freed() -> None:
    def fakes() -> int:
        gc.collect()
        return sum(type(each).__name__ == "FakeTensor" for each in gc.get_objects())

    gc.unfreeze()
    already = fakes()
    run = _run(device(), lambda m, h, k: (m.bank[k : k + 2] + h[k : k + 2]) * h[k])
    step = ws.compile(run.step)
    for i in range(4):
        step(*run.arguments(i))
    assert fakes() > already
    step.reset()
    assert fakes() == already
