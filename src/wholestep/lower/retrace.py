"""Retrace a region as a graph of its own, in the operators that Inductor compiles.

The nodes run once more on fake tensors, with Inductor's decompositions and ours (`decompositions.py`); scalar inputs
are elements of one tensor (`scalar_inputs.py`). Inputs: the tensors of the region, then its scalars as float32, then as
float64.

Results get the strides of their metadata, whatever decompositions and functionalization made of them: `view` outside of
the region, random ops and user code depend on them. Strides are compared in the trace, because a tensor that is being
functionalized reports the strides that it would have had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.ir.effects import shared_inputs, write_condition, writes, written_positions
from wholestep.ir.io.node_values import hint_of
from wholestep.ir.meta import node_meta
from wholestep.lower.decompositions import (
    call_elementwise,
    call_short_attention,
    call_with_layout,
    element_operator,
    is_foreach,
    is_short_attention,
    make_bernoulli_opaque,
    needs_layout,
    unscaled,
)
from wholestep.lower.regions import Region, is_view, order_of
from wholestep.lower.scalar_inputs import ScalarInput, call
from wholestep.lower.shared_bodies import BodyCache
from wholestep.torch_private.fake_tensors import FakeTensor
from wholestep.torch_private.inductor import decomposed
from wholestep.torch_private.operators import OpOverload, may_copy

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class Retraced:
    """A region as Inductor gets it."""

    gm: fx.GraphModule
    inputs: list[Any]
    """Fake tensors, in the order of the placeholders."""
    packs: tuple[torch.dtype, ...]
    """The dtypes of the tensors of packed scalars, which follow the region's tensors."""
    device: torch.device
    seed: fx.Node | None = None
    """The node that the last input replaces."""
    computes_seed: bool = False
    """Whether the region computes the seed itself: then it is one more result, the last."""
    bodies: BodyCache | None = None
    """Where repeated parts of it are compiled once; None: all is compiled as it is."""


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
        inputs += [torch.empty(len(region.scalars), dtype=dtype, device=device) for dtype in packs]
    computes_seed = seed is not None and node_meta(seed).starts_backward
    if seed is not None:
        inputs.append(_fresh(seed.meta["val"], mode))
    order = [node for node in order_of(region) if computes_seed or node is not seed]
    mutates = not _only_writes_back(order, region.inputs)

    def run(*flat: Any) -> tuple[Any, ...]:
        if seed is None:
            return _run(region, order, packs, flat, {})
        return _run(region, order, packs, flat[:-1], {seed: flat[-1]})

    traced = decomposed(run, inputs, mode, settings=dict(settings), functionalize=mutates)
    results = [*region.outputs, seed] if seed is not None and computes_seed else region.outputs
    set_result_strides(traced, [node.meta.get("val") for node in results], mode)
    if settings["fallback_random"]:
        make_bernoulli_opaque(traced)
    return Retraced(traced, inputs, packs, device, seed, computes_seed)


