"""Rows about odd places of values, about code that changes between calls, and about what capture does not see."""

from __future__ import annotations

import warnings
import weakref
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from capture import test_code_and_classes as code
from capture import test_odd_places as odd
from capture import test_swallowed_refusals as swallowed
from capture.odd_places import assert_refused, assert_same
from docs.rows.page import network, row, same


class Typed(Optimizer):
    """An optimizer that can tell an int from a float."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"k": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            k = group["k"]
            sign = torch.tensor(1.0) if isinstance(k, int) else torch.tensor(k).atan2(torch.tensor(-1.0))
            for p in group["params"]:
                p.sub_(p.grad * sign)


@row("a number in a param group that goes from int to float")
def types_of_options() -> None:
    values = [0.0, -0.0, 0, 0.0, 1]

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["k"] = values[i]

    def body(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    same(body, optimizer=lambda model: Typed(model.parameters()), between=between, steps=5, graphs=None)


def stepper(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


@row("one `torch.autocast` block around several calls of a step that changes weights")
def one_autocast_block() -> None:
    step = ws.compile(stepper(network()), lower="eager")
    x = torch.ones(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        step(x)
        with pytest.raises(ws.errors.UnsupportedError, match="autocast block"):
            step(x)


@row("`obj.__class__ = Other`")
def code_and_classes() -> None:
    programs = (code.class_of_an_object, code.code_of_a_function, code.keyword_default, code.shadowed_builtin)
    for program in (*programs, code.registered_with_an_own_abc):
        assert_same(program)
    code.test_setting_a_class_or_code_in_the_step_is_refused_and_put_back()


@row("a module that the step imports or looks up itself")
def imports() -> None:
    for program in (code.imported_in_the_step, code.imported_by_name, code.looked_up_by_name):
        assert_same(program)


@row("values read as a whole or by a bound method")
def whole_reads() -> None:
    for kind in ("vars", "__dict__", "copy", "dict.get", "globals() += 1", "eval"):
        assert_same(odd.WHOLE[kind])


@row("memory, locks and values of other processes")
def memory() -> None:
    for kind in ("memoryview", "mmap", "ctypes", "multiprocessing.Value", "Event", "Lock", "Semaphore", "weak values"):
        assert_same(odd.MEMORY[kind])
    assert_refused(odd.WRITES["ctypes"], "WS-SIDE-EFFECT")
    assert_refused(odd.WRITES["Event.set"], "WS-SIDE-EFFECT")


@row("what the process tells")
def process() -> None:
    restore = odd.process_as_it_was.__wrapped__()
    next(restore)
    for kind in ("getcwd", "isEnabledFor", "argv", "geterr", "initial_seed", "Generator.initial_seed"):
        assert_same(odd.PROCESS[kind])
    next(restore, None)


@row("`tensor._version` of a tensor")
def versions() -> None:
    odd.test_the_version_of_a_tensor_of_the_step_is_refused()


@row("writing to a `StringIO`, an open file")
def text_that_is_kept() -> None:
    for kind in ("StringIO", "csv", "a bound write", "getvalue"):
        assert_refused(odd.WRITES[kind], "WS-SIDE-EFFECT")
    for kind in ("print to a StringIO", "a handler that keeps", "a stream of a logger"):
        assert_same(odd.WRITES[kind])


@row("a refusal that the step catches")
def caught_by_the_step() -> None:
    for code_of, do in swallowed.SWALLOWED.values():
        assert_refused(swallowed.swallows(do), code_of)


@row("a batch made under `torch.inference_mode()`")
def inference() -> None:
    swallowed.test_a_batch_of_inference_mode_may_be_evaluated()
    swallowed.test_a_batch_of_inference_mode_is_refused_where_gradients_are_computed(True)


# What capture does not see.


@row("weights that something else changed in the same `torch.autocast` block")
def two_steps_in_one_block() -> None:
    def last(compiled: bool) -> Tensor:
        model = network()
        train, evaluate = stepper(model), lambda x: model(x)
        if compiled:
            train, evaluate = ws.compile(train, lower="eager"), ws.compile(evaluate, lower="eager")
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            train(torch.ones(5, 6))
            return evaluate(torch.ones(5, 6)).detach()

    assert not torch.equal(last(True), last(False))


@row("the state of an object written in C that Python cannot enumerate")
def element_of_xml() -> None:
    element = ElementTree.Element("a", scale="2")
    step = ws.compile(lambda x: x * float(element.get("scale", "0")), lower="eager")
    assert step(torch.ones(())).item() == 2.0
    element.set("scale", "3")
    assert step(torch.ones(())).item() == 2.0


@row("an object that only a weak reference leads to")
def weakly_held() -> None:
    held: list[Any] = [odd.Held(2.0)]
    reference = weakref.ref(held[0])
    step = ws.compile(lambda x: x * (1.0 if (found := reference()) is None else found.scale), lower="eager")
    assert step(torch.ones(())).item() == 2.0
    held.clear()
    assert step(torch.ones(())).item() == 2.0


@row("what `signal.getsignal` answers, the list `warnings.filters`")
def of_the_interpreter() -> None:
    step = ws.compile(lambda x: x + len(warnings.filters), lower="eager")
    before = step(torch.ones(())).item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", ImportWarning)
        assert step(torch.ones(())).item() == before
