"""Slots and the values in records as JSON, by type: what is data is written, what is the user's is an address.

    a GradSlot                              ["GradSlot", "gradient", "model.fc.weight.grad", null, {"at": 12}]
    0.5, (1, "a"), torch.float32            {"float": "0x1.0p-1"}, {"tuple": [1, "a"]}, {"dtype": "float32"}
    the model, a list of the user's         {"at": 3}: an entry of the table of addresses

A reader takes any JSON: what is not of the form or type expected is an ArtefactError, before anything is changed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import fields
from enum import Enum
from types import CellType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from wholestep.artefact.addresses import Addresses, AddressWriter, class_name, named
from wholestep.capture.scalars.symbolic_scalars import LastRateSlot
from wholestep.capture.scalars.tables import TableSlot, is_program
from wholestep.errors import ArtefactError, GraphFormatError
from wholestep.ir.io.arguments import ArgumentReader, ArgumentWriter, TargetReader, shown
from wholestep.ir.signature import InputKind
from wholestep.ir.user_objects.plain_contents import FreshContainersSlot, NestedSlot, OwnerSlot
from wholestep.ir.user_objects.slots import (
    ABSENT,
    BatchAttributeSlot,
    BatchSlot,
    CellSlot,
    ClassSlot,
    ContextVarSlot,
    FixedSlot,
    GeneratorSlot,
    GradSlot,
    GroupParamSlot,
    HyperSlot,
    LocalSlot,
    MappingSlot,
    MemberSlot,
    ModuleSlot,
    OptimizerStateSlot,
    SameMemorySlot,
    SequenceSlot,
    Slot,
    StoredItemSlot,
    ThreadLocalSlot,
)
from wholestep.ir.user_objects.wrapper_tensors import InnerTensorSlot, TensorForm, WrapperForm, is_wrapper_class

SLOTS: dict[str, type[Slot]] = {
    cls.__name__: cls
    for cls in (
        BatchAttributeSlot,
        BatchSlot,
        CellSlot,
        ClassSlot,
        ContextVarSlot,
        FixedSlot,
        FreshContainersSlot,
        GeneratorSlot,
        GradSlot,
        GroupParamSlot,
        HyperSlot,
        InnerTensorSlot,
        LastRateSlot,
        LocalSlot,
        MappingSlot,
        MemberSlot,
        ModuleSlot,
        NestedSlot,
        OptimizerStateSlot,
        OwnerSlot,
        SameMemorySlot,
        SequenceSlot,
        StoredItemSlot,
        TableSlot,
        ThreadLocalSlot,
    )
}
_OBJECTS: dict[str, tuple[type, ...]] = {
    "mapping": (MutableMapping,),
    "module": (nn.Module,),
    "sequence": (list, deque),
    "cell": (CellType,),
    "optimizer": (Optimizer,),
    "generator": (torch.Generator,),
    "variable": (ContextVar,),
    "local": (threading.local,),
    "scheduler": (LRScheduler,),
}
"""Fields that hold an object of the user's, and of which type it is."""
_INNER = frozenset({"root", "parameter", "inner"})
"""Fields that hold another slot."""
_INDICES = frozenset({"index", "group"})
_COUNT = len(fields(Slot))


def wrong(data: Any, what: str) -> ArtefactError:
    """The error for a part of a file that is not what belongs there."""
    return ArtefactError(f"the file is damaged: {shown(data)} is not {what}.", fix="save the step again.")


def whole(data: Any, below: int | None = None) -> int:
    """A number from 0 on."""
    if type(data) is not int or data < 0 or (below is not None and data >= below):
        raise wrong(data, "a number in range")
    return data


def text(data: Any) -> str:
    """A text."""
    if type(data) is not str:
        raise wrong(data, "a text")
    return data


def rows(data: Any, width: int | None = None) -> list[Any]:
    """A list; with `width`, of lists that are so long."""
    if not isinstance(data, list):
        raise wrong(data, "a list")
    if width is not None and not all(isinstance(row, list) and len(row) == width for row in data):
        raise wrong(data, f"a list of lists of {width}")
    return data


