"""Which node holds the current contents of a fake tensor: views, writes through views, and reads after writes.

A tensor is a *view chain* over a *base*; each write advances the version of the base. Reading a view of an older
version replays the chain; writing to a view scatters the new value back along it.

    v = x[0]; v.zero_(); x.sum()      v = select(x, 0, 0); v1 = zero(v); x1 = select_scatter(x, v1, 0, 0); sum(x1)

`invert_view` computes the new value of a parent from the new value of its view, the second node here:

    v = select(x, 0, 2); v.add_(1)        v1 = add(v, 1); x1 = select_scatter(x, v1, 0, 2)

Views that only permute elements are inverted (transpose by transpose), views that select elements are scattered, and
all others go through an index map, which is slower and always correct.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.capture.graph.refusals import opaque_view
from wholestep.capture.scalars.symbolic_scalars import ScalarNode
from wholestep.errors import UnsupportedError
from wholestep.ir.effects import shared_inputs
from wholestep.ir.meta import user_location
from wholestep.ir.trace_protocol import TracedNodes
from wholestep.torch_private.fake_tensors import FakeTensorMode, storage_key

aten = torch.ops.aten

OPAQUE = "a view that a custom operator made"
"""Takes the place of a view's operator where it is unknown which elements of its input the view shows."""

SAME_VALUE = frozenset({aten.detach.default, aten.alias.default})
"""Views that return their input unchanged: no node is recorded."""


class Base:
    """The memory behind one or more tensors, and the node that holds its current contents."""

    __slots__ = ("is_input", "version")

    def __init__(self) -> None:
        self.version = 0
        self.is_input = False


class Value:
    """One fake tensor: the node that holds its contents, and the operator that makes it from its parent."""

    __slots__ = ("args", "base", "fake", "index", "kwargs", "node", "op", "parent", "version")

    def __init__(
        self,
        fake: Tensor,
        node: fx.Node,
        base: Base,
        parent: Value | None = None,
        op: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        index: int | None = None,
    ) -> None:
        self.fake = fake
        self.node = node
        self.base = base
        self.version = base.version
        self.parent = parent
        self.op = op
        self.args = args
        self.kwargs = kwargs or {}
        self.index = index


