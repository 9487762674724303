"""Values between stages, and state of stages: inputs, outputs, buffers and shared parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pipelining.models import CASES, make, numbers
from pipelining.test_local_runs import assert_like_eager
from wholestep.errors import PipelineError, PipelineInputError, PipelineStateError
from wholestep.pipelining import MultiUseParameterConfig, SharedParameter, pipe_split, pipeline

X = numbers(4, 8)
TRANSMIT, REPLICATE = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE


class Tied(nn.Module):
    """Embedding and head share their weight; a buffer that is counted up and read later; one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.ones(8), persistent=False)

    def forward(self, x):
        h = self.embed(x)
        self.calls.add_(1)
        for layer in self.layers:
            h = layer(h) + self.shift * self.calls
            pipe_split()
        return self.head(h), self.calls * 2


IDS = torch.arange(8).view(2, 4)
NAMES = ("embed.weight", "head.weight")


@pytest.mark.parametrize(
    ("asked", "mode"),
    [("replicate", REPLICATE), ("transmit", TRANSMIT), (TRANSMIT, TRANSMIT), ({"head.weight": "transmit"}, TRANSMIT)],
)
def test_a_tied_weight_is_replicated_or_transmitted_as_requested(asked, mode):
    model = Tied()
    pipe = pipeline(model, (IDS,), multi_use_params=asked)
    for _ in range(2):
        assert_like_eager(pipe, model, (IDS,), {})
    found = SharedParameter(NAMES, (0, 2), mode)
    assert (pipe.shared, pipe.transmitted) == (((found,), ()) if mode is REPLICATE else ((), (found,)))
    holds = [set(NAMES) <= stage.state_dict().keys() for stage in pipe.stages]
    assert holds == [True, False, mode is REPLICATE]
    sent = [value for value in pipe.routing.values.values() if value.name == "sent_embed_weight"]
    assert [(value.producer, value.consumers, value.differentiable) for value in sent] == (
        [] if mode is REPLICATE else [(0, (2,), True)]
    )
    assert len(list(pipe.parameters())) == len(list(model.parameters()))
    assert pipe.replicated_params == ([{"submod_pp_0": NAMES[0], "submod_pp_2": NAMES[0]}] if pipe.shared else [])


def test_invalid_multi_use_params_are_refused():
    with pytest.raises(PipelineError, match="does not have"):
        pipeline(Tied(), (IDS,), multi_use_params={"tail.weight": "transmit"})
    with pytest.raises(PipelineError, match="'sent' is not a mode"):
        pipeline(Tied(), (IDS,), multi_use_params="sent")


def test_state_dicts_have_the_names_and_persistence_of_the_model():
    model = Tied()
    pipe = pipeline(model, (IDS,))
    names = set().union(*(stage.state_dict() for stage in pipe.stages))
    assert names == model.state_dict().keys()
    assert "shift" in dict(pipe.get_stage_module(1).named_buffers())
    assert not any("shift" in stage.state_dict() for stage in pipe.stages)
    assert [list(stage.state_dict()) for stage in pipe.stages][1] == ["layers.1.weight", "layers.1.bias"]


def test_a_pipe_loads_and_saves_the_state_of_the_model():
    model, other = Tied(), Tied()
    pipe = pipeline(model, (IDS,))
    assert pipe.load_state_dict(other.state_dict()).missing_keys == []
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in pipe.state_dict().items())
    again = Tied()
    again.load_state_dict(pipe.state_dict())
    with pytest.raises(RuntimeError, match=r"missing.*unexpected"):
        pipe.load_state_dict({"nothing": torch.ones(())})


def test_a_buffer_that_a_later_stage_writes_and_an_earlier_one_reads_is_refused():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            x = self.fc(x) + self.seen
            pipe_split()
            self.seen.add_(1)
            return x

    with pytest.raises(PipelineStateError, match="stage 1 writes seen, which stage 0") as caught:
        pipeline(Late(), (X,))
    assert caught.value.location.text == "self.seen.add_(1)"


def test_the_routing_table_tells_frozen_parameters_and_differentiable_inputs():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    model[1].requires_grad_(True)
    cut = {"1": "BEGINNING", "2": "BEGINNING"}
    from wholestep.pipelining import SplitPoint

    spec = {name: SplitPoint[point] for name, point in cut.items()}
    values = pipeline(model, (X,), split_spec=spec).routing.values
    assert [value.differentiable for value in values.values()] == [False, False, True, True]
    values = pipeline(model, (X.clone().requires_grad_(),), split_spec=spec).routing.values
    assert all(value.differentiable for value in values.values())


def test_values_without_a_gradient_are_distinguished():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            h = self.fc(x)
            zero, best, apart, late = torch.zeros_like(h), h.argmax(-1), h.detach(), torch.zeros_like(h)
            late.add_(h)
            pipe_split()
            return h + zero + apart + best[:, None] + late

    values = pipeline(Mixed(), (X,)).routing.values
    known = {name: value.differentiable for name, value in values.items()}
    assert known == {
        "x": False,
        "linear": True,
        "zeros_like": False,
        "argmax": False,
        "detach": False,
        "zeros_like_1": True,
        "add_3": True,
    }


