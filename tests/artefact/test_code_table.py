"""The table of code that a saved step compares: what counts as another code, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wholestep.artefact import code_table

ROOTS = (nn.Linear, torch.optim.AdamW, torch.optim.SGD)


def test_what_dynamo_does_at_the_first_use_of_torch_compile_is_no_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_table.code_of(ROOTS)
    disable: Any = torch._dynamo.disable
    monkeypatch.setattr(nn.Linear, "forward", disable(nn.Linear.forward))
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):  # AdamW has it from Adam
        monkeypatch.setattr(optimizer, "_init_group", disable(optimizer._init_group), raising=False)  # type: ignore[attr-defined]
    assert list(code_table.differences(before, code_table.code_of(ROOTS))) == []


def test_a_method_that_was_replaced_is_another_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_table.code_of(ROOTS)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T)
    found = list(code_table.differences(before, code_table.code_of(ROOTS)))
    assert found == ["the code of torch.nn.modules.linear.Linear is different"]
