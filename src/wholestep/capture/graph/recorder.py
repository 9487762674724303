"""Record every operator that the user's step runs in one functional FX graph, in a single trace.

The step runs on fake tensors; autograd is real. This dispatch mode sees each operator below autograd, runs it on the
fakes (writes included, so that version counters and errors are eager's), and records what it means for values:

    eager                      recorded
    x.add_(y)                  x1 = add(x, y)          later reads of x read x1
    v = x[0]; v.zero_()        v = select(x, 0, 0); v1 = zero(v); x1 = select_scatter(x, v1, 0, 0)
    h.detach()                 nothing: the same value

One mode and not make_fx with functionalization: its two Python layers per operator cost 1.6 to 1.9 times a bare
make_fx; this mode costs less than one.

`Nodes` creates the nodes, each with the metadata of its value and its origin. A backward node is mapped to its forward
line by autograd's sequence numbers: the backward of autograd node n gets the line of the operator that made node n.

`Operands` converts arguments: to what the fake operator takes, and to what represents them in the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from wholestep.capture.graph.functional_forms import CustomOperators, OperatorCall, Writes
from wholestep.capture.graph.refusals import (
    data_shape,
    higher_order,
    refuse_branching_backward,
    refuse_returned_number,
    unsupported,
)
from wholestep.capture.graph.tensor_values import Value, Values
from wholestep.capture.results.accounting import Account
from wholestep.capture.scalars.scalar_operands import fix_metadata
from wholestep.capture.scalars.symbolic_scalars import ScalarNode, scalar_of
from wholestep.errors import (
    Location,
    ParameterDataError,
    SparseError,
    UnsupportedError,
)
from wholestep.ir.effects import OperatorFacts, operator_facts, view_variant
from wholestep.ir.graph_functions import packed_weights
from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.meta import KEY, NodeMeta, location_of, user_frame, user_location
from wholestep.torch_private.autograd import autograd_sequence_number, current_autograd_node, node_sequence_number
from wholestep.torch_private.fake_tensors import (
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    has_symbolic_sizes,
)
from wholestep.torch_private.operators import HigherOrderOperator, OpOverload, bound_argument
from wholestep.torch_private.symbolic_shapes import shapes_by_python

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
    """What the recorder needs from the capture that owns it."""

    phase: str
    module_path: str
    account: Account

    def before_operator(self) -> None: ...

    def lift(self, tensor: Tensor) -> Tensor: ...

    def constant(self, tensor: Tensor) -> fx.Node: ...

    def generator(self, generator: torch.Generator) -> fx.Node: ...

    def item(self, tensor: Tensor, node: fx.Node) -> Any: ...

    def shape_arg(self, value: Any) -> Any: ...

    def begin_data_sizes(self) -> bool: ...

    def size_of(self, scalar: ScalarNode) -> torch.SymInt: ...

    def name_data_sizes(self, node: fx.Node, tensor: Tensor) -> None: ...

    def in_recompute(self) -> bool: ...


_RESIZES = frozenset({aten.resize_.default, aten.resize_as_.default})


class Recorder(DispatchMode):
    """The dispatch mode that builds the graph."""

    supports_higher_order_operators = True  # to refuse them with a reason

    def __init__(self, graph: fx.Graph, fake_mode: FakeTensorMode, host: Host) -> None:
        super().__init__()
        self.host = host
        self.named_scalars: dict[str, ScalarNode] = {}
        """Scalars that the next operator takes by name as plain floats (see `patches`)."""
        self.used_scalars: set[int] = set()
        """Which of `named_scalars` some operator took."""
        self.random_devices: dict[str, None] = {}
        self.subclass_lines: dict[type, Location | None] = {}
        """Where the step first used a tensor subclass."""
        self.reshaped: dict[int, tuple[Tensor, Location | None]] = {}
        """Inputs whose sizes or strides an operator changed in place (`x.t_()`), by identity of the fake: an alias with
        the former sizes and strides, and the line."""
        self.nodes = Nodes(graph, host)
        self.values = Values(self.nodes, fake_mode, host.shape_arg)
        self._has_symbols = fake_mode.shape_env is not None
        self._operands = Operands(self.values, host)
        self._writes = Writes(self)
        self._custom = CustomOperators(self)
        self._special: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._item,
            aten.lift_fresh.default: self._lift_fresh,
            aten.detach.default: self._same_value,
            aten.alias.default: self._same_value,
        }

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Record an operator on nodes; its `val` is computed from theirs."""
        return self.values.emit(op, *args, **kwargs)

    def emit_function(self, target: Callable[..., Any], args: tuple[Any, ...], val: Any) -> fx.Node:
        """Record a call of a Python function with a known result."""
        return self.nodes.create(target, args, {}, val)

    def node_of(self, fake: Tensor) -> fx.Node:
        """The node that holds the current contents of a fake tensor."""
        return self.values.node_of(fake)

    def as_input(self, fake: Tensor) -> Tensor:
        """The tensor with the sizes and strides that it had when the step began."""
        return self.reshaped[id(fake)][0] if id(fake) in self.reshaped else fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        subclass = next(
            (t for t in types if not issubclass(t, FakeTensor) and t.__torch_dispatch__ is not _NO_DISPATCH), None
        )
        if subclass is not None:
            if subclass not in self.subclass_lines:
                self.subclass_lines[subclass] = user_location()
            return NotImplemented  # a tensor subclass unwraps itself into plain tensors first
        if self.values.paused or func in _METADATA_QUERIES:
            return func(*args, **kwargs)
        self.host.before_operator()
        if not self._has_symbols:
            return self._recorded(func, args, kwargs)
        with self.values.below_recorder():
            return self._recorded(func, args, kwargs)

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        special = self._special.get(func)
        if special is not None:
            return special(func, args, kwargs)
        if isinstance(func, HigherOrderOperator):
            raise higher_order(func)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            raise UnsupportedError(
                f"{func} communicates outside of the graph.",
                fix="use torch.distributed._functional_collectives in the step (all_reduce, all_gather_tensor, ...), "
                "whose results are values; or communicate outside of the step.",
                location=user_location(),
            )
        refuse_branching_backward(func, args)
        if func is aten._pack_padded_sequence.default:  # its backward, and RNNs over its result, read data in C++
            raise data_shape(func)
        facts = operator_facts(func)
        if facts.is_custom:
            refuse_returned_number(func)
            self.host.account.custom_call(func)
        fake_args, node_args = self._operands.convert_all(args)
        fake_kwargs, node_kwargs = self._operands.convert_kwargs(kwargs)
        view_args: Sequence[Any] = fake_args
        if self._operands.has_scalars:
            self._operands.has_scalars = False
            view_args = fix_metadata(
                func, facts, (args, kwargs), (fake_args, fake_kwargs), (node_args, node_kwargs), self.host.size_of
            )
        if self.named_scalars:
            self._insert_named_scalars(facts, node_args, node_kwargs)
        if func is aten._cudnn_rnn.default and fake_args[3] is None:
            fake_args[3], node_args[3] = self._packed_weights(fake_args[1], node_args[1])
        call = OperatorCall(func, facts, fake_args, fake_kwargs, node_args, node_kwargs)
        try:
            if facts.is_inplace_view:
                return self._inplace_view(func, fake_args, fake_kwargs)
            if facts.replaces_storage:
                return self._replace_storage(func, fake_args, fake_kwargs)
            if facts.writes and (not facts.writes_if or self._flag(func, facts, args, kwargs)):
                if self._writes.overlap(call):
                    return self._writes.one_by_one(func, list(args), kwargs)
                return self._writes.record(call)
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
            self.note_random(out, fake_args)
        if facts.is_custom:
            return self._custom.record(call, out)
        if facts.is_view:
            return self._record_view(call, view_args, out)
        node = self.nodes.create(func, tuple(node_args), node_kwargs, out)
        self.register_outputs(node, out)
        return out

    def note_symbols(self) -> None:
        """From now on tensors may have symbolic sizes."""
        self._has_symbols = True

    def _computed(self, func: Any, fake_args: list[Any], fake_kwargs: dict[str, Any]) -> Any:
        try:
            return self._run(func, fake_args, fake_kwargs)
        except DynamicOutputShapeException:
            if not self.host.begin_data_sizes():
                raise
        self._has_symbols = True
        return self._run(func, fake_args, fake_kwargs)

    def _run(self, func: Any, fake_args: list[Any], fake_kwargs: dict[str, Any]) -> Any:
        try:
            if not self._has_symbols:
                return func(*fake_args, **fake_kwargs)
            with shapes_by_python(), self.values.below_recorder():
                return func(*fake_args, **fake_kwargs)
        except AssertionError as error:
            # Shape rules in Python assert what a kernel checks: user code gets the exception that eager raises.
            raise RuntimeError(str(error)) from error

    def _flag(self, func: OpOverload, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        flag = bound_argument(func, facts.names.index(facts.writes_if), args, kwargs)
        return bool(flag) and bound_argument(func, facts.writes[0], args, kwargs) is not None

    def register_outputs(self, node: fx.Node, out: Any) -> None:
        """Register the tensors of a result as the values of the node, or of its elements."""
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
                    self.register_outputs(self.nodes.create(operator.getitem, (node, i), {}, item), item)

    def _record_view(self, call: OperatorCall, view_args: Sequence[Any], out: Any) -> Any:
        func, fake_kwargs = call.func, call.fake_kwargs
        source = view_args[0] if view_args else next(iter(fake_kwargs.values()))
        if not isinstance(source, Tensor) or out is source:
            return out
        parent = self.values.value(source)
        node = self.nodes.create(func, tuple(call.node_args), call.node_kwargs, out)
        rest = tuple(view_args[1:])
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
        """`x.unsqueeze_(0)`: the tensor becomes a view of its former value."""
        fake = fake_args[0]
        if func is aten.detach_.default:
            return func(*fake_args, **fake_kwargs)
        functional = view_variant(func)
        if functional is None:
            raise UnsupportedError(
                f"{func} has no view form.", location=user_location(), fix="use the out-of-place form."
            )
        was = fake.detach()
        if self._is_input(fake):
            self.reshaped[id(fake)] = was, user_location()
        out = func(*fake_args, **fake_kwargs)
        self._become_view(fake, was, functional, tuple(fake_args[1:]), fake_kwargs)
        return out

    def _is_input(self, fake: Tensor) -> bool:
        """Whether a fake is that of one of the user's tensors, not of a view of it."""
        value = self.values.value(fake)
        return value.parent is None and value.base.is_input

    def _become_view(self, fake: Tensor, was: Tensor, view: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def as_view(before: Value) -> Value:
            node = self.nodes.create(view, (before.node, *rest), kwargs, fake)
            return Value(fake, node, before.base, before, view, rest, kwargs)

        self.values.turn_into_view(fake, was, as_view)

    def _replace_storage(self, func: Any, fake_args: list[Any], fake_kwargs: dict[str, Any]) -> Any:
        fake = fake_args[0]
        is_users = self._is_input(fake)
        if func in _RESIZES:
            size = list(fake_args[1].shape if isinstance(fake_args[1], Tensor) else fake_args[1])
            if size == list(fake.shape):
                return fake
            if not is_users and fake.is_contiguous() and math.prod(size) <= fake.numel() and not fake_kwargs:
                was = fake.detach()
                func(*fake_args)  # the first elements, under another shape
                self._become_view(fake, was, aten.as_strided.default, (size, list(fake.stride())), {})
                return fake
        elif not is_users:
            # A tensor that the step made (cuDNN tests for packed weights): looked up by its new storage from now on.
            out = func(*fake_args, **fake_kwargs)
            self.values.forget(fake)
            return out
        raise ParameterDataError(
            f"{func} replaces the storage of a tensor inside the step.",
            fix="create a new tensor instead of resizing or re-setting one: torch.empty(size), x.reshape(size).",
            location=user_location(),
        )

    def _item(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if not isinstance(tensor, FakeTensor):
            tensor = self.host.lift(tensor)
        return self.host.item(tensor, self.node_of(tensor))

    def _lift_fresh(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.tensor(...)` in the step: its data is a constant of the graph."""
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
        """The one buffer of all weights that cuDNN takes, found at replay."""
        chunk = torch.empty(sum(w.numel() for w in weights), dtype=weights[0].dtype, device=weights[0].device)
        node = self.nodes.create(packed_weights, (nodes,), {}, chunk)
        self.values.register(chunk, node)
        return chunk, node

    def note_random(self, out: Any, fake_args: list[Any]) -> None:
        """Record for the signature on which device an operator drew random numbers."""
        for tensor in tensors_in([out, fake_args]):
            self.random_devices[str(tensor.device)] = None
            return

    def _insert_named_scalars(self, facts: OperatorFacts, args: list[Any], kwargs: dict[str, Any]) -> None:
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


class Place(Protocol):
    """Where in the step the trace currently is."""

    phase: str
    module_path: str

    def name_data_sizes(self, node: fx.Node, tensor: Tensor) -> None: ...

    def in_recompute(self) -> bool: ...


class Nodes:
    """Creates nodes at the end of one graph."""

    def __init__(self, graph: fx.Graph, place: Place) -> None:
        self.graph = graph
        self._place = place
        self._after_backward = False
        self._forward_of: dict[int, tuple[str, Location | None]] = {}

    def create(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any, in_place: OpOverload | None = None
    ) -> fx.Node:
        """A call of `target` whose result has the metadata of `val`; `in_place`: the operator that eager ran here."""
        node = self.graph.create_node("call_function", target, args, kwargs)
        node.meta["val"] = val
        node.meta[KEY] = self._meta(in_place)
        if isinstance(val, Tensor) and has_symbolic_sizes(val):
            self._place.name_data_sizes(node, val)
        return node

    def last(self) -> fx.Node | None:
        """The newest node."""
        return next(iter(reversed(self.graph.nodes)), None)

    def since(self, before: fx.Node | None) -> list[fx.Node]:
        """The nodes created after `before`, in order."""
        made: list[fx.Node] = []
        for node in reversed(self.graph.nodes):
            if node is before:
                break
            made.append(node)
        return made[::-1]

    def _meta(self, in_place: OpOverload | None) -> NodeMeta:
        place = self._place
        running = current_autograd_node()
        if running is None:
            where = location_of(user_frame(3))
            phase = place.phase
            if phase == "forward":
                if self._after_backward and not place.module_path and not torch.is_grad_enabled():
                    phase = "update"
                # An operator without a node of autograd's (batch norm counts its calls) finds the last one's number.
                self._forward_of.setdefault(autograd_sequence_number() - 1, (place.module_path, where))
            return NodeMeta(place.module_path, where, phase, in_place)
        self._after_backward = True
        path, forward = self._forward_of.get(node_sequence_number(running), (place.module_path, None))
        if place.in_recompute():
            return NodeMeta(
                place.module_path or path, location_of(user_frame(3)) or forward, "backward", in_place, recompute=True
            )
        return NodeMeta(path, forward or location_of(user_frame(3)), "backward", in_place)


_VALUES = frozenset({int, float, bool, str, torch.dtype, torch.device})


class OperandHost(Protocol):
    """What `Operands` needs from the capture."""

    def lift(self, tensor: Tensor) -> Tensor: ...

    def generator(self, generator: torch.Generator) -> fx.Node: ...

    def shape_arg(self, value: Any) -> Any: ...


class Operands:
    """Converts arguments to fakes and to nodes."""

    def __init__(self, values: Values, host: OperandHost) -> None:
        self._values = values
        self._host = host
        self.has_scalars = False
        """True after a symbolic scalar was among the arguments; the reader resets it."""

    def convert_all(self, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        """Positional arguments as fakes and as nodes."""
        fakes, nodes = [], []
        for arg in args:
            fake, node = self._convert(arg)
            fakes.append(fake)
            nodes.append(node)
        return fakes, nodes

    def convert_kwargs(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments by name as fakes and as nodes."""
        if not kwargs:
            return {}, {}
        pairs = {name: self._convert(arg) for name, arg in kwargs.items()}
        return {n: p[0] for n, p in pairs.items()}, {n: p[1] for n, p in pairs.items()}

    def _convert(self, arg: Any) -> tuple[Any, Any]:
        if isinstance(arg, FakeTensor):
            return arg, self._values.node_of(arg)
        if arg is None or type(arg) in _VALUES:  # by type: a symbolic scalar is an instance of int
            return arg, arg
        if isinstance(arg, list | tuple):
            fakes, nodes = self.convert_all(tuple(arg))
            return fakes, nodes
        if isinstance(arg, Tensor):
            lifted = self._host.lift(arg)
            return lifted, self._values.node_of(lifted)
        if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
            scalar = scalar_of(arg)
            if scalar is None:
                return arg, self._host.shape_arg(arg)
            self.has_scalars = True
            return (1.0 if scalar.kind is float else 1) if scalar.hint is None else scalar.hint, scalar.fx_arg()
        if isinstance(arg, torch.Generator):
            return None, self._host.generator(arg)
        return arg, arg
