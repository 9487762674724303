"""Stand-ins for lists, dicts, sets and deques of the user's that a step writes: each write is recorded.

A first trace detects that a container which outlives the call was changed, and ends. In the next one a stand-in
replaces the container in every place that holds it:

    losses.append(loss)        recorded, and done: the real container is put back after the trace
    logs["loss"] = value       the same
    logs["n"] += 1             the value is read: an input, if it is a number or tensor; otherwise a guard
    len(losses), losses[-1]    the contents are read: a guard; refused where the step also makes them longer each time

A container that the step has emptied before (`features.clear()`) may be read: the step made all its contents.
C code that reads the storage of a list without its methods finds a single element, which raises at every use.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wholestep.capture.effects.container_stand_ins import stand_in_of
from wholestep.capture.objects.objects_found_by_calls import EarlierTraces, TraceAgain
from wholestep.capture.scalars.symbolic_scalars import scalar_of
from wholestep.errors import Location, SideEffectError
from wholestep.ir.meta import user_location
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import copy_of, same_contents
from wholestep.ir.user_objects.slots import ABSENT, MappingSlot, SequenceSlot, Slot

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

RECORDED_TYPES = (list, dict, set, deque, defaultdict, OrderedDict, Counter)


class NeedsRecorders(TraceAgain):
    """Ends a trace: the step changed containers that outlive it."""

    def __init__(self, containers: list[Any], refusal: SideEffectError) -> None:
        super().__init__("containers are written")
        self.containers = containers
        self.refusal = refusal

    def teach(self, earlier: EarlierTraces) -> Callable[[], None]:
        earlier.written += self.containers
        return lambda: None


class GrowsEachCallError(SideEffectError):
    """The step reads a list or dict whose length it changes in each call."""


class ContainerRecorder:
    """What one trace does to one container."""

    def __init__(self, capture: Capture, real: Any, path: str) -> None:
        self._capture = capture
        self.real = real
        self.path = path
        self.before = _same_kind(real, real) if isinstance(real, deque) else copy_of(real)
        self.is_structured = False
        """The step adds or removes elements."""
        self.is_known = False
        """The step made all contents."""
        self.read_at: Location | None = None
        """Where the contents as a whole were read first."""
        self.reads: dict[Any, Any] = {}
        """Keys or indices whose value from before the step was read, with what was there."""
        self.written: set[Any] = set()
        self._served: dict[Any, Any] = {}
        self._origins = _same_kind(real, range(len(real))) if isinstance(real, list | deque) else None
        """For each element of a sequence after the step: its index before the step; None if the step made it."""
        self._shadow = copy_of(self.before) if not isinstance(real, deque) else _same_kind(real, real)

    # Reading.

    def read_all(self) -> Any:
        """Note that the contents are read; returns the real container."""
        if not self.is_known and self.read_at is None:
            self.read_at = user_location() or Location("", 0)
        return self.real

    def items(self) -> list[Any]:
        """All values, as the step gets them."""
        self.read_all()
        if isinstance(self.real, dict):
            return [self.value(key) for key in list(self.real)]
        if self._origins is not None:
            return [self.value(i) for i in range(len(self.real))]
        return [self._stand_in(item, i) for i, item in enumerate(self.real)]

    def value(self, key: Any) -> Any:
        """The value of one key or index that exists, as the step gets it."""
        held = self.real[key]
        if self._origins is None:
            return self._stand_in(held, key) if self.is_known or key in self.written else self._of_before(key, held)
        origin = self._origins[key]
        return self._stand_in(held, key) if origin is None else self._of_before(origin, held)

    def _of_before(self, key: Any, held: Any) -> Any:
        """A value from before the step: an input or a guard. `key`: where it was then."""
        if key in self._served:
            return self._served[key]
        self.reads[key] = held
        where = self._where(key)
        if type(held) in (int, float) and self._capture.numbers.lifts(where):
            held = self._capture.scalars.lift(replace(self.slot(key), kind=InputKind.HYPER_PARAMETER), held)
        self._served[key] = held = self._stand_in(held, key)
        return held

    def note_absent(self, key: Any) -> None:
        """The step asked for a key that is not there."""
        if not self.is_known and key not in self.written:
            self.reads.setdefault(key, ABSENT)

    def _stand_in(self, value: Any, key: Any) -> Any:
        return self._capture.sources.stand_ins.of(value, self._where(key))

    def _where(self, key: Any) -> str:
        """The path of an element; a tensor among the keys is named by its own path."""
        if not isinstance(key, Tensor):
            return f"{self.path}[{key!r}]"
        tracked = self._capture.table.by_fake.get(id(key))
        return f"{self.path}[{tracked.slot.path if tracked is not None else id(key)}]"

    def slot(self, key: Any) -> Slot:
        """The place of an element in the real container."""
        where = self._where(key)
        if isinstance(self.real, dict):  # after the trace its keys are the user's tensors again
            return MappingSlot(InputKind.CAPTURED, where, None, self.real, self._capture.table.real_of(key))
        return SequenceSlot(InputKind.CAPTURED, where, None, self.real, key)

    # Writing.

    def do(
        self, name: str, *args: Any, keys: Iterable[Any] = (), structured: bool = True, order: Sequence[int] = ()
    ) -> Any:
        """Call a method of the real container, and record it. `order`: which elements a sequence has afterwards, where
        the method decides that by their values."""
        self.written.update(keys)
        self.is_structured = self.is_structured or structured
        label = {"__setitem__": "", "__delitem__": "", "__iadd__": ".extend"}.get(name, f".{name}")
        self._capture.effects.store(f"{self.path}{label}", getattr(self.real, name), *args)
        getattr(self._shadow, name)(*args)
        result = getattr(self.real, name)(*args)
        if self._origins is not None:
            self._follow(name, args, order)
        return result

    def _follow(self, name: str, args: tuple[Any, ...], order: Sequence[int]) -> None:
        """Apply a method to the origins of the elements as it applies to the elements."""
        origins: Any = self._origins
        if name in ("append", "appendleft"):
            getattr(origins, name)(None)
        elif name in ("extend", "extendleft"):
            getattr(origins, name)([None] * len(args[0]))
        elif name == "insert":
            origins.insert(args[0], None)
        elif name == "__setitem__":
            origins[args[0]] = [None] * len(args[1]) if isinstance(args[0], slice) else None
        elif name in ("sort", "remove"):
            self._origins = _same_kind(self.real, [origins[i] for i in order])
        else:
            getattr(origins, name)(*args)

    def take(self, name: str, *args: Any) -> Any:
        """`pop`, `popleft`: the element, as the step gets it."""
        index = (args[0] if args else -1) if name == "pop" else 0
        value = self.value(range(len(self.real))[index]) if self.real else None
        self.do(name, *args)
        return value

    def empty(self) -> None:
        """`clear()`."""
        self.is_known = True
        self.do("clear")

    # After the trace.

    @property
    def is_changed(self) -> bool:
        """Whether the step wrote to it."""
        return self.is_structured or bool(self.written)

    def check(self) -> None:
        """Raise if the container was changed without the stand-in, or is read and grows."""
        if not same_contents(self._shadow, self.real):
            raise SideEffectError(
                f"the step changes the contents of {self.path} in a way that a replay would not repeat.",
                fix="call its methods by its name in the step, or return the value and store it outside.",
            )
        if self.read_at is not None and self.is_structured and len(self.before) and not self._same_structure():
            raise GrowsEachCallError(
                f"the step reads {self.path} and makes it longer or shorter: each call would need another graph.",
                fix="read it outside of the step; or keep what the step needs of it in a number or tensor.",
                location=self.read_at if self.read_at.file else None,
            )

    def _same_structure(self) -> bool:
        if isinstance(self.real, dict):
            return list(self.real) == list(self.before)
        if isinstance(self.real, set):
            return bool(self.real == self.before)
        return isinstance(self.real, list | deque) and len(self.real) == len(self.before)

    def is_written(self, slot: Slot) -> bool:
        """Whether the step writes the element that lies in a slot, or moves elements."""
        if self._origins is not None and self.is_structured:
            return True
        if isinstance(slot, MappingSlot):
            return any(self._capture.table.real_of(key) is slot.key or _equal(key, slot.key) for key in self.written)
        return getattr(slot, "index", None) in self.written

    def read_values(self) -> Iterator[tuple[str, Slot, Any]]:
        """Elements that the step read: path, place and value before the step."""
        for key, held in self.reads.items():
            if scalar_of(self._served.get(key)) is None:
                slot = self.slot(key)
                yield slot.path, slot, held


def _same_kind(real: Any, values: Iterable[Any]) -> Any:
    """A sequence of the same type, and of the same limit."""
    return deque(values, real.maxlen) if isinstance(real, deque) else type(real)(values)


def _equal(key: Any, other: Any) -> bool:
    return not isinstance(key, Tensor) and not isinstance(other, Tensor) and bool(key == other)


class Recorders:
    """The stand-ins of one trace."""

    def __init__(self, capture: Capture, containers: list[Any]) -> None:
        self._capture = capture
        self._wanted = {id(container): container for container in containers}
        self._made: dict[int, tuple[ContainerRecorder, Any]] = {}

    def will_hold(self, container: Any) -> bool:
        """Whether writes to a container will be recorded: an earlier trace saw some."""
        return id(container) in self._wanted

    def holds(self, container: Any) -> bool:
        """Whether writes to a container are recorded."""
        return id(container) in self._made

    def stand_in(self, real: Any, path: str) -> Any | None:
        """The stand-in that replaces a container; None if it has none."""
        if id(real) not in self._wanted:
            return None
        if id(real) not in self._made:
            recorder = ContainerRecorder(self._capture, real, path)
            self._made[id(real)] = recorder, stand_in_of(recorder)
        return self._made[id(real)][1]

    def release(self) -> None:
        """Drop what the step wrote, and the copies: both hold fakes."""
        self._made.clear()

    def made(self) -> list[ContainerRecorder]:
        """The recorders that were used."""
        return [recorder for recorder, _ in self._made.values()]

    def places(self) -> Iterator[tuple[Slot, Any]]:
        """Where stand-ins go: each place of each container that is written."""
        for identity, container in self._wanted.items():
            for slot in self._capture.world.places.get(identity, ()):
                holder = getattr(slot, "mapping", None) or getattr(slot, "sequence", None)
                if slot is not None and id(holder) not in self._wanted and slot.get() is container:
                    yield slot, container


def can_record(container: Any, places: list[Slot | None]) -> bool:
    """Whether a stand-in can replace a container in every place that holds it."""
    settable = all(slot is not None and type(slot).set is not Slot.set for slot in places)
    return type(container) in RECORDED_TYPES and bool(places) and settable
