"""Tables of numbers at an index that changes: `betas[it]`, a schedule as a list, tuple or NumPy array.

An index that is a symbolic scalar would be fixed to its value: a graph for each `it`. So a trace in which code takes
the value of such an index ends, if there are tables in reach. In the next one stand-ins lie in their places, and what
is read of one at a symbolic index is an input of its own:

    betas[it]         TableSlot(betas, it): looked up before each run
    betas[it // 10]   the same, with the operations in between
    betas[3], sum(betas), betas[it:]      as ever: the stand-in holds the same numbers

An index that the table does not have ends the graph: the step is captured again, and raises what eager raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from wholestep.capture.objects.objects_found_by_calls import EarlierTraces, TraceAgain
from wholestep.capture.scalars.symbolic_scalars import OPERATIONS, ScalarNode, scalar_of
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import item_slot, own_dict, stored_items
from wholestep.ir.user_objects.slots import ABSENT, ComputedSlot, MappingSlot, Slot
from wholestep.torch_private.modules_and_optimizers import MODULE_INTERNALS

if TYPE_CHECKING:
    from wholestep.capture.trace import Capture

_NUMBERS = (int, float, numpy.float64)
_LONGEST = 40
_SHORT = 4


class NeedsTables(TraceAgain):
    """Ends a trace: an index that changes is taken, perhaps of a table."""

    def teach(self, earlier: EarlierTraces) -> Callable[[], None]:
        earlier.tables = True
        return lambda: None


@dataclass(frozen=True, eq=False)
class TableSlot(ComputedSlot):
    """An element of a table, at an index that is computed from other places."""

    table: Any
    places: tuple[Slot, ...]
    program: tuple[Any, ...]
    """The index in postfix form: `("place", 0)`, `("number", 2)`, `("floordiv", 2)`: an operation on two values."""

    def compute(self, value_of: Callable[[Slot], Any]) -> Any:
        stack: list[Any] = []
        try:
            for operation, operand in self.program:
                if operation == "place":
                    stack.append(value_of(self.places[operand]))
                elif operation == "number":
                    stack.append(operand)
                else:
                    stack[-operand:] = [OPERATIONS[operation](*stack[-operand:])]
            return self.table[stack[0]]
        except (IndexError, TypeError, ValueError, ArithmeticError):
            return ABSENT


def is_program(program: Any, places: int) -> bool:
    """Whether data of a file is the program of an index."""
    depth = 0
    for each in program if type(program) is tuple else ():
        if type(each) is not tuple or len(each) != 2 or type(each[1]) is not int:
            return False
        operation, operand = each
        if operation in ("place", "number"):
            if operation == "place" and not 0 <= operand < places:
                return False
            depth += 1
        elif operation in OPERATIONS and 0 < operand <= depth:
            depth += 1 - operand
        else:
            return False
    return depth == 1


def _program_of(node: ScalarNode) -> tuple[tuple[Slot, ...], tuple[Any, ...]] | None:
    """The places and the program of an index; None where it depends on more than the user's numbers."""
    places: list[Slot] = []
    program: list[Any] = []

    def add(each: ScalarNode) -> bool:
        if len(program) > _LONGEST:
            return False
        if each.leaf is not None:
            if not isinstance(each.leaf, Slot) or isinstance(each.leaf, ComputedSlot):
                return False
            if each.leaf not in places:
                places.append(each.leaf)
            program.append(("place", places.index(each.leaf)))
        elif not each.method:
            if type(each.hint) is not int:
                return False
            program.append(("number", each.hint))
        else:
            if not all(map(add, each.args)):
                return False
            program.append((each.method, len(each.args)))
        return True

    return (tuple(places), tuple(program)) if add(node) else None


