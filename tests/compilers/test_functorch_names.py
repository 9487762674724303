"""Code that was written for `functorch.compile` runs with the import changed, and does what eager does."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import functorch.compile
import pytest
import torch
from torch import Tensor, fx, nn

import wholestep as ws
from debug.graphs import chain, has_mul
from wholestep import compilers
from wholestep.compilers import aot_function, aot_module, nop

NAMES = [name for name in dir(functorch.compile) if not name.startswith("_")]
NOT_TAKEN = {
    "aot_function": {"enable_log", "disable_functionalization", "_disable_torch_fn_metadata_mode"},  # by **settings
    "compiled_function": {"enable_log", "disable_functionalization", "_disable_torch_fn_metadata_mode"},
}
"""Arguments that are not here on purpose (docs/see-what-autograd-made.md)."""


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_functorch_is_here_and_takes_its_arguments_in_their_order(name: str) -> None:
    theirs, ours = getattr(functorch.compile, name), getattr(compilers, name)
    assert name in compilers.__all__
    if not callable(theirs):
        return
    wanted = [each for each in inspect.signature(theirs).parameters if each not in NOT_TAKEN.get(name, ())]
    found = [each for each in inspect.signature(ours).parameters if each in wanted]
    assert found == wanted


class Counted:
    """A compiler that counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return nop(gm, inputs)


def test_symbolic_sizes_are_traced_once_and_again_where_the_trace_relied_on_them() -> None:
    def branches(x: Tensor, scale: int) -> Tensor:
        return (x * scale if x.shape[0] > 4 else x + scale).sum()

    counted = Counted()
    compiled = aot_function(branches, counted, dynamic=True)
    for rows, columns, scale in [(2, 3, 5), (3, 4, 6), (4, 6, 7), (5, 3, 2), (9, 4, -2), (7, 4, -5), (1, 5, 2)]:
        x = torch.randn(rows, columns, requires_grad=True)
        compiled(x, scale).backward()
        assert torch.equal(x.grad, torch.full_like(x, scale if rows > 4 else 1))
        with torch.no_grad():
            assert torch.equal(compiled(x, scale), branches(x, scale))
    # With and without gradients: few rows, many rows, a negative scale, one row.
    assert compiled.graphs == 8
    assert counted.graphs == 12


def test_sizes_that_were_equal_and_no_longer_are_get_a_trace_of_their_own() -> None:
    def product(x: Tensor, k: int) -> Tensor:
        return x @ x.t() * k

    compiled = aot_function(product, nop, dynamic=True)
    for x, k in [(torch.randn(3, 3), 3), (torch.randn(4, 4), 4), (torch.randn(4, 5), 4), (torch.randn(4, 5), 6)]:
        assert torch.equal(compiled(x, k), product(x, k))
    assert compiled.graphs == 3
    turned = torch.randn(5, 6).t()
    assert torch.equal(compiled(turned, 2), product(turned, 2))


def test_equal_floats_of_another_sign_are_not_one_argument() -> None:
    compiled = aot_function(lambda x, k: x * k, nop)
    for k in (0.0, -0.0, float("nan"), float("nan")):
        assert torch.equal(torch.signbit(compiled(torch.ones(1), k)), torch.signbit(torch.ones(1) * k))
    assert compiled.graphs == 3


def test_positional_arguments_of_torchs_aot_module_and_a_cut_of_torchs() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.BatchNorm1d(8)), torch.randn(3, 4)
    compiled = aot_module(model, nop, nop, compilers.min_cut_rematerialization_partition)
    assert torch.equal(compiled(x), model(x))
    compiled(x).sum().backward()
    assert int(model[2].num_batches_tracked) == 3
    with pytest.raises(TypeError, match="fw_compiler"):
        aot_module(model)


def test_a_buffer_that_is_replaced_is_refused_instead_of_lost() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return x * self.calls

    with pytest.raises(ws.errors.UnsupportedError, match="calls"):
        aot_module(Counts(), nop)(torch.ones(2))


def test_functorchs_minifier_gives_back_a_graph_and_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [torch.randn(6, 8), torch.randn(6, 8)]
    small, values = compilers.minifier(chain(20, 11), inputs, has_mul, save_dir=str(tmp_path))
    assert len(small.graph.nodes) <= 4
    assert has_mul(small, values)
    assert str(tmp_path / "repro.py") in capsys.readouterr().out
    seen: list[Any] = []
    compilers.minifier(chain(20, 11), inputs, has_mul, lambda *state: seen.append(state))
    assert len(seen) == 1


def test_the_minifier_takes_all_of_functorchs_arguments(tmp_path: Path) -> None:
    inputs = [torch.randn(6, 8), torch.randn(6, 8)]
    seen: list[Any] = []

    def notes(gm: fx.GraphModule, values: Any) -> bool:
        return has_mul(gm, values)

    small, _ = compilers.minifier(
        chain(20, 11),
        inputs,
        notes,
        lambda *state: seen.append(state),
        save_dir=str(tmp_path),
        offload_to_disk=True,
        skip_offload=True,
        skip_sanity=True,
        max_granularity=4,
    )
    assert len(small.graph.nodes) <= 4
    assert len(seen) == 1
    with pytest.raises(ValueError, match="max_granularity 3 not power of two"):
        compilers.minifier(chain(20, 11), inputs, has_mul, max_granularity=3)
    with pytest.raises(ValueError, match="without a save_dir"):
        compilers.minifier(chain(20, 11), inputs, has_mul, offload_to_disk=True)


def test_drawings_as_functorch_asks_for_them(tmp_path: Path) -> None:
    gm = fx.symbolic_trace(lambda x: x.sin())
    path = compilers.draw_graph(gm, str(tmp_path / "forward"), "my <forward>", clear_meta=True)
    assert path.name == "forward.svg"
    assert "<title>my &lt;forward&gt;</title>" in path.read_text(encoding="utf-8")


def test_drawings_show_lines_of_code_and_other_shapes_of_nodes(tmp_path: Path) -> None:
    def waves(x: Tensor) -> Tensor:
        return x.sin()

    gm = ws.capture(waves, torch.randn(2))
    path = compilers.draw_graph(gm, tmp_path / "g.dot", "g", False, None, True, "ellipse")
    text = path.read_text(encoding="utf-8")
    assert 'shape="ellipse"' in text
    assert "test_functorch_names.py:" in text
    assert "test_functorch_names.py:" not in compilers.draw_graph(gm, tmp_path / "h.dot").read_text(encoding="utf-8")


def test_an_interpreter_runs_another_graph_with_the_modules_attributes() -> None:
    gm = fx.symbolic_trace(lambda x: x.sin())
    other = fx.symbolic_trace(lambda x: x.cos()).graph
    x = torch.randn(3)
    assert torch.equal(compilers.DebugInterpreter(gm, True, other).run(x), x.cos())