def table(data: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(data, dict):
        raise wrong(data, "an object")
    return data


class PlaceWriter:
    """Writes slots and values; each slot once, by number."""

    def __init__(self, addresses: AddressWriter, shards: Callable[[Any], Any]) -> None:
        self.addresses = addresses
        self.slots: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._plain = ArgumentWriter()
        self._shards = shards

    def slot(self, slot: Slot) -> int:
        """The number of a slot."""
        if id(slot) not in self._numbers:
            kind = type(slot).__name__
            if SLOTS.get(kind) is not type(slot):
                raise ArtefactError(f"{slot.path} cannot be saved: it lies in a {kind}.")
            names = [field.name for field in fields(slot)][_COUNT:]
            content = [self._field(slot, name, getattr(slot, name)) for name in names]
            self._numbers[id(slot)] = len(self.slots)
            self.slots.append([kind, str(slot.kind), slot.path, slot.of, *content])
        return self._numbers[id(slot)]

    def _field(self, slot: Slot, name: str, value: Any) -> Any:
        if name in _INNER:
            return self.slot(value)
        if name == "places":
            return [self.slot(each) for each in value]
        if name in _OBJECTS:
            return self.at(value, slot.path)
        if name == "spec":
            return self._shards(value)
        if name == "member":
            return value.__name__
        return self.value(value, slot.path)

    def at(self, value: Any, what: str) -> int:
        """The address of an object."""
        return self.addresses.write(value, what)

    def value(self, value: Any, what: str) -> Any:
        """A value: data, or an object of the user's by its address."""
        if value is ABSENT:
            return {"absent": True}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, TensorForm):
            return {"tensor": [list(value.size), list(value.stride), self._plain.write(value.dtype), str(value.device)]}
        if isinstance(value, WrapperForm):
            inner = [[name, self.value(form, what)] for name, form in value.inner]
            kind, context = self.at(value.kind, what), self.value(value.context, what)
            return {"wrapper": [kind, context, list(value.size), list(value.stride), inner]}
        if isinstance(value, Enum):
            return {"enum": [f"{type(value).__module__}:{type(value).__qualname__}", value.name]}
        if type(value) in (tuple, list) and self.addresses.is_unknown(value):
            return {type(value).__name__: [self.value(item, what) for item in value]}
        if type(value) is dict and self.addresses.is_unknown(value):
            return {"pairs": [[self.value(k, what), self.value(v, what)] for k, v in value.items()]}
        if isinstance(value, _DATA) or value is Ellipsis:
            return {"data": self._plain.write(value)} if isinstance(value, _TAGGED) else self._plain.write(value)
        return {"at": self.at(value, what)}


_TAGGED = (slice, torch.dtype, torch.device, torch.layout, torch.memory_format, complex, range)
_DATA = (int, float, bool, str, type(None), *_TAGGED)


