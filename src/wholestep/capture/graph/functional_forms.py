"""How writes and operators of `torch.library` are recorded in functional form.

`Writes`: an operator that writes to its arguments is run on the fakes, and its functional form is recorded.

    eager                      recorded
    x.add_(y)                  x1 = add(x, y)                  later reads of x read x1
    torch.add(x, y, out=z)     z1 = add(x, y)
    an operator without        z1 = call_on_copies(op, ..)     it runs on copies of what it writes
    a functional variant

A functional result of another dtype, shape or strides is converted to those of the tensor that is written.
`add_write_backs` ends the graph with a `copy_` into every input whose memory the step wrote.

`CustomOperators`: each call of an operator of `torch.library` is one node, whatever the operator returns.

    the operator returns                      recorded
    new tensors, or nothing                   the call
    its input, and its schema says so         the call; the result is the input
    a view of its input, by its schema        the call; what it returns can be read, not written to
    its input or a view of it, and its        `call_on_copies`, which returns new memory; what it returns can be read,
    schema says nothing                       not written to

Where the schema says nothing the fake kernel may be an approximation: the real one may return an alias where the fake
one does, or a new tensor. Reading the result of the call is right in both cases. A write through it would be right in
one of them, so `Values` refuses it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from wholestep.capture.graph.refusals import refuse_overlap, refuse_shifted_overlap
from wholestep.capture.graph.tensor_values import OPAQUE, Value
from wholestep.errors import AliasError, OverlapError, ParameterDataError
from wholestep.ir.effects import OperatorFacts, is_custom_operator, is_view_of_first, shared_inputs
from wholestep.ir.graph_functions import call_on_copies
from wholestep.ir.graph_walks import tensors_in
from wholestep.ir.meta import NodeMeta, set_node_meta, user_location
from wholestep.torch_private.autograd import is_accumulating_gradient
from wholestep.torch_private.distributed import local_of
from wholestep.torch_private.fake_tensors import storage_key
from wholestep.torch_private.operators import bound_argument, has_autograd_kernel, schema_of

if TYPE_CHECKING:
    from wholestep.capture.graph.recorder import Recorder
    from wholestep.capture.objects.swapped_state import Tracked
    from wholestep.capture.trace import Capture

aten = torch.ops.aten


@dataclass
class OperatorCall:
    """A call of an operator, with the fakes that it runs on and the nodes that it is recorded with."""

    func: Any
    facts: OperatorFacts
    fake_args: list[Any]
    fake_kwargs: dict[str, Any]
    node_args: list[Any]
    node_kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return list(tensors_in([self.fake_args, list(self.fake_kwargs.values())]))

    def written(self) -> list[Any]:
        """The arguments that the operator writes, each a tensor, a list of tensors, or None."""
        return [bound_argument(self.func, i, self.fake_args, self.fake_kwargs) for i in self.facts.writes]


class Writes:
    """Records operators that write, for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._nodes = recorder.nodes
        self._values = recorder.values

    def record(self, call: OperatorCall) -> Any:
        """Run an operator that writes on the fakes and record its functional form."""
        func, facts, fake_args, fake_kwargs = call.func, call.facts, call.fake_args, call.fake_kwargs
        if func is aten.copy_.default and self._steals(fake_args[0], fake_args[1]):
            out = func(*fake_args, **fake_kwargs)
            self._values.write(fake_args[0], call.node_args[1])
            return out
        targets = call.written()
        flat = list(tensors_in(targets))
        records = torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors())
        for target in flat:
            refuse_overlap(func, target)
            if records:  # autograd recreates the view from its storage offset
                self._values.fix_moving_views(target, "a write through a view that autograd records")
        refuse_shifted_overlap(func, flat, fake_args)
        functional = facts.functional
        exact = functional is not None and _keeps_geometry(targets, call)
        if facts.is_random and not exact:
            functional = None  # a random operator fills memory in order: keep the layout
        for name in facts.out_names if functional is not None else ():
            fake_kwargs.pop(name)
            call.node_kwargs.pop(name)
            exact = False
        plain = None
        if functional is not None and not exact:
            lost = {n: d for n, d in facts.lost_defaults if facts.names.index(n) >= len(fake_args)}
            plain = functional(*fake_args, **{**lost, **fake_kwargs})
            fake_kwargs.update(zip(facts.out_names, targets, strict=False))
        out = func(*fake_args, **fake_kwargs)
        if facts.is_random:
            self._recorder.note_random(targets, fake_args)
        fresh = _fresh_results(out, facts)
        if functional is None:
            node = self._call_on_copies(call, fresh, targets)
            results = iter(self._split_flat(node, len(fresh) + sum(1 for _ in tensors_in(targets))))
            fresh_nodes = [next(results) for _ in fresh]
            new_nodes = list(results)
        else:
            vals = plain if plain is not None else _functional_vals(fresh, targets)
            for name, default in facts.lost_defaults:
                if facts.names.index(name) >= len(call.node_args):
                    call.node_kwargs.setdefault(name, default)
            in_place = None if facts.out_names else func
            node = self._nodes.create(functional, tuple(call.node_args), call.node_kwargs, vals, in_place)
            pieces = list(self._pieces(node, vals))
            fresh_nodes, new_nodes = pieces[: len(fresh)], pieces[len(fresh) :]
        for fake, fresh_node in zip(fresh, fresh_nodes, strict=True):
            self._recorder.register_outputs(fresh_node, fake)
        for target, new in zip(tensors_in(targets), new_nodes, strict=True):
            self._values.write(target, self._fitted(target, new))
        return out

    def overlap(self, call: OperatorCall) -> bool:
        """Whether two of the tensors that an operator writes share a base."""
        flat = list(tensors_in(call.written()))
        return len(flat) > 1 and len({id(self._values.value(t).base) for t in flat}) < len(flat)

    def one_by_one(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A foreach operator that writes twice to the same memory: each element sees the writes before it.

        Takes the arguments as the step passed them, with symbolic scalars.
        """
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and a]
        count = max(len(a) for a in lists)
        if any(len(a) != count for a in lists) or is_custom_operator(func):
            raise OverlapError(
                f"{func} writes twice to the same memory.",
                fix="pass each tensor once.",
                location=user_location(),
            )
        for i in range(count):
            each = [[a[i]] if isinstance(a, list | tuple) and a else a for a in args]
            named = {n: [a[i]] if isinstance(a, list | tuple) and a else a for n, a in kwargs.items()}
            self._recorder.__torch_dispatch__(func, (), tuple(each), named)
        return None

    def _steals(self, target: Tensor, source: Tensor) -> bool:
        """Autograd stores a gradient itself in `.grad` if nothing else refers to it, and a copy otherwise. In eager
        nothing would refer to this one; here the recorder does."""
        if not is_accumulating_gradient():
            return False
        made = self._values.value(target).node.target
        same = target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride()
        return made is aten.new_empty_strided.default and same

    def _pieces(self, node: fx.Node, vals: Any) -> Iterator[fx.Node]:
        """One node per tensor of a nested result."""
        if isinstance(vals, Tensor):
            yield node
        else:
            for i, item in enumerate(vals):
                if isinstance(item, Tensor) or item:
                    yield from self._pieces(self._nodes.create(operator.getitem, (node, i), {}, item), item)

    def _split_flat(self, node: fx.Node, count: int) -> list[fx.Node]:
        vals = node.meta["val"]
        return [self._nodes.create(operator.getitem, (node, i), {}, vals[i]) for i in range(count)]

    def _call_on_copies(self, call: OperatorCall, fresh: list[Any], targets: list[Any]) -> fx.Node:
        """Record an operator without a functional variant as a call on copies of what it writes."""
        func, facts, positional, rest = call.func, call.facts, list(call.node_args), dict(call.node_kwargs)
        while len(positional) <= max(facts.writes) and facts.names[len(positional)] not in facts.keyword_only:
            argument = schema_of(func).arguments[len(positional)]
            positional.append(rest.pop(argument.name, argument.default_value))
        vals = (*fresh, *(_like(t) for t in tensors_in(targets)))
        node = self._nodes.create(call_on_copies, (func, tuple(facts.writes), *positional), rest, vals, func)
        return node

    def _fitted(self, target: Tensor, new: fx.Node) -> fx.Node:
        """Convert a result to the dtype, shape and strides of the tensor that it is written to."""
        val = new.meta["val"]
        if val.dtype == target.dtype and val.shape == target.shape and val.stride() == target.stride():
            return new
        before = self._values.node_of(target)
        return self._nodes.create(aten.copy.default, (before, new), {}, _like(target), aten.copy_.default)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _fresh_results(out: Any, facts: OperatorFacts) -> list[Tensor]:
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


def _keeps_geometry(targets: list[Any], call: OperatorCall) -> bool:
    """Whether the functional result is certain to have the dtype and strides of what it replaces."""
    if len({t.dtype for t in call.tensors()}) > 1:
        return False
    return all(t.is_contiguous() for t in tensors_in(targets))


def add_write_backs(capture: Capture, outputs: Iterable[Any]) -> list[tuple[fx.Node, fx.Node]]:
    """Add the final copies to the graph. Returns each input with the value that is copied into it."""
    _refuse_shared_data(capture)
    found: list[tuple[fx.Node, fx.Node]] = []
    written: list[Tracked] = []
    for node in [n for n in capture.graph.nodes if n.op == "placeholder"]:
        fake = node.meta.get("val")
        tracked = capture.table.by_fake.get(id(fake)) if isinstance(fake, Tensor) else None
        if tracked is not None and capture.recorder.values.is_written(fake):
            found.append((node, capture.recorder.node_of(fake)))
            written.append(tracked)
    kept = {node for node in outputs if isinstance(node, fx.Node)}
    used = {id(n.meta.get("val")) for n in capture.graph.nodes if n.op == "placeholder" and (n.users or n in kept)}
    _refuse_shared_memory([t for t in capture.table.tracked.values() if t in written or id(t.input) in used], written)
    replaced = set(map(id, capture.recorder.values.replaced()))
    copies = []
    found = [
        (node, _not_an_input(capture, value) if id(node.meta["val"]) in replaced else value) for node, value in found
    ]
    for target, value in found:
        if value is target:
            continue
        copy = capture.graph.call_function(torch.ops.aten.copy_.default, (target, value))
        copy.meta["val"] = target.meta["val"]
        set_node_meta(copy, NodeMeta(phase="epilogue"))
        copies.append((target, value))
    return copies


def _not_an_input(capture: Capture, value: fx.Node) -> fx.Node:
    """The value of a tensor that took the data of another input, which may be written before it is read."""
    is_input = value.op == "placeholder" or shared_inputs(value)
    return capture.recorder.emit(aten.clone.default, value) if is_input else value


def _refuse_shared_data(capture: Capture) -> None:
    """Refuse a step after which two tensors of the user's share memory, because one took the data of the other."""
    for other in capture.table.tracked.values():
        replaced = replaced_data_in(capture, other.input)
        if replaced is not None and replaced is not other:
            raise ParameterDataError(
                f"after the step {replaced.slot.path} and {other.slot.path} would share memory: the step sets .data of "
                "the first.",
                fix="copy the values: param.copy_(new) under torch.no_grad().",
            )


def replaced_data_in(capture: Capture, tensor: Tensor) -> Tracked | None:
    """A tensor of the user's that took the memory of this one (`p.data = tensor`), or a part of it."""
    for replaced in capture.recorder.values.replaced():
        if replaced is tensor:
            return capture.table.by_fake.get(id(replaced))
    for replaced in capture.recorder.values.replaced():
        tracked = capture.table.by_fake.get(id(replaced))
        if tracked is not None and storage_key(replaced) == storage_key(tensor) and _overlap(replaced, tensor):
            return tracked
    return None


def _refuse_shared_memory(tracked: Iterable[Tracked], written: list[Tracked]) -> None:
    """Refuse two inputs over the same memory of which one is written: the graph would not see the other change."""
    by_storage: dict[int, list[Tracked]] = {}
    for item in tracked:
        if local_of(item.real).numel():
            by_storage.setdefault(storage_key(local_of(item.real)), []).append(item)
    for item in written:
        for other in by_storage.get(storage_key(local_of(item.real)), ()):
            if other is not item and _overlap(local_of(item.real), local_of(other.real)):
                raise AliasError(
                    f"{item.slot.path} and {other.slot.path} share memory, and the step writes to the first.",
                    fix="clone() one of them, or tie them as one parameter.",
                )


def _overlap(a: Tensor, b: Tensor) -> bool:
    (a0, a1), (b0, b1) = _extent(a), _extent(b)
    return a0 < b1 and b0 < a1


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte in the storage, and the byte after the last one."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start, start + length * tensor.element_size()


class CustomOperators:
    """Records custom operators that do not write to their arguments."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._nodes = recorder.nodes
        self._values = recorder.values

    def record(self, call: OperatorCall, out: Any) -> Any:
        """Record a call whose fake result is `out`. Returns what the step gets."""
        func, facts, node_args, node_kwargs = call.func, call.facts, call.node_args, call.node_kwargs
        inputs = call.tensors()
        results = list(tensors_in(out))
        sources = [self._source(result, inputs, declared=facts.is_view) for result in results]
        shared = [(result, source) for result, source in zip(results, sources, strict=True) if source is not None]
        if not shared or (facts.is_view and all(result is source for result, source in shared)):
            node = self._nodes.create(func, tuple(node_args), node_kwargs, out)
            self._recorder.register_outputs(node, out)
            return out
        if is_view_of_first(func):
            node = self._nodes.create(func, tuple(node_args), node_kwargs, out)
            parts = list(self._parts(node, out))
        else:
            node = self._nodes.create(call_on_copies, (func, (), *node_args), node_kwargs, tuple(results))
            parts = list(self._parts(node, tuple(results)))
        stand_ins: dict[int, Tensor] = {}
        for got, result, source in zip(parts, results, sources, strict=True):
            if source is None:
                self._recorder.register_outputs(got, result)
                continue
            if result is source and facts.is_view:
                continue
            seen = self._alias(func, result) if self._values.knows(result) else result
            stand_ins[id(result)] = seen
            got.meta["val"] = seen
            parent = self._values.value(source)
            self._values.add_view(seen, Value(seen, got, parent.base, parent, OPAQUE))
        return _replaced(out, stand_ins)

    def _parts(self, node: fx.Node, out: Any) -> Iterator[fx.Node]:
        """One node per tensor of a result."""
        if isinstance(out, Tensor):
            yield node
        elif isinstance(out, list | tuple):
            for i, item in enumerate(out):
                yield from self._parts(self._nodes.create(operator.getitem, (node, i), {}, item), item)

    def _source(self, result: Tensor, inputs: list[Tensor], *, declared: bool) -> Tensor | None:
        """The input that shares memory with a result, by the fake kernel or by the schema."""
        if result.layout is not torch.strided:
            return None
        for source in inputs:
            if source is result or storage_key(source) == storage_key(result):
                return source
        return inputs[0] if declared and inputs else None

    def _alias(self, func: Any, source: Tensor) -> Tensor:
        """A new tensor over the memory of an input that a fake kernel returned."""
        if source.requires_grad and not has_autograd_kernel(func):
            raise AliasError(
                f"{func} returns an input that requires grad, and its schema does not say so.",
                fix="return a new tensor (x.clone()), or declare it: (Tensor(a) x) -> Tensor(a).",
                location=user_location(),
            )
        return torch.ops.aten.alias.default(source)  # type: ignore[no-any-return]


def _replaced(out: Any, stand_ins: dict[int, Tensor]) -> Any:
    if isinstance(out, list | tuple):
        return type(out)(_replaced(item, stand_ins) for item in out)
    return stand_ins.get(id(out), out)
