"""What the step left in attributes, variables, lists and dicts of the user: set after the graph ran, or refused."""

from __future__ import annotations

import operator
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wholestep.capture.effects.containers import NeedsRecorders
from wholestep.capture.objects.rebound_containers import NeedsItems
from wholestep.capture.python_reads.attribute_reads import Attributes, holds_tensor
from wholestep.capture.python_reads.clocks import refuse_clocks
from wholestep.capture.python_reads.stand_ins import real_of
from wholestep.capture.results.bindings import PLAIN_CONSTANTS, Bindings
from wholestep.capture.results.changed_state import bind_nest
from wholestep.capture.results.effect_line import Effect, contents_effect, value_effect
from wholestep.capture.scalars.scalar_policy import MustBeInputs
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import ParameterDataError, SideEffectError
from wholestep.ir.captured_step import Change, WrittenContainer
from wholestep.ir.signature import ChangeKind, InputKind
from wholestep.ir.user_objects.plain_contents import kind_of, own_dict, same_contents, same_plain
from wholestep.ir.user_objects.slots import ABSENT, MappingSlot, Slot
from wholestep.torch_private.fake_tensors import FakeTensor

if TYPE_CHECKING:
    from wholestep.capture.objects.discover import World
    from wholestep.capture.trace import Capture


