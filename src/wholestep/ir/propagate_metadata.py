"""Run a graph on fake tensors once more and compare the results with the recorded metadata of its nodes (`val`).

    propagate            the whole graph, each node from what was computed before it
    propagate_changed    some nodes, each from the recorded values of its inputs: enough if all others were right before
    fill_values          give a `val` to nodes that have none

Nothing real runs: no data, no random op, no communication. Where a result depends on data, or an operator cannot be
run on fake tensors, the recorded value is assumed and the walk continues from there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, repeat
from operator import attrgetter, not_
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from wholestep.ir.effects import is_data_dependent
from wholestep.ir.graph_functions import CHECKS, SIDE_EFFECTS, call_on_copies
from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.io.node_values import hint_of, is_shape_symbol, kind_of
from wholestep.ir.io.tensor_file import find_constant
from wholestep.ir.readable import describe_value
from wholestep.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    failures_not_logged,
    fake_tensor,
    has_symbolic_sizes,
)
from wholestep.torch_private.fx_graphs import NODE_ARGUMENTS, NODE_KEYWORDS, NODE_SOURCES
from wholestep.torch_private.operators import OpOverload, op_name

Fail = Callable[[fx.Node, str], NoReturn]

_UNKNOWABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    GuardOnDataDependentSymNode,
)
_ANY_NUMBER = {"int": 1, "float": 1.0, "bool": True}
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format})
"""Types of arguments that are looked up by value. (Of a `torch.device` the result depends: such a node is run.)"""
_SEQUENCES = (list, tuple)
_NONE = (type(None), None)
_OF_STORAGE = frozenset(
    {
        torch.ops.aten.as_strided.default,
        torch.ops.aten.as_strided_scatter.default,
        torch.ops.aten.as_strided_copy.default,
    }
)
"""Operators on all the memory behind a tensor, of which its layout says nothing."""


def propagate(gm: fx.GraphModule, fail: Fail) -> None:
    """Call `fail` for the first node whose recorded value is not what its operator gives."""
    run = _Run.of(gm, fail)
    with run.env.suppress_guards(), torch.no_grad():
        for node in gm.graph.nodes:
            run.step(node)


def propagate_changed(gm: fx.GraphModule, changed: Collection[fx.Node], fail: Fail) -> None:
    """Call `fail` for the first of some nodes whose recorded value is not the result of its operator on its inputs.

    Costs only these nodes, and operators on equal arguments run once: a layer is like the one before it.
    """
    run: _Run | None = None
    lookup = _Lookup()
    for node in changed:
        recorded = node.meta.get("val")
        if not _is_checkable(node, recorded) or lookup.confirms(node, recorded):
            continue
        if run is None:
            run = _Run.of(gm, fail)
        with run.env.suppress_guards():
            run.check(node, recorded)


def fill_values(gm: fx.GraphModule, fail: Fail | None = None, among: Iterable[fx.Node] | None = None) -> list[fx.Node]:
    """Give a `val` to each node that has none, from those of its inputs, and return these nodes. Costs only them.

    `among`: all nodes that may have none, in order, where that is known.
    """
    run: _Run | None = None
    filled: list[fx.Node] = []
    for node in _without_value(gm.graph) if among is None else among:
        if node.op != "call_function":
            continue
        if any("val" not in source.meta for source in node.all_input_nodes):
            continue  # a graph without metadata stays one
        if run is None:
            run = _Run.of(gm, fail or _refuse)
        node.meta["val"] = run.value_of(node)
        filled.append(node)
    return filled


def _without_value(graph: fx.Graph) -> Iterator[fx.Node]:
    nodes = list(graph.nodes)
    return compress(nodes, map(not_, map(dict.__contains__, map(attrgetter("meta"), nodes), repeat("val"))))


def fakes_for(gm: fx.GraphModule, nodes: Iterable[fx.Node]) -> tuple[FakeTensorMode, dict[fx.Node, Any]]:
    """A new fake mode, and in it a value for each node that is like its recorded `val`."""
    run = _Run.of(gm, _refuse)
    return run.mode, {node: run.fake(node.meta["val"]) for node in nodes}


def _refuse(node: fx.Node, what: str) -> NoReturn:
    raise ValueError(what)


class _Run:
    def __init__(self, gm: fx.GraphModule, env: ShapeEnv, fail: Fail) -> None:
        self._gm = gm
        self.env = env
        self.mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        self._fail = fail
        self._values: dict[fx.Node, Any] = {}

    @classmethod
    def of(cls, gm: fx.GraphModule, fail: Fail) -> _Run:
        """A run in the environment of the graph's symbolic sizes, where it has any."""
        found = (env for node in gm.graph.nodes if (env := _shape_env(node.meta.get("val"))) is not None)
        env = next(found, None)
        return cls(gm, ShapeEnv() if env is None else env, fail)

    def step(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        recorded = node.meta.get("val")
        if node.op == "get_attr":
            constant = find_constant(self._gm, str(node.target))
            # A graph of another machine keeps its constants on the CPU.
            self._compare(node, recorded, constant, device=False)
            self._values[node] = self.fake(constant if recorded is None else recorded)
        elif _is_arithmetic(node) and recorded is None:
            # A number that only a run knows, computed from others.
            self._values[node] = _ANY_NUMBER["float"]
        elif node.op == "placeholder" or self._is_given(node, recorded):
            self._values[node] = self.fake(recorded)
        else:
            self._values[node] = self._computed(node, recorded)

    def check(self, node: fx.Node, recorded: Any) -> None:
        """Call `fail` if a node's recorded value is not what follows from the recorded values of its inputs."""
        self._compare(node, recorded, self.value_of(node))

    def value_of(self, node: fx.Node) -> Any:
        """What a node gives, from the recorded values of its inputs."""
        if node.target is operator.getitem:
            source, index = node.args
            given = source.meta["val"]  # type: ignore[union-attr]
            if not (isinstance(given, list | tuple) and isinstance(index, int) and index < len(given)):
                self._fail(node, f"{node.name} takes item {index} of {source}, which is {describe_value(given)}.")
            return given[index]
        for source in node.all_input_nodes:
            self._values[source] = self.fake(source.meta["val"])
        with torch.no_grad():
            return self._computed(node, None)

    def _is_given(self, node: fx.Node, recorded: Any) -> bool:
        if node.target in SIDE_EFFECTS or node.target in CHECKS or is_data_dependent(node.target):
            return True
        return recorded is not None and not isinstance(recorded, Tensor | list | tuple)

    def _computed(self, node: fx.Node, recorded: Any) -> Any:
        args = fx.node.map_arg(node.args, self._values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self._values.__getitem__)
        assert callable(node.target)
        refused = ""
        try:
            with self.mode, failures_not_logged():
                computed = node.target(*args, **kwargs)
        except _UNKNOWABLE:
            return self.fake(recorded)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if refused:  # outside of `except`: the reader wants the node, not torch's traceback
            self._fail(node, f"{node.name} does not accept its arguments: {refused}")
        if recorded is not None:
            self._compare(node, recorded, computed)
        return computed

    def fake(self, recorded: Any) -> Any:
        """A recorded value in the mode of this run; numbers as the numbers they were."""
        if isinstance(recorded, Tensor):
            return fake_tensor(
                self.mode,
                recorded.shape,
                recorded.stride(),
                recorded.dtype,
                recorded.device,
                offset=recorded.storage_offset(),
            )
        if isinstance(recorded, list | tuple):
            return type(recorded)(self.fake(item) for item in recorded)
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


@dataclass(frozen=True, eq=False, slots=True)
class _Layout:
    """A tensor without data, as something to look up: one object for all that are alike (`_layout`)."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@lru_cache(maxsize=10_000)
def _layout(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], stride: tuple[int, ...]) -> _Layout:
    return _Layout(dtype, device, shape, stride)


class _NoKeyError(Exception):
    """A value is not looked up: it has symbolic sizes, or other devices than the others."""


def _is_checkable(node: fx.Node, recorded: Any) -> bool:
    """True if a node's value follows from the recorded values of its inputs."""
    if node.op != "call_function" or not isinstance(recorded, Tensor | list | tuple) or _is_opaque(node.target):
        return False
    return all("val" in source.meta for source in NODE_SOURCES(node))


@lru_cache(maxsize=10_000)
def _is_opaque(target: Any) -> bool:
    """True if the result of a target does not follow from the layouts of its inputs alone.

    Collectives of DTensor ask the process group for its size, and a graph may be rewritten where there is none.
    """
    if target in SIDE_EFFECTS or target in CHECKS or target in _OF_STORAGE or is_data_dependent(target):
        return True
    return isinstance(target, OpOverload) and op_name(target).startswith("_dtensor::")


def has_same_layout(one: Any, other: Any) -> bool:
    """True if two values are one object, or tensors without symbolic sizes that are alike but for their data."""
    if one is other and one is not None:
        return True
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or has_symbolic_sizes(one):
        return False
    if has_symbolic_sizes(other) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.stride() == other.stride() and one.device == other.device


class _Lookup:
    """Results of operators for arguments that were seen before, by the layouts of tensors."""

    def __init__(self) -> None:
        self._layouts: dict[fx.Node, Any] = {}
        self._devices: set[torch.device] = set()

    def confirms(self, node: fx.Node, recorded: Any) -> bool:
        """True if a node's recorded value is its result. False if it is not, or if only a run of the node can tell."""
        try:
            if node.target is operator.getitem:
                source, index = node.args
                return has_same_layout(source.meta["val"][index], recorded)  # type: ignore[union-attr]
            if not isinstance(node.target, OpOverload):
                return False
            args = tuple(map(self._key, NODE_ARGUMENTS(node)))
            named = NODE_KEYWORDS(node)
            kwargs = tuple((name, self._key(arg)) for name, arg in named.items()) if named else ()
            given = self._of_node(node)
            return len(self._devices) == 1 and bool(_given_for(node.target, args, kwargs) == _sizes_of(given))
        except Exception:  # a run of the node says what is wrong
            return False
        finally:
            self._devices.clear()

    def _of_node(self, node: fx.Node) -> Any:
        found = self._layouts.get(node)
        if found is None:
            found = self._layouts[node] = self._key(node.meta["val"])
        if type(found) is _Layout:
            self._devices.add(found.device)
        return found

    def _key(self, value: Any) -> Any:
        """A value as something to look up, with its type: 1, 1.0 and True are not the same argument."""
        kind = type(value)
        if kind is fx.Node:
            return self._of_node(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            if has_symbolic_sizes(value):
                raise _NoKeyError
            device = value.device
            self._devices.add(device)
            return _layout(value.dtype, device, value.shape, value.stride())
        if isinstance(value, _SEQUENCES):
            kinds = tuple(map(type, value))
            return (list, kinds, *value) if _PLAIN.issuperset(kinds) else (list, None, *map(self._key, value))
        raise _NoKeyError


@lru_cache(maxsize=10_000)
def _given_for(target: OpOverload, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Any:
    """The sizes and strides that an operator gives for arguments on one device, whichever that is."""
    tensors: dict[_Layout, Tensor] = {}
    given = [_without_data(arg, tensors) for arg in args]
    named = {name: _without_data(arg, tensors) for name, arg in kwargs}
    with torch.no_grad():
        return _sizes_of(target(*given, **named))


def _without_data(key: Any, tensors: dict[_Layout, Tensor]) -> Any:
    """The value of a key; equal layouts are one tensor, on no device."""
    if type(key) is _Layout:
        if key not in tensors:
            tensors[key] = torch.empty_strided(key.shape, key.stride, dtype=key.dtype, device="meta")
        return tensors[key]
    kind, *items = key
    if kind is not list:
        return items[0]
    return items[1:] if items[0] is not None else [_without_data(item, tensors) for item in items[1:]]


def _sizes_of(result: Any) -> Any:
    """What is compared of a result, from tensors or from its key."""
    if isinstance(result, _Layout):
        return result.dtype, result.shape, result.stride
    if isinstance(result, Tensor):
        return result.dtype, tuple(result.shape), result.stride()
    if result is None or result == _NONE:
        return None
    if isinstance(result, list | tuple):
        return [_sizes_of(item) for item in (result[2:] if result[:1] == (list,) else result)]
    raise _NoKeyError


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether a node computes a number out of numbers, or reads one from a tensor."""
    if isinstance(node.target, OpOverload):
        return node.target is torch.ops.aten._local_scalar_dense.default
    return node.op == "call_function" and node.target not in (operator.getitem, call_on_copies, *SIDE_EFFECTS, *CHECKS)


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
