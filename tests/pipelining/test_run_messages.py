"""Values round-trip through messages: dtypes, shapes, strides, and absent values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wholestep.errors import StageError
from wholestep.pipelining.run import messages
from wholestep.pipelining.run.messages import (
    MessageLayout,
    MicrobatchSize,
    Packet,
    check_values,
    is_dense,
    layout_of,
    unpack,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]


@st.composite
def tensors(draw):
    """Contiguous ones, turned ones, ones with holes, and expanded ones; also numbers and empty ones."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    value = torch.randint(0, 2, [*shape, 2]).to(draw(st.sampled_from(DTYPES)))
    kind = draw(st.sampled_from(["whole", "holes", "turned", "expanded"]))
    if kind == "holes":
        return value[..., 0]
    if kind == "turned":
        return value.movedim(-1, 0)
    return value[..., :1].expand(*shape, 4) if kind == "expanded" else value


def same(ours: torch.Tensor, given: torch.Tensor) -> None:
    assert torch.equal(ours, given)
    assert ours.dtype == given.dtype
    if is_dense(given.shape, given.stride()):
        assert ours.stride() == given.stride()


@given(st.lists(tensors(), max_size=4), st.booleans(), st.data())
def test_a_message_round_trips(values, large, data):
    limit = messages._LARGE
    messages._LARGE = -1 if large else limit
    try:
        layout = layout_of(values, MicrobatchSize(0.5, 3), gradients=False)
        assert layout.fits(values, MicrobatchSize(0.5, 3), False)
        assert MessageLayout.read(layout.write()) == layout
        sent, came = Packet(layout, CPU, receives=False), Packet(layout, CPU, receives=True)
        absent = [data.draw(st.booleans()) for _ in values]
        for missing in (absent, [False] * len(values)):  # the memory is used again, and nothing of before is left
            given_now = [None if gone else value for value, gone in zip(values, missing, strict=True)]
            for target, source in zip(came.received(), sent.fill(given_now), strict=True):
                target.copy_(source)
            assert came.read_lengths() == (0, 0)
            for found, value in zip(came.read_present(), given_now, strict=True):
                assert (found is None) == (value is None)
                if value is not None:
                    same(found, value)
    finally:
        messages._LARGE = limit


@given(st.lists(tensors(), max_size=4))
def test_an_unexpected_message_carries_its_description(values):
    layout = layout_of(values, MicrobatchSize(), gradients=True)
    described = layout.write()
    packet = Packet(layout.together, CPU, front=len(described), receives=False)
    packet.describe(described)
    (extra,) = packet.fill(values)
    usual, came = Packet(MessageLayout(), CPU, receives=False), Packet(MessageLayout(), CPU, receives=True)
    for target, source in zip(came.received(), usual.announce(len(described), extra.numel()), strict=True):
        target.copy_(source)
    front, length = came.read_lengths()
    assert length == extra.numel()
    read = MessageLayout.read(bytes(extra[:front].tolist()))
    assert read == layout
    for found, value in zip(unpack(extra, read.together, front), values, strict=True):
        same(found, value)


def test_another_shape_dtype_stride_gradient_or_weight_does_not_match():
    value = torch.randn(2, 3)
    layout = layout_of([value], MicrobatchSize(), gradients=True)
    assert layout.fits([torch.randn(2, 3)], MicrobatchSize(), True)
    others = [torch.randn(2, 2), value.double(), torch.randn(3, 2).t(), torch.randn(2, 3, requires_grad=True)]
    assert not any(layout.fits([other], MicrobatchSize(), True) for other in others)
    assert not layout.fits([value], MicrobatchSize(0.5), True)
    assert not layout.fits([value], MicrobatchSize(rows=2), True)
    assert not layout.fits([value, value], MicrobatchSize(), True)


@pytest.mark.parametrize("value", [3, None, torch.eye(2).to_sparse()])
def test_only_dense_tensors_can_be_sent(value):
    with pytest.raises(StageError, match="only dense tensors"):
        check_values([torch.ones(1), value], 1)
