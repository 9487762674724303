"""Order of passes per graph, what happens after each, and that a failing pass leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import wholestep as ws
from cases.parts import train_step
from wholestep.errors import OptionError, PassError, PassOrderError
from wholestep.ir.verify import verify
from wholestep.passes import applied_passes, graph_optimization_pass, run_passes
from wholestep.passes.engine.manager import apply_pass

aten = torch.ops.aten


@graph_optimization_pass(numerics="exact")
def first(gm: fx.GraphModule) -> None:
    """Nothing."""


@graph_optimization_pass(prerequisites=[first])
def needs_first(gm: fx.GraphModule) -> None:
    """Nothing."""


@graph_optimization_pass(apply_after=[needs_first])
def after_needs_first(gm: fx.GraphModule) -> None:
    """Nothing."""


@graph_optimization_pass(numerics="exact")
def double_the_loss(gm: fx.GraphModule, factor: float = 2.0) -> None:
    """Breaks its promise."""
    output = gm.graph.output_node()
    epilogue = next((n for n in gm.graph.nodes if n.target is aten.copy_.default), output)
    with gm.graph.inserting_before(epilogue):
        new = gm.graph.call_function(aten.mul.Tensor, (output.args[0][0], factor))
    output.args = ((new, *output.args[0][1:]),)


@graph_optimization_pass(numerics="changes")
def forget_a_write_back(gm: fx.GraphModule) -> None:
    """Breaks the signature."""
    last = [n for n in gm.graph.nodes if n.target is aten.copy_.default][-1]
    target = next(n for n in gm.graph.nodes if n.op == "placeholder" and n is not last.args[0])
    with gm.graph.inserting_before(next(iter(gm.graph.nodes)).next.next.next.next.next.next):
        gm.graph.call_function(aten.copy_.default, (target, target))


@graph_optimization_pass()
def raises(gm: fx.GraphModule) -> None:
    """Half done when it raises."""
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.args = ()
    raise RuntimeError("out of ideas")


def step_graph() -> ws.StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return ws.capture(train_step, model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4))


def test_prerequisites_must_have_run_on_this_graph() -> None:
    one, other = step_graph(), step_graph()
    first(one)
    needs_first(one)
    assert applied_passes(one.gm) == ("first", "needs_first")
    with pytest.raises(PassOrderError, match="first are the prerequisites of needs_first"):
        needs_first(other)
    assert applied_passes(other.gm) == ()


def test_a_pass_that_must_come_before_cannot_come_after() -> None:
    graph = step_graph()
    first(graph)
    after_needs_first(graph)
    with pytest.raises(AssertionError, match="after_needs_first must be applied after needs_first"):
        needs_first(graph)


def test_a_pass_runs_once_unless_it_is_said_otherwise() -> None:
    graph = step_graph()
    first(graph.gm)
    with pytest.raises(PassOrderError, match="already ran"):
        first(graph.gm)
    first(graph.gm, allow_rerun=True)
    assert applied_passes(graph.gm) == ("first", "first")


def test_without_a_graph_options_are_bound() -> None:
    bound = ws.passes.comm_fusion_with_concat(bucket_size_mb=0.5)
    assert repr(bound) == "comm_fusion_with_concat(bucket_size_mb=0.5)"
    bound(step_graph())


@pytest.mark.parametrize("broken", [raises, forget_a_write_back])
def test_a_pass_that_fails_leaves_the_graph_as_it_was(broken: Any) -> None:
    graph = step_graph()
    text, print_, signature = graph.to_json(), graph.fingerprint(), graph.signature
    with pytest.raises(PassError, match=broken.name):
        broken(graph)
    assert graph.to_json() == text
    assert graph.fingerprint() == print_
    assert graph.signature == signature
    assert applied_passes(graph.gm) == ()
    verify(graph, 2)
    graph.gm(*[torch.ones(s.tensor.shape) if s.tensor else 0.1 for s in graph.signature.inputs])  # type: ignore[arg-type]


def test_level_3_holds_a_pass_to_its_numerics() -> None:
    graph = step_graph()
    with pytest.raises(PassError, match="output 0 has other values"):
        apply_pass(double_the_loss, graph, (), {}, level=3)
    apply_pass(double_the_loss, graph, (1.0,), {}, level=3)
    with pytest.raises(PassError, match="double_the_loss"):
        ws.compile(train_step, passes=[double_the_loss], verify=3)(*_arguments())


def _arguments() -> tuple[Any, ...]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4)


def test_new_nodes_get_values_and_places() -> None:
    graph = step_graph()
    double_the_loss(graph)
    new = graph.gm.graph.output_node().args[0][0]
    assert new.meta["val"].shape == ()
    assert new.meta["wholestep"].location is not None
    assert new.meta["wholestep"].location.function == "train_step"


def test_compile_runs_passes_and_names_can_be_given() -> None:
    model, optimizer, x = _arguments()
    step = ws.compile(train_step, passes=["comm_fusion_with_concat", ws.passes.schedule_comm_wait])
    step(model, optimizer, x)
    assert step.last is not None
    assert applied_passes(step.last.gm) == ("comm_fusion_with_concat", "schedule_comm_wait")
    quiet = ws.compile(train_step, passes="default", disable_passes=["bucket_all_gather"])
    quiet(model, optimizer, x)
    assert quiet.last is not None
    assert "bucket_all_gather" not in applied_passes(quiet.last.gm)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"passes": "fast"}, "passes='fast'"),
        ({"passes": ["comm_fusion_with_conkat"]}, "did you mean 'comm_fusion_with_concat'"),
        ({"passes": ["iter_move_grads_and_optimizers"]}, r"has to know what to move[\s\S]*overlap_optimizer_with_next"),
        ({"passes": [train_step]}, "is not a pass"),
        ({"passes": "default", "disable_passes": ["nothing"]}, "disable_passes names 'nothing'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        ws.compile(train_step, **options)


def test_order_is_checked_through_compile_too() -> None:
    with pytest.raises(PassOrderError, match="are the prerequisites of schedule_comm_wait"):
        ws.compile(train_step, passes=[ws.passes.schedule_comm_wait])(*_arguments())


def test_dumps_hold_both_sides_and_what_changed(tmp_path: Path) -> None:
    ws.compile(train_step, passes=[double_the_loss(factor=1.0)], dump_passes=str(tmp_path))(*_arguments())
    names = {path.name for path in tmp_path.iterdir()}
    sides = {f"000-double_the_loss.{side}.{kind}" for side in ("before", "after") for kind in ("txt", "json")}
    assert names == sides | {"summary.txt"}
    summary = (tmp_path / "summary.txt").read_text()
    assert "0 displaced" in summary
    assert "aten::mul.Tensor" in summary
    again = ws.StepGraph.from_json((tmp_path / "000-double_the_loss.after.json").read_text())
    run_passes(again, [first()])


def test_the_process_wide_dump_is_a_default(tmp_path: Path) -> None:
    ws.passes.enable_graph_optimization_dump(tmp_path)
    try:
        first(step_graph())
    finally:
        ws.passes.disable_graph_optimization_dump()
    first(step_graph())
    assert len(list(tmp_path.glob("*.after.txt"))) == 1
