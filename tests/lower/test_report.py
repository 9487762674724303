"""The report of explain: every node outside of regions has a reason, and the table has columns."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import wholestep as ws
from lower.graphs import interpreted, lowered, report
from lower.test_regions import Drawn, drawn_graphs
from wholestep.errors import LowerError
from wholestep.lower import LowerOptions, partial_lower
from wholestep.lower.report import Lowering, RegionReport

__all__ = ["interpreted"]


def assert_complete(gm: Any) -> None:
    """Whatever is neither a call of a region nor an element of its result is listed, with a reason."""
    found = report(gm)
    calls = [node for node in gm.graph.nodes if node.op == "call_module"]
    left = [
        node.name
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "output", "call_module")
        and not (node.target is operator.getitem and node.args[0] in calls)
    ]
    assert [name for name, _, _ in found.outside] == left
    assert all(reason for _, _, reason in found.outside)
    assert [region.name for region in found.regions] == [node.target for node in calls]


@given(drawn_graphs(communicates=True, writes=True))
def test_every_node_outside_has_a_reason(drawn: Drawn) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wholestep.lower.compiled_region.compile_inductor", lambda gm, *_, **__: gm)
        partial_lower(drawn.gm, drawn.accepts, options=LowerOptions(min_aten_ops=drawn.smallest, strict=True))
    assert_complete(drawn.gm)


@pytest.mark.usefixtures("interpreted")
def test_views_and_write_backs_that_stay_are_listed() -> None:
    def work(x: Tensor, y: Tensor) -> Tensor:
        s = torch.sin(x)
        result = (s.t() + y).t()
        x.copy_(s)
        return result

    gm = lowered(work, torch.randn(3, 3), torch.randn(3, 3))
    assert_complete(gm)
    told = {target: reason for _, target, reason in report(gm).outside}
    assert told["aten.t.default"] == "a view or a size: recomputed where it is used"
    assert told["aten.copy_.default"].startswith("writes back a value from outside")


def test_the_table_reads_in_columns() -> None:
    lowering = Lowering(
        [RegionReport(0, "subgraph_0", "tag", 120, 9, 2, 4, ("forward", "backward"))],
        [("wait", "wait_tensor", "communicates"), ("reduce", "all_reduce", "communicates"), ("n", "add", "a number")],
    )
    assert str(lowering).splitlines() == [
        "1 region with 120 operators; 3 nodes outside",
        "region      operators  in  out  writes  what",
        "subgraph_0  120        9   2    4       forward, backward",
        "",
        "nodes  why outside   for example",
        "2      communicates  wait = wait_tensor",
        "1      a number      n = add",
    ]


@pytest.mark.usefixtures("interpreted")
def test_explain_prints_the_report_of_a_graph_or_a_step_and_returns_it(capsys: pytest.CaptureFixture[str]) -> None:
    gm = lowered(lambda x: torch.sin(x) * 2, torch.randn(3))
    assert str(ws.lower.explain(gm)) + "\n" == capsys.readouterr().out
    model = nn.Linear(4, 4)

    @ws.compile(lower="inductor", lower_options={"min_aten_ops": 1, "strict": True})
    def step(x: Tensor) -> Tensor:
        return model(x).sum()

    with pytest.raises(LowerError):
        ws.lower.explain(step)
    step(torch.randn(2, 4))
    found = ws.lower.explain(step)
    assert found.regions[0].phases == ("forward",)
    assert_complete(step.executable)


def test_a_graph_that_was_never_lowered_says_so() -> None:
    with pytest.raises(LowerError, match="nothing was lowered in this Linear"):
        ws.lower.explain(nn.Linear(2, 2))


def test_breaks_are_logged_with_their_reasons(caplog: pytest.LogCaptureFixture, interpreted: None) -> None:
    with caplog.at_level("INFO", logger="wholestep.lower"):
        lowered(lambda x: torch.sin(x) * 2, torch.randn(3))
    assert "sin stays outside: refused by node_predicate" in caplog.messages


@pytest.mark.usefixtures("interpreted")
def test_a_graph_lowered_twice_is_explained_as_a_whole() -> None:
    """First the part before the sine, then the rest."""

    def work(x: Tensor) -> Tensor:
        return ((x + 1) * 2).sin().cos() * 3

    gm = lowered(work, torch.ones(3), node_predicate=lambda node: node.name in ("add", "mul"))
    partial_lower(gm, lambda node: node.name != "sin", options={"min_aten_ops": 1})
    assert_complete(gm)
    found = report(gm)
    assert [(region.name, region.operators) for region in found.regions] == [("subgraph_0", 2), ("subgraph_0_", 2)]
    assert found.outside == [("sin", "aten.sin.default", "refused by node_predicate")]
    x = torch.randn(3)
    torch.testing.assert_close(gm(x), work(x))
