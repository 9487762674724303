"""Graphs of every kind that torch makes: trees of inputs, exported programs, real and symbolic traces, all sizes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from lower.graphs import ANYTHING, aten, interpreted, lowered, report
from wholestep.errors import LowerWarning
from wholestep.lower import LowerOptions, partial_lower

__all__ = ["interpreted"]

ANY = LowerOptions(min_aten_ops=1, strict=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, batch: dict[str, Tensor], *, scale: Tensor) -> dict[str, Any]:
        h = self.linear(batch["x"]).relu() * scale
        self.count.add_(1)
        return {"a": h + self.count, "b": (h.t().reshape(-1), [h * 2])}


def inputs(rows: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    return {"x": torch.randn(rows, 4)}, torch.randn(4)


@pytest.mark.usefixtures("interpreted")
class TestTrees:
    @pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
    def test_make_fx_graphs_keep_their_trees(self, tracing: str) -> None:
        def work(batch: dict[str, Tensor], scale: Tensor) -> dict[str, Any]:
            h = batch["x"].relu() * scale
            return {"a": h, "b": (h.t() + 1, [torch.sin(h) * 2])}

        gm = make_fx(work, tracing_mode=tracing)(*inputs())
        partial_lower(gm, lambda node: node.target is not aten.sin.default, options=ANY)
        assert len(report(gm).regions) == 2
        for rows in (3, 5) if tracing == "symbolic" else (3,):
            batch, scale = inputs(rows)
            torch.testing.assert_close(gm(batch, scale), work(batch, scale))

    @pytest.mark.parametrize("decomposed", [False, True])
    def test_exported_programs_keep_their_trees_and_update_their_buffers(self, decomposed: bool) -> None:
        model = Model()
        batch, scale = inputs()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its tree specs
            program = torch.export.export(copy.deepcopy(model), (batch,), {"scale": scale})
            program = program.run_decompositions({}) if decomposed else program
            gm = program.module()
        partial_lower(gm, options=ANY)
        assert len(report(gm).regions) == 1
        for _ in range(3):
            batch, scale = inputs()
            with torch.no_grad():
                torch.testing.assert_close(gm(batch, scale=scale), model(batch, scale=scale))
        assert torch.equal(gm.count, model.count)

    def test_reshapes_that_copied_are_not_recomputed_after_a_write(self) -> None:
        class Turned(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor, ...]:
                flat = x.t().reshape(-1)
                same = x.reshape(-1)
                x.add_(1)
                return torch.sin(flat), torch.sin(same), x * 2

        gm = torch.export.export(Turned(), (torch.randn(3, 4),)).module()
        partial_lower(gm, lambda node: node.target is not aten.sin.default, options=ANY)
        x, y = torch.ones(3, 4), torch.ones(3, 4)
        torch.testing.assert_close(gm(x), Turned()(y))
        assert torch.equal(x, y)


def summed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = torch.cat([x, y, x[:1]])
    s = torch.sin(z)
    q = (s * x.shape[0]).relu() + 1
    return q, q.view(-1, 2).sum(0), torch.softmax(q, 0)


class TestSizes:
    def test_one_compiled_graph_serves_many_sizes(self) -> None:
        gm = make_fx(summed, tracing_mode="symbolic")(torch.randn(3, 4), torch.randn(5, 4))
        # Behind the sine sizes are s0 + s1 + 1: the inputs that tell s0 and s1 come along.
        partial_lower(gm, lambda node: node.target is not aten.sin.default, options=ANY)
        assert len(report(gm).regions) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for rows, others in ((2, 3), (7, 9), (33, 65), (4, 6)):
                x, y = torch.randn(rows, 4), torch.randn(others, 4)
                torch.testing.assert_close(gm(x, y), summed(x, y))

    def test_sizes_for_which_code_is_not_valid_run_operator_by_operator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def compile_for_large(gm: fx.GraphModule, given: list[Any], *_: Any, **__: Any) -> Any:
            assert given[0].shape[0] > 4  # a condition: the traced call had 6
            return lambda tensors: tuple(value * 1 for value in gm(*tensors))

        monkeypatch.setattr("wholestep.lower.compiled_region.compile_inductor", compile_for_large)
        gm = lowered(lambda x: (x * 2).relu(), torch.randn(6, 3), tracing="symbolic", **ANYTHING)
        for rows in (5, 9):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(gm(x), (x * 2).relu())
        with pytest.warns(LowerWarning, match=r"region 0 runs operator by operator for some sizes: its code is for"):
            torch.testing.assert_close(gm(torch.ones(3, 3)), torch.full((3, 3), 2.0))
        gm(torch.ones(2, 3))  # said once

    def test_a_step_with_a_dynamic_batch_is_lowered_for_ranges_of_sizes(self) -> None:
        torch.manual_seed(3)
        models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        results = []
        for model, options in zip(models, ({"lower": "eager"}, {"lower": "inductor"}), strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            @ws.compile(dynamic={"x": {0: ws.Dim(min=2, max=64)}}, lower_options={"strict": True}, **options)
            def step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            generator = torch.Generator().manual_seed(1)
            results.append([step(torch.randn(rows, 4, generator=generator)).item() for rows in (8, 3, 17, 2, 64, 7)])
        # Inductor chooses kernels by size (here s + 8 <= 32): such a choice is a guard.
        assert len(step.graphs) <= 2
        assert len(ws.lower.explain(step).regions) == 1
        assert results[1] == pytest.approx(results[0], rel=1e-4)

    @pytest.mark.usefixtures("interpreted")
    def test_views_of_any_size_in_a_region_that_writes(self) -> None:
        def work(x: Tensor) -> tuple[Tensor, ...]:
            y = x * 2
            x.add_(x.shape[0])
            y[1:].mul_(3)
            tail = y.narrow(0, 1, x.shape[0] - 1) + 1
            return tail, y.select(1, 1) + x[:, 0], y.diagonal() + 0, torch.cat(y.split([1, x.shape[0] - 1])) + 0

        gm = make_fx(work, tracing_mode="symbolic")(torch.randn(6, 4))
        partial_lower(gm, options=ANY)
        assert len(report(gm).regions) == 1
        for rows in (6, 5, 9):
            x = torch.randn(rows, 4)
            y = x.clone()
            torch.testing.assert_close(gm(x), work(y))
            assert torch.equal(x, y)

    @pytest.mark.usefixtures("interpreted")
    def test_sizes_as_inputs_and_results(self) -> None:
        def work(x: Tensor, n: int) -> tuple[Any, ...]:
            wide = x.repeat(n, 1)
            return torch.sin(wide) * wide.shape[0], wide.shape[0], wide.mean(0) / n

        gm = make_fx(work, tracing_mode="symbolic")(torch.randn(3, 4), 5)
        partial_lower(gm, lambda node: node.target is not aten.sin.default, options=ANY)
        assert report(gm).regions
        for rows, n in ((3, 5), (6, 2), (4, 7)):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(gm(x, n), work(x, n))


def test_cond_stays_outside_and_its_bodies_can_be_lowered_by_themselves() -> None:
    def work(x: Tensor) -> Tensor:
        y = (x * 2).tanh()
        return torch.cond(x.sum() > 0, lambda a: (a + 1).sin() * 2, lambda a: a.cos() - 1, (y,)) + 1

    gm = partial_lower(make_fx(work, tracing_mode="fake")(torch.randn(3)), options={"min_aten_ops": 1, "strict": True})
    reasons = {name: reason for name, _, reason in report(gm).outside}
    assert reasons["cond"] == "cond calls graphs of its own"
    partial_lower(gm.true_graph_0, options={"min_aten_ops": 1, "strict": True})
    assert report(gm.true_graph_0).regions
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(gm(x), work(x))
