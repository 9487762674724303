"""Every compiler trains every network as eager does: through torch's own AOT functions, torch.compile and ours."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, aot_module
from torch import Tensor

import wholestep as ws
from compilers.networks import SMALL, assert_trains_as_in_eager, hugging_face
from selection import each_now
from wholestep.compilers import boxed

COMPILERS = ("nop", "print_compile", "ts_compile", "simple_ts_compile", "draw", "debug_nop", "debug_compile")


def compiler(name: str, folder: Path) -> Any:
    if name == "draw":
        return ws.compilers.draw_graph_compile(str(folder / "graph"))
    found = getattr(ws.compilers, name)
    return functools.partial(found, folder=folder) if name == "debug_compile" else found


@pytest.mark.parametrize("network", SMALL)
@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_of_torchs_aot_module_trains_as_eager_does(name: str, network: str, tmp_path: Path) -> None:
    model, inputs = SMALL[network]()
    each = compiler(name, tmp_path)
    assert_trains_as_in_eager(model, lambda m: aot_module(m, fw_compiler=each, bw_compiler=each), inputs)


@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_of_torchs_aot_function_has_the_gradients_of_eager(name: str, tmp_path: Path) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin() * y).sum()

    each = compiler(name, tmp_path)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    aot_function(function, fw_compiler=each, bw_compiler=each)(x, y).backward()
    assert torch.equal(x.grad, x.detach().cos() * y)


@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_runs_a_graph_of_symbolic_sizes(name: str, tmp_path: Path) -> None:
    each = compiler(name, tmp_path)
    compiled = aot_function(lambda x: (x * x.shape[0]).sum(), fw_compiler=each, bw_compiler=each, dynamic=True)
    for size in (3, 5):
        x = torch.randn(size, requires_grad=True)
        compiled(x).backward()
        assert torch.equal(x.grad, torch.full((size,), float(size)))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at the gradient of what it resumes with
@pytest.mark.parametrize("network", each_now(["GPT2", "Bert"], "Bert"))
def test_hugging_face_models_train_through_torch_compile_with_every_compiler(network: str, tmp_path: Path) -> None:
    graphs = 0

    def all_of_them(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        compiled = [compiler(name, tmp_path)(gm, inputs) for name in COMPILERS]

        def run(*args: Any) -> Any:
            expected, *others = [each(*args) for each in compiled]
            for found in others:
                for want, have in zip(expected, found, strict=True):
                    assert torch.equal(want, have) if isinstance(want, Tensor) else want == have
            return expected

        return boxed(run)

    model, inputs = hugging_face(network)
    torch._dynamo.reset()
    backend = ws.compilers.as_backend(all_of_them)
    assert_trains_as_in_eager(model, lambda m: torch.compile(m, backend=backend), inputs)
    assert graphs >= 2


def test_tied_parameters_are_one_input() -> None:
    model, inputs = hugging_face("Bert")
    with pytest.raises(ValueError, match="tied"):
        aot_module(model, fw_compiler=ws.compilers.nop)(**inputs)
    assert_trains_as_in_eager(model, lambda m: ws.compilers.aot(m, fw_compiler=ws.compilers.nop), inputs)


def test_a_call_with_other_shapes_modes_or_arguments_is_traced_on_its_own() -> None:
    dropped = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    compiled = ws.compilers.aot(dropped, fw_compiler=ws.compilers.nop)
    x = torch.randn(3, 4)
    for count, call in enumerate([x, torch.randn(5, 4), x.t().contiguous().t(), x.clone().requires_grad_(), x[1:]], 1):
        assert compiled(call).shape == call.shape
        assert compiled.compiled.graphs == count
    dropped.eval()
    assert torch.equal(compiled(x), dropped(x))
    with torch.no_grad():
        assert torch.equal(compiled(x), dropped(x))
    assert compiled.compiled.graphs == 7
    compiled(x)
    assert compiled.compiled.graphs == 7


def test_one_tensor_passed_twice_is_traced_as_one() -> None:
    compiled = ws.compilers.aot(lambda a, b: (a * b).sum(), fw_compiler=ws.compilers.nop)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    compiled(x, x).backward()
    assert torch.equal(x.grad, 2 * x.detach())
    x.grad = None
    compiled(x, y).backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(y.grad, x.detach())


def test_printing_shows_shapes_and_the_lines_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    aot_function(lambda x: x.sin() + 1, fw_compiler=ws.compilers.print_compile)(torch.randn(2, 3))
    assert 'sin: "f32[2, 3]"' in capsys.readouterr().out


def test_a_compiled_graph_takes_one_list_which_it_empties_or_plain_arguments() -> None:
    gm = torch.fx.symbolic_trace(lambda a, b: a - b)
    compiled = ws.compilers.nop(gm, [])
    box = [torch.tensor(3), torch.tensor(1)]
    assert compiled(box) == 2
    assert box == []
    assert compiled(torch.tensor(3), torch.tensor(1)) == 2
