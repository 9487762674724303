"""What a pass does to the module around a graph: kept where it succeeds, undone where it does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from wholestep.errors import PassError
from wholestep.passes import graph_optimization_pass

aten = torch.ops.aten


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


@graph_optimization_pass(numerics="changes")
def adds_constants_to_a_copy(gm: fx.GraphModule) -> fx.GraphModule:
    new = copy.deepcopy(gm)
    new.register_buffer("seven", torch.full((2,), 7.0))
    new.deep = nn.Module()
    new.deep.three = nn.Parameter(torch.full((2,), 3.0))
    output = new.graph.output_node()
    with new.graph.inserting_before(output):
        total: Any = output.args[0]
        for name in ("seven", "deep.three"):
            total = new.graph.call_function(aten.add.Tensor, (total, new.graph.get_attr(name)))
        output.args = (total,)
    return new


def test_a_new_module_that_a_pass_returns_brings_its_constants() -> None:
    gm, x = fx.symbolic_trace(Scaled()), torch.randn(3, 2)
    expected = gm(x) + 7 + 3
    returned = adds_constants_to_a_copy(gm)
    assert returned is gm
    assert torch.equal(gm(x), expected)
    assert "seven" in dict(gm.named_buffers())
    assert "deep.three" in dict(gm.named_parameters())


@graph_optimization_pass(numerics="exact")
def changes_attributes_and_fails(gm: fx.GraphModule) -> None:
    gm.scale = torch.zeros(2)
    gm.register_buffer("other", torch.ones(1))
    gm.note = "half done"
    gm.inner = nn.Identity()
    raise RuntimeError("boom")


def test_attributes_are_what_they_were_after_a_pass_failed() -> None:
    gm, x = fx.symbolic_trace(Scaled()), torch.randn(3, 2)
    expected, names = gm(x), list(gm.state_dict())
    with pytest.raises(PassError, match="boom"):
        changes_attributes_and_fails(gm)
    assert torch.equal(gm(x), expected)
    assert list(gm.state_dict()) == names
    assert not hasattr(gm, "note")
    assert not hasattr(gm, "other")