def _only_writes_back(order: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> bool:
    """True if the only writes are copies into inputs at the very end, which Inductor compiles as they are."""
    given = set(inputs)
    ends = False
    for node in order:
        if node.target is aten.copy_.default and node.args[0] in given and node.args[1] not in given:
            ends = True
        elif ends or writes(node):
            return False
    return True


def _run(
    region: Region, order: Sequence[fx.Node], packs: Sequence[torch.dtype], flat: Sequence[Any], env: dict[fx.Node, Any]
) -> tuple[Any, ...]:
    env.update(zip(region.inputs, flat, strict=False))
    given = dict(zip(packs, flat[len(region.inputs) :], strict=True))
    for i, node in enumerate(region.scalars):
        single, double = (given[dtype][i] if dtype in given else None for dtype in (torch.float32, torch.float64))
        env[node] = ScalarInput(single, double)
    seeds = []
    for node in order:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        value = _call(node, tuple(args), dict(kwargs))
        if env.setdefault(node, value) is not value:
            seeds.append(value)  # the rest reads the input that stands for it
    return (*(env[node] for node in region.outputs), *seeds)


def _call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return target(*args, **kwargs)
    if needs_layout(node):
        return call_with_layout(node, args, kwargs)
    if is_short_attention(node):
        return call_short_attention(target, args, kwargs)
    if target in _VIEWS:
        # Decompositions may choose another layout than eager's kernel; a view of the same elements is a copy then.
        return aten.reshape.default(*args, **kwargs)
    if may_copy(target) and shared_inputs(node) and not is_view(node):
        # A copy, as in eager: functionalization may treat it as a view and apply later writes to it.
        return target(*args, **kwargs).clone()
    if write_condition(target) and writes(node):
        return _call_hidden_writer(target, args, kwargs)
    if target is aten._amp_foreach_non_finite_check_and_unscale.default:
        return unscaled(*args)
    if is_foreach(target) and element_operator(target) is not None:
        return call_elementwise(target, args, kwargs)
    return call(target, args, kwargs)


def _call_hidden_writer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch norm updates its statistics, which its schema does not say: update copies, and write them back."""
    copies = {i: args[i].clone() for i in written_positions(op)}
    result = op(*(copies.get(i, value) for i, value in enumerate(args)), **kwargs)
    for i, value in copies.items():
        args[i].copy_(value)
    return result


def _fakes(region: Region, tensors: list[Any]) -> list[FakeTensor]:
    made = [node.meta.get("val") for node in region.nodes]
    return [val for val in (*tensors, *made) if isinstance(val, FakeTensor)]


def device_of(region: Region) -> torch.device:
    """The device that the region computes on; packed scalars are copied there."""
    tensors = [node.meta["val"] for node in region.inputs]
    found = [val.device for val in _fakes(region, tensors) if val.dim() > 0]
    return next((device for device in found if device.type != "cpu"), found[0] if found else torch.device("cpu"))


def _packs(region: Region) -> tuple[torch.dtype, ...]:
    if not region.scalars:
        return ()
    dtypes = {val.dtype for val in _fakes(region, [node.meta.get("val") for node in region.inputs])}
    return (torch.float32, torch.float64) if torch.float64 in dtypes else (torch.float32,)


def _fresh(val: Any, mode: Any) -> Any:
    """A new fake tensor: two inputs may have the same one as metadata."""
    if not isinstance(val, Tensor):
        return val
    with mode:
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)


def set_result_strides(gm: fx.GraphModule, wanted: Sequence[Any], mode: Any) -> None:
    """Give the results of a traced graph the strides of the `wanted` tensors, by a copy where they have others."""
    output = gm.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for i, want in enumerate(wanted):
        value = results[i].meta.get("val") if isinstance(results[i], fx.Node) else None
        if isinstance(value, Tensor) and isinstance(want, Tensor) and _strides(value) != _strides(want):
            with gm.graph.inserting_before(output), mode:
                results[i] = _copied(results[i], want)
    output.args = (tuple(results),)
    gm.recompile()


def _copied(node: fx.Node, want: Tensor) -> fx.Node:
    """A copy whose dimensions are ordered in memory as those of another tensor."""
    order = sorted(range(want.dim()), key=lambda d: (-_hint(want.stride(d)), d))
    back = [order.index(d) for d in range(want.dim())]
    node = _add(node, aten.permute.default, order)
    node = _add(node, aten.clone.default, memory_format=torch.contiguous_format)
    return _add(node, aten.permute.default, back)


def _add(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    new = node.graph.call_function(target, (node, *args), kwargs)
    new.meta["val"] = target(node.meta["val"], *args, **kwargs)
    return new


def _strides(val: Tensor) -> list[str]:
    return [str(step) for step, size in zip(val.stride(), val.shape, strict=True) if str(size) != "1"]


def _hint(size: Any) -> float:
    known = size if type(size) is int else hint_of(size)
    return 0 if known is None else known
