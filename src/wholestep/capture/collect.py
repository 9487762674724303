"""After the trace: what the step returned, wrote, created, rebound and removed, as a StepGraph with signature."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from wholestep._torch_compat import (
    SCALER_TENSORS,
    FakeTensor,
    describe_placement,
    is_dtensor,
    lazy_graph_module,
    local_of,
    spec_of,
    storage_key,
)
from wholestep.capture.captured import Captured, Change
from wholestep.capture.host_numbers import HostNumber
from wholestep.capture.known import ItemLeaf, Recipe
from wholestep.capture.plain import kind_of, same_contents, same_plain
from wholestep.capture.python_state import Attributes, holds_tensor
from wholestep.capture.scalars import ScalarNode, scalar_of
from wholestep.capture.slots import (
    ABSENT,
    BatchGradSlot,
    BatchSlot,
    GradSlot,
    HyperSlot,
    LocalSlot,
    MappingSlot,
    OptimizerStateSlot,
    Slot,
)
from wholestep.capture.state import Tracked
from wholestep.capture.tree import flatten
from wholestep.errors import AliasError, ItemError, ParameterDataError, SideEffectError, UnsupportedError
from wholestep.ir.effects import is_needed
from wholestep.ir.groups import group_table
from wholestep.ir.meta import NodeMeta, set_node_meta
from wholestep.ir.result_tree import describe, describe_leaf
from wholestep.ir.signature import (
    ChangeKind,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    Signature,
    StateChange,
    TensorSpec,
    WriteBack,
)
from wholestep.ir.step_graph import StepGraph

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

_PLAIN = (int, float, bool, str, type(None))
_OVERRIDDEN = frozenset({"step", "get_last_lr", "optimizer"})


def collect(capture: Capture, result: Any) -> Captured:
    """Turn the recorded nodes into a StepGraph. The user's objects still hold fakes."""
    return _Collector(capture).run(result)


