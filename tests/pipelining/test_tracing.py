"""`Pipe.from_tracing` without an example call, `PipeSequential` and chunk specs, as code for PiPPy uses them."""

from __future__ import annotations

import copy
import operator
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn

from wholestep.errors import PipelineError, PipelineInputError
from wholestep.pipelining import (
    MultiUseParameterConfig,
    Pipe,
    PipeSequential,
    PipeSplitWrapper,
    SplitPoint,
    TensorChunkSpec,
    TrivialLossWrapper,
    annotate_split_points,
    merge_chunks,
    pipe_split,
    pipeline,
    split_args_kwargs_into_chunks,
)
from wholestep.pipelining.build.loss_and_backward import null_coalesce_accumulate

TRANSMIT, REPLICATE = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE


class Model(nn.Module):
    """A parameter and a submodule that two of three stages use, a buffer, a constant, and a skip over the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.layer = nn.Linear(6, 6)
        self.register_buffer("shift", torch.randn(6))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x):
        skip = x @ self.weight
        pipe_split()
        x = self.layer(skip.relu() @ self.weight + self.shift)
        pipe_split()
        return self.layer(x.relu() + skip) * self.scale + torch.ones(6)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def assert_gradients_of_autograd(model: nn.Module, pipe: Pipe, *args: Any) -> None:
    """`pipe` has a loss; `model` returns it."""
    found_loss = pipe(*args)
    found = gradients(model)
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    torch.testing.assert_close(found_loss, loss.detach())
    torch.testing.assert_close(found, gradients(model))


@pytest.mark.parametrize("spec", [None, TRANSMIT, REPLICATE, {"weight": REPLICATE}])
def test_results_and_gradients_of_a_traced_pipe_equal_those_of_the_model(spec):
    model, x = Model(), torch.randn(3, 6)
    before = set(vars(model))
    assert torch.equal(Pipe.from_tracing(model, spec)(x), model(x))
    with_loss = TrivialLossWrapper(model, nn.MSELoss())
    assert_gradients_of_autograd(with_loss, Pipe.from_tracing(with_loss, spec), x, torch.randn(3, 6))
    assert set(vars(model)) == before


def test_a_traced_pipe_has_names_of_pippy_and_a_state_dict_of_the_model():
    model = Model()
    pipe = Pipe.from_tracing(model, REPLICATE)
    assert pipe.replicated_params == [
        {"submod_0": "moved_weight", "submod_1": "moved_weight"},
        {"submod_1": "layer.weight", "submod_2": "layer.weight"},
        {"submod_1": "layer.bias", "submod_2": "layer.bias"},
    ]
    assert pipe.split_gm.submod_1.moved_shift is model.shift
    assert {pipe.remap_qualname(name) for name, _ in pipe.named_parameters()} == set(dict(model.named_parameters()))
    assert pipe.state_dict().keys() == model.state_dict().keys()
    other = Model()
    Pipe.from_tracing(other).load_state_dict(pipe.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    with pytest.raises(PipelineError, match="no module or tensor named"):
        pipe.remap_qualname("split_gm.submod_0.other")


def test_unused_state_stays_in_the_state_dict():
    model = Model()
    model.spare = nn.BatchNorm1d(3)
    pipe = Pipe.from_tracing(model)
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert copy.deepcopy(pipe).state_dict().keys() == model.state_dict().keys()
    assert {id(p) for p in pipe.parameters()} == {id(p) for p in model.parameters()}


def test_without_a_loss_autograd_spans_the_whole_pipe():
    model, x = Model(), torch.randn(3, 6)
    Pipe.from_tracing(model)(x).sum().backward()
    found = gradients(model)
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, gradients(model))


def test_nested_values_cross_cuts_with_their_gradients():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            out, state = self.lstm(x)
            pipe_split()
            middle = self.layer(out) + state[0].transpose(0, 1)
            pipe_split()
            return middle.mean() + state[1].square().sum() + state[0].sum()

    model, x = Nested(), torch.randn(2, 3, 4)
    pipe = Pipe.from_tracing(model, output_loss_value_spec=True)
    assert any(node.target is null_coalesce_accumulate for node in pipe.split_gm.graph.nodes)
    assert_gradients_of_autograd(model, pipe, x)


def test_a_value_used_without_gradient_and_a_returned_parameter():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x):
            hidden = self.layer(x)
            norm = hidden.sum()
            pipe_split()
            scaled = hidden * norm.detach()
            pipe_split()
            return scaled.mean() * self.weight.sum(), self.weight

    model, x = Odd(), torch.randn(2, 4)
    pipe = Pipe.from_tracing(model, output_loss_value_spec=(True, False))
    pipe(x)
    found = gradients(model)
    model.zero_grad()
    model(x)[0].backward()
    torch.testing.assert_close(found, gradients(model))
    assert torch.equal(pipe(x)[1], model.weight)


def test_a_stage_that_writes_its_input_raises_with_a_hint():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            x = self.layer(x)
            pipe_split()
            return x.relu_().sum()

    model, x = Writes(), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match="in-place") as caught:
        Pipe.from_tracing(model, output_loss_value_spec=True)(x)
    assert any("pipeline()" in note for note in caught.value.__notes__)
    assert torch.equal(Pipe.from_tracing(model)(x), model(x))
    assert torch.equal(pipeline(model, (x,), loss=True)(x)[0], model(x))


def test_a_sequential_is_cut_between_its_modules_and_a_repeated_one_is_shared():
    layer = nn.Linear(4, 4)
    model, x = nn.Sequential(layer, nn.Tanh(), layer), torch.randn(2, 4)
    chain = PipeSequential.from_sequential(model)
    assert torch.equal(chain(x), model(x))
    pipe = Pipe.from_tracing(chain)
    assert pipe.new_to_old_qualname_mapping == {"submod_0.0": "0", "submod_1.1": "1", "submod_2.2": "2"}
    assert pipe.replicated_params == [
        {"submod_0": "0.weight", "submod_2": "2.weight"},
        {"submod_0": "0.bias", "submod_2": "2.bias"},
    ]
    exported = pipeline(chain, (x,))
    assert exported.num_stages == 3
    assert torch.equal(exported(x)[0], model(x))
    assert exported.shared[0].stages == (0, 2)
    with_loss = TrivialLossWrapper(chain, nn.MSELoss())
    assert_gradients_of_autograd(with_loss, Pipe.from_tracing(with_loss), x, torch.randn(2, 4))


def test_markers_around_leaf_modules_cut():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(2, 4)
    with annotate_split_points(model, {"1": SplitPoint.BEGINNING | SplitPoint.END}):
        pipe = Pipe.from_tracing(model)
    assert pipe.num_stages == 3
    assert torch.equal(pipe(x), model(x))


def test_a_policy_a_tracer_and_a_copy():
    class NoLeaves(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
            return False

    def before_the_last(traced: fx.GraphModule) -> fx.GraphModule:
        node = next(node for node in reversed(traced.graph.nodes) if node.target is torch.nn.functional.linear)
        with traced.graph.inserting_before(node):
            traced.graph.call_function(pipe_split)
        return traced

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(2, 4)
    pipe = Pipe.from_tracing(model, tracer=NoLeaves(), split_policy=before_the_last, deep_copy_module=True)
    assert pipe.num_stages == 2
    assert torch.equal(pipe(x), model(x))
    assert pipe.split_gm.submod_1.moved_2_weight is not model[2].weight


def test_arguments_are_bound_to_the_signature_of_the_model():
    class Add(nn.Module):
        def forward(self, x, y=2):
            return operator.add(x, y)

    pipe = Pipe.from_tracing(Add())
    assert [pipe(1), pipe(1, 3), pipe(y=4, x=1)] == [3, 4, 5]
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        pipe(1, z=3)


def test_an_example_call_gives_a_pipe_for_ranks():
    model, x = Model(), torch.randn(3, 6)
    pipe = Pipe.from_tracing(model, example_args=(x,))
    assert pipe.routing.stages == pipe.num_stages == 3
    assert torch.equal(pipe(x)[0], model(x))
    with pytest.raises(PipelineError, match="traced without an example call"):
        Pipe.from_tracing(model).build_stage(0, "cpu")


def test_num_chunks_of_pippy_splits_a_whole_batch():
    model, x = Model(), torch.randn(6, 6)
    for pipe in (
        Pipe.from_tracing(model, 3, example_args=(x,)),
        Pipe.from_tracing(model, num_chunks=3, example_args=(), example_kwargs={"x": x}),
        Pipe.from_tracing(model, REPLICATE, num_chunks=3, example_args=(x,)),
    ):
        assert pipe.num_stages == 3
        assert next(iter(pipe.routing.values.values())).meta.shape[1:] == (6,)
        assert torch.equal(pipe(x[:2])[0], model(x[:2]))


@pytest.mark.parametrize("capture", [Pipe.from_tracing, lambda model: pipeline(model, (torch.randn(3, 6),))])
def test_a_module_in_a_split_wrapper_begins_or_ends_a_stage(capture):
    layers = [nn.Linear(6, 6) for _ in range(3)]
    ends = PipeSplitWrapper.SplitPoint.END
    model = nn.Sequential(layers[0], PipeSplitWrapper(layers[1]), PipeSplitWrapper(nn.ReLU(), ends), layers[2])
    pipe = capture(model)
    assert pipe.num_stages == 3
    x = torch.randn(3, 6)
    found = pipe(x)
    assert torch.equal(found[0] if isinstance(found, tuple) else found, model(x))
    assert set(pipe.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"multi_use_param_spec": 3}, "multi_use_param_spec must be MultiUseParamSpec enum or dict"),
        ({"multi_use_param_spec": {"weight": 3}}, "Unknown multi-use config value 3 specified for weight"),
        ({"return_to_0": True}, "results stay in the last stage"),
    ],
)
def test_invalid_tracing_options_are_refused(options, said):
    with pytest.raises(PipelineError, match=said):
        Pipe.from_tracing(Model(), **options)


def test_split_gm_cannot_be_called_and_copies_are_independent():
    model, x = Model(), torch.randn(3, 6)
    pipe = Pipe.from_tracing(model)
    with pytest.raises(RuntimeError, match="invoke the Pipe object directly"):
        pipe.split_gm(x)
    other = copy.deepcopy(pipe)
    with pytest.raises(RuntimeError, match="invoke the Pipe object directly"):
        other.split_gm(x)
    assert torch.equal(other(x), pipe(x))
    assert other.state_dict().keys() == pipe.state_dict().keys()


class Batch(NamedTuple):
    """An argument of two values."""

    values: Any
    number: Any


def test_none_in_a_chunk_spec_passes_the_whole_value_and_specs_match_by_name():
    x, y, batch = torch.randn(4, 3), torch.randn(3, 4), Batch(torch.randn(4, 2), 42)
    args, kwargs = split_args_kwargs_into_chunks(
        (x,),
        {"y": y, "batch": batch, "x": x},
        4,
        (None,),
        {"x": TensorChunkSpec(0), "batch": Batch(TensorChunkSpec(0), None), "y": TensorChunkSpec(1)},
    )
    assert all(torch.equal(each[0], x) for each in args)
    for i, each in enumerate(kwargs):
        assert torch.equal(each["y"], y[:, i : i + 1])
        assert torch.equal(each["x"], x[i : i + 1])
        assert torch.equal(each["batch"].values, batch.values[i : i + 1])
        assert each["batch"].number == 42
    assert torch.equal(merge_chunks([{"x": each["x"]} for each in kwargs], {"x": TensorChunkSpec(0)})["x"], x)


@pytest.mark.parametrize("spec", [{"x": TensorChunkSpec(0)}, {"batch": (TensorChunkSpec(0),), "x": None}, {"batch": 3}])
def test_an_invalid_chunk_spec_raises_with_a_valid_one(spec):
    given = {"batch": Batch(torch.randn(4, 2), 42), "x": torch.randn(4)}
    with pytest.raises(PipelineInputError, match=r"TensorChunkSpec\(0\)"):
        split_args_kwargs_into_chunks((), given, 2, None, spec)
