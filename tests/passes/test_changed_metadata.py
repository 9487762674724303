"""At the default level, the metadata of what a pass changed is recomputed and compared."""

from __future__ import annotations

import importlib
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import wholestep as ws
from wholestep.errors import PassError
from wholestep.ir import StepGraph

aten = torch.ops.aten
graph_optimization_pass = ws.passes.graph_optimization_pass


def captured() -> StepGraph:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ws.capture(step, torch.randn(5, 4))


def first(gm: fx.GraphModule, target: Any) -> fx.Node:
    return next(iter(gm.graph.find_nodes(op="call_function", target=target)))


def a_pass(function: Callable[[fx.GraphModule], Any]) -> Any:
    return graph_optimization_pass(numerics="changes")(function)


@a_pass
def drops_a_transpose(gm: fx.GraphModule) -> None:
    node = first(gm, aten.t.default)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    gm.graph.erase_node(node)


@a_pass
def casts_an_operand(gm: fx.GraphModule) -> None:
    node = first(gm, aten.relu.default)
    with gm.graph.inserting_before(node):
        node.args = (gm.graph.call_function(aten._to_copy.default, node.args, {"dtype": torch.float64}),)


@a_pass
def inserts_a_call_that_cannot_be(gm: fx.GraphModule) -> None:
    node = first(gm, aten.relu.default)
    with gm.graph.inserting_before(node):
        node.args = (gm.graph.call_function(aten.view.default, (node.args[0], [7, 7])),)


@a_pass
def changes_an_argument(gm: fx.GraphModule) -> None:
    node = first(gm, aten.view.default) if gm.graph.find_nodes(op="call_function", target=aten.view.default) else None
    node = node or first(gm, aten.expand.default)
    node.args = (node.args[0], [3, 1])


@a_pass
def changes_a_target(gm: fx.GraphModule) -> None:
    node = first(gm, aten.relu.default)
    node.target = aten.gt.Scalar
    node.args = (*node.args, 0)


@a_pass
def writes_a_wrong_value(gm: fx.GraphModule) -> None:
    node = first(gm, aten.relu.default)
    node.meta["val"] = node.meta["val"].new_empty(3, 3)


@a_pass
def forgets_a_value_that_others_follow_from(gm: fx.GraphModule) -> None:
    node = first(gm, aten.relu.default)
    node.target = aten.t.default
    del node.meta["val"]


WRONG = [
    drops_a_transpose,
    casts_an_operand,
    inserts_a_call_that_cannot_be,
    changes_an_argument,
    changes_a_target,
    writes_a_wrong_value,
    forgets_a_value_that_others_follow_from,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda each: each.name)
@pytest.mark.parametrize("bare", [False, True], ids=["StepGraph", "GraphModule"])
def test_metadata_that_does_not_fit_is_found_by_default(wrong: Any, bare: bool) -> None:
    graph = captured()
    before = str(graph.gm.graph)
    with pytest.raises(PassError, match=f"{wrong.name} left a graph that breaks a rule") as caught:
        wrong(graph.gm if bare else graph)
    assert caught.value.node
    assert caught.value.around
    assert "the view or cast that is missing" in caught.value.fix
    assert str(graph.gm.graph) == before


def test_the_author_of_a_pass_sees_no_traceback_of_torch(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PassError, match="addmm_default does not accept its arguments") as caught:
        drops_a_transpose(captured())
    shown = "".join(traceback.format_exception(caught.value))
    assert "site-packages/torch" not in shown
    assert "During handling" not in shown
    assert "direct cause" not in shown
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.parametrize("error", [KeyError("relu"), ws.errors.PlanError("it cannot be.")], ids=["python", "ours"])
def test_the_exception_of_a_pass_is_the_cause_of_what_is_raised(error: Exception) -> None:
    @a_pass
    def raises(gm: fx.GraphModule) -> None:
        raise error

    with pytest.raises(PassError, match=f"raises raised {type(error).__name__}: ") as caught:
        raises(captured())
    assert caught.value.__cause__ is error
    assert caught.value.what.count("\n") == 0


def test_a_deleted_value_is_recomputed_with_all_that_follow_from_it() -> None:
    @a_pass
    def doubles_the_batch(gm: fx.GraphModule) -> None:
        relu = first(gm, aten.relu.default)
        with gm.graph.inserting_after(relu):
            twice = gm.graph.call_function(aten.mul.Tensor, (relu, 2))
        relu.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)

    graph = captured()
    doubles_the_batch(graph)
    made = first(graph.gm, aten.mul.Tensor)
    assert made.meta["val"].shape == (5, 8)


def test_only_what_changed_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    verify = importlib.import_module("wholestep.ir.verify")
    original = verify.propagate_changed

    def noting(gm: fx.GraphModule, changed: list[fx.Node], fail: Any) -> None:
        checked.extend(node.name for node in changed)
        original(gm, changed, fail)

    monkeypatch.setattr(verify, "propagate_changed", noting)

    @a_pass
    def negates_twice(gm: fx.GraphModule) -> None:
        relu = first(gm, aten.relu.default)
        with gm.graph.inserting_after(relu):
            once = gm.graph.call_function(aten.neg.default, (relu,))
        relu.replace_all_uses_with(once, delete_user_cb=lambda user: user is not once)
        once.meta["val"] = relu.meta["val"]

    graph = captured()
    negates_twice(graph)
    assert checked == ["neg_default_1" if "neg_default_1" in checked else "neg_default"]


def test_dynamic_sizes_are_checked_too() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w.t())

    compiled = ws.compile(step, dynamic={"x": {0: ws.Dim(max=64)}})
    graph = ws.capture(compiled, torch.randn(5, 4), torch.randn(8, 4))
    with pytest.raises(PassError, match="does not accept its arguments"):
        drops_a_transpose(graph)


def test_a_pass_of_a_script_that_breaks_a_graph_prints_one_traceback(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "import torch, wholestep as ws\n"
        "@ws.passes.graph_optimization_pass(numerics='changes')\n"
        "def drops(gm):\n"
        "    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.t.default)\n"
        "    node.replace_all_uses_with(node.args[0])\n"
        "def step(x, w):\n"
        "    return x @ w.t()\n"
        "ws.compile(step, passes=[drops], lower='eager')(torch.ones(2, 4), torch.ones(3, 4))\n"
    )
    source = str(Path(ws.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PYTHONPATH": source},
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "WS-PASS] drops left a graph that breaks a rule: mm_default does not accept its arguments" in done.stderr
    assert "_meta_registrations" not in done.stderr
