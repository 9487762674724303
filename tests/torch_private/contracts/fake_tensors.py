"""What wholestep relies on in `torch_private/fake_tensors.py` (its meta rules: `test_fake_tensors.py`)."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_private.contract_table import contracts_of
from wholestep.torch_private import fake_tensors
from wholestep.torch_private.symbolic_shapes import ShapeEnv

of = contracts_of("fake_tensors")
aten = torch.ops.aten


@of("FakeTensor", "FakeTensorMode", "new_fake_mode", "DynamicOutputShapeException", "DataDependentOutputException")
def operators_on_fakes_give_fakes_or_say_what_they_need() -> None:
    mode = fake_tensors.new_fake_mode(None)
    x = mode.from_tensor(torch.ones(2, 3))
    y = aten.mm.default(x, x.t())
    assert type(y) is fake_tensors.FakeTensor
    assert (y.shape, y.fake_mode, y.device.type) == ((2, 2), mode, "cpu")
    with mode:
        assert type(torch.empty(3, device="cpu:0")) is fake_tensors.FakeTensor
    with pytest.raises(fake_tensors.DataDependentOutputException):
        y[0, 0].item()
    with pytest.raises(fake_tensors.DynamicOutputShapeException):
        aten.nonzero.default(y)
    lengths = mode.from_tensor(torch.tensor([2]))
    loss = (mode.from_tensor(torch.zeros(3, 1, 2)), mode.from_tensor(torch.zeros(1, 2)), lengths, lengths)
    with pytest.raises(fake_tensors.DynamicOutputShapeException):
        aten._ctc_loss.Tensor(*loss)
    symbolic = fake_tensors.new_fake_mode(ShapeEnv())
    loss = tuple(symbolic.from_tensor(torch.zeros(each.shape, dtype=each.dtype), static_shapes=True) for each in loss)
    assert isinstance(aten._ctc_loss.Tensor(*loss)[1].shape[2], torch.SymInt)
    backward = aten._log_softmax_backward_data.default(x, x.t().t(), -1, torch.float32)
    assert backward.is_contiguous()
    with pytest.raises(AssertionError):  # a real tensor beside fakes
        aten.mm.default(x, torch.ones(3, 2))
    for _ in range(2):
        assert len(fake_tensors.FakeTensorMode.cache) > 0
        fake_tensors.FakeTensorMode.cache_clear()
        assert len(fake_tensors.FakeTensorMode.cache) == 0
        aten.mm.default(x, x.t())


@of("UnsupportedOperatorException", "failures_not_logged")
def an_operator_without_a_fake_kernel_is_refused_without_a_log() -> None:
    if not hasattr(torch.ops.wholestep_contract, "without_fake"):
        torch.library.define("wholestep_contract::without_fake", "(Tensor x) -> Tensor")
        torch.library.impl("wholestep_contract::without_fake", "CPU")(lambda x: x + 1)
    mode = fake_tensors.new_fake_mode(None)
    x = mode.from_tensor(torch.ones(2))
    seen = list[logging.LogRecord]()

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    handler, log = Noted(), logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        with fake_tensors.failures_not_logged(), pytest.raises(fake_tensors.UnsupportedOperatorException):
            torch.ops.wholestep_contract.without_fake.default(x)
    finally:
        log.removeHandler(handler)
    assert not seen
    assert not log.disabled


@of("TorchDispatchMode", "without_modes", "without_functions_and_modes")
def modes_see_operators_and_can_be_left() -> None:
    seen = list[Any]()

    class Watching(fake_tensors.DispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append("function")
            return func(*args, **(kwargs or {}))

    assert isinstance(Watching(), fake_tensors.TorchDispatchMode)
    x = torch.ones(2)
    with Watching():
        aten.sin.default(x)
        with fake_tensors.without_modes():
            aten.cos.default(x)
        with Functions(), fake_tensors.without_functions_and_modes():
            torch.exp(x)
        aten.tan.default(x)
    assert seen == [aten.sin.default, aten.tan.default]
    with fake_tensors.new_fake_mode(None), fake_tensors.without_modes():
        assert torch.ones(2).sum().item() == 2


@of("has_symbolic_sizes", "new_fake", "fake_tensor", "is_zero_tensor", "mark_parameter", "take_class")
def fakes_are_made_with_exactly_the_layout_that_is_asked_for() -> None:
    env = ShapeEnv()
    mode = fake_tensors.new_fake_mode(env)
    like = torch.zeros(3, 4).t()
    fake = fake_tensors.new_fake(mode, like)
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (like.shape, like.stride(), like.dtype, like.device)
    assert fake_tensors.new_fake(mode, like, (5, 6)).stride() == (6, 1)
    size = env.create_unbacked_symint()
    assert fake_tensors.has_symbolic_sizes(fake_tensors.new_fake(mode, like, (size, 2)))
    assert not fake_tensors.has_symbolic_sizes(fake)
    made = fake_tensors.fake_tensor(
        mode, (2, 3), (4, 1), torch.float64, torch.device("cuda"), offset=5, requires_grad=True
    )
    assert (made.stride(), made.storage_offset(), made.dtype) == ((4, 1), 5, torch.float64)
    assert (made.device.type, made.requires_grad, made.is_leaf) == ("cuda", True, True)
    plain = fake_tensors.fake_tensor(mode, (2,), (1,), torch.float32, torch.device("cpu"))
    assert not isinstance(plain, torch.nn.Parameter)
    fake_tensors.mark_parameter(plain)
    assert isinstance(plain, torch.nn.Parameter)
    assert type(plain) is fake_tensors.FakeTensor
    assert fake_tensors.is_zero_tensor(torch._efficientzerotensor(2))
    assert not fake_tensors.is_zero_tensor(torch.zeros(2))

    class Mine(torch.nn.Parameter): ...

    fake_tensors.take_class(plain, Mine)
    assert isinstance(plain, Mine)
    assert (plain + 1).shape == (2,)


@of("storage_key")
def views_have_one_key_and_other_memory_another() -> None:
    x = torch.zeros(4)
    fake = fake_tensors.new_fake(fake_tensors.new_fake_mode(None), x)
    for each in (x, fake, torch.zeros(0), torch.zeros(3, device="meta")):
        assert fake_tensors.storage_key(each) == fake_tensors.storage_key(each.view(-1))
    keys = {fake_tensors.storage_key(each) for each in (x, fake, torch.zeros(4))}
    assert len(keys) == 3 or fake_tensors.storage_key(x) != fake_tensors.storage_key(fake)


@of("held_by_torch")
def a_tensor_that_torch_holds_too_is_told_from_one_of_python() -> None:
    tensor, holder = torch.zeros(1), torch.zeros(1, requires_grad=True)
    before = fake_tensors.held_by_torch(tensor)
    holder.grad = tensor
    assert before == 0
    assert fake_tensors.held_by_torch(tensor) in (0, 1)


@of("version_of", "version_reads", "set_version")
def writes_are_counted_and_reads_of_the_count_seen() -> None:
    x = torch.zeros(2)
    before = fake_tensors.version_of(x)
    x.add_(1)
    x[0] = 3
    assert fake_tensors.version_of(x) == before + 2
    fake_tensors.set_version(x, before)
    assert fake_tensors.version_of(x) == before
    with torch.inference_mode():
        assert fake_tensors.version_of(torch.zeros(2)) == 0
    fake, seen = fake_tensors.new_fake(fake_tensors.new_fake_mode(None), x), list[Tensor]()
    with fake_tensors.version_reads(seen.append):
        assert fake._version == 0
        assert x._version == before
    assert len(seen) == 1
    assert seen[0] is fake
    assert fake._version == 0
    assert len(seen) == 1


@of("no_torch_function", "overrides_functions", "wrapper_tensor", "why_unreadable")
def subclasses_and_transformed_tensors_are_told_from_plain_ones() -> None:
    calls = list[Any]()

    class Wrapped(Tensor):
        __torch_function__ = fake_tensors.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return torch.zeros(2)

    class Functions(Tensor): ...

    like = torch.zeros(4, 3, dtype=torch.float64).t()
    made = fake_tensors.wrapper_tensor(Wrapped, like)
    assert (type(made), made.shape, made.stride(), made.dtype) == (Wrapped, like.shape, like.stride(), like.dtype)
    assert type(made + 1) is Tensor
    assert calls == [aten.add.Tensor]
    assert not fake_tensors.overrides_functions(Wrapped)
    assert fake_tensors.overrides_functions(Functions)
    assert not fake_tensors.overrides_functions(torch.nn.Parameter)
    assert "Wrapped" in fake_tensors.why_unreadable(made)
    assert fake_tensors.why_unreadable(like) == ""
    assert "negated" in fake_tensors.why_unreadable(torch.zeros(2, dtype=torch.complex64).conj().imag)
    seen = list[str]()
    torch.vmap(lambda x: (seen.append(fake_tensors.why_unreadable(x)), x)[1])(torch.ones(2, 2))
    assert "torch.func" in seen[0]
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")  # torch scripts decompositions at the first use
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert "dual" in fake_tensors.why_unreadable(dual)
        assert fake_tensors.why_unreadable(torch.ones(2)) == ""
