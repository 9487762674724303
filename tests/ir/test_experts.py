"""Products of experts' matrices (`_grouped_mm`): a fake result looks like the real one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wholestep._torch_compat import FakeTensorMode, new_fake_mode

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
