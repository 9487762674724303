"""Copies of values keep strides and shared memory, and share it with nothing else."""

from __future__ import annotations

import torch

from wholestep.ir.tensor_copies import copy_tensor, copy_values


def test_a_copy_has_the_strides_of_what_it_copies() -> None:
    x = torch.randn(6, 8)
    for tensor in (x, x.t(), x[:, ::2], x[::3, 1:], x[:, :1].expand(6, 5), x[:0], x[2, 3], x.to_sparse()):
        copy = copy_tensor(tensor)
        assert torch.equal(copy.to_dense(), tensor.to_dense())
        if tensor.layout is torch.strided:
            assert copy.stride() == tensor.stride()
            assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not copy.numel()


def test_values_that_share_memory_do_so_after_and_one_given_twice_is_one() -> None:
    x = torch.randn(20)
    values = [x[:12].view(3, 4).t(), 7, x[8:], x, x, torch.randn(2, requires_grad=True), None]
    copies = copy_values(values)
    assert copies[3] is copies[4]
    assert copies[1] == 7
    assert copies[5].requires_grad
    assert copies[6] is None
    copies[3].fill_(0)
    assert not copies[0].any()
    assert not copies[2].any()
    assert x.all()


def test_far_ends_of_one_large_memory_are_copied_alone() -> None:
    x = torch.zeros(100_000)
    first, last = copy_values([x[:2], x[-2:]])
    assert first.untyped_storage().nbytes() + last.untyped_storage().nbytes() == 16
