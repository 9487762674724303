"""partial_lower: its arguments, the graph that it returns, and what happens when compiling fails."""

from __future__ import annotations

import operator
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import wholestep as ws
from lower.graphs import assert_runs_as, aten, graph_of, interpreted, lowered, no_sin, report
from wholestep.errors import LowerError, LowerWarning, OptionError
from wholestep.lower import LowerOptions, partial_lower
from wholestep.lower.compiled_region import RegionCache

__all__ = ["interpreted"]

ANY = LowerOptions(min_aten_ops=1, strict=True)


def chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = (x * 2).relu() + y
    b = torch.sin(a) + 1
    return b.exp(), a


def _plus(value: float) -> Any:
    constant = torch.full((3,), value)
    return lambda x: x * constant + torch.tensor([value, 1.0, 2.0])


def traced(function: Any = chain, *inputs: Any) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*(inputs or (torch.randn(3, 4), torch.randn(3, 4))))


@pytest.mark.usefixtures("interpreted")
class TestTheNewGraph:
    def test_regions_are_called_subgraph_by_number_and_keep_the_names_of_their_results(self) -> None:
        before = traced()
        gm = partial_lower(traced(), no_sin, options=ANY)
        calls = gm.graph.find_nodes(op="call_module", target="subgraph_0", sort=True)
        calls += gm.graph.find_nodes(op="call_module", target="subgraph_1", sort=True)
        assert [node.target for node in calls] == ["subgraph_0", "subgraph_1"]
        outputs = before.graph.output_node().all_input_nodes
        assert [node.name for node in gm.graph.output_node().all_input_nodes] == [node.name for node in outputs]
        assert_runs_as(chain, gm, torch.randn(3, 4), torch.randn(3, 4))

    def test_a_submodule_name_that_is_taken_is_not_overwritten(self) -> None:
        gm = traced()
        gm.subgraph_0 = nn.Identity()
        partial_lower(gm, no_sin, options=ANY)
        assert isinstance(gm.subgraph_0, nn.Identity)
        assert_runs_as(chain, gm, torch.randn(3, 4), torch.randn(3, 4))

    def test_lowering_a_lowered_graph_changes_nothing_that_it_computes(self) -> None:
        gm = partial_lower(partial_lower(traced(), no_sin, options=ANY), options=ANY)
        assert_runs_as(chain, gm, torch.randn(3, 4), torch.randn(3, 4))

    def test_the_same_graph_module_is_returned(self) -> None:
        gm = traced()
        assert partial_lower(gm, options=ANY) is gm

    def test_the_dumper_sees_the_nodes_and_its_tag_is_a_keyword_of_the_call(self) -> None:
        texts: list[str] = []

        def dumper(text: str) -> str:
            texts.append(text)
            return f"dump_{len(texts)}"

        gm = partial_lower(traced(), no_sin, dumper=dumper, options=ANY)
        calls = [node for node in gm.graph.nodes if node.op == "call_module"]
        assert [node.kwargs["tag"] for node in calls] == ["dump_1", "dump_2"]
        assert "aten.relu.default" in texts[0]
        assert "aten.exp.default" in texts[1]

    @pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11
    def test_profilers_show_the_tag(self) -> None:
        gm = partial_lower(traced(), dumper=lambda text: "my region", options=ANY)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            gm(torch.randn(3, 4), torch.randn(3, 4))
        assert "my region" in {event.key for event in profile.key_averages()}

    def test_a_call_has_the_metadata_of_its_results(self) -> None:
        gm = partial_lower(traced(), options=ANY)
        (call,) = (node for node in gm.graph.nodes if node.op == "call_module")
        assert [tuple(val.shape) for val in call.meta["val"]] == [(3, 4)] * 2
        assert all("val" in node.meta for node in gm.graph.nodes if node.op != "output")

    def test_constants_stay_attributes_and_are_inputs_of_regions(self) -> None:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        gm = make_fx(lambda x: (x * scale).relu() + scale)(torch.randn(2, 4))
        partial_lower(gm, options=ANY)
        constants = gm.graph.find_nodes(op="get_attr")
        (call,) = (node for node in gm.graph.nodes if node.op == "call_module")
        assert constants
        assert set(constants) <= set(call.args)
        x = torch.randn(2, 4)
        torch.testing.assert_close(gm(x), (x * scale).relu() + scale)

    def test_tuples_cross_both_boundaries_of_a_region(self) -> None:
        def work(x: torch.Tensor) -> tuple[Any, ...]:
            top = torch.topk(x, 2)
            least = torch.min(x, 0)
            s = torch.sin(top.values)
            parts = torch.chunk(s + 1, 2, 1)
            return top, least.indices + 1, least.values, parts, torch.cat([torch.sin(part) for part in parts])

        gm = lowered(work, torch.randn(4, 4))
        assert_runs_as(work, gm, torch.randn(4, 4))

    def test_elements_stay_with_their_tuple_whatever_a_predicate_answers(self) -> None:
        def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values, places = (x + 1).max(0)
            return values * 2, places + 1, *torch._foreach_add([x, x], 1.0)

        gm = traced(parts, torch.randn(3, 4))
        partial_lower(gm, lambda node: node.target is not operator.getitem, options=ANY)
        assert len(report(gm).regions) == 1
        assert_runs_as(parts, gm, torch.randn(3, 4))

    def test_a_list_that_is_used_as_a_list_stays_outside(self) -> None:
        nodes = {"many": (aten._foreach_exp.default, ["x", "y"]), "one": (aten.neg.default, "x")}
        gm = partial_lower(graph_of(nodes, x=torch.ones(3), y=torch.ones(2)), options=ANY)
        assert [entry[2] for entry in report(gm).outside] == ["its results are used as one tuple"]
        many, one = gm(torch.zeros(3), torch.ones(2))
        assert [value.tolist() for value in many] == [[1.0] * 3, torch.ones(2).exp().tolist()]
        assert one.tolist() == [0.0] * 3


