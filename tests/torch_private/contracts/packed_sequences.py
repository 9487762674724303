"""What wholestep relies on in `torch_private/packed_sequences.py`."""

from __future__ import annotations

import torch
from torch import nn

from torch_private.contract_table import contracts_of
from wholestep.torch_private import packed_sequences
from wholestep.torch_private.fake_tensors import new_fake_mode
from wholestep.torch_private.symbolic_shapes import ShapeEnv

of = contracts_of("packed_sequences")


@of("packed_operators", "NAMESPACE")
def packed_operators_compute_what_the_modules_of_torch_do() -> None:
    operators = packed_sequences.packed_operators()
    assert operators.name == packed_sequences.NAMESPACE
    x, lengths = torch.rand(4, 3, 2), torch.tensor([4, 2, 1])
    layer = nn.GRU(2, 5)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
    expected, hidden = layer(packed)
    data, sizes = operators.pack(x, lengths, False)
    assert torch.equal(data, packed.data)
    assert torch.equal(sizes, packed.batch_sizes)
    weights, state = list(layer.parameters()), torch.zeros(1, 3, 5)
    found, last = operators.packed_rnn("gru", data, sizes, [state], weights, True, 1, False)
    assert torch.equal(found, expected.data)
    assert torch.equal(last, hidden)
    padded, again = operators.pad(found, sizes, 3, False, 0.0, 4)
    assert torch.equal(padded, nn.utils.rnn.pad_packed_sequence(expected)[0])
    assert torch.equal(again, lengths)
    ones = torch.ones_like(found)
    needed = [True, *([False] * 5)]
    settings = ("gru", [ones, None], data, sizes, [state], [each.detach() for each in weights], True, 1, False)
    leaf = x.clone().requires_grad_()
    layer(nn.utils.rnn.pack_padded_sequence(leaf, lengths))[0].data.sum().backward()
    (grad,) = operators.packed_rnn_backward(*settings, needed)
    assert leaf.grad is not None
    assert torch.allclose(operators.pack_backward(grad, list(x.shape), sizes, False), leaf.grad)
    assert torch.equal(operators.pad_backward(padded, lengths, found.shape[0], False), found)


@of("packed_operators")
def fakes_of_packed_operators_have_sizes_that_a_run_decides() -> None:
    operators = packed_sequences.packed_operators()
    mode = new_fake_mode(ShapeEnv())
    x, lengths = mode.from_tensor(torch.rand(4, 3, 2), static_shapes=True), mode.from_tensor(torch.tensor([4, 2, 1]))
    data, sizes = operators.pack(x, lengths, False)
    assert isinstance(data.shape[0], torch.SymInt)
    assert isinstance(sizes.shape[0], torch.SymInt)
    padded, _ = operators.pad(data, sizes, 3, False, 0.0, 4)
    assert padded.shape == x.shape
