"""A policy that does nothing, or cannot be obeyed, says so."""

from __future__ import annotations

import pytest
import torch

from remat.steps import Net, Trained
from wholestep.compilers import memory_efficient_fusion, nop
from wholestep.errors import MemoryPolicyWarning, OptionError


def test_a_pattern_that_names_nothing_is_told_what_is_near():
    with pytest.warns(
        MemoryPolicyWarning, match=r"'model\.block\.1' names no module .* Near to it: .*'model\.blocks\.1"
    ):
        Trained(memory_budget=0.5, policy={"model.block.1": "recompute"}, steps=1)
    with pytest.warns(MemoryPolicyWarning, match=r"Near to it: .*'aten\.addmm'"):
        Trained(memory_budget=0.5, policy={"aten.admm": "save"}, steps=1)


def test_an_operator_that_a_model_does_not_have_is_no_mistake():
    Trained(memory_budget=0.5, policy={torch.ops.aten.convolution: "save"}, steps=1)


@pytest.mark.parametrize(
    "policy", [{"aten.bernoulli": "recompute"}, lambda n: "recompute" if "bernoulli" in str(n.target) else None]
)
def test_random_numbers_are_not_drawn_again_and_it_is_said(policy):
    with pytest.warns(MemoryPolicyWarning, match="done nowhere: bernoulli.*random numbers"):
        found = Trained(memory_budget=0.5, policy=policy)
    assert found.equals(Trained(eager=True))


def test_a_module_with_dropout_in_it_is_computed_again_around_that_without_a_word():
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


def test_fusion_says_it_too():
    fused = memory_efficient_fusion(Net(), memory_budget=0.5, policy={"nosuch": "save"}, fw_compiler=nop)
    with pytest.warns(MemoryPolicyWarning, match="'nosuch' names no module and no operator of the forward"):
        fused(torch.randn(4, 16)).sum().backward()
