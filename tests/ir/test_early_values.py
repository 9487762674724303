"""Branches on random numbers that always go the same way."""

from __future__ import annotations

import pytest
import torch

from wholestep.ir.early_values import KnownDraws, compared

SIGNS = {"<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge}


@pytest.mark.parametrize("sign", SIGNS)
def test_an_answer_is_given_only_where_all_draws_agree(sign):
    ends = torch.tensor([0.0, 0.25, 1.0 - 2**-24])
    for number in (-1.0, -0.5, 0, 0.0, 0.5, 1, 1.0, 2.0):
        found = SIGNS[sign](ends, number)
        answer = compared(sign, number)
        assert answer is None or bool((found == answer).all())
        if number in (-1.0, 1.0, 2.0):
            assert answer is not None
    assert compared("<", 0.0) is False
    assert compared(">=", 0.0) is True
    assert compared("<", 0.1) is None
    assert compared("<", torch.zeros(())) is None


def test_the_value_is_not_asked_for():
    with KnownDraws():
        draw = torch.rand([], device="meta")
        assert not draw < 0.0
        assert (draw >= 0.0).item()
        with pytest.raises(RuntimeError, match="meta"):
            bool(draw < 0.5)
        with pytest.raises(RuntimeError, match="meta"):
            bool(draw - 1 < 0.0)
