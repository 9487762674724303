"""Records every operator that the user's step runs into one functional FX graph, in the same trace.

The step runs on fake tensors; autograd is real. This dispatch mode sees each operator below autograd, runs it on the
fakes (writes included, so that version counters and errors are eager's), and records what it means for values:

    eager                      recorded
    x.add_(y)                  x1 = add(x, y)          later reads of x read x1
    v = x[0]; v.zero_()        v = select(x, 0, 0); v1 = zero(v); x1 = select_scatter(x, v1, 0, 0)
    h.detach()                 nothing: the same value

Why one mode instead of make_fx with functionalization: two more Python layers per
operator cost 1.6 to 1.9 times a bare make_fx; this costs less than one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from wholestep._torch_compat import (
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    UnsupportedOperatorException,
    is_accumulating_gradient,
    shapes_by_python,
)
from wholestep.capture.fake_kernels import FAKE_KERNELS
from wholestep.capture.location import user_location
from wholestep.capture.nodes import Nodes
from wholestep.capture.refusals import (
    data_shape,
    higher_order,
    refuse_branching_backward,
    refuse_overlap,
    refuse_shifted_overlap,
    unsupported,
)
from wholestep.capture.scalars import ScalarNode, scalar_of
from wholestep.capture.schema import OpFacts, bind, op_facts, view_variant
from wholestep.capture.values import Value, Values
from wholestep.errors import (
    OverlapError,
    ParameterDataError,
    SparseError,
    UnsupportedError,
)
from wholestep.ir.mutable import call_on_copies
from wholestep.ir.rnn import packed_weights

aten = torch.ops.aten
prim = torch.ops.prim

_METADATA_QUERIES = frozenset(
    {
        prim.device.default,
        prim.layout.default,
        aten.is_contiguous.default,
        aten.is_contiguous.memory_format,
        aten.is_strides_like_format.default,
        aten.is_non_overlapping_and_dense.default,
        aten.size.default,
        aten.sym_size.default,
        aten.stride.default,
        aten.sym_stride.default,
        aten.storage_offset.default,
        aten.sym_storage_offset.default,
        aten.numel.default,
        aten.sym_numel.default,
        aten.dim.default,
        aten._assert_tensor_metadata.default,
    }
)
_NO_DISPATCH = Tensor.__torch_dispatch__
_OTHER_NAMES = {"momentum": "exponential_average_factor"}


class Host(Protocol):
    """What the recorder asks of the capture that owns it."""

    phase: str
    module_path: str

    def lift(self, tensor: Tensor) -> Tensor: ...

    def constant(self, tensor: Tensor) -> fx.Node: ...

    def generator(self, generator: torch.Generator) -> fx.Node: ...

    def item(self, tensor: Tensor, node: fx.Node) -> Any: ...

    def shape_arg(self, value: Any) -> Any: ...

    def in_recompute(self) -> bool: ...


class Recorder(DispatchMode):
    """The dispatch mode that builds the graph."""

    supports_higher_order_operators = True  # to refuse them with a reason

    def __init__(self, graph: fx.Graph, fake_mode: FakeTensorMode, host: Host) -> None:
        super().__init__()
        self.host = host
        self.named_scalars: dict[str, ScalarNode] = {}
        """Numbers that the next operator takes by name as plain floats (see `patches`)."""
        self.used_scalars: set[int] = set()
        """Which of `named_scalars` some operator took."""
        self.random_devices: dict[str, None] = {}
        self.nodes = Nodes(graph, host)
        self.values = Values(self.nodes, fake_mode, host.shape_arg)
        self._has_symbols = fake_mode.shape_env is not None
        self._special: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._item,
            aten.lift_fresh.default: self._lift_fresh,
            aten.detach.default: self._same_value,
            aten.alias.default: self._same_value,
        }

    # What the capture asks of its recorder.

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Record an operator on nodes; `val` is computed from theirs."""
        return self.values.emit(op, *args, **kwargs)

    def emit_function(self, target: Callable[..., Any], args: tuple[Any, ...], val: Any) -> fx.Node:
        """Record a call of a Python function with a known result."""
        return self.nodes.create(target, args, {}, val)

    def node_of(self, fake: Tensor) -> fx.Node:
        """The node that holds the current contents of a fake tensor."""
        return self.values.node_of(fake)

    # Dispatch.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(t is not FakeTensor and t.__torch_dispatch__ is not _NO_DISPATCH for t in types):
            return NotImplemented  # a tensor subclass unwraps itself into plain tensors first
        if self.values.paused or func in _METADATA_QUERIES:
            return func(*args, **kwargs)
        special = self._special.get(func)
        if special is not None:
            return special(func, args, kwargs)
        if isinstance(func, HigherOrderOperator):
            raise higher_order(func)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            raise UnsupportedError(
                f"{func} communicates behind the graph's back.",
                fix="use torch.distributed._functional_collectives in the step (all_reduce, all_gather_tensor, ...), "
                "whose results are values; or communicate outside of the step.",
                location=user_location(),
            )
        refuse_branching_backward(func, args)
        facts = op_facts(func)
        fake_args, node_args = self._convert_all(args)
        fake_kwargs, node_kwargs = self._convert_kwargs(kwargs)
        if self.named_scalars:
            self._insert_named_scalars(facts, node_args, node_kwargs)
        if func is aten._cudnn_rnn.default and fake_args[3] is None:
            fake_args[3], node_args[3] = self._packed_weights(fake_args[1], node_args[1])
        try:
            if facts.is_inplace_view:
                return self._inplace_view(func, fake_args, fake_kwargs)
            if facts.replaces_storage:
                return self._replace_storage(func, fake_args, fake_kwargs)
            if facts.writes and (not facts.writes_if or self._flag(facts, args, kwargs)):
                return self._write_op(func, facts, fake_args, fake_kwargs, node_args, node_kwargs)
            out = self._computed(func, fake_args, fake_kwargs)
        except DynamicOutputShapeException as error:
            raise data_shape(func) from error
        except (DataDependentOutputException, UnsupportedOperatorException) as error:
            raise unsupported(func, error) from error
        except RuntimeError as error:
            if "no fake impl" not in str(error):
                raise
            raise unsupported(func, error) from error
        if facts.is_random:
            self._note_random(out, fake_args)
        if facts.is_view:
            return self._record_view(func, fake_args, fake_kwargs, node_args, node_kwargs, out)
        node = self.nodes.create(func, tuple(node_args), node_kwargs, out)
        self._register_outputs(node, out)
        return out

    def _computed(self, func: Any, fake_args: list[Any], fake_kwargs: dict[str, Any]) -> Any:
        kernel = FAKE_KERNELS.get(func, func)
        if not self._has_symbols:
            return kernel(*fake_args, **fake_kwargs)
        with shapes_by_python():
            return kernel(*fake_args, **fake_kwargs)

    def _flag(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        flag = bind(facts, args, kwargs, facts.names.index(facts.writes_if))
        return bool(flag) and bind(facts, args, kwargs, facts.writes[0]) is not None

    def _register_outputs(self, node: fx.Node, out: Any) -> None:
        if isinstance(out, Tensor):
            if out.layout is not torch.strided:
                raise SparseError(
                    f"{node.target} makes a {out.layout} tensor.",
                    fix="use dense gradients: nn.Embedding(..., sparse=False); or call .to_dense().",
                    location=user_location(),
                )
            if not self.values.knows(out):
                self.values.register(out, node)
        elif isinstance(out, list | tuple):
            for i, item in enumerate(out):
                if isinstance(item, Tensor | list | tuple):
                    self._register_outputs(self.nodes.create(operator.getitem, (node, i), {}, item), item)

    # Views.

    def _record_view(
        self,
        func: Any,
        fake_args: list[Any],
        fake_kwargs: dict[str, Any],
        node_args: list[Any],
        node_kwargs: dict[str, Any],
        out: Any,
    ) -> Any:
        source = fake_args[0] if fake_args else next(iter(fake_kwargs.values()))
        if not isinstance(source, Tensor) or out is source:
            return out
        parent = self.values.value(source)
        node = self.nodes.create(func, tuple(node_args), node_kwargs, out)
        rest = tuple(fake_args[1:])
        if isinstance(out, Tensor):
            self.values.add_view(out, Value(out, node, parent.base, parent, func, rest, fake_kwargs))
        else:
            for i, item in enumerate(out):
                got = self.nodes.create(operator.getitem, (node, i), {}, item)
                self.values.add_view(item, Value(item, got, parent.base, parent, func, rest, fake_kwargs, i))
        return out

    def _same_value(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0] if isinstance(args[0], FakeTensor) else self.host.lift(args[0])
        out = func(source)
        if out is not source:
            parent = self.values.value(source)
            self.values.add_view(out, Value(out, self.values.read(parent), parent.base, parent, func))
        return out

    def _inplace_view(self, func: Any, fake_args: list[Any], fake_kwargs: dict[str, Any]) -> Any:
        """`x.unsqueeze_(0)`: the tensor becomes a view of what it was."""
        fake = fake_args[0]
        if func is aten.detach_.default:
            return func(*fake_args, **fake_kwargs)
        functional = view_variant(func)
        if functional is None:
            raise UnsupportedError(
                f"{func} has no view form.", location=user_location(), fix="use the out-of-place form."
            )
        was = fake.detach()
        out = func(*fake_args, **fake_kwargs)
        rest = tuple(fake_args[1:])

        def as_view(before: Value) -> Value:
            node = self.nodes.create(functional, (before.node, *rest), fake_kwargs, fake)
            return Value(fake, node, before.base, before, functional, rest, fake_kwargs)

        self.values.turn_into_view(fake, was, as_view)
        return out

    def _replace_storage(self, func: Any, fake_args: list[Any], fake_kwargs: dict[str, Any]) -> Any:
        fake = fake_args[0]
        if func is aten.resize_.default and list(fake_args[1]) == list(fake.shape):
            return fake
        if self.values.value(fake).node.op != "placeholder":
            # A tensor of the step's own (cuDNN's look for packed weights): from now on known by its new memory.
            out = func(*fake_args, **fake_kwargs)
            self.values.forget(fake)
            return out
        raise ParameterDataError(
            f"{func} gives a tensor other memory inside the step.",
            fix="create a new tensor instead of resizing or re-setting an existing one.",
            location=user_location(),
        )

    # Writes.

    def _write_op(
        self,
        func: Any,
        facts: OpFacts,
        fake_args: list[Any],
        fake_kwargs: dict[str, Any],
        node_args: list[Any],
        node_kwargs: dict[str, Any],
    ) -> Any:
        if func is aten.copy_.default and self._steals(fake_args[0], fake_args[1]):
            out = func(*fake_args, **fake_kwargs)
            self.values.write(fake_args[0], node_args[1])
            return out
        targets = [bind(facts, tuple(fake_args), fake_kwargs, position) for position in facts.writes]
        flat = list(_tensors(targets))
        for target in flat:
            refuse_overlap(func, target)
        if len(flat) > 1 and len({id(self.values.value(t).base) for t in flat}) < len(flat):
            return self._one_by_one(func, fake_args, fake_kwargs)
        refuse_shifted_overlap(func, flat, fake_args)
        functional = facts.functional
        exact = functional is not None and _keeps_geometry(targets, fake_args, fake_kwargs)
        if facts.is_random and not exact:
            functional = None  # random numbers are drawn in memory order: keep the memory
        for name in facts.out_names if functional is not None else ():
            fake_kwargs.pop(name)
            node_kwargs.pop(name)
            exact = False
        plain = None
        if functional is not None and not exact:
            lost = {n: d for n, d in facts.lost_defaults if facts.names.index(n) >= len(fake_args)}
            plain = functional(*fake_args, **{**lost, **fake_kwargs})
            fake_kwargs.update(zip(facts.out_names, targets, strict=False))
        out = func(*fake_args, **fake_kwargs)
        if facts.is_random:
            self._note_random(targets, fake_args)
        fresh = _fresh_results(out, facts)
        if functional is None:
            node = self._call_on_copies(func, facts, node_args, node_kwargs, fresh, targets)
            results = iter(self._split_flat(node, len(fresh) + sum(1 for _ in _tensors(targets))))
            fresh_nodes = [next(results) for _ in fresh]
            new_nodes = list(results)
        else:
            vals = plain if plain is not None else _functional_vals(fresh, targets)
            for name, default in facts.lost_defaults:
                if facts.names.index(name) >= len(node_args):
                    node_kwargs.setdefault(name, default)
            in_place = None if facts.out_names else func
            node = self.nodes.create(functional, tuple(node_args), node_kwargs, vals, in_place)
            pieces = list(self._pieces(node, vals))
            fresh_nodes, new_nodes = pieces[: len(fresh)], pieces[len(fresh) :]
        for fake, fresh_node in zip(fresh, fresh_nodes, strict=True):
            self._register_outputs(fresh_node, fake)
        for target, new in zip(_tensors(targets), new_nodes, strict=True):
            self.values.write(target, self._fitted(target, new))
        return out

    def _one_by_one(self, func: Any, fake_args: list[Any], fake_kwargs: dict[str, Any]) -> Any:
        """A list operator that writes to the same memory twice: each element sees what the one before it wrote."""
        lists = [a for a in (*fake_args, *fake_kwargs.values()) if isinstance(a, list) and a]
        count = max(len(a) for a in lists)
        if any(len(a) != count for a in lists):
            raise OverlapError(
                f"{func} writes twice to the same memory.",
                fix="pass each tensor once.",
                location=user_location(),
            )
        for i in range(count):
            args = [[a[i]] if isinstance(a, list) and a else a for a in fake_args]
            kwargs = {n: [a[i]] if isinstance(a, list) and a else a for n, a in fake_kwargs.items()}
            self.__torch_dispatch__(func, (), tuple(args), kwargs)
        return None

    def _steals(self, target: Tensor, source: Tensor) -> bool:
        """Autograd copies a gradient into `.grad` where something else still refers to it. Here that something is this
        recorder, which keeps every tensor alive; eager would take the gradient itself."""
        if not is_accumulating_gradient():
            return False
        made = self.values.value(target).node.target
        same = target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride()
        return made is aten.new_empty_strided.default and same

    def _pieces(self, node: fx.Node, vals: Any) -> Iterator[fx.Node]:
        """A node for each tensor of a nested result."""
        if isinstance(vals, Tensor):
            yield node
        else:
            for i, item in enumerate(vals):
                if isinstance(item, Tensor) or item:
                    yield from self._pieces(self.nodes.create(operator.getitem, (node, i), {}, item), item)

    def _split_flat(self, node: fx.Node, count: int) -> list[fx.Node]:
        vals = node.meta["val"]
        return [self.nodes.create(operator.getitem, (node, i), {}, vals[i]) for i in range(count)]

    def _call_on_copies(
        self,
        func: Any,
        facts: OpFacts,
        node_args: list[Any],
        node_kwargs: dict[str, Any],
        fresh: list[Any],
        targets: list[Any],
    ) -> fx.Node:
        """An operator without a functional variant runs on copies of what it writes."""
        positional = list(node_args)
        rest = dict(node_kwargs)
        while len(positional) <= max(facts.writes):
            name = facts.names[len(positional)]
            if name not in rest:
                positional = []
                break
            positional.append(rest.pop(name))
        if not positional:
            raise UnsupportedError(
                f"{func} writes to keyword-only arguments and has no functional variant.",
                fix="use the out-of-place form of the operator.",
                location=user_location(),
            )
        vals = (*fresh, *(_like(t) for t in _tensors(targets)))
        node = self.nodes.create(call_on_copies, (func, tuple(facts.writes), *positional), rest, vals, func)
        return node

    def _fitted(self, target: Tensor, new: fx.Node) -> fx.Node:
        """A result of another dtype, shape or layout than what it is written to is copied into its form."""
        val = new.meta["val"]
        if val.dtype == target.dtype and val.shape == target.shape and val.stride() == target.stride():
            return new
        before = self.values.node_of(target)
        return self.nodes.create(aten.copy.default, (before, new), {}, _like(target), aten.copy_.default)

    # Single operators with a meaning of their own.

    def _item(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if not isinstance(tensor, FakeTensor):
            tensor = self.host.lift(tensor)
        return self.host.item(tensor, self.node_of(tensor))

    def _lift_fresh(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.tensor(...)` in the step: its data is a constant of the program."""
        tensor = args[0]
        if isinstance(tensor, FakeTensor):
            return tensor
        out = func(tensor)
        constant = self.host.constant(tensor)
        constant.meta["val"] = out
        node = self.nodes.create(aten.lift_fresh_copy.default, (constant,), {}, out)
        self.values.register(out, node)
        return out

    def _packed_weights(self, weights: list[Tensor], nodes: list[fx.Node]) -> tuple[Tensor, fx.Node]:
        """The chunk of all weights that cuDNN takes, found at replay."""
        chunk = torch.empty(sum(w.numel() for w in weights), dtype=weights[0].dtype, device=weights[0].device)
        node = self.nodes.create(packed_weights, (nodes,), {}, chunk)
        self.values.register(chunk, node)
        return chunk, node

    def _note_random(self, out: Any, fake_args: list[Any]) -> None:
        for tensor in _tensors([out, fake_args]):
            self.random_devices[str(tensor.device)] = None
            return

    # Arguments.

    def _convert_all(self, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        fakes, nodes = [], []
        for arg in args:
            fake, node = self._convert(arg)
            fakes.append(fake)
            nodes.append(node)
        return fakes, nodes

    def _convert_kwargs(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if not kwargs:
            return {}, {}
        pairs = {name: self._convert(arg) for name, arg in kwargs.items()}
        return {n: p[0] for n, p in pairs.items()}, {n: p[1] for n, p in pairs.items()}

    def _convert(self, arg: Any) -> tuple[Any, Any]:
        """What the fake operator takes, and what stands for it in the graph."""
        if isinstance(arg, FakeTensor):
            return arg, self.values.node_of(arg)
        if arg is None or isinstance(arg, int | float | str | torch.dtype | torch.device):
            return arg, arg
        if isinstance(arg, list | tuple):
            fakes, nodes = self._convert_all(tuple(arg))
            return fakes, nodes
        if isinstance(arg, Tensor):
            lifted = self.host.lift(arg)
            return lifted, self.values.node_of(lifted)
        if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
            scalar = scalar_of(arg)
            if scalar is None:
                return arg, self.host.shape_arg(arg)
            return (1.0 if scalar.kind is float else 1) if scalar.hint is None else scalar.hint, scalar.fx_arg()
        if isinstance(arg, torch.Generator):
            return None, self.host.generator(arg)
        return arg, arg

    def _insert_named_scalars(self, facts: OpFacts, args: list[Any], kwargs: dict[str, Any]) -> None:
        for name, scalar in self.named_scalars.items():
            name = name if name in facts.names else _OTHER_NAMES.get(name, name)
            if name not in facts.names:
                continue
            self.used_scalars.add(id(scalar))
            position = facts.names.index(name)
            if position < len(args):
                args[position] = scalar.fx_arg()
            else:
                kwargs[name] = scalar.fx_arg()


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for item in nested:
            yield from _tensors(item)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _fresh_results(out: Any, facts: OpFacts) -> list[Tensor]:
    if facts.fresh_results == 0 or out is None:
        return []
    items = list(out) if isinstance(out, list | tuple) else [out]
    return items[: facts.fresh_results]


def _functional_vals(fresh: list[Tensor], targets: list[Any]) -> Any:
    vals = [*fresh]
    for target in targets:
        if isinstance(target, Tensor):
            vals.append(_like(target))
        elif target is not None:
            vals.append([_like(t) for t in target])  # type: ignore[arg-type]
        else:
            vals.append(None)  # type: ignore[arg-type]
    return vals[0] if len(vals) == 1 else tuple(vals)


def _keeps_geometry(targets: list[Any], fake_args: list[Any], fake_kwargs: dict[str, Any]) -> bool:
    """Whether the functional result surely has the dtype and strides of what it replaces."""
    dtypes = {t.dtype for t in _tensors([fake_args, list(fake_kwargs.values())])}
    if len(dtypes) > 1:
        return False
    return all(t.is_contiguous() for t in _tensors(targets))