class PlaceReader:
    """Reads them, bound to the objects of this process."""

    def __init__(self, addresses: Addresses, slots: Any, shards: Callable[[Any], Any]) -> None:
        self.addresses = addresses
        self._data = rows(slots)
        self._slots: dict[int, Slot] = {}
        self._plain = ArgumentReader({}, TargetReader())
        self._shards = shards

    def slot(self, number: Any) -> Slot:
        """The slot with a number."""
        number = whole(number, len(self._data))
        found = self._slots.get(number)
        if found is None:
            found = self._slots[number] = self._read(number, self._data[number])
        return found

    def is_not_given(self, number: Any) -> bool:
        """Whether a slot lies in the function of a step that was not given."""
        kind, _, _, _, *content = rows(self._data[whole(number, len(self._data))])
        cls = SLOTS.get(text(kind))
        names = [] if cls is None else [field.name for field in fields(cls)][_COUNT:]
        given = dict(zip(names, content, strict=False))
        if given.get("mapping") is not None and "key" in given:
            found = self.addresses.is_not_given(whole(given["mapping"]))
            return found or (self.addresses.has_given(whole(given["mapping"])) and not self._has(given))
        return any(self.addresses.is_not_given(whole(given[name])) for name in _OBJECTS.keys() & given.keys())

    def _has(self, given: dict[str, Any]) -> bool:
        return given["key"] in self.at(given["mapping"], dict)

    def _read(self, number: int, data: Any) -> Slot:
        kind, input_kind, path, of, *content = rows(data)
        cls = SLOTS.get(text(kind))
        if cls is None or not (of is None or isinstance(of, str)):
            raise wrong(kind, "a slot")
        names = [field.name for field in fields(cls)][_COUNT:]
        if len(content) != len(names):
            raise wrong(data, f"a {kind}")
        made: dict[str, Any] = {}
        for name, item in zip(names, content, strict=True):
            if name in _INNER:
                made[name] = self.slot(whole(item, number))  # an earlier one: no circles
            elif name == "places":
                made[name] = tuple(self.slot(whole(each, number)) for each in rows(item))
            elif name in _OBJECTS:
                made[name] = self.at(item, *_OBJECTS[name])
            elif name == "spec":
                made[name] = self._shards(item)
            elif name == "member":
                made[name] = _member(type(made["holder"]), text(item))
            else:
                made[name] = self.value(item)
        _check(kind, made)
        return cls(InputKind(text(input_kind)), text(path), of, **made)

    def at(self, number: Any, *types: type) -> Any:
        """The object at an address; of one of some types."""
        found = self.addresses.find(whole(number))
        if types and not isinstance(found, types):
            raise wrong(class_name(found), f"a {types[0].__name__}")
        return found

    def value(self, data: Any) -> Any:
        """What `PlaceWriter.value` wrote."""
        if not isinstance(data, dict) or len(data) != 1:
            return self._plain.read(data)
        [(tag, content)] = data.items()
        if tag == "absent":
            return ABSENT
        if tag == "at":
            return self.at(content)
        if tag == "size":
            return torch.Size([whole(item) for item in rows(content)])
        if tag == "bytes":
            return bytes.fromhex(text(content))
        if tag == "tensor":
            return self._form(content)
        if tag == "wrapper":
            return self._wrapper(content)
        if tag == "enum":
            [name, member] = rows(content)
            cls = named(text(name))
            if not (isinstance(cls, type) and issubclass(cls, Enum)):
                raise wrong(name, "an enumeration of this process")
            return cls.__members__[text(member)]
        if tag in ("tuple", "list"):
            items = [self.value(item) for item in rows(content)]
            return tuple(items) if tag == "tuple" else items
        if tag == "pairs":
            return {self.value(k): self.value(v) for k, v in rows(content, 2)}
        return self._data_of(data, content if tag == "data" else data)

    def _data_of(self, data: Any, content: Any) -> Any:
        try:
            return self._plain.read(content)
        except GraphFormatError as error:
            raise wrong(data, "a value") from error

    def _form(self, data: Any) -> TensorForm:
        [(size, stride, dtype, device)] = rows([data], 4)
        found = self._data_of(data, dtype)
        if not isinstance(found, torch.dtype):
            raise wrong(dtype, "a dtype")
        try:
            place = torch.device(text(device))
        except RuntimeError as error:
            raise wrong(device, "a device") from error
        return TensorForm(tuple(map(whole, rows(size))), tuple(map(whole, rows(stride))), found, place)

    def _wrapper(self, data: Any) -> WrapperForm:
        [(kind, context, size, stride, inner)] = rows([data], 5)
        found = self.at(kind, type)
        if not is_wrapper_class(found):
            raise wrong(class_name(found), "a class of tensors that are made of others")
        forms = [(text(name), self.value(form)) for name, form in rows(inner, 2)]
        for _, form in forms:
            if not isinstance(form, TensorForm | WrapperForm):
                raise wrong(form, "the form of a tensor")
        sizes, strides = tuple(map(whole, rows(size))), tuple(map(whole, rows(stride)))
        return WrapperForm(found, self.value(context), sizes, strides, tuple(forms))


def _check(kind: str, made: Mapping[str, Any]) -> None:
    for name in _INDICES & made.keys():
        if type(made[name]) is not int and not (name == "index" and made[name] is None and kind == "HyperSlot"):
            raise wrong(made[name], "a number")
    if kind == "TableSlot" and not is_program(made["program"], len(made["places"])):
        raise wrong(made["program"], "the index of a table")
    if kind == "GradSlot" and not isinstance(made["param"], Tensor):
        raise wrong(class_name(made["param"]), "a tensor")
    if kind == "ClassSlot" and not isinstance(made["owner"], type):
        raise wrong(class_name(made["owner"]), "a class")
    if kind == "BatchAttributeSlot" and made["attribute"] not in ("grad", "requires_grad", "form"):
        raise wrong(made["attribute"], "an attribute of a tensor")
    if "name" in made:
        text(made["name"])


def _member(cls: type, name: str) -> MemberDescriptorType:
    for base in cls.__mro__:
        found = vars(base).get(name)
        if isinstance(found, MemberDescriptorType):
            return found
    raise ArtefactError(f"{cls.__qualname__} has no {name} in its __slots__.")
