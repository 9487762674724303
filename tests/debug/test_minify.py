"""`ws.debug.minify` finds the smallest graph that fails, whatever the graph and however it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from debug.graphs import (
    Layers,
    chain,
    die,
    gives_nan,
    has_mul,
    refuse_negative,
    refuses,
    rest_follows,
    sleep_forever,
)
from forked import run_script
from wholestep.debug import minify
from wholestep.ir.io.tensor_file import read_tensors

aten = torch.ops.aten
HERE = Path(__file__).parent


def run_repro(found: Any) -> str:
    """What the script prints in a forked process, which need not import torch again."""
    done = run_script(Path(found.repro_path))
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_fresh_repro(found: Any) -> str:
    """What the script prints in a process that has imported nothing yet."""
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, str(found.repro_path)], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def two() -> list[Tensor]:
    return [torch.randn(6, 8), torch.randn(6, 8)]


def test_a_predicate_on_an_operator_leaves_four_nodes_and_a_script_that_shows_it():
    found = minify(chain(60, 31), two(), has_mul)
    assert found.num_nodes <= 4
    assert has_mul(found.gm, found.inputs)
    assert all(value.numel() == 1 for value in found.inputs)
    assert "REPRODUCED" in run_fresh_repro(found)


def test_the_node_that_produces_nan_is_isolated_in_three_nodes():
    def model(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(10):
            x = x.sin() + y
        return (x - 20).log().cos().exp()

    found = minify(fx.symbolic_trace(model), two(), gives_nan)
    assert found.num_nodes <= 3
    assert [node.target for node in found.gm.graph.nodes if node.op.startswith("call")] == ["log"]
    assert "REPRODUCED" in run_repro(found)


def test_the_same_error_is_required_in_type_message_and_node():
    def model(x: Tensor, y: Tensor) -> Tensor:
        z = x.exp().cos()
        z = z @ y.t().sin()
        return z.view(7, 5).sum()

    found = minify(fx.symbolic_trace(model), two())
    [node] = [node for node in found.gm.graph.nodes if node.op.startswith("call")]
    assert node.target == "view"
    assert "invalid for input" in found.failure
    with pytest.raises(RuntimeError, match="invalid for input"):
        found.gm(*found.inputs)


def test_an_error_can_be_named_by_class_and_by_instance_and_another_one_is_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(refuse_negative, (graph.call_function(torch.neg, (x,)), 3)))
    gm = fx.GraphModule({}, graph)
    for named in (ArithmeticError, Exception, ArithmeticError("4 numbers below zero, limit 3")):
        assert minify(gm, [torch.ones(4)], named).num_nodes == 3
    with pytest.raises(ws.errors.MinifyError, match="another way"):
        minify(gm, [torch.ones(4)], error=KeyError)


def test_a_graph_of_modules_with_a_dict_of_results_ends_at_the_module_that_is_wrong():
    found = minify(fx.symbolic_trace(Layers()), [torch.randn(4, 8)])
    assert [str(node.target) for node in found.gm.graph.nodes if node.op == "call_module"] == ["wrong"]
    assert found.num_nodes == 3
    assert "REPRODUCED" in run_repro(found)


def test_tuple_results_are_cut_at_their_elements():
    def model(x: Tensor) -> tuple[Tensor, ...]:
        low, high = torch.ops.aten.aminmax(x.cos().sin())
        values, _ = torch.topk(torch.stack([low, high, low * high]), 2)
        return values, high, low

    found = minify(make_fx(model)(torch.randn(8)), [torch.randn(8)], has_mul)
    assert found.num_nodes <= 4


def test_lists_of_tensors_become_shorter():
    graph = fx.Graph()
    sources = [graph.placeholder(f"x{i}") for i in range(16)]
    graph.output((graph.call_function(aten.cat.default, (sources,)),))

    def has_three(gm: fx.GraphModule, inputs: list[Any]) -> bool:
        joins = any(node.target is aten.cat.default for node in gm.graph.nodes)
        return joins and any(bool((value == 3).any()) for value in gm(*inputs))

    found = minify(fx.GraphModule({}, graph), [torch.full((2,), float(i)) for i in range(16)], has_three)
    assert len(found.inputs) == 1
    assert found.inputs[0].tolist() == [3.0]


def test_symbolic_inputs_of_a_minified_graph_become_ints_that_follow_the_shapes():
    def model(x: Tensor, y: Tensor) -> Tensor:
        return (x.cos() * y).view(x.shape[0] * x.shape[1]).log().sum()

    gm = make_fx(model, tracing_mode="symbolic")(torch.ones(6, 8), -torch.ones(6, 8))
    found = minify(gm, [torch.ones(6, 8), -torch.ones(6, 8)], gives_nan)
    assert found.num_nodes <= 3
    graph = fx.Graph()
    size, x = graph.placeholder("size"), graph.placeholder("x")
    graph.output((graph.call_function(aten.view.default, (graph.call_function(aten.log.default, (x,)), [size])),))
    found = minify(fx.GraphModule({}, graph), [12, -torch.ones(3, 4)], gives_nan)
    assert found.num_nodes == 3


def test_writes_and_random_ops_that_do_not_matter_are_removed():
    def model(x: Tensor, y: Tensor) -> Tensor:
        a = x.clone()
        a.add_(1)
        noise = torch.rand(3)
        b = y * a
        b.mul_(2)
        return b.sum() + noise.sum()

    found = minify(make_fx(model)(*two()), two(), has_mul)
    assert found.num_nodes <= 4


def test_a_signal_is_a_failure_with_crash_and_the_caller_survives():
    graph = fx.Graph()
    x = graph.placeholder("x")
    value = graph.call_function(torch.sin, (x,))
    value = graph.call_function(die, (graph.call_function(torch.cos, (value,)),))
    graph.output(graph.call_function(torch.exp, (value,)))
    gm = fx.GraphModule({}, graph)
    with pytest.raises(ws.errors.MinifyError, match="SIGSEGV"):
        minify(gm, [torch.ones(2)])
    found = minify(gm, [torch.ones(2)], crash=True)
    assert [node.name for node in found.gm.graph.nodes if node.op == "call_function"] == ["die"]
    assert "SIGSEGV" in found.failure


def test_a_graph_that_hangs_is_a_failure_with_hang():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.exp, (graph.call_function(sleep_forever, (x,)),)))
    gm = fx.GraphModule({}, graph)
    with pytest.raises(ws.errors.MinifyError, match="hang=True"):
        minify(gm, [torch.ones(1)], timeout=0.7)
    found = minify(gm, [torch.ones(1)], hang=True, timeout=0.7)
    assert [node.name for node in found.gm.graph.nodes if node.op == "call_function"] == ["sleep_forever"]


def test_an_interrupted_search_is_resumed_from_its_trial_log(tmp_path):
    gm, inputs = chain(60, 31), two()
    whole = minify(gm, inputs, has_mul, folder=tmp_path / "whole")
    part = minify(gm, inputs, has_mul, folder=tmp_path / "part", max_trials=whole.trials // 2)
    assert part.num_nodes > whole.num_nodes
    with (tmp_path / "part" / "trials.jsonl").open("a") as file:
        file.write('{"edit": "00')  # the process died while it wrote
    rest = minify(gm, inputs, has_mul, folder=tmp_path / "part")
    assert rest.trials < whole.trials
    assert [str(n) for n in rest.gm.graph.nodes] == [str(n) for n in whole.gm.graph.nodes]
    assert all(map(torch.equal, rest.inputs, whole.inputs))
    with pytest.raises(ws.errors.MinifyError, match="another graph"):
        minify(chain(61, 31), inputs, has_mul, folder=tmp_path / "part")


def test_a_damaged_trial_log_is_refused(tmp_path):
    call = (chain(12, 5), two(), has_mul)
    minify(*call, folder=tmp_path)
    head, *lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    for change in (
        {"numbers": [1]},
        {"numbers": {"x": "text"}},
        {"devices": {"nobody": "cpu"}},
        {"requires_grad": 5},
    ):
        changed = [json.dumps({**json.loads(line), **change}) if "devices" in line else line for line in lines]
        assert changed != lines
        (tmp_path / "trials.jsonl").write_text("\n".join([head, *changed]) + "\n")
        with pytest.raises(ws.errors.WholestepError, match=r"trial log|is gone"):
            minify(*call, folder=tmp_path)


def test_no_file_of_a_search_is_a_pickle(tmp_path):
    minify(chain(20, 7), two(), has_mul, folder=tmp_path)
    kinds = {path.suffix for path in tmp_path.iterdir()}
    assert kinds <= {".py", ".json", ".jsonl", ".safetensors", ".log"}
    for path in tmp_path.glob("*.safetensors"):
        assert read_tensors(path)


@pytest.mark.parametrize("isolate", ["none", "worker"])
def test_trials_can_run_in_this_process_or_in_a_worker(isolate):
    inputs = two()
    state = torch.random.get_rng_state()
    found = minify(chain(30, 11), inputs, has_mul, isolate=isolate)
    assert found.num_nodes <= 4
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_dead_worker_is_restarted_and_a_local_predicate_is_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(die, (graph.call_function(torch.cos, (x,)),)))
    found = minify(fx.GraphModule({}, graph), [torch.ones(2)], crash=True, isolate="worker", max_trials=2)
    assert found.trials == 2
    assert "SIGSEGV" in found.failure
    with pytest.raises(ws.errors.MinifyError, match="imported"):
        minify(chain(3, 1), two(), lambda gm, inputs: True, isolate="worker")


@pytest.mark.long  # smaller graphs, above
def test_a_graph_of_eight_thousand_nodes_is_small_after_few_trials():
    found = minify(chain(8000, 5000), two(), has_mul)
    assert found.num_nodes <= 4
    assert found.trials < 100


def test_the_given_graph_and_inputs_are_not_changed():
    gm, inputs = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), [torch.randn(2, 4)]
    text, copies = str(gm.graph), [value.clone() for value in inputs]
    minify(gm, inputs, lambda gm, inputs: any(node.op == "call_module" for node in gm.graph.nodes))
    assert str(gm.graph) == text
    assert all(map(torch.equal, inputs, copies))


def test_what_does_not_fail_is_refused():
    with pytest.raises(ws.errors.MinifyError, match="does not fail"):
        minify(chain(3), two(), has_mul)
    with pytest.raises(ws.errors.MinifyError, match="placeholders"):
        minify(chain(3, 1), two()[:1], has_mul)
    with pytest.raises(ws.errors.MinifyError, match="itself raised"):
        minify(chain(3, 1), two(), lambda gm, inputs: 1 / 0)
    with pytest.raises(ws.errors.OptionError):
        minify(chain(3, 1).graph, two(), has_mul)


def test_strides_of_inputs_are_preserved_in_trials_and_in_the_script():
    def model(x: Tensor, y: Tensor) -> Tensor:
        return x.view(-1).cos() + y

    for x in (torch.randn(4, 1).expand(4, 4), torch.randn(4, 9)[:, :4], torch.randn(50, 70)[:40, :40]):
        found = minify(fx.symbolic_trace(model), [x, torch.randn(x.numel())], error=RuntimeError, shapes=False)
        assert found.num_nodes == 3
        assert "REPRODUCED: RuntimeError view size" in run_repro(found)


def test_aliasing_of_inputs_is_preserved_in_trials_and_in_the_script():
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().cos() + x.add_(1), y

    memory = torch.randn(40)
    found = minify(fx.symbolic_trace(model), [memory[:30], memory[20:]], rest_follows)
    assert [node.name for node in found.gm.graph.nodes] == ["x", "y", "add_", "output"]
    assert "REPRODUCED" in run_repro(found)


def test_modules_with_numbers_for_names_are_in_the_script():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    found = minify(fx.symbolic_trace(layers), [torch.randn(1, 4)], error=ValueError, shapes=False)
    assert found.num_nodes == 3
    assert "REPRODUCED: ValueError Expected more than 1 value" in run_repro(found)


def halved(x: Tensor) -> Tensor:
    return x / 2


def test_local_functions_and_predicates_with_globals_are_in_the_script(monkeypatch):
    def model(x: Tensor) -> Tensor:
        return halved(x.sin()).cos()

    def has_halved(gm: fx.GraphModule, inputs: list[Any]) -> bool:
        known = [each for each in (aten.mul.Tensor, os.getpid) if each]
        return any(n.name == "halved" and n.target not in known for n in gm.graph.nodes)

    monkeypatch.setattr(halved, "__module__", "__main__")
    graph = fx.Tracer(autowrap_functions=(halved,)).trace(model)
    last = next(node for node in graph.nodes if node.target is torch.Tensor.cos or node.name == "cos")
    with graph.inserting_before(last):
        call = graph.call_function(halved, (last.args[0],), name="halved")
    last.args = (call,)
    found = minify(fx.GraphModule({}, graph), [torch.randn(3)], has_halved)
    assert found.left_out == ()
    assert "REPRODUCED" in run_repro(found)


def test_a_sparse_input_is_accepted():
    found = minify(
        fx.symbolic_trace(lambda x, y: (torch.sparse.mm(x, y).sin() - 9).log()),
        [torch.eye(3).to_sparse(), torch.randn(3, 3)],
        gives_nan,
    )
    assert found.num_nodes == 3


def test_the_module_that_registers_an_operator_is_imported_or_named(monkeypatch):
    graph = chain(4, 2).graph
    [last] = graph.output_node().args[0]
    with graph.inserting_before(graph.output_node()):
        graph.output_node().args = (graph.call_function(torch.ops.wholestep_tests.refuses.default, (last,)),)
    gm = fx.GraphModule({}, graph)
    found = minify(gm, two(), error=RuntimeError)
    assert found.left_out == ()
    assert "REPRODUCED: RuntimeError it refuses" in run_fresh_repro(found)
    monkeypatch.setattr(refuses._init_fn, "__module__", "__main__")
    found = minify(gm, two(), error=RuntimeError)
    assert found.left_out == ("what registers the operator wholestep_tests::refuses",)


def test_a_predicate_without_a_form_as_text_is_left_out_and_the_script_says_so():
    found = minify(chain(4, 2), two(), lambda gm, inputs: has_mul(gm, inputs))
    assert "predicate" in found.left_out[0]
    assert "NOT ASKED" in run_repro(found)


def test_a_failure_on_two_branches_is_isolated_from_their_join():
    def model(x: Tensor, y: Tensor) -> Tensor:
        first, second = x.tanh(), (y @ y.t()).tanh()
        return torch.cat([first, second], 1).sum(0).exp()

    def two_tanh(gm: fx.GraphModule, inputs: list[Any]) -> bool:
        gm(*inputs)
        return sum(node.name.startswith("tanh") for node in gm.graph.nodes if node.op != "placeholder") == 2

    found = minify(fx.symbolic_trace(model), two(), two_tanh)
    assert sorted(node.op for node in found.gm.graph.nodes if node.op != "placeholder") == ["call_method"] * 2 + [
        "output"
    ]
