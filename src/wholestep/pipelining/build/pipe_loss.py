"""Gives a pipe its loss: which result it is, and its backward in the graph of stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.pipelining.build.backward import insert_backward
from wholestep.pipelining.build.detach import not_on_its_own
from wholestep.pipelining.build.loss import LossWrapper, Result, bad_loss, default_spec, find_loss
from wholestep.pipelining.pipe import Pipe


def add_loss(pipe: Pipe, module: torch.nn.Module, spec: Any) -> None:
    """Put the backward of the loss into `pipe.split_gm`.

    A result named "loss" that nobody asked for is found too, if it can be one. Calling the pipe runs the backward only
    if the caller gave a spec, or the model is a `LossWrapper`; a `DetachExecutor` always does.
    """
    names = pipe.routing.outputs[-1]
    results = pipe.unflatten_outputs([Result(name) for name in names])
    found = default_spec(module, results) if spec is None else spec
    if found is None or found is False:
        return
    name = find_loss(results, found)
    why = _why_not(pipe, name)
    if why and spec is None:
        return
    if why:
        raise bad_loss(name, why, results)
    graph = pipe.split_gm.graph
    output = graph.output_node().args[0]
    assert isinstance(output, tuple)
    loss = output[names.index(name)]
    assert isinstance(loss, fx.Node)
    insert_backward(graph, loss)
    pipe.split_gm.recompile()
    pipe.split_gm.forward = not_on_its_own
    pipe.loss_spec = found
    pipe.has_loss_and_backward = True
    pipe.call_runs_backward = spec is not None or isinstance(module, LossWrapper)


def _why_not(pipe: Pipe, name: str) -> str:
    """Why no backward can begin with a value; empty if it can."""
    value = pipe.routing.values[name]
    if not value.differentiable:
        return "no parameter has a gradient from it"
    if value.meta is not None and value.meta.numel() != 1:
        return f"it has the shape {list(value.meta.shape)}"
    return ""
