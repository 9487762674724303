"""Where a model is cut: markers, specs, policies and numbers of stages; the model itself is not changed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from pipelining.models import SkipMLP, make, numbers
from wholestep.errors import CutError, PipelineError
from wholestep.pipelining import (
    Balance,
    Pipe,
    PipeSplitWrapper,
    SplitPoint,
    annotate_split_points,
    pipe_split,
    pipeline,
)

X = numbers(4, 8)


class Layers(nn.Module):
    """Layers in a list, one after the other."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def layers_of(pipe: Pipe) -> list[list[str]]:
    return [[name for name, _ in pipe.get_stage_module(i).layers.named_children()] for i in range(pipe.num_stages)]


def assert_same(pipe: Pipe, model: nn.Module) -> None:
    assert torch.equal(pipe(X)[0], model(X))


def test_a_split_before_and_a_split_after_cut_at_the_named_modules():
    model = Layers()
    pipe = pipeline(model, (X,), split_spec={"layers.2": SplitPoint.BEGINNING, "layers.3": SplitPoint.END})
    assert layers_of(pipe) == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert_same(pipe, model)


def test_an_end_followed_by_a_beginning_is_one_cut():
    model = Layers()
    spec = {"layers.1": SplitPoint.END, "layers.2": SplitPoint.BEGINNING}
    assert layers_of(pipeline(model, (X,), split_spec=spec)) == [["0", "1"], ["2", "3", "4", "5"]]


@pytest.mark.parametrize("both", [SplitPoint.BEGINNING | SplitPoint.END, (SplitPoint.BEGINNING, SplitPoint.END)])
def test_a_module_can_be_a_stage_of_its_own(both):
    pipe = pipeline(Layers(), (X,), split_spec={"layers.2": both})
    assert layers_of(pipe) == [["0", "1"], ["2"], ["3", "4", "5"]]


def test_markers_at_begin_and_end_create_no_empty_stage():
    spec = {"layers.0": SplitPoint.BEGINNING, "layers.3": SplitPoint.BEGINNING, "layers.5": SplitPoint.END}
    assert pipeline(Layers(), (X,), split_spec=spec).num_stages == 2


def test_markers_and_split_points_of_torch_are_accepted():
    from torch.distributed import pipelining as torchs

    class Marked(Layers):
        def forward(self, x):
            x = self.layers[0](x)
            torchs.pipe_split()
            return self.layers[2](self.layers[1](x))

    assert layers_of(pipeline(Marked(3), (X,))) == [["0"], ["1", "2"]]
    spec = {"layers.1": torchs.SplitPoint.END}
    assert layers_of(pipeline(Layers(3), (X,), split_spec=spec)) == [["0", "1"], ["2"]]


def test_a_policy_inserts_markers_into_the_graph():
    def before_each_second_product(gm):
        products = [node for node in gm.graph.nodes if node.target is torch.ops.aten.linear.default]
        for node in products[2::2]:
            with gm.graph.inserting_before(node):
                gm.graph.call_function(pipe_split)
        return gm

    model = Layers()
    pipe = pipeline(model, (X,), split_policy=before_each_second_product)
    assert layers_of(pipe) == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert_same(pipe, model)
    assert_same(pipe.eval(), model.eval())
    assert Pipe.from_tracing(model, (X,), split_policy=before_each_second_product).num_stages == 3


def test_two_ways_to_cut_at_once_are_refused():
    with pytest.raises(PipelineError, match=r"both `split_spec` and `split_policy`"):
        pipeline(Layers(), (X,), split_spec={}, split_policy=lambda gm: gm)
    with pytest.raises(ValueError, match=r"both `split_spec` and `stages`"):
        pipeline(Layers(), (X,), split_spec={}, stages=2)


def test_uncalled_modules_and_arguments_of_the_wrong_type_are_named():
    model = Layers()
    with pytest.raises(PipelineError, match=r"'layers', which the model does not call.*\n.*such as 'layers.5'"):
        pipeline(model, (X,), split_spec={"layers": SplitPoint.BEGINNING})
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(PipelineError, match=r"not a Tensor.\n.*write \(x,\)"):
        pipeline(model, X, stages=2)
    for stages in (0, "2"):
        with pytest.raises(PipelineError, match="not a number of stages"):
            pipeline(model, (X,), stages=stages)


