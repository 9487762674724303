"""Follow the places that Python reads values from while one step is traced.

Before the step, numbers that became scalar inputs are put into their places, and reads are recorded from then on. After
it, places that the step read or set are added to its variables, which are guarded and which a replay sets again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wholestep.capture.objects.user_code import is_installed
from wholestep.capture.python_reads.attribute_reads import AttributeReads, class_values
from wholestep.capture.python_reads.clocks import Clocks
from wholestep.capture.python_reads.outside_reads import OutsideReads
from wholestep.capture.python_reads.stand_ins import StandIns
from wholestep.capture.results.effect_line import array_effect
from wholestep.errors import SideEffectError
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.opaque_state import ASKS_LOCKS, tells_state
from wholestep.ir.user_objects.plain_contents import ArrayCopy, copy_of, is_large, same_plain
from wholestep.ir.user_objects.slots import ABSENT, ClassSlot, MappingSlot, Slot, ThreadLocalSlot

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

_FOUND_AT_FIRST = (Tensor, nn.Module, Optimizer, LRScheduler)
"""Places whose contents are replaced before the step runs, and cannot be found later."""


class ValueSources:
    """The places of one capture outside of instances: attributes of classes and of Python modules, thread locals."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._world = capture.world
        self.reads = AttributeReads(self.found)
        self._classes: dict[type, tuple[str, dict[str, Any], dict[str, None]]] = {}
        """Of each class: its path, what it held, what was read."""
        self._modules: dict[ModuleType, tuple[str, dict[str, Any], dict[str, None]]] = {}
        self.outside = OutsideReads()
        self.clocks = Clocks(capture.numbers.clocks)
        replaced = self.clocks.readers | self.outside.replacements | capture.showing.replacements
        self.stand_ins = StandIns(replaced, capture.recorded, capture.tables)
        self._arrays: dict[int, ArrayCopy] = {}
        self.changed_arrays: list[ArrayCopy] = []
        self._counts = (0, 0, 0)
        self._active = False
        self._asks_locks = False
        """Whether code of the user's program asks for the state of a lock, of as many functions as were looked at."""
        self._codes_seen = 0

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Record reads in the block, then add what was read or set to the variables of the step."""
        self._counts = (len(self._world.holders), len(self._world.containers), len(self._world.variables))
        self._active = True
        try:
            self._follow_classes()
            self._follow_modules()
            self._put_stand_ins()
            for slot, container in [*self._capture.recorded.places(), *self._capture.tables.places()]:
                self.stand_ins.put(slot, container)
            self._copy_arrays()
            for value, path in self._world.sources.fixed:
                self.stand_ins.watch(value, path)
            for tracker, _ in [t for t in self._capture.readers if not t[0].sees_reads]:
                self.reads.note_all(tracker)
            with self.clocks.watched(), self.outside.watched():
                yield
        finally:
            self._active = False
            self.reads.stop()
            self.stand_ins.restore()
            self.changed_arrays = [copy for copy in self._arrays.values() if not copy.is_same()]
            for copy in self.changed_arrays:
                copy.restore()
            self._add_variables()
            self._world.find = lambda value, path, slot: None  # the walk would keep the arguments of this call alive
        self.stand_ins.refuse_moved()
        for copy in self.changed_arrays:
            raise SideEffectError(
                f"the step changes the contents of {copy.path}, an array, which a replay would not repeat.",
                fix="make it a tensor, which is an input of the graph; or change it outside of the step.",
            ).seen_by(array_effect(copy.array))

    def _copy_arrays(self) -> None:
        for array, path in self._world.sources.arrays:
            if id(array) not in self._arrays and not is_large(array) and self.counts(array):
                self._arrays[id(array)] = ArrayCopy(array, path)

    def counts(self, array: Any) -> bool:
        """Whether the step may depend on memory or a lock: on a lock only where its code asks for the state."""
        if not tells_state(array):
            return True
        codes = self._world.codes
        if not self._asks_locks and len(codes) > self._codes_seen:
            new = itertools.islice(codes.values(), self._codes_seen, None)
            self._asks_locks = any(ASKS_LOCKS & set(code.co_names) for _, code in new if not is_installed(code))
            self._codes_seen = len(codes)
        return self._asks_locks

    def _put_stand_ins(self) -> None:
        places = self._world.sources.stand_ins
        while places:
            self.stand_ins.put(*places.pop())

    def found(self, value: Any, path: str, slot: Slot | None = None) -> Any:
        """Follow the result of a read if discovery did not see it. Returns what the step gets."""
        if not self._active or isinstance(value, _FOUND_AT_FIRST) or self._capture.rebound.is_swapped(value):
            return value
        if slot is not None and self.stand_ins.of(value, path) is not value:
            return self.stand_ins.put(slot, value)
        self._follow(value, path, slot)
        return value

    def _follow(self, value: Any, path: str, slot: Slot | None) -> None:
        world = self._world
        world.find(value, path, slot)
        self._put_stand_ins()
        self._copy_arrays()
        if (len(world.holders), len(world.containers), len(world.variables)) == self._counts and (
            len(world.sources.classes) == len(self._classes) and len(world.sources.python_modules) == len(self._modules)
        ):
            return
        before, self._counts = self._counts, (len(world.holders), len(world.containers), len(world.variables))
        for holder, where in list(world.holders.values())[before[0] :]:
            self._capture.follow_holder(holder, where)
        for container, where in world.containers[before[1] :]:
            self._capture.copies.append((container, where, copy_of(container)))
            self._capture.scalars.lift_items(container, where)
        for name, place, held in world.variables[before[2] :]:
            self._lift(place, held, name)
        self._follow_classes()
        self._follow_modules()

    def _follow_classes(self) -> None:
        for cls, path in list(self._world.sources.classes.items()):
            if cls in self._classes:
                continue
            values = self._real(class_values(cls))
            read: dict[str, None] = {}
            self._classes[cls] = (path, values, read)
            for name, value in values.items():
                slot = ClassSlot(InputKind.CAPTURED, f"{path}.{name}", None, cls, name)
                self._lift(slot, value, slot.path)
            if self._world.sees_dict_of(cls):
                read.update(dict.fromkeys(values))  # a recorder would be visible there
                for name, value in values.items():
                    self.found(
                        value, f"{path}.{name}", ClassSlot(InputKind.CAPTURED, f"{path}.{name}", None, cls, name)
                    )
            else:
                self.reads.record_class(cls, frozenset(values), path, read)

    def _follow_modules(self) -> None:
        for module, path in list(self._world.sources.python_modules.items()):
            if module in self._modules:
                continue
            read: dict[str, None] = {}
            self._modules[module] = (path, self._real(vars(module).items()), read)
            for name, value in list(vars(module).items()):
                where = f"{path}.{name}"
                self._lift(MappingSlot(InputKind.CAPTURED, where, None, vars(module), name), value, where)
            self.reads.record_module(module, path, read)

    def _real(self, values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """What a class or module held before fakes took the places of its tensors."""
        real_of = self._capture.table.real_of
        return {name: real_of(value) for name, value in values}

    def _lift(self, slot: Slot, value: Any, path: str) -> None:
        if self._capture.numbers.lifts(path) and type(value) in (int, float):
            slot.set(self._capture.scalars.lift(replace(slot, kind=InputKind.HYPER_PARAMETER), value))

    def _add_variables(self) -> None:
        known = {(id(slot.mapping), slot.key) for _, slot, _ in self._world.variables if isinstance(slot, MappingSlot)}
        for cls, (path, before, read) in self._classes.items():
            for name in {**before, **dict(class_values(cls))}:
                self._add(ClassSlot(InputKind.CAPTURED, f"{path}.{name}", None, cls, name), before, name, read)
        for module, (path, before, read) in self._modules.items():
            for name in {**before, **vars(module), **read}:
                if not name.startswith("__") and (id(vars(module)), name) not in known:
                    slot = MappingSlot(InputKind.CAPTURED, f"{path}.{name}", None, vars(module), name)
                    self._add(slot, before, name, read)
        for fn, path, names in self._world.sources.functions:
            for name in vars(fn).keys() - names:
                self._add(MappingSlot(InputKind.CAPTURED, f"{path}.{name}", None, vars(fn), name), {}, name, {})
        places = {(id(s.local), s.name) for _, s, _ in self._world.variables if isinstance(s, ThreadLocalSlot)}
        for local, path in self._world.sources.thread_locals:
            for name in vars(local):
                if (id(local), name) not in places:
                    self._add(ThreadLocalSlot(InputKind.CAPTURED, f"{path}.{name}", None, local, name), {}, name, {})

    def _add(self, slot: Slot, before: dict[str, Any], name: str, read: dict[str, None]) -> None:
        held = before.get(name, ABSENT)
        if name in read or not same_plain(self._capture.table.real_of(slot.get()), held):
            self._world.variables.append((slot.path, slot, held))