class Tables:
    """The stand-ins for tables of one trace."""

    def __init__(self, capture: Capture, wanted: bool) -> None:
        self._capture = capture
        self._wanted = wanted and bool(capture.numbers.lifted) and not capture.numbers.plain
        self._made: dict[int, tuple[Any, Any]] = {}
        self._read: dict[tuple[int, str], Any] = {}

    def ask(self, index: ScalarNode) -> None:
        """Code takes the value of an index: end the trace, if that changed between two calls and there are tables."""
        numbers = self._capture.numbers
        changed = any(isinstance(leaf, Slot) and numbers.lifts(leaf.path) for leaf in index.leaves())
        if changed and not self._wanted and any(True for _ in self._places()):
            raise NeedsTables("tables are read at an index that changes")

    def places(self) -> Iterator[tuple[Slot, Any]]:
        """Where stand-ins go before the step runs."""
        return self._places() if self._wanted else iter(())

    def _places(self) -> Iterator[tuple[Slot, Any]]:
        world = self._capture.world
        for _, slot, value in world.variables:
            if is_table(value):
                yield slot, value
        owners = [*world.modules.items(), *((holder, path) for holder, path in world.holders.values())]
        for owner, path in owners:
            attributes = own_dict(owner)
            for key, value in list(attributes.items()):
                if key not in MODULE_INTERNALS and is_table(value):
                    yield MappingSlot(InputKind.CAPTURED, f"{path}.{key}", None, attributes, key), value
        for container, path in world.containers:
            items = stored_items(container) if isinstance(container, dict) else enumerate(container)
            for key, value in list(items) if not isinstance(container, set) else ():
                if is_table(value) and (found := item_slot(container, key, InputKind.CAPTURED, f"{path}[{key!r}]")):
                    yield found, value

    def stand_in(self, real: Any, path: str) -> Any | None:
        """The stand-in for a table; None for anything else."""
        if not self._wanted or not is_table(real) or self._capture.recorded.will_hold(real):
            return None
        if id(real) not in self._made:
            self._made[id(real)] = real, _stand_in(self, real, path)
        return self._made[id(real)][1]

    def look_up(self, real: Any, path: str, index: Any) -> Any:
        """`table[index]`."""
        node = scalar_of(index)
        if node is None or node.hint is None or node.kind is not int or node.is_fixed:
            return real[index]
        known = self._read.get((id(real), node.key))
        if known is not None:
            return known
        found = _program_of(node)
        if found is None or not -len(real) <= node.hint < len(real) or type(real[node.hint]) not in _NUMBERS:
            return real[node.specialise("an index")]
        slot = TableSlot(InputKind.HYPER_PARAMETER, f"{path}[{node.key}]", None, real, *found)
        value = self._read[id(real), node.key] = self._capture.scalars.lift(slot, real[node.hint])
        return value

    def release(self) -> None:
        """Drop the stand-ins and what was read."""
        self._made.clear()
        self._read.clear()


def is_table(value: Any) -> bool:
    """Whether a value may be a table of numbers: judged by its first element, each that is read is checked."""
    if type(value) is tuple and len(value) < _SHORT:  # a kernel size, betas of an optimizer
        return False
    if type(value) in (list, tuple):
        return len(value) > 1 and type(value[0]) in _NUMBERS
    return type(value) is numpy.ndarray and value.ndim == 1 and len(value) > 1 and value.dtype == numpy.float64


class TableStandIn:
    """The base class: what is read at a symbolic index is an input, all else is that of the table."""

    wholestep_tables: Tables
    wholestep_real: Any
    wholestep_path: str

    def __getitem__(self, index: Any) -> Any:
        return self.wholestep_tables.look_up(self.wholestep_real, self.wholestep_path, index)

    def __copy__(self) -> Any:
        return copy.copy(self.wholestep_real)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.wholestep_real.__reduce_ex__(protocol)


def _also_of_real(name: str) -> Any:
    """A method that changes the list: of both, so that the change is seen."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(list, name)(self, *args, **kwargs)
        getattr(self.wholestep_real, name)(*args, **kwargs)
        return self if name.startswith("__i") else result

    return method


def _of_real(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self.wholestep_real, name)(*args, **kwargs)


_CHANGES = "append clear extend insert pop remove reverse sort __setitem__ __delitem__ __iadd__ __imul__".split()


class _ListTable(TableStandIn, list[Any]):
    pass


class _TupleTable(TableStandIn, tuple[Any, ...]):
    pass


for _name in _CHANGES:
    setattr(_ListTable, _name, _also_of_real(_name))


class _ArrayTable(TableStandIn, numpy.ndarray):
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(ufunc, method)(*map(_plain, inputs), **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})


for _name in dir(numpy.ndarray):
    if not _name.startswith("__") and callable(getattr(numpy.ndarray, _name)):
        setattr(_ArrayTable, _name, _of_real(_name))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple) and not isinstance(value, TableStandIn):
        return type(value)(map(_plain, value))
    return value.wholestep_real if isinstance(value, TableStandIn) else value


def _stand_in(tables: Tables, real: Any, path: str) -> Any:
    made: Any = (
        real.view(_ArrayTable)
        if isinstance(real, numpy.ndarray)
        else (_ListTable(real) if isinstance(real, list) else _TupleTable(real))
    )
    made.wholestep_tables, made.wholestep_real, made.wholestep_path = tables, real, path
    return made