class Nested(nn.Module):
    """All kinds of arguments and results: dictionaries, flags, more positions, early outputs, sizes, state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.weight = nn.Parameter(torch.ones(3))
        self.constant = torch.full((8,), 2.0)

    def forward(self, x, extra, *rest, scale: float = 1.0, mask=None):
        out, (h, c) = self.lstm(x)
        first, second = out.chunk(2, dim=1)
        pipe_split()
        y = first.reshape(first.shape[0], -1) + extra["z"] * scale
        pipe_split()
        table = torch.tensor([1.0, 2.0] * 4)
        more = (second * self.constant * table).reshape(x.shape[0], -1)
        y = y if mask is None else y * mask
        return {
            "y": y,
            "state": [h, c, more],
            "none": None,
            "rest": rest[0] * 2,
            "w": self.weight,
            "x": x,
            "b": x.shape[0],
        }


def nested_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    extra = {"q": numbers(3, 8), "z": numbers(3, 8)}
    return (numbers(3, 2, 8), extra, numbers(2)), {"scale": 0.5, "mask": numbers(3, 8)}


def test_nested_arguments_and_results_early_outputs_and_sizes():
    model = Nested()
    args, kwargs = nested_call()
    pipe = pipeline(model, args, kwargs)
    assert pipe.num_stages == 3
    assert_like_eager(pipe, model, args, kwargs)
    found, wanted = pipe(*args, **kwargs), model(*args, **kwargs)
    assert list(found) == list(wanted)
    assert (found["none"], found["b"]) == (None, 3)
    assert isinstance(found["state"], list)


def test_a_pipe_accepts_every_form_of_the_call():
    model, (query, item), kwargs = make("two_tower")
    pipe = pipeline(model, (query,), {"weight": kwargs["weight"], "item": item})
    wanted = model(query, item, **kwargs)["scores"]
    calls = [
        ((query, item), kwargs),
        ((), {"item": item, **kwargs, "query": query}),
        ((query,), {"item": item, **kwargs}),
    ]
    for args, named in calls:
        assert torch.equal(pipe(*args, **named)["scores"], wanted)
    nested = Nested()
    args, kwargs = nested_call()
    other_order = {"z": args[1]["z"], "q": args[1]["q"]}
    found = pipeline(nested, args, kwargs)(args[0], other_order, args[2], **kwargs)
    assert torch.equal(found["y"], nested(*args, **kwargs)["y"])


def test_a_call_that_does_not_match_the_captured_one_is_refused():
    model = Nested()
    args, kwargs = nested_call()
    pipe = pipeline(model, args, kwargs)
    with pytest.raises(PipelineInputError, match=r"scale was 0\.5 in the captured call and is 0\.25"):
        pipe(*args, **{**kwargs, "scale": 0.25})
    with pytest.raises(PipelineInputError, match="mask was a tensor in the captured call and is None"):
        pipe(*args, scale=0.5)
    with pytest.raises(
        PipelineInputError, match=r"x has the shape \[3, 2, 7\]; the graph was captured for \[any, 2, 8\]"
    ):
        pipe(numbers(3, 2, 7), *args[1:], **kwargs)
    with pytest.raises(PipelineInputError, match="structure of the arguments differs"):
        pipe(args[0], {"z": args[1]["z"]}, args[2], **kwargs)
    without = pipeline(model, args)
    with pytest.raises(PipelineInputError, match="mask was not given"):
        without(*args, mask=kwargs["mask"])
    assert torch.equal(without(*args, mask=None, scale=1.0)["y"], model(*args)["y"])
    with pytest.raises(TypeError, match="unexpected keyword"):
        pipe(*args, **kwargs, wrong=1)


def test_a_skip_is_relayed_by_the_stages_between():
    model, args, _ = make("skip")
    routing = pipeline(model, args).routing
    assert [routing.relayed(name) for name in ("shift", "tanh")] == [(0, 1, 2), (1, 2)]
    assert routing.values["tanh"].consumers == (1, 3)


def test_the_routing_table_is_printed():
    model, args, _ = make("skip")
    pipe = pipeline(model, args)
    text = pipe.print_readable()
    assert "  shift: input -> stage 3, through 0, 1, 2  float32[4, 8]\n" in text
    assert "  tanh: stage 0 -> stage 1, stage 3, through 2  float32[4, 8], gradient back\n" in text
    assert text.count("class Stage") == 4
    info = pipe.info()
    assert (info.num_stages, info.has_loss_and_backward) == (4, False)
    assert [node.target for node in info.graph.nodes if node.op == "call_module"] == [
        f"submod_pp_{i}" for i in range(4)
    ]
    with pytest.raises(ValueError, match="Invalid stage index 4"):
        pipe.get_stage_module(4)


def test_a_copy_of_a_stage_has_its_own_state_and_both_modes():
    model, args, kwargs = make("unet")
    pipe = pipeline(model, args, kwargs, split_spec=CASES["unet"].split)
    stages = [copy.deepcopy(stage) for stage in pipe.stages]
    for mine, theirs in zip(stages, pipe.stages, strict=True):
        assert list(mine.state_dict()) == list(theirs.state_dict())
        assert all(a is not b for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    for training in (True, False):
        values: Any = args
        torch.manual_seed(0)
        for stage in stages:
            result = stage.train(training)(*values)
            values = result if isinstance(result, tuple) else (result,)
        torch.manual_seed(0)
        assert torch.equal(values[0], model.train(training)(*args))