class Values:
    """The contents of every tensor of a trace, by identity of the fake."""

    def __init__(self, nodes: TracedNodes, fake_mode: FakeTensorMode, shape_arg: Callable[[Any], Any]) -> None:
        self.paused = False
        """Operators that run now are our own arithmetic on metadata and are not recorded."""
        self._nodes = nodes
        self._fake_mode = fake_mode
        self._size_node = shape_arg
        self._values: dict[int, Value] = {}
        self._by_storage: dict[int, Value] = {}
        self._replaced: dict[int, tuple[Tensor, Any]] = {}
        """Tensors whose `.data` was replaced, by identity, with the memory that they had."""

    def register_input(self, fake: Tensor, node: fx.Node) -> None:
        """Register a fake tensor that is a placeholder of the graph."""
        node.meta["val"] = fake
        self.register(fake, node).base.is_input = True

    def release(self) -> list[tuple[weakref.ref[Tensor], fx.Node]]:
        """Drop all tensors. Returns weak references to them, with their nodes."""
        known = [(weakref.ref(value.fake), value.node) for value in self._values.values()]
        self._values, self._by_storage = {}, {}
        self._replaced = {}
        return known

    def is_written(self, fake: Tensor) -> bool:
        """Whether the step wrote to memory of an input that this tensor shares."""
        return id(fake) in self._replaced or self._values[id(fake)].base.version > 0

    def writes_to(self, fake: Tensor) -> tuple[int, int]:
        """A value that differs after each write to a tensor."""
        base = self.value(fake).base
        return id(base), base.version

    def set_data(self, fake: Tensor, source: Tensor) -> None:
        """`fake.data = source`: both share memory from here on; other aliases of `fake` keep the former memory."""
        value = self.value(source)
        if id(fake) not in self._replaced:
            self.value(fake)
            self._replaced[id(fake)] = fake, fake.untyped_storage()
        fake.data = source
        self._values[id(fake)] = Value(fake, self.read(value), value.base, value, aten.alias.default)

    def replaced(self) -> list[Tensor]:
        """The tensors whose `.data` was replaced."""
        return [fake for fake, _ in self._replaced.values()]

    def shares_memory(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors share memory at the end of the step."""
        return self.value(one).base is self.value(other).base

    def as_it_is(self, fake: Tensor) -> fx.Node:
        """A node with the current contents of a tensor, which later writes to the memory of an input do not change."""
        value = self.value(fake)
        node = self.read(value)
        is_own = node.op == "call_function" and not shared_inputs(node) and not value.base.is_input
        return node if is_own else self.emit(aten.clone.default, node)

    def node_of(self, fake: Tensor) -> fx.Node:
        """The node that holds the current contents of a fake tensor."""
        return self.read(self.value(fake))

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Record an operator on nodes; its `val` is computed from theirs."""
        if op == GETITEM:
            return self._nodes.create(operator.getitem, args, {}, args[0].meta["val"][args[1]])
        fakes = fx.map_arg(args, lambda n: n.meta["val"])
        fake_kwargs = fx.map_arg(kwargs, lambda n: n.meta["val"])
        self.paused = True
        try:
            with self._fake_mode, self.below_recorder():
                out = op(*fakes, **fake_kwargs)
        finally:
            self.paused = False
        nodes = tuple(self._shape_arg(a) for a in args)
        return self._nodes.create(op, nodes, {k: self._shape_arg(v) for k, v in kwargs.items()}, out)

    @contextmanager
    def below_recorder(self) -> Iterator[None]:
        """In the block, sizes are read only for the metadata of a result."""
        env: Any = self._fake_mode.shape_env
        if env is None:
            yield
            return
        before, env.below_recorder = env.below_recorder, True
        try:
            yield
        finally:
            env.below_recorder = before

    def register_result(self, fake: Tensor, node: fx.Node) -> None:
        """Register a fake tensor as the result of a node."""
        node.meta["val"] = fake
        self.register(fake, node)

    def write(self, fake: Tensor, new: fx.Node) -> None:
        """Set the contents of a fake tensor, and of all that share its memory, to the value of `new`."""
        value = self.value(fake)
        value.base.version += 1
        child, node = value, new
        while True:
            child.node, child.version = node, child.base.version
            parent = child.parent
            if parent is None:
                break
            if child.op in SAME_VALUE:
                node = child.node
            elif child.op is OPAQUE:
                raise opaque_view("writes to", child.fake)
            else:
                before = self._read_before_write(parent)
                args = tuple(_as_argument(a) for a in (*child.args, *child.kwargs.values()))
                node = invert_view(self.emit, before, parent.fake, child.op, args, child.index, child.node, child.fake)
            child = parent

    def register(self, fake: Tensor, node: fx.Node) -> Value:
        value = Value(fake, node, Base())
        self._values[id(fake)] = value
        if fake.layout is torch.strided:
            self._by_storage[storage_key(fake)] = value
        return value

    def value(self, fake: Tensor) -> Value:
        found = self._values.get(id(fake))
        if found is None:
            found = self._adopt(fake)
        return found

    def _adopt(self, fake: Tensor) -> Value:
        """Register a tensor that C++ made below the dispatcher: find it by its storage."""
        base = self._by_storage.get(storage_key(fake))
        if base is None:
            raise UnsupportedError(
                f"a tensor of shape {tuple(fake.shape)} appeared in the step that no recorded operator made.",
                fix="if a library creates tensors outside of torch's dispatcher, wrap it with torch.library.custom_op.",
                location=user_location(),
            )
        value = Value(fake, base.node, base.base, base)
        same = fake.shape == base.fake.shape and fake.stride() == base.fake.stride()
        if same and fake.dtype == base.fake.dtype and fake.storage_offset() == base.fake.storage_offset():
            value.op = aten.alias.default
        else:
            value.op = aten.as_strided.default
            value.args = (list(fake.shape), list(fake.stride()), fake.storage_offset())
        value.version = -1
        self._values[id(fake)] = value
        return value

    def read(self, value: Value) -> fx.Node:
        if value.version == value.base.version:
            return value.node
        assert value.parent is not None, "a base is always up to date"
        if value.op is OPAQUE:
            raise opaque_view("reads, after a write to the memory that it shares,", value.fake)
        parent = self.read(value.parent)
        if value.op in SAME_VALUE:
            value.node = parent
        else:
            node = self._nodes.create(
                value.op, (parent, *(self._shape_arg(a) for a in value.args)), value.kwargs, value.fake
            )
            if value.index is not None:
                node.meta["val"] = value.op(value.parent.fake, *value.args, **value.kwargs)
                node = self._nodes.create(operator.getitem, (node, value.index), {}, value.fake)
            value.node = node
        value.version = value.base.version
        return value.node

    def _read_before_write(self, value: Value) -> fx.Node:
        """The node of a parent just before the write that is being propagated."""
        value.base.version -= 1
        try:
            return self.read(value)
        finally:
            value.base.version += 1

    def add_view(self, fake: Tensor, value: Value) -> None:
        """Register a fake tensor as a view of another."""
        self._values[id(fake)] = value

    def knows(self, fake: Tensor) -> bool:
        """Whether this tensor object has a value."""
        return id(fake) in self._values

    def forget(self, fake: Tensor) -> None:
        """Drop the entry of a tensor whose storage was replaced: from now on it is looked up by its new storage."""
        del self._values[id(fake)]

    def turn_into_view(self, fake: Tensor, was: Tensor, make: Callable[[Value], Value]) -> None:
        """An in-place view operator: `fake` becomes a view of its former value, which stays registered as `was`."""
        value = self.value(fake)
        before = Value(was, self.read(value), value.base, value.parent, value.op, value.args, value.kwargs, value.index)
        self._values[id(was)] = before
        if before.node.meta.get("val") is fake:
            before.node.meta["val"] = was
        if self._by_storage.get(storage_key(was)) is value:
            self._by_storage[storage_key(was)] = before
        self._values[id(fake)] = make(before)

    def fix_moving_views(self, fake: Tensor, why: str) -> None:
        """Specialise the symbolic scalars in the arguments of a view and of the views that it was taken from."""
        value: Value | None = self.value(fake)
        while value is not None:
            for arg in value.args:
                if isinstance(arg, ScalarNode):
                    arg.specialise(why)
            value = value.parent

    def _shape_arg(self, arg: Any) -> Any:
        if isinstance(arg, ScalarNode):
            return arg.fx_arg()
        if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._size_node(arg)
        if isinstance(arg, list | tuple):
            return [self._shape_arg(a) for a in arg]
        return arg


def may_replace_data(tensor: Tensor, new: Tensor) -> bool:
    """Whether a tensor keeps its form if it takes the data of another one."""
    same = tensor.shape == new.shape and tensor.stride() == new.stride() and tensor.dtype == new.dtype
    return same and tensor.device == new.device


def _as_argument(arg: Any) -> Any:
    """A symbolic scalar as the node that computes it."""
    return arg.fx_arg() if isinstance(arg, ScalarNode) else arg


GETITEM = "getitem"
"""Passed to `emit` for an element of a list of results."""

Emit = Callable[..., fx.Node]
"""emit(op, *args, **kwargs) -> node, with `val` filled in."""

_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten._reshape_alias.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh.default,
    }
)


