"""memory_efficient_fusion trains functions and modules as eager does, and keeps less between forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import default_decompositions as torchs_decompositions
from torch import Tensor, fx, nn

import wholestep as ws
from compilers.networks import SMALL, assert_trains_as_in_eager, hugging_face
from selection import each_now
from wholestep.compilers import boxed, memory_efficient_fusion


@pytest.mark.parametrize("network", each_now(SMALL, "mlp"))
def test_a_module_trains_as_in_eager(network: str) -> None:
    model, inputs = SMALL[network]()
    fused = memory_efficient_fusion(model)
    assert isinstance(fused, nn.Module)
    assert_trains_as_in_eager(model, memory_efficient_fusion, inputs, exact=False)


def test_a_function_has_the_gradients_and_random_numbers_of_eager() -> None:
    def function(x: Tensor) -> Tensor:
        return nn.functional.dropout(x.sin().cos(), 0.5).sum()

    x, y = (torch.linspace(0, 1, 20).requires_grad_() for _ in range(2))
    torch.manual_seed(3)
    expected = function(x)
    torch.manual_seed(3)
    found = memory_efficient_fusion(function)(y)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    torch.testing.assert_close(y.grad, x.grad)


def kept(partition: dict[str, Any]) -> int:
    """How many tensors the forward of a chain of cheap operators keeps for its backward."""
    counts: list[int] = []

    def counting(gm: fx.GraphModule, inputs: Any) -> Any:
        counts.append(len(gm.graph.output_node().args[0]))
        return boxed(gm)

    def function(x: Tensor) -> Tensor:
        return x.sin().cos().tanh().exp().sigmoid()

    fused = memory_efficient_fusion(function, fw_compiler=counting, bw_compiler=ws.compilers.nop, **partition)
    x = torch.randn(4, requires_grad=True)
    fused(x).sum().backward()
    return counts[0]


def test_the_min_cut_saves_less_than_eager() -> None:
    from functorch.compile import default_partition

    assert kept({}) < kept({"partition_fn": default_partition})


def test_the_table_of_decompositions_is_that_of_functorch() -> None:
    assert ws.compilers.default_decompositions.keys() == torchs_decompositions.keys()
    assert all(callable(each) for each in ws.compilers.default_decompositions.values())


class Deep(nn.Module):
    """Wide activations between narrow ones."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        made = (nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(layers))
        self.layers = nn.Sequential(*made)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def bytes_kept(budget: float, **options: Any) -> int:
    """What the forward keeps for its backward under a budget, besides its inputs."""
    found: list[int] = []

    def counting(gm: fx.GraphModule, inputs: Any) -> Any:
        results = gm.graph.output_node().args[0]
        made = [node.meta["val"] for node in results[1:] if isinstance(node, fx.Node) and node.op != "placeholder"]
        found.append(sum(value.numel() * value.element_size() for value in made if isinstance(value, Tensor)))
        return boxed(gm)

    torch.manual_seed(0)
    model, x = Deep(), torch.randn(128, 8)
    expected = model(x).pow(2).sum()
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    settings = {"fw_compiler": counting, "bw_compiler": ws.compilers.nop, **options}
    loss = memory_efficient_fusion(model, memory_budget=budget, **settings)(x).pow(2).sum()
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, mine)
    return found[0]


def test_a_smaller_budget_saves_less() -> None:
    kept_bytes = [bytes_kept(budget) for budget in (0.0, 1.0)]
    assert kept_bytes == sorted(kept_bytes)
    assert kept_bytes[0] < 0.5 * kept_bytes[-1]


def test_a_policy_saves_what_it_says() -> None:
    assert bytes_kept(0.0, policy={"aten.addmm": "save"}) > bytes_kept(0.0)


def test_a_budget_that_cannot_be_met_is_an_error() -> None:
    with pytest.raises(ws.errors.MemoryBudgetError, match="smallest peak"):
        memory_efficient_fusion(Deep(), memory_budget=100)(torch.randn(128, 8)).sum().backward()


@pytest.mark.long  # a budget without Inductor, and Inductor without a budget, run always
def test_modules_train_under_a_budget_with_inductor() -> None:
    assert_trains_as_in_eager(
        Deep(), lambda model: memory_efficient_fusion(model, memory_budget=0.2), {"x": torch.randn(32, 8)}, exact=False
    )


def test_torch_compile_takes_a_budget_too() -> None:
    torch._dynamo.reset()
    assert_trains_as_in_eager(
        Deep(layers=1),
        lambda model: torch.compile(model, backend="ws_fusion", options={"memory_budget": 0.0}),
        {"x": torch.randn(32, 8)},
        exact=False,
    )
    with pytest.raises(Exception, match="memory_budget"):
        torch.compile(Deep(layers=1), backend="ws_fusion", options={"budget": 0.0})(torch.randn(32, 8))


def test_hugging_face_models_train_under_a_budget() -> None:
    model, inputs = hugging_face("Bert")
    fused = partial(memory_efficient_fusion, fw_compiler=ws.compilers.nop, memory_budget=0.2)
    assert_trains_as_in_eager(model, fused, inputs, exact=False)


def test_a_function_that_returns_a_tuple_does_so_when_compiled() -> None:
    fused = memory_efficient_fusion(lambda x: (x.sin(), x.cos()), fw_compiler=ws.compilers.nop)
    assert isinstance(fused(torch.randn(3, requires_grad=True)), tuple)
    listed = memory_efficient_fusion(lambda x: [x.sin(), x.cos()], fw_compiler=ws.compilers.nop)
    assert isinstance(listed(torch.randn(3, requires_grad=True)), list)
