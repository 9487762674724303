"""Passes of other packages: found by the entry point `wholestep.passes`, held to their contracts, named when broken."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from cases.parts import train_step
from wholestep.errors import OptionError, PassError, PassOrderError
from wholestep.passes import applied_passes

CODE = """
import torch
from wholestep.passes import comm_fusion_with_concat, graph_optimization_pass

aten = torch.ops.aten

@graph_optimization_pass(apply_after=["schedule_comm_wait"], numerics="exact")
def double_negation(gm, times=1):
    for node in [n for n in gm.graph.nodes if n.target is aten.tanh.default]:
        users, new = list(node.users), node
        with gm.graph.inserting_before(node.next):
            for _ in range(2 * times):
                new = gm.graph.call_function(aten.neg.default, (new,))
        for user in users:
            user.replace_input_with(node, new)

@graph_optimization_pass(prerequisites=["double_negation"], numerics="exact")
def says_it_is_exact(gm):
    for node in [n for n in gm.graph.nodes if n.target is aten.tanh.default]:
        node.target = aten.relu.default

@graph_optimization_pass()
def schedule_comm_wait(gm):
    raise RuntimeError("this is not the pass that was meant")

@graph_optimization_pass()
def overlap_optimizer_with_next_forward(gm):
    "Without the rules of the pass that has this name."

three_times = double_negation(times=3)
small_buckets = comm_fusion_with_concat(bucket_size_mb=0.5)
a_number = 3

def no_pass(gm):
    return gm
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts distributions where pip would: modules, and a dist-info folder beside them."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)

    def install(distribution: str, entry_points: str, **files: str) -> None:
        for module, text in files.items():
            (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[wholestep.passes]\n{entry_points}\n")

    yield install
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def train(step: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return [step(model, optimizer, torch.ones(2, 4)) for _ in range(3)]


def negations(step: Any) -> int:
    return sum(node.target is torch.ops.aten.neg.default for node in step.last.gm.graph.nodes)


def test_a_pass_is_found_by_name_and_is_imported_only_then(install: Callable[..., None]) -> None:
    install("their-passes", "double_negation = their_passes:double_negation", their_passes=CODE)
    ws.compile(train_step, passes="default")
    assert "their_passes" not in sys.modules
    step = ws.compile(train_step, passes=["comm_fusion_with_concat", "double_negation"], verify=3)
    assert all(map(torch.equal, train(step), train(train_step)))
    assert applied_passes(step.last.gm) == ("comm_fusion_with_concat", "double_negation")
    assert negations(step) == 2


def test_a_pass_can_be_disabled_by_name(install: Callable[..., None]) -> None:
    install("their-passes", "double_negation = their_passes:double_negation", their_passes=CODE)
    names = ["comm_fusion_with_concat", "double_negation"]
    step = ws.compile(train_step, passes=names, disable_passes=["double_negation"])
    train(step)
    assert applied_passes(step.last.gm) == ("comm_fusion_with_concat",)


def test_an_entry_point_may_bind_options_and_have_another_name_than_its_pass(install: Callable[..., None]) -> None:
    install(
        "their-passes",
        "triple = their_passes:three_times\nsmall_buckets = their_passes:small_buckets",
        their_passes=CODE,
    )
    step = ws.compile(train_step, passes=["small_buckets", "triple"], verify=3)
    train(step)
    assert negations(step) == 6
    assert repr(step.options.passes[0]) == "comm_fusion_with_concat(bucket_size_mb=0.5)"
    for name in ("triple", "double_negation"):
        options = ws.compile(train_step, passes=["small_buckets", "triple"], disable_passes=[name]).options
        assert [each.name for each in options.passes] == ["comm_fusion_with_concat"]


def test_the_contract_of_a_pass_from_elsewhere_holds(install: Callable[..., None]) -> None:
    points = "double_negation = their_passes:double_negation\nsays_it_is_exact = their_passes:says_it_is_exact"
    install("their-passes", points, their_passes=CODE)
    with pytest.raises(PassOrderError, match="double_negation are the prerequisites of says_it_is_exact"):
        train(ws.compile(train_step, passes=["says_it_is_exact"]))
    with pytest.raises(PassOrderError, match="double_negation must be applied after schedule_comm_wait"):
        train(ws.compile(train_step, passes=["comm_fusion_with_concat", "double_negation", "schedule_comm_wait"]))
    with pytest.raises(PassError, match="says_it_is_exact left a graph that breaks a rule"):
        train(ws.compile(train_step, passes=["double_negation", "says_it_is_exact"], verify=3))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("not_installed:double_negation", "ModuleNotFoundError: No module named 'not_installed'"),
        ("their_passes:nothing", "AttributeError: .*nothing"),
        ("broken:anything", "ZeroDivisionError: division by zero"),
        ("their_passes:a_number", "is a int, not a pass"),
        ("their_passes:no_pass", "is a function, not a pass"),
        ("their_passes", "is a module, not a pass"),
        ("their_passes:schedule_comm_wait", "calls itself 'schedule_comm_wait', which is one of wholestep"),
    ],
)
def test_an_entry_point_that_leads_nowhere_names_its_distribution(
    install: Callable[..., None], value: str, text: str
) -> None:
    install("their-passes", f"their_pass = {value}", their_passes=CODE, broken="1 / 0")
    with pytest.raises(OptionError, match=rf"(?s)WS-OPTION.*wholestep.passes:their_pass.*their-passes 1\.2.*{text}"):
        ws.compile(train_step, passes=["their_pass"])


@pytest.mark.parametrize("name", ["schedule_comm_wait", "reinplace_tail", "iter_move_grads_and_optimizers"])
def test_a_name_that_is_ours_is_refused_and_the_pass_itself_is_not(install: Callable[..., None], name: str) -> None:
    install("their-passes", f"{name} = their_passes:double_negation", their_passes=CODE)
    with pytest.raises(OptionError, match=rf"'{name}' is that of a pass of wholestep .* of their-passes 1\.2"):
        ws.compile(train_step, passes=["comm_fusion_with_concat", name])
    assert "their_passes" not in sys.modules
    step = ws.compile(train_step, passes=["comm_fusion_with_concat", ws.passes.schedule_comm_wait])
    train(step)
    assert applied_passes(step.last.gm) == ("comm_fusion_with_concat", "schedule_comm_wait")


def test_a_name_that_two_distributions_offer_is_refused(install: Callable[..., None]) -> None:
    install("one-package", "double_negation = their_passes:double_negation", their_passes=CODE)
    install("other-package", "double_negation = their_passes:three_times")
    with pytest.raises(OptionError, match=r"offered by .*-package 1\.2 and .*-package 1\.2"):
        ws.compile(train_step, passes=["double_negation"])


def test_a_pass_that_is_called_like_one_of_ours_changes_no_rule_of_ours(install: Callable[..., None]) -> None:
    install("their-passes", "double_negation = their_passes:double_negation", their_passes=CODE)
    ws.compile(train_step, passes=["double_negation"])
    assert "their_passes" in sys.modules
    with pytest.raises(PassOrderError, match="overlap_optimizer_with_next_forward must be applied after comm_fusion"):
        ws.compile(train_step, passes=["overlap_optimizer_with_next_forward", "comm_fusion_with_concat"])


def test_names_of_entry_points_are_among_those_that_a_typing_error_may_have_meant(install: Callable[..., None]) -> None:
    install("their-passes", "double_negation = their_passes:double_negation", their_passes=CODE)
    with pytest.raises(OptionError, match="did you mean 'double_negation'"):
        ws.compile(train_step, passes=["duble_negation"])
