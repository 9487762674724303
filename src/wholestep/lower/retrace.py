"""A region as a graph of its own, in the operators Inductor wants.

The nodes run once more on fake tensors, with Inductor's decompositions; list operators run element by element, numbers
come out of one tensor (`scalars.py`). Inputs: the tensors of the region, then the numbers as float32, then as float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import shared_inputs, write_condition, writes, written_positions
from wholestep.lower.draw_order import draw, needs_layout
from wholestep.lower.draws import throw_opaque_coins
from wholestep.lower.foreach import call_elementwise, element_operator, is_foreach, unscaled
from wholestep.lower.in_place import only_writes_back
from wholestep.lower.layout import lay_out_results
from wholestep.lower.regions import Region, is_view, order_of
from wholestep.lower.scalars import Number, call
from wholestep.lower.short_attention import call_short_attention, is_short_attention
from wholestep.torch_private.fake_tensors import FakeTensor
from wholestep.torch_private.inductor import decomposed
from wholestep.torch_private.operators import OpOverload, may_copy

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class Retraced:
    """What is handed to Inductor."""

    gm: fx.GraphModule
    inputs: list[Any]
    """Fake tensors, in the order of the placeholders."""
    packs: tuple[torch.dtype, ...]
    """The dtypes in which the numbers of the region follow its tensors."""
    device: torch.device
    seed: fx.Node | None = None
    """The node that the last input stands for."""


def retrace(region: Region, settings: Mapping[str, Any], *, seed: fx.Node | None = None) -> Retraced:
    """Trace a region on fake copies of its inputs, under settings of Inductor. `seed`: a node that becomes one more
    input, the last."""
    tensors = [node.meta["val"] for node in region.inputs]
    mode = next((val.fake_mode for val in _fakes(region, tensors)), None)
    assert mode is not None, "a region has values"
    device = device_of(region)
    packs = _packs(region)
    inputs = [_fresh(val, mode) for val in tensors]
    with mode:
        inputs += [torch.empty(len(region.numbers), dtype=dtype, device=device) for dtype in packs]
    if seed is not None:
        inputs.append(_fresh(seed.meta["val"], mode))
    order = [node for node in order_of(region) if node is not seed]
    mutates = not only_writes_back(order, region.inputs)

    def run(*flat: Any) -> tuple[Any, ...]:
        given = {} if seed is None else {seed: flat[-1]}
        return _run(region, order, packs, flat if seed is None else flat[:-1], given)

    traced = decomposed(run, inputs, mode, settings=dict(settings), functionalize=mutates)
    lay_out_results(traced, [node.meta.get("val") for node in region.outputs], mode)
    if settings["fallback_random"]:
        throw_opaque_coins(traced)
    return Retraced(traced, inputs, packs, device, seed)


def _run(
    region: Region, order: Sequence[fx.Node], packs: Sequence[torch.dtype], flat: Sequence[Any], env: dict[fx.Node, Any]
) -> tuple[Any, ...]:
    env.update(zip(region.inputs, flat, strict=False))
    given = dict(zip(packs, flat[len(region.inputs) :], strict=True))
    for i, node in enumerate(region.numbers):
        single, double = (given[dtype][i] if dtype in given else None for dtype in (torch.float32, torch.float64))
        env[node] = Number(single, double)
    for node in order:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = _call(node, tuple(args), dict(kwargs))
    return tuple(env[node] for node in region.outputs)


def _call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return target(*args, **kwargs)
    if needs_layout(node):
        return draw(node, args, kwargs)
    if is_short_attention(node):
        return call_short_attention(target, args, kwargs)
    if target in _VIEWS:
        # Decompositions may lay out what eager's kernel did not; a view of the same elements is a copy then.
        return aten.reshape.default(*args, **kwargs)
    if may_copy(target) and shared_inputs(node) and not is_view(node):
        # A copy here, as it was in eager: functionalization may take it for a view, and let it follow writes.
        return target(*args, **kwargs).clone()
    if write_condition(target) and writes(node):
        return _call_hidden_writer(target, args, kwargs)
    if target is aten._amp_foreach_non_finite_check_and_unscale.default:
        return unscaled(*args)
    if is_foreach(target) and element_operator(target) is not None:
        return call_elementwise(target, args, kwargs)
    return call(target, args, kwargs)


def _call_hidden_writer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch norm updates its statistics without saying so: let it update copies, and say it."""
    copies = {i: args[i].clone() for i in written_positions(op)}
    result = op(*(copies.get(i, value) for i, value in enumerate(args)), **kwargs)
    for i, value in copies.items():
        args[i].copy_(value)
    return result


def _fakes(region: Region, tensors: list[Any]) -> list[FakeTensor]:
    made = [node.meta.get("val") for node in region.nodes]
    return [val for val in (*tensors, *made) if isinstance(val, FakeTensor)]


def device_of(region: Region) -> torch.device:
    """Where the region computes; numbers are sent there."""
    tensors = [node.meta["val"] for node in region.inputs]
    found = [val.device for val in _fakes(region, tensors) if val.dim() > 0]
    return next((device for device in found if device.type != "cpu"), found[0] if found else torch.device("cpu"))


def _packs(region: Region) -> tuple[torch.dtype, ...]:
    if not region.numbers:
        return ()
    dtypes = {val.dtype for val in _fakes(region, [node.meta.get("val") for node in region.inputs])}
    return (torch.float32, torch.float64) if torch.float64 in dtypes else (torch.float32,)


def _fresh(val: Any, mode: Any) -> Any:
    """A fake tensor that is nobody else's: two inputs may have been described by one."""
    if not isinstance(val, Tensor):
        return val
    with mode:
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