@pytest.mark.usefixtures("interpreted")
class TestWhatIsLowered:
    def test_the_defaults_refuse_nothing(self) -> None:
        gm = partial_lower(traced(), options=ANY)
        assert len(report(gm).regions) == 1
        assert report(gm).outside == []

    def test_small_regions_are_not_worth_a_call(self) -> None:
        gm = partial_lower(traced(), no_sin)
        assert report(gm).regions == []
        assert any("a region has at least 10" in reason for _, _, reason in report(gm).outside)
        assert len(report(partial_lower(traced(), options=LowerOptions(min_aten_ops=6))).regions) == 1
        assert len(report(partial_lower(traced(), options=LowerOptions(min_aten_ops=7))).regions) == 0

    def test_a_subgraph_predicate_refuses_whole_regions(self) -> None:
        asked: list[list[str]] = []

        def no_exp(nodes: list[fx.Node]) -> bool:
            asked.append([node.name for node in nodes])
            return all(node.target is not aten.exp.default for node in nodes)

        gm = partial_lower(traced(), no_sin, no_exp, options=ANY)
        assert [len(names) for names in asked] == [3, 2]
        assert [region.name for region in report(gm).regions] == ["subgraph_0"]
        assert [reason for _, _, reason in report(gm).outside].count("refused by subgraph_predicate") == 2
        assert_runs_as(chain, gm, torch.randn(3, 4), torch.randn(3, 4))

    def test_each_node_is_asked_for_once(self) -> None:
        asked: list[str] = []
        partial_lower(traced(), lambda node: not asked.append(node.name), options=ANY)
        assert len(asked) == len(set(asked)) == 6

    def test_modules_methods_and_python_functions_stay_outside(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.ReLU()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.relu(self.inner(x).neg()) + 1

        gm = fx.symbolic_trace(Model())
        FakeTensorProp(gm).propagate(torch.randn(3))
        partial_lower(gm, options=ANY)
        reasons = [reason for _, _, reason in report(gm).outside]
        assert reasons == [
            "a call_module node, not an operator",
            "a call_method node, not an operator",
            "relu is a Python function; make_fx shows its operators",
            "add is a Python function; make_fx shows its operators",
        ]
        assert gm(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 1.0]

    def test_fused_optimizers_complex_numbers_and_data_dependent_results_stay_outside(self) -> None:
        def work(x: torch.Tensor) -> tuple[Any, ...]:
            z = torch.view_as_complex(x)
            return (z * z).abs(), torch.nonzero(x), x.exp()

        gm = lowered(work, torch.randn(3, 2), tracing="symbolic", node_predicate=lambda node: True)
        told = {name.split("_default")[0]: reason for name, _, reason in report(gm).outside}
        assert told["view_as_complex"] == "complex, sparse or quantized values"
        assert told["abs_1"] == "reads complex, sparse or quantized values"
        assert told["nonzero"] == "its result depends on the contents of a tensor"
        assert_runs_as(work, gm, torch.randn(3, 2))


class TestBadInput:
    @pytest.mark.parametrize("answer", [None, 1, "yes", torch.tensor(True)])
    def test_a_node_predicate_that_does_not_answer_is_named_with_its_node(self, answer: Any) -> None:
        with pytest.raises(LowerError, match=r"node_predicate returned .* for mul"):
            partial_lower(traced(), lambda node: answer, options=ANY)

    def test_a_node_predicate_that_raises_is_named_with_its_node(self) -> None:
        def predicate(node: fx.Node) -> bool:
            raise KeyError(node.name)

        with pytest.raises(LowerError, match="node_predicate raised KeyError for mul") as caught:
            partial_lower(traced(), predicate, options=ANY)
        assert isinstance(caught.value.__cause__, KeyError)

    def test_a_subgraph_predicate_that_raises_or_does_not_answer_is_named_with_its_nodes(self) -> None:
        with pytest.raises(LowerError, match="subgraph_predicate returned 3 for the 3 nodes from mul to add"):
            partial_lower(traced(), no_sin, len, options=ANY)  # type: ignore[arg-type]
        with pytest.raises(LowerError, match="subgraph_predicate raised ZeroDivisionError for the 3 nodes"):
            partial_lower(traced(), no_sin, lambda nodes: bool(1 // 0), options=ANY)

    def test_a_dumper_that_raises_is_named(self) -> None:
        with pytest.raises(LowerError, match="dumper raised OSError for region 0: no space"):
            partial_lower(traced(), dumper=lambda text: (_ for _ in ()).throw(OSError("no space")), options=ANY)

    @pytest.mark.parametrize("keyword", ["node_predicate", "subgraph_predicate", "dumper"])
    def test_what_cannot_be_called_is_an_option_error(self, keyword: str) -> None:
        with pytest.raises(OptionError, match=f"{keyword}=7 cannot be called"):
            partial_lower(traced(), **{keyword: 7})  # type: ignore[arg-type]

    def test_a_graph_without_metadata_says_how_to_get_it(self) -> None:
        with pytest.raises(LowerError, match="x has no `val`") as caught:
            partial_lower(fx.symbolic_trace(lambda x: torch.relu(x) + 1))
        assert "make_fx" in str(caught.value)

    def test_a_graph_that_fails_lint_is_refused_as_it_is(self) -> None:
        gm = traced()
        nodes = list(gm.graph.nodes)
        nodes[3].append(nodes[2])
        with pytest.raises(LowerError, match=r"the graph is not valid: .*before it has been defined"):
            partial_lower(gm)

    def test_a_module_that_is_not_a_graph_module_is_refused(self) -> None:
        with pytest.raises(LowerError, match=r"an object of type Linear is not a torch\.fx\.GraphModule"):
            partial_lower(nn.Linear(2, 2))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "options",
        [
            {"min_aten_ops": -1},
            {"min_aten_ops": True},
            {"min_aten_ops": 2.5},
            {"strict": "yes"},
            {"remat": 1},
            {"config": ["max_autotune"]},
            {"config": {"max_autotunee": True}},
            {"region_config": {0: {"nothing": 1}}},
            {"region_config": {"0": {}}},
            {"region_config": {0: 3}},
            {"region_config": [{}]},
            {"minimum": 3},
            7,
        ],
    )
    def test_bad_lower_options_are_option_errors(self, options: Any) -> None:
        with pytest.raises(OptionError):
            ws.compile(lambda: None, lower_options=options)


class TestCompiling:
    @pytest.fixture
    def crash(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def compile_inductor(gm: fx.GraphModule, *_: Any, **__: Any) -> Any:
            if gm.graph.find_nodes(op="call_function", target=aten.exp.default):
                raise RuntimeError("no compiler\nand many lines more")
            return lambda tensors: tuple(gm(*tensors))

        monkeypatch.setattr("wholestep.lower.compiled_region.compile_inductor", compile_inductor)

    @pytest.mark.usefixtures("crash")
    def test_a_region_that_does_not_compile_runs_operator_by_operator_with_a_warning(self) -> None:
        with pytest.warns(LowerWarning, match=r"region 1 \(add_1 to exp, 2 operators\) .* RuntimeError: no compiler"):
            gm = partial_lower(traced(), no_sin, options=LowerOptions(min_aten_ops=1))
        assert [region.number for region in report(gm).regions] == [0]
        assert ("exp", "aten.exp.default", "region 1 did not compile: RuntimeError: no compiler") in report(gm).outside
        assert_runs_as(chain, gm, torch.randn(3, 4), torch.randn(3, 4))

    @pytest.mark.usefixtures("crash")
    def test_strict_raises_instead_and_leaves_the_graph_as_it_was(self) -> None:
        gm = traced()
        code = gm.code
        with pytest.raises(LowerError, match=r"region 1 .* does not compile") as caught:
            partial_lower(gm, no_sin, options=ANY)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert gm.code == code
        assert_runs_as(chain, gm, torch.randn(3, 4), torch.randn(3, 4))

    def test_settings_of_inductor_reach_all_regions_or_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[dict[str, Any]] = []

        def compile_inductor(gm: fx.GraphModule, inputs: Any, settings: dict[str, Any], *_: Any, **__: Any) -> Any:
            seen.append(settings)
            return lambda tensors: tuple(gm(*tensors))

        monkeypatch.setattr("wholestep.lower.compiled_region.compile_inductor", compile_inductor)
        options = LowerOptions(
            min_aten_ops=1, config={"epilogue_fusion": False}, region_config={1: {"max_fusion_size": 3}}
        )
        partial_lower(traced(), no_sin, options=options)
        assert [settings["epilogue_fusion"] for settings in seen] == [False, False]
        assert [settings.get("max_fusion_size") for settings in seen] == [None, 3]

    def test_equal_regions_are_compiled_once(self, interpreted: None) -> None:
        def layers(x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                x = torch.sin((x @ x).relu() * 2)
            return x

        cache = RegionCache()
        gm = partial_lower(traced(layers, torch.randn(4, 4)), no_sin, options=ANY, cache=cache)
        assert len(report(gm).regions) == 8
        assert cache.hits == 7
        other = partial_lower(traced(layers, torch.randn(5, 5)), no_sin, options=ANY, cache=cache)
        assert cache.hits == 14
        for each, size in ((gm, 4), (other, 5)):
            assert_runs_as(layers, each, torch.randn(size, size))

    def test_constants_of_equal_regions_are_told_apart(self, interpreted: None) -> None:
        cache = RegionCache()
        for value in range(6):
            gm = make_fx(_plus(float(value)))(torch.ones(3))
            partial_lower(gm, options=ANY, cache=cache)
            torch.testing.assert_close(gm(torch.ones(3)), _plus(float(value))(torch.ones(3)))

    # A number that no run before has seen, also where a test before this one seeded `random`: a new folder for the
    # cache would cost a minute of compiled headers.
    # Pooling comes first: Inductor's decomposition of it needs a part of Inductor that it does not import.
    GRAPH = """
        def pooled(x):
            return torch.nn.functional.max_pool2d(x * NUMBER, 2).relu()

        gm = make_fx(pooled, tracing_mode="fake")(torch.randn(1, 2, 6, 4))
        ws.partial_lower(gm, options=ws.lower.LowerOptions(min_aten_ops=1, strict=True))
        assert gm(-torch.ones(1, 2, 6, 4)).sum() == 0
    """
    STEP = """
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def train(x):
            loss = (model(x).tanh() * NUMBER).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ws.compile(train, lower="inductor", lower_options={"min_aten_ops": 1})
        first = step(torch.ones(7, 3))
        assert step(torch.ones(7, 3)) < first
    """

    @pytest.mark.parametrize(
        ("lines", "compiled"), [(GRAPH, 1), pytest.param(STEP, 2, marks=pytest.mark.long)], ids=["graph", "step"]
    )
    def test_a_second_process_finds_regions_in_the_cache_on_disk(self, lines: str, compiled: int) -> None:
        head = """
            import os
            import torch
            import torch._inductor.compile_fx
            from torch.fx.experimental.proxy_tensor import make_fx
            import wholestep as ws
            from torch._dynamo.utils import counters

            torch.set_num_threads(1)
            torch.manual_seed(0)
            if os.fork():  # the parent does what its child has done: nothing but the disk leads from one to the other
                assert os.wait()[1] == 0
        """
        tail = """
            found = (counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass"))
            print(*found, flush=True)
        """
        program = "\n".join(map(textwrap.dedent, (head, lines, tail)))
        program = program.replace("NUMBER", repr(random.SystemRandom().random()))
        source = str(Path(ws.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": source}
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.splitlines() == [f"0 {compiled} 0", f"{compiled} 0 0"]
