"""A pipe in one process: outputs, gradients and buffers are bitwise equal to those of the model, in both modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pipelining.models import CASES, make
from selection import each_now
from wholestep.pipelining import Pipe, pipeline
from wholestep.torch_private.fx_graphs import pytree


def tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def one_step(model: nn.Module, owner: nn.Module, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Outputs, and the gradients and buffers that a forward and a backward leave in the model."""
    owner.zero_grad()
    torch.manual_seed(5)
    results = tensors(model(*args, **kwargs))
    sum(result.float().square().mean() for result in results if result.requires_grad).backward()
    left = {f"gradient of {name}": parameter.grad for name, parameter in owner.named_parameters()}
    left |= {name: buffer.clone() for name, buffer in owner.named_buffers()}
    return [result.detach() for result in results], left


def assert_like_eager(pipe: Pipe, model: nn.Module, args: Any, kwargs: Any) -> None:
    before = copy.deepcopy(model.state_dict())
    wanted, wanted_left = one_step(model, model, args, kwargs)
    model.load_state_dict(before)
    found, found_left = one_step(pipe, model, args, kwargs)
    model.load_state_dict(before)
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for name, value in wanted_left.items():
        assert (value is None) == (found_left[name] is None), name
        assert value is None or torch.equal(value, found_left[name]), name


@pytest.mark.parametrize("name", each_now(CASES, *(name for name in CASES if name not in ("t5", "llama", "gpt2"))))
def test_outputs_gradients_and_buffers_equal_those_of_the_model_in_both_modes(name):
    model, args, kwargs = make(name)
    before = copy.deepcopy(model.state_dict())
    pipe = pipeline(model, args, kwargs, split_spec=CASES[name].split)
    assert pipe.num_stages == CASES[name].stages
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert_together_the_models(pipe, model)
    for training in (True, False):
        model.train(training)
        pipe.train(training)
        assert_like_eager(pipe, model, args, kwargs)


@pytest.mark.parametrize("name", ["skip", "two_tower", "unet", "moe"])
def test_the_same_graph_runs_a_smaller_batch(name):
    model, args, kwargs = make(name)
    pipe = pipeline(model, args, kwargs, split_spec=CASES[name].split)
    smaller = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:-1], (args, kwargs))
    if smaller[0][0].shape[0] > 1:
        assert_like_eager(pipe, model, *smaller)
    else:
        model.eval()
        pipe.eval()
        assert_like_eager(pipe, model, *smaller)


def assert_together_the_models(pipe: Pipe, model: nn.Module) -> None:
    """The state dicts of the stages are together that of the model."""
    together: dict[str, torch.Tensor] = {}
    for i in range(pipe.num_stages):
        together |= pipe.get_stage_module(i).state_dict()
    wanted = model.state_dict()
    assert together.keys() == wanted.keys() == pipe.state_dict().keys()
    assert all(together[key].data_ptr() == wanted[key].data_ptr() for key in wanted)


def test_neighbours_agree_on_values_and_inputs_are_in_signature_order():
    model, args, kwargs = make("two_tower")
    routing = pipeline(model, args, kwargs).routing
    assert routing.inputs[0] == ("query", "item", "weight")
    assert routing.inputs[1:] == routing.outputs[:-1]
    query = routing.values["query"]
    assert (query.producer, query.consumers, query.differentiable) == ("input", (1,), False)
    assert routing.relayed("query") == (0,)
    tower = routing.values[routing.outputs[0][-1]]
    assert (tower.producer, tower.consumers, tower.differentiable) == (0, (2,), True)
    assert routing.crossing_bytes(0) == 4 * (4 * 8 + 4 + 4 * 8)