class ChangedPython:
    """Finds and binds the changes; records the rest for guards."""

    def __init__(self, capture: Capture, bindings: Bindings) -> None:
        self._capture = capture
        self._table = capture.table
        self._bindings = bindings
        self._not_inputs: set[str] = set()
        self.volatile: dict[int, set[str]] = {}
        """See `CapturedStep`."""
        self.rebound_variables: dict[str, tuple[Slot, Any]] = {}
        """See `CapturedStep`."""
        self.kinds: list[tuple[dict[str, Any], str, str, Any]] = []
        """See `CapturedStep`."""
        self.written: list[WrittenContainer] = []
        """See `CapturedStep`."""
        self.elements_read: list[tuple[str, Slot, Any]] = []
        """Elements of these that the step read: path, place, value before the step."""
        self._to_record: list[tuple[Any, SideEffectError]] = []
        self._to_rebind: list[tuple[Slot, SideEffectError]] = []

    def bind(self) -> None:
        for snapshot in self._capture.snapshots:
            if names := self._capture.rebound.names_in(snapshot.now):
                self.volatile.setdefault(id(snapshot.obj), set()).update(names)
            self._attributes(snapshot)
        self._variables()
        self._containers()
        self._classes_and_code()
        self._recorded()
        if self._to_rebind:
            raise NeedsItems([slot for slot, _ in self._to_rebind], self._to_rebind[0][1])
        if self._to_record:
            raise NeedsRecorders([container for container, _ in self._to_record], self._to_record[0][1])
        if self._not_inputs:
            raise MustBeInputs(frozenset(self._not_inputs))

    # Attributes.

    def _attributes(self, snapshot: Attributes) -> None:
        obj = snapshot.obj
        for key, before, after in snapshot.rebound():
            self._attribute(obj, snapshot.path, key, before, after)
        for key, contents, container in snapshot.mutated():
            if self._only_swapped(contents, container):
                continue
            if isinstance(obj, torch.nn.Module) and key == "_buffers":
                self._buffers(obj, snapshot.path, contents, container)
            else:
                error = _changed_contents(obj, snapshot.path, key).seen_by(contents_effect(container))
                self._changed(container, error)

    def _attribute(self, obj: Any, path: str, key: str, before: Any, after: Any) -> None:
        where, after = f"{path}.{key}", real_of(after)
        if after is before:
            return
        scalar = scalar_of(after)
        if scalar is not None and isinstance(scalar.leaf, Slot) and scalar.leaf.path == where:
            self.volatile.setdefault(id(obj), set()).add(key)  # an input of the graph that the step only read
            return
        kind = InputKind.BUFFER if isinstance(obj, torch.nn.Module) else InputKind.CAPTURED
        slot = MappingSlot(kind, where, None, own_dict(obj), key)
        plain = isinstance(after, PLAIN_CONSTANTS) or after is ABSENT
        if not (plain or isinstance(after, Tensor) or scalar is not None):
            if isinstance(obj, torch.amp.GradScaler) and not after:
                return
            if not holds_tensor(after) and isinstance(obj, torch.nn.Module):
                self._keep_object(obj, where, key, after)
                return
            error = SideEffectError(
                f"the step sets {where} to a {type(after).__name__}, which a replay cannot repeat.",
                fix="return it from the step and store it outside.",
            ).seen_by(value_effect(partial(own_dict(obj).get, key, ABSENT)))
            at_call = self._capture.at_calls.attribute(own_dict(obj), key, after)
            self._rebound(slot, before, at_call, after, error)
            return
        at_call = self._capture.at_calls.attribute(own_dict(obj), key, after)
        self._bind_around_calls(slot, before, at_call, after)
        if not (isinstance(after, Tensor) or before is ABSENT or scalar is not None):
            return
        reader = next((r for r, _ in self._capture.readers if r.obj is obj), None)
        was_read = reader is None or key in reader.names or key not in reader.before
        if was_read and scalar is not None and self._is_assumed(before, where):
            return
        self.volatile.setdefault(id(obj), set()).add(key)
        if was_read:
            self.kinds.append((own_dict(obj), key, where, kind_of(self._real(before))))

    def _rebound(self, slot: Slot, before: Any, at_call: Any, after: Any, error: SideEffectError) -> None:
        """The step made a container and set a place to it."""
        places = self._capture.rebound
        refuse_clocks(after, slot.path)
        if at_call is not after or (places.holds(slot) and not places.may_be_set(before, after)):
            raise error
        if places.holds(slot):
            bind_nest(self._bindings, slot, before, after, replaced=not isinstance(after, tuple))
        elif places.may_hold(slot, before, after):
            self._to_rebind.append((slot, error))
        else:
            raise error

    def _bind_around_calls(self, slot: Slot, before: Any, at_call: Any, after: Any) -> None:
        """Bind what the step set before it called a scheduler, and after the scheduler ran what it set then."""
        if at_call is after or same_plain(at_call, after):
            self._bindings.bind(slot, after, created=before is ABSENT)
            return
        if at_call is not before and not same_plain(at_call, before):
            self._bindings.bind(slot, at_call, created=before is ABSENT)
        self._bindings.bind(slot, after, created=before is ABSENT, after_calls=True)

    def _is_assumed(self, before: Any, where: str) -> bool:
        """Whether the graph assumes the former value of a place that the step read and sets to another value each time.

        A number becomes an input at once; one that cannot, or a bool or text, stays a constant under a guard.
        """
        if not isinstance(before, PLAIN_CONSTANTS) or before is None:
            return False
        numbers = self._capture.numbers
        if type(before) not in (int, float) or where in numbers.pinned or numbers.plain:
            return True
        if where in numbers.lifted:
            return False
        self._not_inputs.add(where)
        return True

    def _real(self, value: Any) -> Any:
        tracked = self._table.by_fake.get(id(value))
        return tracked.real if tracked is not None else value

    def _keep_object(self, obj: Any, where: str, key: str, after: Any) -> None:
        """A module caches an object without tensors: set the same object on each replay."""
        refuse_clocks(after, where)
        slot = MappingSlot(InputKind.BUFFER, where, None, own_dict(obj), key)
        self._bindings.changes.append(Change(ChangeKind.CONSTANT, slot, constant=after))
        self.volatile.setdefault(id(obj), set()).add(key)

    def _buffers(self, module: Any, path: str, before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in {**before, **now}:
            old, new = before.get(name, ABSENT), now.get(name, ABSENT)
            if old is not new:
                slot = MappingSlot(InputKind.BUFFER, f"{path}.{name}", None, module._buffers, name)
                self._bindings.bind(slot, new, created=old is ABSENT or old is None)

    # Variables and containers.

    def _variables(self) -> None:
        """Closure variables and globals that the step rebound."""
        seen: set[tuple[int, Any]] = set()
        for name, slot, before in self._capture.world.variables:
            after = real_of(slot.get())
            if self._capture.rebound.holds(slot):
                before = self._capture.rebound.found(slot)
            where = (id(getattr(slot, "cell", None) or getattr(slot, "mapping", None)), name)
            scalar = scalar_of(after)
            unread = scalar is not None and isinstance(scalar.leaf, Slot) and scalar.leaf.path == name
            if after is before or where in seen or unread or self._stands_for(after, before):
                continue
            if self._table.is_of_optimizer(after):
                continue
            seen.add(where)
            if not (isinstance(after, (*PLAIN_CONSTANTS, Tensor)) or scalar is not None):
                error = SideEffectError(
                    f"the step binds {name} to a {type(after).__name__}, which a replay cannot repeat.",
                    fix="return it from the step and bind it outside.",
                ).seen_by(value_effect(slot.get))
                self._rebound(slot, before, self._capture.at_calls.variable(slot, after), after, error)
                continue
            self._bind_around_calls(slot, before, self._capture.at_calls.variable(slot, after), after)
            if scalar is not None and self._is_assumed(before, name):
                continue
            if isinstance(after, Tensor) or scalar is not None:
                self.rebound_variables[name] = (slot, kind_of(before))

    def _containers(self) -> None:
        attributes = self._capture.dicts_of_attributes()
        for container, path, contents in self._capture.copies:
            if id(container) in attributes or id(container) in self._table.filled_in_place:
                continue
            if same_contents(contents, container) or self._only_swapped(contents, container):
                continue
            if not self._is_let_go(contents, container):
                self._changed(container, _not_repeated(path).seen_by(contents_effect(container)))

    def _changed(self, container: Any, error: ParameterDataError | SideEffectError) -> None:
        """A container holds something else than before the step: its writes are recorded, or the step is refused."""
        if self._capture.recorded.holds(container) or self._table.is_of_optimizer(container):
            return
        if not isinstance(error, SideEffectError) or not self._capture.may_record(container):
            raise error
        self._to_record.append((container, error))

    def _recorded(self) -> None:
        """What a replay does to containers, and what it assumes of those that the step also reads."""
        for recorder in self._capture.recorded.made():
            recorder.check()
            if not recorder.is_changed:
                continue
            container = recorder.real
            places = [slot for slot in self._capture.world.places.get(id(container), []) if slot is not None]
            keys: Any = None
            if recorder.read_at is not None:
                is_dict = isinstance(container, dict)
                keys = list(map(self._table.real_of, recorder.before)) if is_dict else len(recorder.before)
            self.written.append(WrittenContainer(container, recorder.path, tuple(places), keys))
            for path, slot, held in recorder.read_values():
                if isinstance(held, Tensor):
                    self.rebound_variables[path] = (slot, Tensor)
                    tracked = self._table.tracked.get(id(self._table.real_of(held)))
                    if tracked is not None and tracked.slot.path != path:
                        self._table.note_same(slot, tracked)
                    continue
                if recorder.is_written(slot):
                    self._is_assumed(held, path)
                self.elements_read.append((path, slot, held))

    def _classes_and_code(self) -> None:
        """`obj.__class__ = Other` and `f.__code__ = ..` in the step."""
        for obj, path, kind in self._capture.classes.values():
            if type(obj) is not kind:
                raise SideEffectError(
                    f"the step makes {path} a {type(obj).__name__} (it was a {kind.__name__}), and a replay would not.",
                    fix="set __class__ outside of the step.",
                ).seen_by(Effect(lambda capture, obj=obj: type(obj), operator.is_))  # type: ignore[misc]
        for fn, code in self._capture.world.codes.values():
            if fn.__code__ is not code:
                raise SideEffectError(
                    f"the step sets the code of {fn.__qualname__}, and a replay would not.",
                    fix="set __code__ outside of the step.",
                ).seen_by(Effect(lambda capture, fn=fn: fn.__code__, operator.is_))  # type: ignore[misc]

    def _only_swapped(self, before: Any, now: Any) -> bool:
        """Whether a container differs only by fakes in the place of their tensors, and symbolic scalars in that of
        their numbers."""
        if len(before) != len(now):
            return False
        if isinstance(before, set):
            return {self._table.real_of(item) for item in now} == before
        container, is_item = now, self._capture.scalars.is_item
        if isinstance(before, dict):
            now = {self._table.real_of(key): value for key, value in now.items()}
        triples = (
            [(k, before[k], now.get(k)) for k in before]
            if isinstance(before, dict)
            else zip(range(len(now)), before, now, strict=True)
        )
        return all(same_plain(b, a) or self._stands_for(b, a) or is_item(container, k, b) for k, a, b in triples)

    def _is_let_go(self, before: Any, now: Any) -> bool:
        """Whether a weak container only has new entries for tensors that nothing keeps: they go with the call."""
        if not isinstance(now, dict | set) or any(item not in now for item in before):
            return False
        new = [item for item in now if item not in before]
        if isinstance(now, dict) and any(now[key] is not value for key, value in before.items()):
            return False
        entries = [(key, now[key]) for key in new] if isinstance(now, dict) else [(item,) for item in new]
        return bool(entries) and all(any(map(self._dies, entry)) for entry in entries)

    def _dies(self, reference: Any) -> bool:
        tensor = reference() if isinstance(reference, weakref.ref) else None
        if not isinstance(tensor, FakeTensor) or id(tensor) in self._table.by_fake:
            return False
        node = self._capture.recorder.node_of(tensor)
        return all(output is not node for _, _, output in self._bindings.outputs)

    def _stands_for(self, fake: Any, real: Any) -> bool:
        tracked = self._table.by_fake.get(id(fake))
        return (tracked is not None and tracked.real is real) or self._table.whole_of(fake) is real


def classes_of(world: World) -> dict[int, tuple[Any, str, type]]:
    """Modules, optimizers and the like by identity, with their paths and classes."""
    kinds: tuple[dict[Any, str], ...] = (world.modules, world.optimizers, world.schedulers, world.scalers)
    return {id(obj): (obj, path, type(obj)) for found in kinds for obj, path in found.items()}


def restore_classes_and_code(capture: Capture) -> None:
    """Undo `obj.__class__ = Other` and `f.__code__ = ..` of the step."""
    for obj, _, kind in capture.classes.values():
        if type(obj) is not kind:
            obj.__class__ = kind
    for fn, code in capture.world.codes.values():
        if fn.__code__ is not code:
            fn.__code__ = code


def _changed_contents(obj: Any, path: str, key: str) -> ParameterDataError | SideEffectError:
    """Why the contents of an attribute may not change."""
    if isinstance(obj, torch.nn.Module) and key in ("_parameters", "_modules"):
        return ParameterDataError(
            f"the step replaces or adds a {'parameter' if key == '_parameters' else 'module'} of {path}.",
            fix="write into the parameter under torch.no_grad() instead: param.copy_(new).",
        )
    if isinstance(obj, torch.amp.GradScaler):
        return SideEffectError(
            f"{path} is left in the middle of an iteration.",
            fix="call scaler.update() at the end of the step.",
        )
    return _not_repeated(f"{path}.{key}")


def _not_repeated(path: str) -> SideEffectError:
    return SideEffectError(
        f"the step changes the contents of {path}, which a replay would not repeat.",
        fix="return the value from the step and store it outside.",
    )
