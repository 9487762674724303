"""Run a graph on fake tensors once more and compare what comes out with what its nodes say (`val`).

Nothing real runs: no data, no random draw, no communication. Where a result depends on data, or an operator cannot be
run on fake tensors, what was recorded is taken as true and the walk goes on from there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from wholestep.ir.effects import is_data_dependent
from wholestep.ir.graphs import tensors_in
from wholestep.ir.io.node_values import hint_of, is_shape_symbol, kind_of
from wholestep.ir.io.tensor_file import find_constant
from wholestep.ir.mutable import call_on_copies
from wholestep.ir.readable import describe_value
from wholestep.ir.rng import SIDE_EFFECTS
from wholestep.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    fake_tensor,
)
from wholestep.torch_private.operators import OpOverload

Fail = Callable[[fx.Node, str], NoReturn]

_UNKNOWABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    GuardOnDataDependentSymNode,
)
_ANY_NUMBER = {"int": 1, "float": 1.0, "bool": True}


def propagate(gm: fx.GraphModule, fail: Fail) -> None:
    """Call `fail` for the first node whose recorded value is not what its operator gives."""
    nodes = list(gm.graph.nodes)
    env = next((found for node in nodes if (found := _shape_env(node.meta.get("val"))) is not None), None)
    env = ShapeEnv() if env is None else env
    run = _Run(gm, FakeTensorMode(shape_env=env, allow_non_fake_inputs=True), fail)
    with env.suppress_guards(), torch.no_grad():
        for node in nodes:
            run.step(node)


def fill_values(gm: fx.GraphModule) -> None:
    """Give a `val` to each node that has none, from those of its inputs. Costs only those nodes."""
    run: _Run | None = None
    for node in gm.graph.nodes:
        if node.op != "call_function" or "val" in node.meta:
            continue
        if any("val" not in source.meta for source in node.all_input_nodes):
            continue  # a graph without metadata stays one
        if run is None:
            env = next((e for n in gm.graph.nodes if (e := _shape_env(n.meta.get("val"))) is not None), None)
            run = _Run(gm, FakeTensorMode(shape_env=env or ShapeEnv(), allow_non_fake_inputs=True), _refuse)
        node.meta["val"] = run.value_of(node)


def fakes_for(gm: fx.GraphModule, nodes: Iterable[fx.Node]) -> tuple[FakeTensorMode, dict[fx.Node, Any]]:
    """A new fake mode, and in it a value for each node that is like its recorded `val`."""
    env = next((e for n in gm.graph.nodes if (e := _shape_env(n.meta.get("val"))) is not None), None)
    mode = FakeTensorMode(shape_env=env or ShapeEnv(), allow_non_fake_inputs=True)
    run = _Run(gm, mode, _refuse)
    return mode, {node: run._fake(node.meta["val"]) for node in nodes}


def _refuse(node: fx.Node, what: str) -> NoReturn:
    raise ValueError(what)


class _Run:
    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode, fail: Fail) -> None:
        self._gm = gm
        self._mode = mode
        self._fail = fail
        self._values: dict[fx.Node, Any] = {}

    def step(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        recorded = node.meta.get("val")
        if node.op == "get_attr":
            constant = find_constant(self._gm, str(node.target))
            # A graph of another machine keeps its constants on the CPU.
            self._compare(node, recorded, constant, device=False)
            self._values[node] = self._fake(constant if recorded is None else recorded)
        elif _is_arithmetic(node) and recorded is None:
            # A number that only a run knows, computed from others.
            self._values[node] = _ANY_NUMBER["float"]
        elif node.op == "placeholder" or self._is_given(node, recorded):
            self._values[node] = self._fake(recorded)
        else:
            self._values[node] = self._computed(node, recorded)

    def value_of(self, node: fx.Node) -> Any:
        """What a node gives, from the recorded values of its inputs."""
        if node.target is operator.getitem:
            return node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr]
        for source in node.all_input_nodes:
            self._values[source] = self._fake(source.meta["val"])
        with torch.no_grad():
            return self._computed(node, None)

    def _is_given(self, node: fx.Node, recorded: Any) -> bool:
        if node.target in SIDE_EFFECTS or is_data_dependent(node.target):
            return True
        return recorded is not None and not isinstance(recorded, Tensor | list | tuple)

    def _computed(self, node: fx.Node, recorded: Any) -> Any:
        args = fx.node.map_arg(node.args, self._values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self._values.__getitem__)
        assert callable(node.target)
        try:
            with self._mode:
                computed = node.target(*args, **kwargs)
        except _UNKNOWABLE:
            return self._fake(recorded)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._fail(node, f"{node.name} does not accept its arguments: {reason[:300]}")
        if recorded is not None:
            self._compare(node, recorded, computed)
        return computed

    def _fake(self, recorded: Any) -> Any:
        """A recorded value in the mode of this run; numbers as the numbers they were."""
        if isinstance(recorded, Tensor):
            return fake_tensor(
                self._mode,
                recorded.shape,
                recorded.stride(),
                recorded.dtype,
                recorded.device,
                offset=recorded.storage_offset(),
            )
        if isinstance(recorded, list | tuple):
            return type(recorded)(self._fake(item) for item in recorded)
        if recorded is None or is_shape_symbol(recorded):
            return recorded
        hint = hint_of(recorded)
        return _ANY_NUMBER.get(kind_of(recorded)) if hint is None else hint

    def _compare(self, node: fx.Node, recorded: Any, computed: Any, *, device: bool = True) -> None:
        left, right = list(tensors_in(recorded)), list(tensors_in(computed))
        if recorded is None:
            return
        if len(left) != len(right):
            self._fail(
                node, f"{node.name} gives {describe_value(computed)}, its `val` says {describe_value(recorded)}."
            )
        for old, new in zip(left, right, strict=True):
            for what, a, b in _differences(old, new):
                if what != "device" or device:
                    self._fail(node, f"{node.name} has {what} {b}, its `val` says {a}.")


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether a node computes a number out of numbers, or reads one from a tensor."""
    if isinstance(node.target, OpOverload):
        return node.target is torch.ops.aten._local_scalar_dense.default
    return node.op == "call_function" and node.target not in (operator.getitem, call_on_copies, *SIDE_EFFECTS)


def _differences(old: Tensor, new: Tensor) -> Iterator[tuple[str, Any, Any]]:
    if old.dtype != new.dtype:
        yield "dtype", old.dtype, new.dtype
    if old.device != new.device:
        yield "device", old.device, new.device
    shapes = [[hint_of(d) for d in tensor.shape] for tensor in (old, new)]
    if len(shapes[0]) != len(shapes[1]) or not all(_same(a, b) for a, b in zip(*shapes, strict=True)):
        yield "shape", list(old.shape), list(new.shape)
        return
    if 0 in shapes[0]:
        return
    strides = [[hint_of(d) for d in tensor.stride()] for tensor in (old, new)]
    if not all(size == 1 or _same(a, b) for size, a, b in zip(shapes[0], *strides, strict=True)):
        yield "stride", list(old.stride()), list(new.stride())


def _same(a: Any, b: Any) -> bool:
    return a is None or b is None or bool(a == b)


def _shape_env(value: Any) -> ShapeEnv | None:
    if isinstance(value, Tensor):
        return next((found for d in value.shape if (found := _shape_env(d)) is not None), None)
    if is_shape_symbol(value):
        env: ShapeEnv = value.node.shape_env
        return env
    return None
