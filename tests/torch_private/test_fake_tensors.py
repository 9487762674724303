"""Operators with a rule of our own for tensors without data: a fake result looks like the real one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wholestep.torch_private import fake_tensors
from wholestep.torch_private.fake_tensors import FakeTensorMode, new_fake_mode

ENDS = torch.tensor([3, 7, 10], dtype=torch.int32)


def rows(dtype: torch.dtype) -> Tensor:
    return torch.randn(10, 8).to(dtype)


def stacked(dtype: torch.dtype, columns: int = 7) -> Tensor:
    return torch.randn(3, columns, 8).to(dtype).transpose(-1, -2)


FORMS = {
    "rows of experts by their matrices": lambda dtype: (rows(dtype), stacked(dtype), ENDS),
    "one matrix each": lambda dtype: (torch.randn(3, 5, 8).to(dtype), stacked(dtype), None),
    "gradients of the matrices": lambda dtype: (torch.randn(10, 16).to(dtype).t(), rows(dtype), ENDS),
    "columns of experts": lambda dtype: (torch.randn(3, 5, 8).to(dtype), rows(dtype).t(), ENDS),
}


def fake_product(mode: FakeTensorMode, a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    fakes = [None if each is None else mode.from_tensor(each) for each in (a, b, ends)]
    return torch._grouped_mm(fakes[0], fakes[1], offs=fakes[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_fake_product_has_the_geometry_of_the_real_one(form: str, dtype: torch.dtype) -> None:
    a, b, ends = FORMS[form](dtype)
    real, fake = torch._grouped_mm(a, b, offs=ends), fake_product(new_fake_mode(None), a, b, ends)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_what_the_kernel_refuses_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Double"):
        torch._grouped_mm(rows(torch.float64), stacked(torch.float64), offs=ENDS)
    with pytest.raises(RuntimeError, match="float64"):
        fake_product(new_fake_mode(None), rows(torch.float64), stacked(torch.float64), ENDS)


def test_a_fake_loss_of_sequences_has_the_geometry_of_the_real_one() -> None:
    log_probs, targets = torch.randn(10, 2, 5).log_softmax(-1), torch.tensor([[1, 2, 2, 3], [4, 1, 3, 2]])
    lengths = ([10, 9], [3, 2])
    mode = new_fake_mode(None)
    fakes = mode.from_tensor(log_probs), mode.from_tensor(targets)
    real, fake = torch.ops.aten._ctc_loss(log_probs, targets, *lengths), torch.ops.aten._ctc_loss(*fakes, *lengths)
    backward = torch.ops.aten._ctc_loss_backward
    real += (backward(torch.ones(2), log_probs, targets, *lengths, *real, 0),)
    fake += (backward(mode.from_tensor(torch.ones(2)), *fakes, *lengths, *fake, 0),)
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_gradients_of_a_recurrent_layer_on_a_gpu_have_its_layout() -> None:
    with new_fake_mode(None):
        x, hidden = torch.empty(5, 2, 3, device="cuda"), torch.empty(1, 2, 4, device="cuda")
        weights = [torch.empty(*size, device="cuda") for size in ((16, 3), (16, 4), (16,), (16,))]
        packed, grad = torch.empty(176, device="cuda"), torch.empty(5, 2, 4, device="cuda")
        settings = (2, 4, 0, 1, False, 0.0, True, False, [], None)
        state = torch.empty(64, dtype=torch.uint8, device="cuda")
        found = torch.ops.aten._cudnn_rnn_backward(
            x, weights, 4, packed, hidden, hidden, grad, grad, hidden, hidden, *settings, state, [True] * 4
        )
    assert [each.shape for each in found[:3]] == [x.shape, hidden.shape, hidden.shape]
    assert [each.shape for each in found[3]] == [each.shape for each in weights]


GRADIENTS = {
    "softplus_backward": (1, 20),
    "hardtanh_backward": (-1, 1),
    "leaky_relu_backward": (0.1, False),
    "logit_backward": (1e-3,),
    "hardswish_backward": (),
    "hardsigmoid_backward": (),
    "gelu_backward": (),
    "silu_backward": (),
    "mish_backward": (),
    "tanh_backward": (),
    "mse_loss_backward": (torch.rand(2, 2, 9), 1),
    "huber_loss_backward": (torch.rand(2, 2, 9), 1, 1.0),
    "smooth_l1_loss_backward": (torch.rand(2, 2, 9), 1, 1.0),
    "binary_cross_entropy_backward": (torch.rand(2, 2, 9), None, 1),
    "_log_softmax_backward_data": (-1, torch.float32),
    "_softmax_backward_data": (-1, torch.float32),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_fake_gradient_has_the_layout_of_the_real_one(name: str) -> None:
    """Where the gradient and the input have other strides, the real kernel decides which of them its result has."""
    packet = getattr(torch.ops.aten, name)
    operator = packet.default if "default" in packet.overloads() else packet.grad_input
    moved, straight = torch.rand(2, 9, 2).transpose(1, 2), torch.rand(2, 2, 9)
    layouts = (moved, straight, torch.rand(9, 2, 2).permute(2, 1, 0))
    for grad in layouts:
        for x in layouts:
            real = operator(grad, x, *GRADIENTS[name])
            mode = new_fake_mode(None)
            fakes = [
                mode.from_tensor(each) if isinstance(each, Tensor) else each for each in (grad, x, *GRADIENTS[name])
            ]
            with mode:
                fake = operator(*fakes)
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_a_fake_takes_the_class_of_a_subclass_of_parameter() -> None:
    class Mine(torch.nn.Parameter):
        def doubled(self) -> torch.Tensor:
            return self * 2

    mode = fake_tensors.new_fake_mode(None)
    fake = fake_tensors.new_fake(mode, torch.ones(2, 3)).requires_grad_()
    fake_tensors.take_class(fake, Mine)
    assert isinstance(fake, Mine)
    assert type(fake.doubled()) is fake_tensors.FakeTensor
    assert fake.doubled().requires_grad
    assert not fake_tensors.overrides_functions(Mine)


def test_results_on_a_subclass_of_tensor_are_of_the_subclass() -> None:
    class Tagged(torch.Tensor):
        pass

    assert fake_tensors.overrides_functions(Tagged)
    assert type(torch.ones(2).as_subclass(Tagged) * 2) is Tagged
    assert not any(map(fake_tensors.overrides_functions, (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)))
