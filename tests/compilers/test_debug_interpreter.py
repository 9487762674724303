"""Every way in which a value can differ from metadata is found, named, and nothing else is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from wholestep.compilers import DebugInterpreter
from wholestep.errors import DebugError


def traced(function: Callable[..., Any], *inputs: Any, mode: str = "fake") -> fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def node_of(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def found(gm: fx.GraphModule, *inputs: Any, **options: bool) -> list[tuple[str, str]]:
    interpreter = DebugInterpreter(gm, raise_error=False, **options)
    interpreter.run(*inputs)
    return [(each.node, each.difference.what) for each in interpreter.mismatches]


def fake_like(gm: fx.GraphModule, name: str, change: Callable[[Tensor], Tensor]) -> None:
    node = node_of(gm, name)
    with node.meta["val"].fake_mode:
        node.meta["val"] = change(node.meta["val"])


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("dtype", lambda val: val.double()),
        ("device", lambda val: val.to("meta")),
        ("number of dimensions", lambda val: val[0]),
        ("size", lambda val: val[:, :2]),
        ("stride", lambda val: val.t().contiguous().t()),
        ("offset", lambda val: torch.empty(100).as_strided(val.shape, val.stride(), 5)),
        ("number of values", lambda val: (val, val)),
    ],
)
def test_wrong_metadata_is_reported_with_its_node(what: str, change: Callable[[Tensor], Any]) -> None:
    gm = traced(lambda x: x.sin() * 2, torch.randn(2, 3))
    x = torch.randn(2, 3)
    assert found(gm, x) == []
    fake_like(gm, "sin", change)
    assert ("sin", what) in found(gm, x)
    with pytest.raises(DebugError, match=rf"(?s)WS-DEBUG.*sin contradicts the metadata.*{what}"):
        DebugInterpreter(gm).run(x)


def test_wrong_contiguity_is_reported() -> None:
    gm = traced(lambda x: x.sin(), torch.randn(2, 3))
    assert ("sin", "contiguity") in found(gm, torch.randn(3, 2).t())


def test_strides_of_single_elements_and_of_empty_tensors_do_not_count() -> None:
    gm = traced(lambda x: x + 1, torch.randn(1, 3))
    assert found(gm, torch.randn(5, 3)[2:3].as_strided((1, 3), (77, 1), 6)) == []
    gm = traced(lambda x: x + 1, torch.randn(0, 3))
    assert found(gm, torch.randn(3, 0).t()) == []


def test_inputs_at_another_storage_offset_and_their_views_are_accepted() -> None:
    gm = traced(lambda x: x[1:] + x[:-1], torch.randn(10)[2:6])
    memory = torch.randn(20)
    assert found(gm, memory[7:11]) == []
    assert found(gm, memory[:4]) == []


def test_a_copy_where_metadata_says_view_is_reported() -> None:
    gm = traced(lambda x: x.view(-1) + 1, torch.randn(2, 3))
    node = node_of(gm, "view")
    node.target = lambda x, size: x.reshape(size).clone()
    assert ("view", "memory") in found(gm, torch.randn(2, 3))


@pytest.fixture
def library() -> Any:
    with torch.library._scoped_library("ws_test_compilers", "FRAGMENT") as lib:
        yield lib


def test_an_undeclared_alias_of_an_argument_is_reported(library: Any) -> None:
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x, "CPU")
    library.impl("same", lambda x: x.new_empty(x.shape), "Meta")
    gm = traced(lambda x: torch.ops.ws_test_compilers.same(x) + 1, torch.randn(3))
    assert found(gm, torch.randn(3)) == [("same", "memory")]


def test_the_memory_of_each_of_several_results_is_checked(library: Any) -> None:
    library.define("halves(Tensor x) -> (Tensor, Tensor)")
    library.impl("halves", lambda x: (x[2:].clone(), x[:2]), "CPU")
    library.impl("halves", lambda x: (x.new_empty(2), x.new_empty(2)), "Meta")
    gm = traced(lambda x: torch.ops.ws_test_compilers.halves(x)[1] + 1, torch.randn(4))
    assert found(gm, torch.randn(4)) == [("halves", "memory")]
    gm = traced(lambda x: x.split(2)[1] + 1, torch.randn(4))
    assert found(gm, torch.randn(4)) == []
    node_of(gm, "split").target = lambda x, size: [part.clone() for part in x.split(size)]
    assert ("split", "memory") in found(gm, torch.randn(4))


def test_composite_operators_may_return_their_argument() -> None:
    with torch.inference_mode():
        gm = traced(lambda x: torch.dropout(x, 0.5, False) + 1, torch.randn(3))
        node_of(gm, "add").prev.meta["val"] = node_of(gm, "add").meta["val"]
        assert found(gm, torch.randn(3)) == []


def test_unsafe_views_are_a_known_fault() -> None:
    def cells(x: Tensor) -> list[Tensor]:
        return [part + 1 for part in (*x.unsafe_split(2), *x.unsafe_chunk(2), *x.unsafe_split_with_sizes([1, 3]))]

    gm = traced(cells, torch.randn(4))
    assert found(gm, torch.randn(4)) == []
    assert found(gm, torch.randn(9)[3:7]) == []


def test_float32_statistics_of_half_precision_norms_are_a_known_fault() -> None:
    def norms(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        layer = torch.native_layer_norm(x, [4], weight, bias, 1e-5)
        return [*layer, *torch.native_group_norm(x, weight, bias, 3, 4, 1, 2, 1e-5)]

    inputs = torch.randn(3, 4).bfloat16(), torch.ones(4), torch.zeros(4)
    gm = traced(norms, *inputs)
    assert found(gm, *inputs) == []
    fake_like(gm, "getitem", lambda val: val.float())
    assert found(gm, *inputs) == [("getitem", "dtype")]


def test_a_custom_operator_with_a_wrong_fake_kernel_is_named_with_the_line_of_the_user(library: Any) -> None:
    library.define("turned(Tensor x) -> Tensor")
    library.impl("turned", lambda x: x.t().contiguous(), "CPU")
    library.impl("turned", lambda x: x.new_empty(x.shape), "Meta")

    class Turns(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.ws_test_compilers.turned(x) + 1  # the line of the user

    torch._dynamo.reset()
    compiled = torch.compile(Turns(), backend=ws.compilers.as_backend(ws.compilers.debug_nop))
    with pytest.raises(DebugError) as caught:
        compiled(torch.randn(2, 3))
    text = str(caught.value)
    assert "size is (3, 2), metadata says (2, 3)" in text
    assert "test_debug_interpreter.py" in text
    assert "# the line of the user" in text
    assert "turned" in text.splitlines()[0]


def test_backed_sizes_are_bound_at_the_inputs_and_checked_after() -> None:
    gm = traced(lambda x, y: torch.cat([x, x]) + y.shape[0], torch.randn(3), torch.randn(5), mode="symbolic")
    assert found(gm, torch.randn(4), torch.randn(7)) == []
    fake_like(gm, "cat", lambda val: val[: val.shape[0] // 2])
    assert ("cat", "size") in found(gm, torch.randn(4), torch.randn(7))
    with pytest.raises(DebugError, match=r"with s\d+=4"):
        DebugInterpreter(gm).run(torch.randn(4), torch.randn(7))


def test_two_inputs_of_the_same_symbolic_size_must_have_it() -> None:
    gm = traced(lambda x, y: x + y, torch.randn(3), torch.randn(3), mode="symbolic")
    assert found(gm, torch.randn(5), torch.randn(5)) == []
    assert ("y_1", "size") in found(gm, torch.randn(5), torch.randn(1))


def test_unbacked_scalars_are_bound_where_they_are_computed() -> None:
    def function(x: Tensor) -> Tensor:
        count = x.sum().item()
        torch._check(count >= 0)
        return torch.zeros(count) + 1

    gm = traced(function, torch.tensor([2, 3]), mode="symbolic")
    assert found(gm, torch.tensor([1, 6])) == []
    zeros = next(node for node in gm.graph.nodes if "zeros" in node.name)
    zeros.args = ([3], *zeros.args[1:])
    assert (zeros.name, "size") in found(gm, torch.tensor([1, 6]))


def test_a_symbol_out_of_its_range_is_reported() -> None:
    def function(x: Tensor) -> Tensor:
        count = x.item()
        torch._check(count >= 2)
        torch._check(count <= 5)
        return torch.zeros(count)

    gm = traced(function, torch.tensor(3), mode="symbolic")
    assert found(gm, torch.tensor(4)) == []
    assert any(what == "range of value" for _, what in found(gm, torch.tensor(9)))


def test_a_plain_scalar_with_another_value_is_reported() -> None:
    gm = traced(lambda x: x + 1, torch.randn(2))
    with gm.graph.inserting_before(node_of(gm, "add")):
        wrong = gm.graph.call_function(operator.add, (1, 2))
    wrong.meta["val"] = 4
    gm.graph.lint()
    assert (wrong.name, "value") in found(gm, torch.randn(2))


def test_the_node_that_produces_nan_or_inf_is_named() -> None:
    gm = traced(lambda x: (x.log() + 1).exp() * 2, torch.rand(3))
    bad = torch.tensor([1.0, -1.0, 0.0])
    assert found(gm, bad) == []
    assert found(gm, bad, check_nan=True) == [("log", "a result")]
    assert found(gm, bad, check_inf=True) == [("log", "a result")]
    assert found(gm, torch.tensor([float("nan")] * 3), check_nan=True) == []


def test_an_infinite_constant_in_the_graph_is_accepted() -> None:
    gm = traced(lambda x: x.masked_fill(x > 0, float("-inf")).softmax(-1), torch.randn(3))
    assert found(gm, torch.tensor([1.0, -1.0, 2.0]), check_inf=True, check_nan=True) == []
    gm = traced(lambda x: torch.complex(x, x.log()) * 2, torch.randn(3))
    assert [node for node, _ in found(gm, -torch.ones(3), check_nan=True)] == ["log"]
    gm = traced(lambda x: x / x.conj(), torch.randn(3, dtype=torch.complex64))
    with pytest.raises(DebugError, match="is not finite: a result is nan, and no argument is"):
        DebugInterpreter(gm, check_nan=True).run(torch.zeros(3, dtype=torch.complex64))


def test_all_mismatches_are_collected_or_the_run_stops_at_the_first() -> None:
    ran: list[str] = []
    gm = traced(lambda x: x.sin().cos().tan(), torch.randn(3))
    for name in ("sin", "cos"):
        fake_like(gm, name, lambda val: val.double())

    class Noted(DebugInterpreter):
        def run_node(self, n: fx.Node) -> Any:
            ran.append(n.name)
            return super().run_node(n)

    with pytest.raises(DebugError) as caught:
        Noted(gm, stop=False).run(torch.randn(3))
    assert [each.node for each in caught.value.mismatches] == ["sin", "cos"]
    assert "2 mismatches in all" in str(caught.value)
    assert ran[-1] == "output"
    ran.clear()
    with pytest.raises(DebugError) as caught:
        Noted(gm).run(torch.randn(3))
    assert [each.node for each in caught.value.mismatches] == ["sin"]
    assert "tan" not in ran


def test_it_needs_no_shape_env_where_torchs_own_breaks() -> None:
    from torch._functorch.compilers import debug_nop as torchs

    def function(x: Tensor) -> Tensor:
        return x.sin()

    x = torch.randn(3)
    with pytest.raises(AssertionError, match="shape_env"):
        torch._functorch.aot_autograd.aot_function(function, fw_compiler=torchs)(x)
    ours = torch._functorch.aot_autograd.aot_function(function, fw_compiler=ws.compilers.debug_nop)
    assert torch.equal(ours(x), x.sin())


def test_an_effect_token_is_none_at_run_time() -> None:
    compiled = aot_function(
        torch.linalg.solve, fw_compiler=ws.compilers.debug_nop, bw_compiler=ws.compilers.debug_nop
    )  # which checks for errors, an effect
    a, b = torch.eye(3).mul(2).requires_grad_(), torch.ones(3)
    compiled(a, b).sum().backward()
    assert torch.equal(a.grad, torch.full((3, 3), -0.25))
