"""A policy that has no effect, or cannot be followed, warns."""

from __future__ import annotations

import pytest
import torch

from remat.steps import Net, Trained
from wholestep.compilers import memory_efficient_fusion, nop
from wholestep.errors import MemoryPolicyWarning, OptionError


def test_a_pattern_that_matches_nothing_gets_close_names():
    with pytest.warns(
        MemoryPolicyWarning, match=r"'model\.block\.1' names no module .* Near to it: .*'model\.blocks\.1"
    ):
        Trained(memory_budget=0.5, policy={"model.block.1": "recompute"}, steps=1)
    with pytest.warns(MemoryPolicyWarning, match=r"Near to it: .*'aten\.addmm'"):
        Trained(memory_budget=0.5, policy={"aten.admm": "save"}, steps=1)


def test_an_operator_that_a_model_does_not_have_is_accepted():
    Trained(memory_budget=0.5, policy={torch.ops.aten.convolution: "save"}, steps=1)


@pytest.mark.parametrize(
    "policy",
    [
        {"aten.bernoulli": "recompute"},
        pytest.param(lambda n: "recompute" if "bernoulli" in str(n.target) else None, marks=pytest.mark.long),
    ],
)
def test_a_policy_to_recompute_random_ops_warns(policy):
    with pytest.warns(MemoryPolicyWarning, match="done nowhere: bernoulli.*random numbers"):
        found = Trained(memory_budget=0.5, policy=policy, steps=2)
    assert found.equals(Trained(eager=True, steps=2))


def test_a_module_with_dropout_is_recomputed_except_for_its_mask():
    found = Trained(memory_budget=1.0, policy={"model.blocks.2": "recompute"})
    assert found.memory.recomputed
    assert found.equals(Trained(eager=True))


def test_an_error_in_a_policy_names_the_node_and_the_line():
    def policy(node):
        return 1 / 0 if "gelu" in str(node.target) else None

    with pytest.raises(OptionError, match=r"ZeroDivisionError: division by zero") as found:
        Trained(memory_budget=0.5, policy=policy, steps=1)
    assert "gelu_default = aten.gelu.default, in module 'model.blocks.0'" in str(found.value)
    assert "steps.py" in str(found.value)
    assert isinstance(found.value.__cause__, ZeroDivisionError)


def test_memory_efficient_fusion_warns_too():
    fused = memory_efficient_fusion(Net(), memory_budget=0.5, policy={"nosuch": "save"}, fw_compiler=nop)
    with pytest.warns(MemoryPolicyWarning, match="'nosuch' names no module and no operator of the forward"):
        fused(torch.randn(4, 16)).sum().backward()