def test_unknown_modules_and_split_points_are_refused():
    with pytest.raises(AttributeError, match=r"layers\.9.*nonexistent.*\n.*such as 'layers\.") as raised:
        annotate_split_points(Layers(), {"layers.9": SplitPoint.END})
    assert isinstance(raised.value, PipelineError)
    assert str(raised.value).startswith("[WS-PIPELINE]")
    with pytest.raises(PipelineError, match="Unknown split point"):
        annotate_split_points(Layers(), {"layers.1": "end"})


def test_annotations_cut_and_can_be_undone():
    model = Layers()
    marks = annotate_split_points(model, {"layers.2": PipeSplitWrapper.SplitPoint.BEGINNING})
    assert pipeline(model, (X,)).num_stages == 2
    marks.undo()
    assert pipeline(model, (X,)).num_stages == 1
    with annotate_split_points(model, {"layers.2": SplitPoint.END}):
        assert pipeline(model, (X,)).num_stages == 2
    assert pipeline(model, (X,)).num_stages == 1


def test_pipeline_does_not_change_the_model_or_the_inputs():
    model, (x,), _ = make("unet")
    model.down.eval()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    attributes, random = dict(vars(x)), torch.get_rng_state()
    pipes = [pipeline(model, (x,), split_spec={"down": SplitPoint.BEGINNING}) for _ in range(2)]
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert vars(x) == attributes
    assert torch.equal(torch.get_rng_state(), random)
    assert [pipe.num_stages for pipe in pipes] == [2, 2]
    model.eval()
    assert torch.equal(pipes[0].eval()(x)[0], pipes[1].eval()(x)[0])


def test_stages_are_balanced_by_estimated_and_by_measured_times():
    model = Layers(8)
    for stages in (2, 4, Balance(4, costs="measured"), Balance(2, costs=lambda node: 1.0)):
        pipe = pipeline(model, (X,), stages=stages)
        assert pipe.num_stages == (stages if isinstance(stages, int) else stages.stages)
        assert_same(pipe, model)
        assert_same(pipe.eval(), model.eval())
    halves = layers_of(pipeline(model, (X,), stages=2))
    assert halves == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]


def test_an_expensive_layer_gets_its_own_stage():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4096), nn.Linear(4096, 8))
    balance = Balance(3, costs=lambda node: float(node.args[1].meta["val"].numel()))
    assert [len(list(stage.parameters())) for stage in pipeline(model, (X,), stages=balance).stages] == [6, 2, 2]


def test_no_stage_holds_more_than_max_bytes():
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    free = pipeline(model, (X,), stages=Balance(2, costs=lambda node: 1.0))
    assert [len(list(stage.parameters())) for stage in free.stages] == [4, 4]
    held = pipeline(model, (X,), stages=Balance(2, costs=lambda node: 1.0, max_bytes=4 * (8 * 512 + 512 + 4 * 1024)))
    assert [len(list(stage.parameters())) for stage in held.stages] == [2, 6]
    with pytest.raises(CutError, match="max_bytes"):
        pipeline(model, (X,), stages=Balance(2, max_bytes=1000))


def test_the_balanced_cut_is_optimal():
    model = SkipMLP()
    costs = {"linear": 3.0, "tanh": 1.0, "linear_1": 5.0, "relu": 1.0, "linear_2": 2.0, "relu_1": 4.0, "linear_3": 1.0}
    order = [*costs, "mul", "add"]
    price = dict.fromkeys(order, 0.5) | costs
    pipe = pipeline(model, (X, X), stages=Balance(3, costs=price))
    stages = [
        sum(price.get(n.name, 0.0) for n in stage.graph.nodes if n.op == "call_function") for stage in pipe.stages
    ]
    line = [price[name] for name in order]
    best = min(
        max(sum(line[:a]), sum(line[a:b]), sum(line[b:])) for a, b in itertools.combinations(range(1, len(line)), 2)
    )
    assert max(stages) == pytest.approx(best)