def invert_view(
    emit: Emit,
    parent: fx.Node,
    parent_value: Tensor,
    op: Any,
    args: tuple[Any, ...],
    index: int | None,
    new: fx.Node,
    child_value: Tensor,
) -> fx.Node:
    """The value of `parent` after its view `op(parent, *args)` (result number `index`) took the value `new`."""
    shape = list(parent_value.shape)
    if op in _RESHAPES:
        return emit(aten.reshape.default, new, shape)
    if op is aten.t.default:
        return emit(aten.t.default, new)
    if op is aten.transpose.int:
        return emit(aten.transpose.int, new, *args)
    if op is aten.permute.default:
        dims = [d % len(shape) for d in args[0]]
        return emit(aten.permute.default, new, [dims.index(i) for i in range(len(dims))])
    if op is aten.select.int:
        return emit(aten.select_scatter.default, parent, new, *args)
    if op is aten.slice.Tensor:
        return emit(aten.slice_scatter.default, parent, new, *args)
    if op is aten.as_strided.default:
        return emit(aten.as_strided_scatter.default, parent, new, *args)
    if op is aten.diagonal.default:
        return emit(aten.diagonal_scatter.default, parent, new, *args)
    if op is aten.unbind.int:
        return emit(aten.select_scatter.default, parent, new, args[0] if args else 0, index)
    if op in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = args[1] if len(args) > 1 else 0
        sizes = args[0] if isinstance(args[0], list | tuple) else None
        start = sum(sizes[:index]) if sizes is not None else args[0] * index
        stop = start + child_value.shape[dim]
        return emit(aten.slice_scatter.default, parent, new, dim, start, stop)
    if op is aten.view_as_real.default:
        return emit(aten.view_as_complex.default, emit(aten.clone.default, new, memory_format=torch.contiguous_format))
    if op is aten.view_as_complex.default:
        return emit(aten.view_as_real.default, new)
    if op is aten.view.dtype:
        return emit(aten.view.dtype, new, parent_value.dtype)
    if op is aten._conj.default:
        return emit(aten._conj_physical.default, new)
    if op is aten._neg_view.default:
        return emit(aten.neg.default, new)
    return _scatter_by_index(emit, parent, parent_value, op, args, index, new)


def _scatter_by_index(
    emit: Emit, parent: fx.Node, parent_value: Tensor, op: Any, args: tuple[Any, ...], index: int | None, new: fx.Node
) -> fx.Node:
    """Number the elements of the parent, take the view of these numbers, and put the new values at those positions."""
    shape = list(parent_value.shape)
    flat = emit(aten.arange.default, parent_value.numel(), device=parent_value.device)
    numbered = emit(aten.view.default, flat, shape)
    seen = emit(op, numbered, *args)
    if index is not None:
        seen = emit(GETITEM, seen, index)
    return emit(aten.put.default, parent, seen, new)
