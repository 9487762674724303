"""Valid and invalid budgets and policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import wholestep as ws
from wholestep.errors import OptionError
from wholestep.ir.step_graph import shown
from wholestep.remat.options import Budget


@pytest.mark.parametrize(
    ("given", "most"),
    [("12GiB", 12 * 2**30), ("800MB", 800_000_000), ("1.5 KiB", 1536), ("77", 77), (5000, 5000), (2e9, 2_000_000_000)],
)
def test_bytes(given, most):
    assert Budget.of(given) == Budget(most=most)


def test_numpy_scalars():
    assert Budget.of(np.int64(5000)) == Budget.of(np.float32(5000.0)) == Budget(most=5000)
    assert Budget.of(np.float32(0.5)) == Budget.of(np.float64(0.5)) == Budget(fraction=0.5)


def test_fractions():
    assert Budget.of(0.0) == Budget(fraction=0.0)
    assert Budget.of(1.0) == Budget(fraction=1.0)
    assert Budget.of(None) is None


@pytest.mark.parametrize(
    "given",
    [
        "12 apples",
        "GiB",
        "-3MB",
        "1e3",
        "0.5",
        "0B",
        "9" * 9 + "TiB",
        True,
        1,
        0,
        -5,
        -0.5,
        1.5,
        float("nan"),
        [],
        float("inf"),
        np.bool_(True),
        np.int64(1),
        np.float32(1.5),
        np.array(0.5),
    ],
)
def test_an_invalid_budget_is_refused_with_valid_examples(given):
    with pytest.raises(OptionError, match="12GiB"):
        ws.compile(lambda: None, memory_budget=given)


@pytest.mark.parametrize("policy", [{"model": "keep"}, {3: "save"}, "model", {"": "save"}])
def test_an_invalid_policy_is_refused(policy):
    with pytest.raises(OptionError, match=r"recompute|policy"):
        ws.compile(lambda: None, memory_budget=1.0, policy=policy)


def test_a_policy_needs_a_budget():
    with pytest.raises(OptionError, match="memory_budget"):
        ws.compile(lambda: None, policy={torch.ops.aten.mm: "save"})


def test_a_budget_together_with_shed_is_refused():
    with pytest.raises(OptionError, match="shed=1024") as raised:
        ws.compile(lambda: None, memory_budget="1GiB", lower_options={"shed": 1024})
    assert "leave out one" in str(raised.value)
    ws.compile(lambda: None, memory_budget="1GiB", lower_options={"shed": 0})
    ws.compile(lambda: None, lower_options={"shed": 1024})


def test_bytes_are_shown_with_a_unit():
    assert [shown(n) for n in (12, 2048, 3 * 2**20, 5 * 2**29)] == ["12 B", "2.00 KiB", "3.00 MiB", "2.50 GiB"]