class _Collector:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.graph = capture.graph
        self.recorder = capture.recorder
        self.table = capture.table
        self.outputs: list[tuple[OutputKind, str, Any]] = []
        self.changes: list[Change] = []
        self._output_index: dict[Any, int] = {}
        self.volatile: dict[int, set[str]] = {}
        self.rebound_variables: dict[str, tuple[Slot, Any]] = {}
        self.kinds: list[tuple[dict[str, Any], str, str, Any]] = []
        self._bound_nodes: set[fx.Node] = set()

    def run(self, result: Any) -> Captured:
        capture = self.capture
        flat = flatten(result)
        leaves = [self._result_leaf(leaf, path) for leaf, path in zip(flat.leaves, flat.paths, strict=True)]
        numbered = iter(leaves)
        description = describe(flat.rebuild([_Leaf(next(numbered)) for _ in flat.leaves]), _leaf_output)
        self._gradients()
        for optimizer, path in capture.world.optimizers.items():
            self._optimizer(optimizer, path)
        for scaler, path in capture.world.scalers.items():
            for attr in SCALER_TENSORS:
                self._scaler_tensor(scaler, attr, f"{path}.{attr}")
        for snapshot in capture.snapshots:
            self._attributes(snapshot)
        self._variables()
        self._containers()
        self._requires_grad()
        write_backs = self._epilogue()
        items = self._item_recipe()  # before dead nodes go
        self._output_node()
        self._drop_unused_inputs()
        gm = lazy_graph_module(_Root(capture.constants), self.graph, "WholeStep")
        inputs = [capture.slot_of[node] for node in gm.graph.nodes if node.op == "placeholder"]
        signature = self._signature(gm, write_backs, description)
        return Captured(
            step_graph=StepGraph(gm, signature),
            inputs=inputs,
            changes=self.changes,
            result_leaves=leaves,
            rebuild_result=None if flat.is_leaf else flat.rebuild,
            host_calls=capture.host_calls,
            stepped=list(dict.fromkeys(capture.steps_seen)),
            world=capture.world,
            table=self.table,
            shapes=capture.shapes,
            scalar_guards=list(capture.guards.values()),
            items=items,
            placeholder_slots=dict(capture.slot_of),
            dynamic_dims=capture.dynamic_dims,
            leaf_paths=capture.leaf_paths,
            leaves=capture.flat.leaves,
            structure=capture.structure,
            volatile=self.volatile,
            rebound_variables=self.rebound_variables,
            kinds=self.kinds,
            reads=list(self._reads()),
            class_reads=[(r.obj, path, dict(r.class_values)) for r, path in capture.readers if r.class_values],
            containers=[(c, path, contents) for c, path, contents in capture.contents if self._may_read(path)],
            modules=list(capture.world.modules.items()),
        )

    # The user's result.

    def _result_leaf(self, leaf: Any, path: str) -> tuple[str, Any]:
        if is_dtensor(leaf):
            index = self._output(OutputKind.RESULT, f"result{path}", self.recorder.node_of(local_of(leaf)))
            return "sharded", (index, spec_of(leaf))
        if isinstance(leaf, Tensor):
            tracked = self.table.by_fake.get(id(leaf))
            if not isinstance(leaf, FakeTensor):
                tracked = self.table.tracked.get(id(leaf))
                leaf = self.capture.lift(leaf)
            if tracked is not None:
                node = next(n for n, s in self.capture.slot_of.items() if n.meta.get("val") is tracked.input)
            else:
                node = self.recorder.node_of(leaf)
            kind = "attached" if leaf.requires_grad and not leaf.is_leaf else "output"
            return kind, self._output(OutputKind.RESULT, f"result{path}", node)
        scalar = scalar_of(leaf)
        if scalar is not None:
            return "output", self._output(OutputKind.RESULT, f"result{path}", self._scalar_node(scalar, path))
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            node = self.capture.shape_arg(leaf)
            if not isinstance(node, fx.Node):
                return "value", node
            return "output", self._output(OutputKind.RESULT, f"result{path}", node)
        if isinstance(leaf, HostNumber):
            return "host", leaf
        if isinstance(leaf, GeneratorType) or _hides_tensor(leaf):
            raise UnsupportedError(
                f"result{path} is a {type(leaf).__name__} with tensors inside, which the graph cannot rebuild.",
                fix="return a dict, tuple or list; or register the class with torch.utils._pytree.register_dataclass.",
            )
        return "value", leaf

    def _scalar_node(self, scalar: ScalarNode, path: str) -> Any:
        for leaf in scalar.leaves():
            if isinstance(leaf, ItemLeaf) and not leaf.known:
                raise ItemError(
                    f"result{path} is a number taken out of a tensor.",
                    fix="return the tensor from the step and read its value outside.",
                )
        return scalar.fx_arg()

    def _output(self, kind: OutputKind, path: str, node: Any) -> int:
        key = (kind, node)
        if kind is not OutputKind.RESULT and key in self._output_index:
            return self._output_index[key]
        self.outputs.append((kind, path, node))
        self._output_index[key] = len(self.outputs) - 1
        return len(self.outputs) - 1

    # State.

    def _gradients(self) -> None:
        for tracked in self.table.tracked.values():
            if isinstance(tracked.slot, BatchSlot) and tracked.fake.grad is not None:
                self._batch_gradient(tracked, tracked.slot)
        for tracked in self.table.parameters:
            before = tracked.real.grad
            before_fake = self.table.tracked[id(before)].fake if before is not None else None
            after = tracked.fake.grad
            if after is before_fake:
                continue
            path = f"{tracked.slot.path}.grad"
            slot = GradSlot(InputKind.GRADIENT, path, tracked.slot.path, tracked.real)
            if after is None:
                self.changes.append(Change(ChangeKind.REMOVED, slot))
            else:
                self._bind(slot, after, created=before is None)

    def _batch_gradient(self, tracked: Tracked, slot: BatchSlot) -> None:
        """The step back-propagates into a tensor that it was given."""
        if tracked.real.grad is not None:
            raise UnsupportedError(
                f"{slot.path} has a gradient already, and the step adds to it.",
                fix="set its .grad to None before the step, or use torch.autograd.grad in it.",
            )
        where = BatchGradSlot(InputKind.GRADIENT, f"{slot.path}.grad", slot.path, slot.index)
        assert tracked.fake.grad is not None
        self._bind(where, tracked.fake.grad, created=True)

    def _optimizer(self, optimizer: Optimizer, path: str) -> None:
        flag = self.capture.skip_flags.get(optimizer)
        before_all = self.table.fake_state_before[optimizer]
        for owner, entries in optimizer.state.items():
            tracked = self.table.by_fake.get(id(owner))
            real_owner = tracked.real if tracked else owner
            owner_path = tracked.slot.path if tracked else str(owner)
            before = before_all.get(owner, {})
            if not isinstance(entries, dict):
                continue
            for name in {**before, **entries}:
                old, new = before.get(name, ABSENT), entries.get(name, ABSENT)
                if old is new or _equal_plain(old, new):
                    continue
                slot = OptimizerStateSlot(
                    InputKind.OPTIMIZER_STATE,
                    f"{path}.state[{owner_path}].{name}",
                    owner_path if tracked else None,
                    optimizer,
                    real_owner,
                    name,
                )
                self._bind(slot, new, created=old is ABSENT, flag=flag)
        self._groups(optimizer, path)

    def _groups(self, optimizer: Optimizer, path: str) -> None:
        before_groups = self.table.fake_groups[optimizer]
        if len(optimizer.param_groups) != len(before_groups):
            raise SideEffectError(
                f"the step adds or removes a param group of {path}.", fix="call add_param_group outside of the step."
            )
        for g, (before, now) in enumerate(zip(before_groups, optimizer.param_groups, strict=True)):
            for key in {**before, **now}:
                old, new = before.get(key, ABSENT), now.get(key, ABSENT)
                if old is new or _equal_plain(old, new) or isinstance(new, HostNumber):
                    continue
                where = f"{path}.param_groups[{g}].{key}"
                if key == "params":
                    if len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True)):
                        continue
                    raise ParameterDataError(f"the step changes the parameters of {path}.param_groups[{g}].")
                slot = HyperSlot(InputKind.HYPER_PARAMETER, where, None, optimizer, g, key, None)
                self._bind(slot, new, created=old is ABSENT)

    def _scaler_tensor(self, scaler: Any, attr: str, path: str) -> None:
        now = vars(scaler).get(attr)
        if isinstance(now, FakeTensor) and id(now) not in self.table.by_fake:
            slot = MappingSlot(InputKind.SCALER_STATE, path, None, vars(scaler), attr)
            self._bind(slot, now, created=True)

    def _bind(self, slot: Slot, new: Any, *, created: bool, flag: fx.Node | None = None) -> None:
        """After the graph ran, the slot holds `new`."""
        unless = self._output(OutputKind.PREDICATE, "optimizer step skipped", flag) if flag is not None else None
        kind = ChangeKind.CREATED if created else ChangeKind.REBOUND
        if new is ABSENT:
            self.changes.append(Change(ChangeKind.REMOVED, slot, unless=unless))
            return
        scalar = scalar_of(new)
        if is_dtensor(new):
            slot = LocalSlot(slot.kind, slot.path, slot.of, slot, spec_of(new))
            new = local_of(new)
        if isinstance(new, Tensor):
            source = new if isinstance(new, FakeTensor) else self.capture.lift(new)
            node = self.recorder.node_of(source)
            index = self._output(OutputKind.STATE, slot.path, self._own_memory(source, node))
            self.changes.append(Change(kind, slot, output=index, unless=unless))
        elif scalar is not None:
            value = scalar.fx_arg()
            if isinstance(value, fx.Node):
                index = self._output(OutputKind.STATE, slot.path, value)
                self.changes.append(Change(kind, slot, output=index, unless=unless))
            else:
                self.changes.append(Change(ChangeKind.CONSTANT, slot, constant=value, unless=unless))
        elif isinstance(new, _PLAIN) or (isinstance(new, tuple | list) and all(isinstance(v, _PLAIN) for v in new)):
            self.changes.append(Change(ChangeKind.CONSTANT, slot, constant=new, unless=unless))
        else:
            raise SideEffectError(
                f"the step sets {slot.path} to a {type(new).__name__}, which a replay cannot repeat.",
                fix="set it outside of the step.",
            )

    def _own_memory(self, fake: Tensor, node: fx.Node) -> fx.Node:
        """State that outlives the step shares memory with no input and with no other state."""
        if node.op != "placeholder" and node not in self._bound_nodes:
            self._bound_nodes.add(node)
            return node
        return self.recorder.emit(torch.ops.aten.clone.default, node)

    # Python attributes.

    def _attributes(self, snapshot: Attributes) -> None:
        obj = snapshot.obj
        is_module = isinstance(obj, torch.nn.Module)
        for key, before, after in snapshot.rebound():
            self._attribute(obj, snapshot.path, key, before, after)
        for key, contents, container in snapshot.mutated():
            where = f"{snapshot.path}.{key}"
            if is_module and key == "_buffers":
                self._buffers(obj, snapshot.path, contents, container)
            elif is_module and key in ("_parameters", "_modules"):
                raise ParameterDataError(
                    f"the step replaces or adds a {'parameter' if key == '_parameters' else 'module'} of "
                    f"{snapshot.path}.",
                    fix="write into the parameter under torch.no_grad() instead: param.copy_(new).",
                )
            elif isinstance(obj, torch.amp.GradScaler):
                raise SideEffectError(
                    f"{snapshot.path} is left in the middle of an iteration.",
                    fix="call scaler.update() at the end of the step.",
                )
            else:
                raise SideEffectError(
                    f"the step changes the contents of {where}, which a replay would not repeat.",
                    fix="return the value from the step and store it outside.",
                )

    def _variables(self) -> None:
        """Closure variables and globals that the step bound anew."""
        seen: set[tuple[int, Any]] = set()
        for name, slot, before in self.capture.world.variables:
            after = slot.get()
            where = (id(getattr(slot, "cell", None) or getattr(slot, "mapping", None)), name)
            scalar = scalar_of(after)
            unread = scalar is not None and isinstance(scalar.leaf, Slot) and scalar.leaf.path == name
            if after is before or where in seen or unread or self._stands_for(after, before):
                continue
            seen.add(where)
            if not (isinstance(after, (*_PLAIN, Tensor)) or scalar is not None):
                raise SideEffectError(
                    f"the step binds {name} to a {type(after).__name__}, which a replay cannot repeat.",
                    fix="return it from the step and bind it outside.",
                )
            self._bind(slot, after, created=False)
            if isinstance(after, Tensor) or scalar is not None:
                self.rebound_variables[name] = (slot, kind_of(before))

    def _stands_for(self, fake: Any, real: Any) -> bool:
        tracked = self.table.by_fake.get(id(fake))
        return tracked is not None and tracked.real is real

    def _containers(self) -> None:
        for container, path, contents in self.capture.copies:
            if not same_contents(contents, container) and not self._only_swapped(contents, container):
                raise SideEffectError(
                    f"the step changes the contents of {path}, which a replay would not repeat.",
                    fix="return the value from the step and store it outside.",
                )

    def _only_swapped(self, before: Any, now: Any) -> bool:
        """Whether a container differs only by fakes in the place of the tensors they stand for."""
        if len(before) != len(now) or isinstance(before, set):
            return False
        pairs = [(before[k], now.get(k)) for k in before] if isinstance(before, dict) else zip(before, now, strict=True)
        return all(same_plain(b, a) or self._stands_for(b, a) for a, b in pairs)

    def _requires_grad(self) -> None:
        for tracked in self.table.parameters:
            if tracked.fake.requires_grad != tracked.real.requires_grad:
                raise SideEffectError(
                    f"the step leaves {tracked.slot.path}.requires_grad changed, which a replay would not repeat.",
                    fix="set it back at the end of the step, or change it outside.",
                )

    def _attribute(self, obj: Any, path: str, key: str, before: Any, after: Any) -> None:
        where = f"{path}.{key}"
        scalar = scalar_of(after)
        if scalar is not None and isinstance(scalar.leaf, Slot) and scalar.leaf.path == where:
            self.volatile.setdefault(id(obj), set()).add(key)  # an input of the graph that the step only read
            return
        plain = isinstance(after, _PLAIN) or after is ABSENT
        if not (plain or isinstance(after, Tensor) or scalar_of(after) is not None):
            if isinstance(obj, torch.amp.GradScaler) and not after:
                return
            if not holds_tensor(after) and isinstance(obj, torch.nn.Module):
                self._keep_object(obj, where, key, after)
                return
            raise SideEffectError(
                f"the step sets {where} to a {type(after).__name__}, which a replay cannot repeat.",
                fix="return it from the step and store it outside.",
            )
        kind = InputKind.BUFFER if isinstance(obj, torch.nn.Module) else InputKind.CAPTURED
        slot = MappingSlot(kind, where, None, vars(obj), key)
        self._bind(slot, after, created=before is ABSENT)
        if isinstance(after, Tensor) or before is ABSENT or scalar_of(after) is not None:
            self.volatile.setdefault(id(obj), set()).add(key)
            reader = next((r for r, _ in self.capture.readers if r.obj is obj), None)
            if reader is None or key in reader.names or key not in reader.watched:
                self.kinds.append((vars(obj), key, where, kind_of(self._real(before))))

    def _real(self, value: Any) -> Any:
        tracked = self.table.by_fake.get(id(value))
        return tracked.real if tracked is not None else value

    def _keep_object(self, obj: Any, where: str, key: str, after: Any) -> None:
        """A module caches an object without tensors: set the same object on each replay."""
        slot = MappingSlot(InputKind.BUFFER, where, None, vars(obj), key)
        self.changes.append(Change(ChangeKind.CONSTANT, slot, constant=after))
        self.volatile.setdefault(id(obj), set()).add(key)

    def _buffers(self, module: Any, path: str, before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in {**before, **now}:
            old, new = before.get(name, ABSENT), now.get(name, ABSENT)
            if old is not new:
                slot = MappingSlot(InputKind.BUFFER, f"{path}.{name}", None, module._buffers, name)
                self._bind(slot, new, created=old is ABSENT or old is None)

    def _reads(self) -> Iterator[tuple[Any, str, dict[str, Any]]]:
        changed = self.volatile
        for reader, path in self.capture.readers:
            before = next(s for s in self.capture.snapshots if s.obj is reader.obj).before
            skip = changed.get(id(reader.obj), set())
            values = {}
            for name in reader.names:
                where = f"{path}.{name}"
                if where in self.capture.symbolic_numbers or name in _OVERRIDDEN:
                    continue
                if name in before and name not in skip:
                    values[name] = before[name]
            yield reader.obj, path, values

    def _item_recipe(self) -> Recipe | None:
        read = [leaf for g in self.capture.guards.values() for leaf in g.expression.leaves()]
        nodes = [leaf.node for leaf in read if isinstance(leaf, ItemLeaf)]
        return Recipe(nodes) if nodes else None

    def _may_read(self, path: str) -> bool:
        """A container in an attribute of a plain object counts only if the step read that attribute."""
        for reader, holder in self.capture.readers:
            if path.startswith(holder + "."):
                name = path[len(holder) + 1 :].split(".")[0].split("[")[0]
                return name in reader.names
        return True

    # The graph.

    def _epilogue(self) -> list[tuple[fx.Node, fx.Node]]:
        """`copy_` into every input whose memory the step wrote."""
        found: list[tuple[fx.Node, fx.Node]] = []
        written: list[Tracked] = []
        for node in [n for n in self.graph.nodes if n.op == "placeholder"]:
            fake = node.meta.get("val")
            tracked = self.table.by_fake.get(id(fake)) if isinstance(fake, Tensor) else None
            if tracked is not None and self.recorder.values.is_written(fake):
                found.append((node, self.recorder.node_of(fake)))
                written.append(tracked)
        _refuse_shared_memory(self.table.tracked.values(), written)
        copies = []
        for target, value in found:
            if value is target:
                continue
            copy = self.graph.call_function(torch.ops.aten.copy_.default, (target, value))
            copy.meta["val"] = target.meta["val"]
            set_node_meta(copy, NodeMeta(phase="epilogue"))
            copies.append((target, value))
        return copies

    def _output_node(self) -> None:
        self.graph.output(tuple(node for _, _, node in self.outputs))
        self.graph.eliminate_dead_code(is_needed)

    def _drop_unused_inputs(self) -> None:
        for node in [n for n in self.graph.nodes if n.op == "placeholder"]:
            if not node.users:
                self.graph.erase_node(node)
        for node in self.graph.nodes:
            _detach_val(node)

    def _signature(self, gm: fx.GraphModule, copies: list[tuple[fx.Node, fx.Node]], result: Any) -> Signature:
        capture = self.capture
        inputs = []
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                slot = capture.slot_of[node]
                fake = node.meta.get("val")
                spec = tensor_spec(fake) if isinstance(fake, Tensor) else None
                placement = describe_placement(slot.spec) if isinstance(slot, LocalSlot) else ""
                inputs.append(InputSpec(node.name, slot.kind, slot.path, spec, slot.of, placement))
        outputs = []
        for kind, path, node in self.outputs:
            val = node.meta.get("val") if isinstance(node, fx.Node) else None
            outputs.append(OutputSpec(kind, path, tensor_spec(val) if isinstance(val, Tensor) else None))
        changes = tuple(
            StateChange(
                c.kind,
                c.slot.kind,
                c.slot.path,
                c.output,
                c.constant if isinstance(c.constant, _PLAIN) else repr(c.constant),
                c.unless,
                c.slot.of,
            )
            for c in self.changes
        )
        guards = [g.describe() for g in capture.guards.values()] + [text for text, _ in capture.shapes.guards()]
        return Signature(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            write_backs=tuple(WriteBack(t.name, v.name) for t, v in copies),
            state_changes=changes,
            result=result,
            guards=tuple(guards),
            rng=tuple(self.recorder.random_devices),
            host_calls=tuple(f"{call.path}.step()" for call in capture.host_calls),
            dynamic={name: (dim.min, dim.max) for name, (dim, _) in capture.shapes.symbols.items()},
            groups=group_table(gm, {} if capture.session is None else capture.session.axis_names()),
        )


def _hides_tensor(value: Any) -> bool:
    """Whether an object that is no tree holds tensors of the trace in its attributes."""
    if isinstance(value, torch.nn.Module | Optimizer | type):
        return False
    if isinstance(value, KeysView | ValuesView | ItemsView):
        return holds_tensor(list(value))
    return any(holds_tensor(v) for v in getattr(value, "__dict__", {}).values())


class _Leaf:
    """A leaf of the result on its way into the description."""

    def __init__(self, found: tuple[str, Any]) -> None:
        self.found = found


def _leaf_output(value: Any) -> int | dict[str, Any] | None:
    if not isinstance(value, _Leaf):
        return None
    kind, found = value.found
    if kind == "sharded":
        return int(found[0])
    return int(found) if kind in ("output", "attached") else describe_leaf(found)


class _Root(torch.nn.Module):
    """Owner of the constants of a graph."""

    def __init__(self, constants: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in constants.items():
            self.register_buffer(name, tensor)


def tensor_spec(fake: Tensor) -> TensorSpec:
    """The metadata of a tensor for the signature."""
    return TensorSpec(
        tuple(int(s) if type(s) is int else str(s) for s in fake.shape),
        tuple(int(s) if type(s) is int else str(s) for s in fake.stride()),
        str(fake.dtype).removeprefix("torch."),
        str(fake.device),
        fake.requires_grad,
    )


def _equal_plain(old: Any, new: Any) -> bool:
    return type(old) is type(new) and isinstance(old, _PLAIN) and old == new


def _detach_val(node: fx.Node) -> None:
    val = node.meta.get("val")
    if isinstance(val, Tensor) and node.op != "placeholder" and val.requires_grad:
        node.meta["val"] = val.detach()


def _refuse_shared_memory(tracked: Any, written: list[Tracked]) -> None:
    """Two inputs over the same memory, one of them written: the graph would not see the other change."""
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
    def extent(t: Tensor) -> tuple[int, int]:
        start = int(t.storage_offset()) * t.element_size()
        length = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
        return start, start + length * t.element_size()

    (a0, a1), (b0, b1) = extent(a), extent(b)
    return a0 < b1 and b0 < a1


__all__ = ["UnsupportedError", "collect", "tensor_spec"]
