"""The data of a step's page: what it says of nodes, memory, passes and times is what graph and simulation say."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import wholestep as ws
from cases import buffers_and_randomness, gradients, structure
from harness import Case
from simulate.sharded_steps import fully_sharded
from steps_to_show import gpt_step
from wholestep.errors import OptionError
from wholestep.inspect.report_page.collect import ReportSource, collect
from wholestep.inspect.report_page.memory_columns import step_memory
from wholestep.ir.graph_walks import copy_graph
from wholestep.ir.reinplace import reinplaced
from wholestep.ir.signature import InputKind
from wholestep.lower.report import Lowering, RegionReport
from wholestep.passes.engine.record import pass_records
from wholestep.simulate import pipeline

Data = dict[str, Any]
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


@pytest.fixture(scope="module")
def step() -> Any:
    return gpt_step(passes=["merge_common_subexpressions"])


@pytest.fixture(scope="module")
def data(step: Any) -> Data:
    return collect(ReportSource.of(step))


def data_of(path: Path) -> Data:
    """What a written page holds."""
    found = re.search(r'id="data">([^<]+)<', path.read_text(encoding="utf-8"))
    assert found is not None
    read: Data = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return read


def test_a_page_is_one_file_that_asks_for_nothing(step: Any, tmp_path: Path) -> None:
    path = step.report(tmp_path / "new folder" / "step.html")
    text = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert data_of(path)["title"] == "train_step"


def test_a_page_without_source_names_files_and_lines_only(step: Any, tmp_path: Path) -> None:
    nodes = data_of(step.report(tmp_path / "step.html", with_source=False))["nodes"]
    assert any(file.endswith("tiny_gpt.py") for file in nodes["files"])
    assert not any(nodes["sources"])


def test_a_title_is_text_and_no_markup(step: Any, tmp_path: Path) -> None:
    path = ws.inspect.report(step.last, tmp_path / "step.html", title="</title><script>alert(1)</script>")
    assert "<script>alert(1)" not in path.read_text(encoding="utf-8")


def test_every_node_is_there_with_its_line_inputs_and_time(step: Any, data: Data) -> None:
    nodes, graph = data["nodes"], list(step.last.gm.graph.nodes)
    assert nodes["name"] == [node.name for node in graph]
    number = {node: i for i, node in enumerate(graph)}
    for i, node in enumerate(graph):
        assert nodes["source"][nodes["begin"][i] : nodes["begin"][i + 1]] == [number[n] for n in node.all_input_nodes]
    i = next(i for i, node in enumerate(graph) if node.target is torch.ops.aten.gelu.default)
    file, line, function = nodes["places"][nodes["place"][i]]
    assert function == "forward"
    assert "self.mlp" in nodes["sources"][file].splitlines()[line - 1]
    assert nodes["modules"][nodes["module"][i]] == "model.blocks.0.mlp.1"
    timeline = ws.simulate.step(step.last)
    assert nodes["end"][i] - nodes["start"][i] == pytest.approx(timeline.span(graph[i].name).us * 1e3, abs=1)


def test_the_summary_counts_what_the_step_has(step: Any, data: Data) -> None:
    summary = data["summary"]
    parameters = next(each for each in summary["inputs"] if each["kind"] == "parameter")
    known = {spec.path for spec in step.last.signature.of_kind(InputKind.PARAMETER)}
    assert parameters["tensors"] == len(known)
    assert summary["step_us"] == pytest.approx(ws.simulate.step(step.last).step_us)
    assert summary["recompiles"] == [str(each) for each in step.recompiles]
    ids = next(spec.tensor for spec in step.last.signature.of_kind(InputKind.BATCH))
    assert summary["largest_batch"] == {"rows": ids.shape[0], "tokens": ids.shape[0] * ids.shape[1]}
    assert len(summary["graphs"]) == 2
    assert sum(summary["peak_by_kind"].values()) == summary["peak"]
    assert {each["title"] for each in data["advice"]} >= {"Compile it", "Check it against eager"}


def test_memory_is_that_of_the_step_with_updates_in_place(step: Any, data: Data) -> None:
    memory = data["memory"]
    assert memory["peak"] == ws.simulate.step(reinplaced(step.last).graph).peak_bytes
    live = [0] * (len(memory["node"]) + 1)
    for size, first, last in zip(memory["bytes"], memory["first"], memory["last"], strict=True):
        live[first] += size
        live[last + 1] -= size
    for k in range(1, len(live)):
        live[k] += live[k - 1]
    assert max(live) == memory["peak"] == live[memory["peak_place"]]
    assert {"parameter", "optimizer_state", "saved", "gradient", "temporary", "batch"} <= set(memory["kinds"])


def test_state_that_a_first_step_creates_is_optimizer_state() -> None:
    step = gpt_step(calls=1)
    first = step_memory(step.last)
    made = [s for s in range(len(first.kinds)) if s not in first.index.persistent]
    state = sum(int(first.index.sizes[s]) for s in made if first.kinds[s] == "optimizer_state")
    parameters = sum(int(first.index.sizes[s]) for s in first.index.persistent if first.kinds[s] == "parameter")
    steps = 4 * len([*step.last.signature.of_kind(InputKind.PARAMETER)])
    assert state == 2 * parameters + steps  # AdamW: two averages of each, and a count
    assert any(first.kinds[s] == "gradient" for s in made)


def test_exposed_communication_has_its_reason_and_its_place() -> None:
    graph = fully_sharded(layers=3)
    data = collect(ReportSource.of(graph))
    timeline = ws.simulate.step(graph)
    assert [each["us"] for each in data["exposed"]] == [each.exposed_us for each in timeline.exposed()]
    for each in data["exposed"]:
        assert each["text"]
        assert sum(end - begin for begin, end in each["stalls"]) <= each["us"] * 1e3 + len(each["stalls"])
    assert data["summary"]["collectives"][0]["count"] > 0
    assert any("communication" in each["title"].lower() for each in data["advice"])


def test_measured_times_stand_beside_the_predicted_ones(step: Any) -> None:
    names = [node.name for node in step.last.gm.graph.nodes if node.op == "call_function"][:3]
    profile = {name: (100.0 + i, 100.5 + i) for i, name in enumerate(names)}
    data = collect(ReportSource.of(step, profile={**profile, "not_a_node": (0.0, 1.0)}))
    assert data["measured"]["start"] == [0, 1000, 2000]
    assert [[data["nodes"]["name"][i] for i in nodes] for nodes in data["measured"]["nodes"]] == [
        [name] for name in names
    ]
    assert "Measure it" not in {each["title"] for each in data["advice"]}


def test_a_pass_is_recorded_with_counts_and_a_diff(step: Any) -> None:
    (record,) = pass_records(step.last.gm)
    assert record.name == "merge_common_subexpressions"
    assert record.numerics == "exact"
    assert record.changed
    before, after = record.nodes
    assert after == step.last.num_nodes
    assert sum(now - was for _, was, now in record.operators) == after - before
    gone = [line for line in record.diff if line.startswith("- ")]
    assert len(gone) == before - after
    assert not {line.split()[1] for line in gone} & {node.name for node in step.last.gm.graph.nodes}


def test_a_pass_that_moves_nodes_says_which() -> None:
    @ws.passes.graph_optimization_pass()
    def gather_the_second_shard_first(gm: fx.GraphModule) -> None:
        gathers = gm.graph.find_nodes(op="call_function", target=GATHER)
        gathers[0].prepend(gathers[1])

    graph = fully_sharded(layers=2)
    moved = graph.gm.graph.find_nodes(op="call_function", target=GATHER)[1]
    ws.passes.run_passes(graph, [gather_the_second_shard_first])
    (record,) = pass_records(graph.gm)
    assert record.displaced == 1
    here, away = (line for line in record.diff if line[0] in "<>")
    assert here[0] + away[0] == "><"
    assert here[2:] == away[2:]
    assert here.startswith(f"> {moved.name} = _c10d_functional.all_gather_into_tensor.default(")


def test_a_pass_that_returns_another_graph_is_compared_by_names() -> None:
    @ws.passes.graph_optimization_pass(numerics="changes")
    def halve_instead_of_tenth(gm: fx.GraphModule) -> fx.GraphModule:
        made = fx.GraphModule(gm, copy_graph(gm.graph))
        for node in made.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.args = (node.args[0], 0.5)
        return made

    graph = fully_sharded(layers=2)
    graph.gm.graph.eliminate_dead_code()
    ws.passes.run_passes(graph, [halve_instead_of_tenth])
    (record,) = pass_records(graph.gm)
    products = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert [line.split()[:2] for line in record.diff] == [["~", node.name] for node in products]
    assert all(line.endswith("0.5)") for line in record.diff)


def test_a_pass_without_an_effect_is_recorded_as_such() -> None:
    step = gpt_step(calls=1, passes=["comm_fusion_with_concat"])
    (record,) = pass_records(step.last.gm)
    assert not record.changed


def test_a_graph_module_without_a_signature_has_a_page(tmp_path: Path) -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    data = data_of(ws.inspect.report(model, tmp_path / "graph.html"))
    assert data["summary"]["nodes"] == len(model.graph.nodes)


def test_regions_have_their_nodes_and_the_others_a_reason(step: Any) -> None:
    graph = step.last.gm.graph
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    names = [*map(str, graph.find_nodes(op="call_function", target=torch.ops.aten.t.default)[:2]), *map(str, products)]
    region = RegionReport(0, "subgraph_0", "", 2, 1, 1, 0, ("forward",), (*names[:2], "not_a_node"))
    lowering = Lowering([region], [(name, "aten.mm", "reads a scalar") for name in names[2:]])
    data = collect(ReportSource(step.last, "step", lowering=lowering, lower="inductor"))
    (found,) = data["regions"]
    assert [data["nodes"]["name"][i] for i in found["nodes"]] == names[:2]
    assert [data["nodes"]["name"][i] for i in data["outside"]["node"]] == names[2:]
    assert data["summary"]["outside"] == [{"reason": "reads a scalar", "count": len(products), "example": names[2]}]
    assert "See what was not compiled" in {each["title"] for each in data["advice"]}


CASES = [case for module in (buffers_and_randomness, gradients, structure) for case in module.CASES]


@pytest.mark.parametrize("case", CASES[::12], ids=lambda case: case.name)
def test_steps_of_all_kinds_have_a_page(case: Case, tmp_path: Path) -> None:
    run = case.make(torch.device("cpu"))
    graph = ws.capture(run.step, *run.arguments(0), **run.keywords(0))
    data = data_of(ws.inspect.report(graph, tmp_path / "step.html"))
    assert data["summary"]["nodes"] == graph.num_nodes


def test_a_memory_budget_and_dynamic_sizes_are_on_the_page(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    within = ws.compile(train_step, lower="eager", memory_budget=0.9)
    within(torch.randn(64, 8))
    budget = data_of(within.report(tmp_path / "budget.html"))["summary"]["budget"]
    report = within.last.memory
    assert (budget["budget"], budget["without"]) == (report.budget, report.peak_without)
    dynamic = ws.compile(train_step, lower="eager", dynamic=True)
    dynamic(torch.randn(4, 8))
    data = data_of(dynamic.report(tmp_path / "dynamic.html"))
    assert any("s" in value and "8]" in value for value in data["nodes"]["values"])
    assert data["memory"]["peak"] > 0


def test_ranks_stand_side_by_side_with_what_is_different(tmp_path: Path) -> None:
    graph, same, other = (fully_sharded(layers=layers) for layers in (3, 3, 2))
    profile = {"mm_default": (0.0, 500.0)}
    data = data_of(ws.inspect.report(graph, tmp_path / "ranks.html", ranks=[(same, profile), other]))
    first, second, third = data["ranks"]
    assert [first["name"], second["name"], third["name"]] == ["rank 0", "rank 1", "rank 2"]
    assert second["measured_us"] == 500.0
    assert second["difference"] == second["order"] == ""
    assert third["step_us"] == ws.simulate.step(other).step_us
    assert third["difference"] == str(ws.inspect.diff(graph, other, labels=("rank 0", "rank 2")))
    assert third["order"].startswith("collective 4 is all_gather_into_tensor_default_3 (all_gather_into_tensor of")
    named = data_of(ws.inspect.report(graph, tmp_path / "named.html", ranks={"rank 7": same}))
    assert [rank["name"] for rank in named["ranks"]] == ["this rank", "rank 7"]


def test_a_pipelines_schedule_is_there_as_simulated(tmp_path: Path) -> None:
    timeline = pipeline.simulate("1F1B", pipeline.Times(F=1, B=2), ranks=2, microbatches=3)
    data = data_of(ws.inspect.report(fully_sharded(layers=1), tmp_path / "step.html", pipeline=timeline))
    (found,) = data["pipeline"]
    assert found["makespan"] == timeline.makespan
    assert found["ranks"][1][0] == ["1F0", "F", 1, 0, 1.0, 2.0]
    assert [len(spans) for spans in found["ranks"]] == [6, 6]


def test_what_cannot_be_reported_is_an_error_with_what_to_do(tmp_path: Path) -> None:
    step = ws.compile(lambda x: x)
    with pytest.raises(OptionError, match="captured nothing yet"):
        step.report(tmp_path / "step.html")
    with pytest.raises(OptionError, match=r"end it in \.html"):
        ws.inspect.report(fully_sharded(layers=1), tmp_path / "step.json")
    with pytest.raises(OptionError, match="cannot be reported"):
        ws.inspect.report(3, tmp_path / "step.html")
    with pytest.raises(OptionError, match="has no spans"):
        ws.inspect.report(fully_sharded(layers=1), tmp_path / "step.html", profile=3)
